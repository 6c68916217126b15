"""DryRuns with what a step does besides its microbatches, which must find nothing of them."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from forward_modules import model
from slow_params import slow
from torch import Tensor, nn

import pipec
from pipec.runtime.stages.bound_stage import BoundStage
from pipec.runtime.step.dry_run import DryRuns
from pipec.runtime.step.ranks import Ranks

X, Y = torch.linspace(-1, 1, 64).view(16, 4), torch.linspace(0, 1, 32).view(16, 2)


def net(tracks: bool = True) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8, track_running_stats=tracks)
    return nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2))


MOST_LITTLE = 10
"""The elements of a stage's parameters that have two at most in each dimension."""


class Adam(torch.optim.AdamW):
    """It notes how many elements it updates."""

    num_updated: ClassVar[list[int]] = []

    def __init__(self, named: Any) -> None:
        super().__init__(named, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        every = [each for group in self.param_groups for each in group["params"]]
        if not any(each.is_meta for each in every):  # as where its memory is predicted
            self.num_updated.append(sum(each.numel() for each in every if each.grad is not None))
        return super().step(closure)


def trained(**options: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses of some steps, one of them without an update, and what has become of the model."""
    given = {"microbatches": 4, "replicas": 2, "clip_grad_norm": 1.0, **options}
    pipe = pipec.compile(net(), ["cpu"] * 4, loss_fn=nn.functional.mse_loss, optimizer=Adam, **given)
    torch.manual_seed(5)
    with pipe.accumulate():
        losses = [pipe.step(X, target=Y)]
    losses += [pipe.step(X, target=Y) for _ in range(2)]
    losses.append(pipe.step(X[:12], target=Y[:12]))
    return losses, pipe.full_state_dict()


def streamed(schedule: str, replicas: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses of a stream without a flush, and what has become of the model."""
    how = {"schedule": schedule, "replicas": replicas, "optimizer": Adam}
    pipe = pipec.compile(net(replicas == 1), ["cpu"] * 4, loss_fn=nn.functional.mse_loss, **how)
    torch.manual_seed(5)
    batches = [(X, Y), (X, Y), (X[:12], Y[:12]), (X, Y)]
    return list(pipe.stream(batches)), pipe.full_state_dict()


@pytest.fixture
def dry_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many microbatches the dry_runs have run."""
    found, run = list[int](), DryRuns._run

    def noting(self: DryRuns, *given: Any) -> None:
        found.append(len(given[0]))
        run(self, *given)

    monkeypatch.setattr(Ranks, "has_gpu_messages", True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(DryRuns, "_run", noting)
    monkeypatch.setattr(Adam, "num_updated", [])
    return found


@pytest.mark.parametrize(
    "train",
    [
        slow(trained),
        functools.partial(trained, shard="parameters"),
        functools.partial(streamed, "pipedream", 2),
        slow(functools.partial(streamed, "pipedream-2bw", 1)),
    ],
    ids=["steps", "shards", "pipedream", "2bw"],
)
def test_training_finds_nothing_of_a_rehearsal(
    dry_runs: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    train: Callable[[], tuple[list[Tensor], dict[str, Tensor]]],
) -> None:
    """In a stream messages are under way all the time. Every replica meets each function once."""
    caplog.set_level("INFO", "pipec")
    found = train()
    assert len(dry_runs) == 8, "four ranks, and batches of two sizes"
    assert max(Adam.num_updated[:2]) <= MOST_LITTLE, "updates are rehearsed as well"
    assert "ended early" not in caplog.text
    monkeypatch.undo()
    torch.testing.assert_close(found, train(), rtol=0, atol=0)


def test_lengths_that_are_not_the_longest_take_one_microbatch(
    dry_runs: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch that is padded to its longest text has another length each time, and steps would take twice."""
    caplog.set_level("INFO", "pipec")
    rows, fill = list[int](), BoundStage.fill_frame

    def counted(self: BoundStage, microbatch: int, *given: Any) -> Any:
        rows.append(microbatch)
        return fill(self, microbatch, *given)

    monkeypatch.setattr(BoundStage, "fill_frame", counted)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    pipe = pipec.compile(layers, ["cpu"] * 2, loss_fn=nn.functional.mse_loss, microbatches=8)
    lengths = [150, 200, *range(100, 200, 9)]
    for length in dict.fromkeys(lengths):
        pipe.step(torch.ones(16, length, 4), target=torch.ones(16, length, 2))
    steps = 2 * 8 * len({*lengths})
    assert len(dry_runs) == 2 * 3, "of two ranks, for 150, for any length, and for those below 128"
    assert len(rows) - steps == 2 * (8 + 8 + 1)
    assert "ended early" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_one_microbatch_of_each_size_is_enough(
    dry_runs: list[int], caplog: pytest.LogCaptureFixture, schedule: str, replicas: int
) -> None:
    """Microbatches have two sizes, and a rank several stages."""
    caplog.set_level("INFO", "pipec")
    layers = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)) for _ in range(4))
    options = {"schedule": schedule, "replicas": replicas, "microbatches": 8, "optimizer": Adam}
    pipe = pipec.compile(nn.Sequential(*layers), ["cpu"] * 4, loss_fn=nn.functional.mse_loss, **options)
    for rows in (40, 28, 27):
        x = torch.randn(rows, 4)
        pipe.step(x, target=x)
    assert len(dry_runs) == 4 * 3
    assert "ended early" not in caplog.text


def test_numbers_are_not_rehearsed(dry_runs: list[int]) -> None:
    """They may be others in each step, which launches the same kernels."""

    @model(layers=lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
    def Scaled(self: Any, x: Tensor, scale: float) -> Tensor:
        return self.layers[1](self.layers[0](x) * scale)

    pipe = pipec.compile(Scaled(), ["cpu"] * 2, loss_fn=nn.functional.mse_loss, microbatches=2)
    for scale in (0.1, 0.2, 0.3, 0.4):
        pipe.step(X, scale, target=X)
    assert dry_runs == [2] * 4, "two ranks, for a number and for any number"
