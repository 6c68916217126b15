"""One of two ranks that have microbatches in different orders: the results are those of plain torch."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import pipec
from pipec.runtime.messages import shared_memory


def worst_difference(schedule: Path) -> float:
    """The largest difference to plain torch of the loss and of the gradients that this rank has."""
    torch.manual_seed(0)
    layers = (nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model, x, y = nn.Sequential(*layers).double(), torch.randn(8, 4).double(), torch.randn(8, 2).double()
    plain = nn.Sequential(*layers).double()
    loss = F.mse_loss(plain(x), y)
    expected = dict(
        zip(dict(plain.named_parameters()), torch.autograd.grad(loss, plain.parameters()), strict=True)
    )
    pipe = pipec.compile(model, 2, loss_fn=F.mse_loss, schedule=schedule, microbatches=4)
    found = [(pipe.step(x, target=y), loss.detach())]
    found += [(p.grad, expected[name]) for name, p in pipe.named_parameters() if p.grad is not None]
    assert len(found) > 1
    return max((one - other).abs().max().item() for one, other in found)


if __name__ == "__main__":
    for path in sys.argv[2:]:
        if sys.argv[1] == "gloo":
            shared_memory._host = lambda: ""
        print("same" if worst_difference(Path(path)) < 1e-12 else "differs")
