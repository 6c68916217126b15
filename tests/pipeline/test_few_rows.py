"""A batch of fewer rows than microbatches, such as an epoch's last, gives the results of plain PyTorch."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_params import slow_but
from torch import Tensor, nn
from worker_processes import run_ranks

import pipec
from pipec.errors import InputError

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
IGNORED = partial(nn.functional.cross_entropy, ignore_index=2)
WEIGHTED = partial(nn.functional.cross_entropy, weight=torch.tensor([0.1, 0.7, 1.3]))
ROWS = (8, 2, 1, 8, 3)


def classifier() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(9, 6, generator=generator), torch.tensor([0, 1, 2, 0, 2, 1, 1, 0, 1])


def reference(loss_fn: Any) -> tuple[list[float], nn.Module]:
    """The losses of plain PyTorch, and the trained model."""
    model, (x, y) = classifier(), data()
    optimizer, losses = SGD(model.parameters()), []
    for rows in ROWS:
        optimizer.zero_grad()
        loss = loss_fn(model(x[:rows]), y[:rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


CASES: Mapping[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe, recomputed": {"schedule": "gpipe", "recompute": "full"},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-v": {"schedule": "zb-v"},
    "searched": {"schedule": "zb-1p"},
    "interleaved": {"schedule": "interleaved-1f1b"},
    "replicas": {"devices": 4, "replicas": 2},
    "unequal replicas": {"devices": 3, "replicas": (2, 1)},
    "sharded replicas": {"devices": 4, "replicas": 2, "shard": "parameters"},
    "more replicas than rows": {"devices": 4, "replicas": 4, "microbatches": 8},
    "sums of rows": {"loss_fn": partial(nn.functional.cross_entropy, reduction="sum")},
    "counts of the batch": {"loss_fn": IGNORED},
    "counts": {"loss_fn": WEIGHTED},
    "weights of microbatches": {"microbatch_weight": lambda x, target: len(target)},
    "non-finite values": {"on_nan": "skip"},
    "asynchronous": {"schedule": "pipedream-2bw"},
    "asynchronous replicas": {"schedule": "pipedream-2bw", "devices": 4, "replicas": 2},
    "asynchronous, non-finite values": {"schedule": "pipedream-2bw", "on_nan": "raise"},
}


WITH_EVALUATION = ("1f1b", "replicas", "sharded replicas", "asynchronous")


@pytest.mark.parametrize(
    "name",
    slow_but(
        CASES,
        "1f1b",
        "zb-v",
        "unequal replicas",
        "sharded replicas",
        "counts of the batch",
        "weights of microbatches",
        "asynchronous",
    ),
)
def test_a_short_batch_is_trained_on_as_in_plain_torch(name: str) -> None:
    options = {"devices": 2, "microbatches": 4, "loss_fn": nn.functional.cross_entropy} | CASES[name]
    expected, model = reference(options["loss_fn"])
    x, y = data()
    pipe = pipec.compile(classifier(), optimizer=SGD, **options)
    assert [pipe.step(x[:rows], target=y[:rows]).item() for rows in ROWS] == pytest.approx(expected, abs=1e-5)
    for rows in (1, 2, 9) if name in WITH_EVALUATION else ():
        torch.testing.assert_close(pipe(x[:rows]), model(x[:rows]).detach())
        loss = options["loss_fn"](model(x[:rows]), y[:rows])
        torch.testing.assert_close(pipe.eval_step(x[:rows], target=y[:rows]), loss.detach())


@pytest.mark.slow
@pytest.mark.slow
def test_an_epoch_of_a_stream_ends_with_a_short_batch() -> None:
    x, y = data()
    batches = [(x[:8], y[:8])] * 3 + [(x[:2], y[:2]), (x[:1], y[:1])] + [(x[:8], y[:8])] * 2
    streamed, stepped = (
        pipec.compile(
            classifier(),
            2,
            microbatches=4,
            loss_fn=nn.functional.cross_entropy,
            optimizer=SGD,
            schedule="pipedream-2bw",
        )
        for _ in range(2)
    )
    losses = [float(loss) for loss in streamed.stream(batches)]
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    assert len(losses) == len(batches)
    assert losses[0] == stepped.step(*batches[0][:1], target=batches[0][1]).item()


@pytest.mark.slow
def test_dependent_rows_are_refused_whatever_their_number() -> None:
    """Also one row: a saved artifact of it would run other batches."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers: Any = classifier()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layers[:2](x)
            return self.layers[2:](hidden - hidden.mean(0))

    x, y = data()
    pipe = pipec.compile(Centred(), 2, microbatches=4, loss_fn=nn.functional.cross_entropy)
    for rows in (1, 2, 8):
        with pytest.raises(InputError, match="rows depend on other rows"):
            pipe.step(x[:rows], target=y[:rows])


@pytest.mark.slow
def test_a_batch_norm_needs_two_values_per_channel() -> None:
    """As torch says of a batch of one row. Of images each row has many values."""
    x, y = data()
    rows = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    pipe = pipec.compile(rows, 2, microbatches=4, loss_fn=nn.functional.cross_entropy)
    pipe.step(x[:8], target=y[:8])
    for few in (1, 2, 4, 5):
        with pytest.raises(InputError, match=f"of {few} rows in 4 microbatches, some have one row"):
            pipe.step(x[:few], target=y[:few])
    pipe.eval()
    pipe.eval_step(x[:2], target=y[:2])
    pipe = pipec.compile(rows.train(), 2, microbatches=1, loss_fn=nn.functional.cross_entropy)
    pipe.step(x[:2], target=y[:2])
    with pytest.raises(InputError, match="of 1 rows in 1 microbatches, some have one row"):
        pipe.step(x[:1], target=y[:1])
    images = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 3))
    pipe = pipec.compile(images, 2, microbatches=4, loss_fn=nn.functional.cross_entropy)
    pipe.step(x[:2, None], target=y[:2])


@pytest.mark.slow
@pytest.mark.parametrize("options", ["devices=2", "devices=2, replicas=2"])
def test_processes_skip_microbatches_without_rows(tmp_path: Path, options: str) -> None:
    """The losses and the outputs of every rank are those of one process."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import pipec
from test_few_rows import ROWS, SGD, classifier, data
from torch import nn
x, y = data()
options = {{"microbatches": 4, "loss_fn": nn.functional.cross_entropy, "optimizer": SGD}}
pipe = pipec.compile(classifier(), {options}, **options)
print([round(pipe.step(x[:rows], target=y[:rows]).item(), 5) for rows in ROWS])
print([[round(each, 5) for each in pipe(x[:rows]).flatten().tolist()] for rows in (1, 3)])
"""
    )
    (alone,) = run_ranks(script, 0, tmp_path)
    assert run_ranks(script, 2, tmp_path) == [alone, alone]
    assert eval(alone.splitlines()[0]) == pytest.approx(reference(nn.functional.cross_entropy)[0], abs=1e-4)
