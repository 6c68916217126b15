"""Models and batches for tests of GPUs, and eager torch to compare with."""

import copy
import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from unsplit_reference import Inputs, Plain, relative_error, unsplit_step

import pipec

VOCABULARY, WIDTH, TOKENS = 64, 64, 16


def transformer(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = {"nhead": 4, "dim_feedforward": 4 * WIDTH, "dropout": dropout, "batch_first": True}
    blocks = [nn.TransformerEncoderLayer(WIDTH, norm_first=True, **sizes) for _ in range(4)]  # type: ignore[arg-type]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))


def tokens(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (rows, TOKENS + 1), generator=generator)
    return {"input": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def wide(num_layers: int = 8, width: int = 2048) -> nn.Sequential:
    """Layers large enough that what libraries hold beside tensors counts little."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return nn.Sequential(*[copy.deepcopy(layer) for _ in range(num_layers)])


def vectors(*shape: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name in ("input", "target")}


def on(device: torch.device, batch: Inputs) -> dict[str, Any]:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def assert_steps_agree(
    expected: nn.Module,
    devices: Sequence[torch.device],
    batches: Iterable[Inputs],
    loss_fn: Any = None,
    rtol: float = 1e-5,
    error: float = 1e-4,
    **options: Any,
) -> pipec.Pipeline:
    """Steps of a pipeline on these batches leave the losses, gradients and buffers of eager torch.

    Eager torch takes the batch in the same microbatches, with a ``precision`` under autocast.
    """
    model, options = copy.deepcopy(expected), {"microbatches": 4, **options}
    pipe: pipec.Pipeline = pipec.compile(model, devices, loss_fn=loss_fn, **options)
    eager = Plain(expected, loss_fn=loss_fn).loss
    for batch in batches:
        sizes = [len(rows) for rows in next(iter(batch.values())).chunk(options["microbatches"])]
        pipe.zero_grad()
        expected.zero_grad()
        loss = pipe.step(**batch)
        with torch.autocast(devices[0].type, torch.bfloat16, enabled="precision" in options):
            reference = unsplit_step(eager, on(devices[0], batch), sizes, expected)
        torch.testing.assert_close(loss.cpu().float(), reference.cpu().float(), rtol=rtol, atol=0)
        mine, theirs = _state(model), _state(expected)
        assert mine.keys() == theirs.keys()
        assert max(relative_error(mine[name], x) for name, x in theirs.items()) < error
    return pipe


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The gradients and buffers."""
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {name: x.float().cpu() for name, x in [*gradients.items(), *model.named_buffers()]}


def free_unused_memory() -> None:
    """Free the memory of a GPU that former tests of this process have left, and that of cuBLAS."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
