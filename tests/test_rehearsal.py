"""Rehearsals with what a step does besides its microbatches, which must find nothing of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipec
from pipec.runtime.execution import Ranks
from pipec.runtime.rehearsal import Rehearsals

X, Y = torch.linspace(-1, 1, 64).view(16, 4), torch.linspace(0, 1, 32).view(16, 2)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2))


def trained(shard: str | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses of some steps, one of them without an update, and what has become of the model."""
    model = net()
    pipe = pipec.compile(
        model,
        ["cpu"] * 4,
        loss_fn=nn.functional.mse_loss,
        microbatches=4,
        replicas=2,
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.1),
        clip_grad_norm=1.0,
        shard=shard,
    )
    torch.manual_seed(5)
    with pipe.accumulate():
        losses = [pipe.step(X, target=Y)]
    losses += [pipe.step(X, target=Y) for _ in range(2)]
    losses.append(pipe.step(X[:12], target=Y[:12]))
    return losses, pipe.full_state_dict()


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many microbatches the rehearsals have run."""
    found, run = list[int](), Rehearsals._run

    def noting(self: Rehearsals, *given: Any) -> None:
        found.append(len(given[0]))
        run(self, *given)

    monkeypatch.setattr(Ranks, "message_by_gpu", True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Rehearsals, "_run", noting)
    return found


@pytest.mark.parametrize("shard", [None, "parameters"])
def test_updates_find_nothing_of_a_rehearsal(
    rehearsals: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    shard: str | None,
) -> None:
    caplog.set_level("INFO", "pipec")
    found = trained(shard)
    assert rehearsals == [4] * 8, "four ranks, and steps of two sizes"
    assert "ended early" not in caplog.text
    monkeypatch.undo()
    torch.testing.assert_close(found, trained(shard), rtol=0, atol=0)
