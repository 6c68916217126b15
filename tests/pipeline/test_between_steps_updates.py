"""What a script changes between two steps, where the program updates: replicas, shares and the optimizer."""

import copy
import functools
import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_params import slow_but
from torch import Tensor, nn
from worker_processes import run_ranks

import pipec

ROWS, COUNT = 8, 4
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
LAYOUTS: list[dict[str, Any]] = [
    {"devices": 2},
    {"devices": 4, "replicas": 2},
    {"devices": 4, "replicas": 2, "shard": "optimizer"},
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Pair:
    """A pipeline that updates, and the unsplit model with an optimizer of its own, which do the same."""

    def __init__(self, **layout: Any) -> None:
        self.models = net(), net()
        self.x, self.y = torch.randn(ROWS, 6), torch.randn(ROWS, 3)
        self.pipe = self.compiled(self.models[0], **layout)
        self.optimizer = ADAMW(list(self.models[1].named_parameters()))

    @staticmethod
    def compiled(model: nn.Module, **layout: Any) -> pipec.Pipeline:
        mse = nn.functional.mse_loss
        return pipec.compile(model, loss_fn=mse, microbatches=COUNT, optimizer=ADAMW, **layout)

    def step(self) -> None:
        loss = self.pipe.step(self.x, target=self.y)
        torch.testing.assert_close(loss, self.plain_loss().detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.compare()

    def plain_loss(self) -> Tensor:
        loss = nn.functional.mse_loss(self.models[1](self.x), self.y)
        loss.backward()
        return loss

    def compare(self) -> None:
        for mine, theirs in zip(self.models[0].parameters(), self.models[1].parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)

    def on_both(self, change: Callable[[nn.Module], object]) -> None:
        for model in self.models:
            change(model)


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, LAYOUTS[2]))
def test_parameters_are_trained_frozen_and_replaced(layout: dict[str, Any], said: list[str]) -> None:
    """One of them is frozen at first. A new one keeps the name and the state of the one that it replaces."""
    pair = Pair(**layout)
    pair.on_both(lambda model: model[2].requires_grad_(False))  # type: ignore[index]
    for _ in range(2):
        pair.step()
    assert "recompiling" not in "".join(said)
    for layer, frozen in ((2, False), (0, True), (0, False)):
        pair.on_both(lambda model, k=layer, f=frozen: model[k].requires_grad_(not f))  # type: ignore[misc]
        for _ in range(2):
            pair.step()
    pair.models[0][2].bias = nn.Parameter(torch.ones(8))
    with torch.no_grad():
        pair.models[1][2].bias.fill_(1.0)
    pair.step()


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_stage_of_frozen_parameters_alone_may_have_replicas(layout: dict[str, Any]) -> None:
    pair = Pair(**layout)
    pair.on_both(lambda model: model[:4].requires_grad_(False))  # type: ignore[index]
    for _ in range(2):
        pair.step()
    first = pair.pipe.plan.stages[0]
    assert first.parameters
    assert {*first.parameters} <= {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_parameters_that_the_optimizer_does_not_know_are_refused() -> None:
    pair = Pair(devices=2)
    pair.step()
    before = pair.models[0][4]
    pair.models[0][4] = nn.Sequential(nn.Linear(8, 3))
    with pytest.raises(pipec.InputError, match=r"other parameters than its optimizer.*4\.0\.bias"):
        pair.pipe.step(pair.x, target=pair.y)
    pair.models[0][4] = before
    pair.step()


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, LAYOUTS[2]))
def test_a_copy_has_an_optimizer_of_its_own(layout: dict[str, Any]) -> None:
    pair = Pair(**layout)
    pair.step()
    copied = copy.deepcopy(pair.pipe)
    pair.pipe.optimizer.param_groups[0]["lr"] = pair.optimizer.param_groups[0]["lr"] = 0.1
    apart = copy.deepcopy(pair.models[1])
    optimizer = ADAMW(list(apart.named_parameters()))
    optimizer.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = 1e-2
    pair.step()
    loss = nn.functional.mse_loss(apart(pair.x), pair.y)
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(copied.step(pair.x, target=pair.y), loss.detach())
    for name, value in copied.state_dict().items():
        torch.testing.assert_close(value, apart.state_dict()[name])
    pair.step()


# microbatches draw by their number in the batch


class Noisy(nn.Module):
    """If it ``tells_sizes`` apart, no one graph serves microbatches of three and of two rows."""

    def __init__(self, tells_sizes: bool) -> None:
        super().__init__()
        self.tells_sizes = tells_sizes

    def forward(self, x: Tensor) -> Tensor:
        x = x + nn.functional.dropout(torch.ones_like(x), 0.5, training=True)
        return (x, x)[0 if self.tells_sizes and len(x) > 2 else 1]


@pytest.mark.parametrize("layout", [{"devices": 1}, {"devices": 2, "stages": 1}])
def test_draws_do_not_depend_on_how_microbatches_are_compiled(layout: dict[str, Any]) -> None:
    """Five microbatches of 3, 3, 3, 2 and 2 rows: one group, or one of each size."""
    x = torch.zeros(13, 16)
    drawn = []
    for tells_sizes in (False, True):
        pipe = pipec.compile(Noisy(tells_sizes), microbatches=5, **layout)
        torch.manual_seed(3)
        drawn.append(pipe(x))
        assert len(list(pipe._executions.compiler.cache.compiled)) == 1 + tells_sizes
    assert torch.equal(*drawn)
    masks = drawn[0].split([3, 3, 3, 2, 2])
    assert not any(torch.equal(one[:2], other[:2]) for one, other in itertools.combinations(masks, 2))


RANKS = """
import copy, functools
import torch, pipec
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(8, 6), torch.randn(8, 3)
net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
pipe = pipec.compile(net, 2, loss_fn=nn.functional.mse_loss, microbatches=4, optimizer=adamw, stages=1,
    shard="parameters", clip_grad_norm=0.5, timeout=240.0)

def step(what, pipe=pipe):
    print(what, f"{float(pipe.step(x, target=y)):.5f}")

for _ in range(2):
    step("first")
net[0].requires_grad_(False)
step("frozen")
net[0].requires_grad_(True)
step("unfrozen")
net[1].p = 0.25
step("attribute")
print("eval", f"{float(pipe.eval_step(x, target=y)):.5f}", f"{float(pipe(x).sum()):.5f}")
pipe.gather_into(net, all_ranks=True)
step("gathered")
copied = copy.deepcopy(pipe)
step("before the copy")
step("copy", copied)
step("after the copy")
pipe.double()
x, y = x.double(), y.double()
print("double", f"{float(pipe.eval_step(x, target=y)):.5f}")
print({name: f"{float(value.sum()):.4f}" for name, value in pipe.full_state_dict(True).items()})
"""


@pytest.mark.slow
def test_ranks_that_keep_shares_of_parameters_do_what_one_process_does(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RANKS))

    def results(num_ranks: int) -> list[list[str]]:
        told = run_ranks(script, num_ranks, tmp_path)
        return [[line for line in each.splitlines() if not line.startswith("pipec: ")] for each in told]

    (expected,) = results(0)
    assert len(expected) == 12
    assert results(2) == [expected, expected]
