"""Steps that use other parameters each time: what one leaves out keeps its gradients and its state."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_params import slow_but
from torch import Tensor, nn

import pipec

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
LAYOUTS: list[dict[str, Any]] = [
    {"devices": 2, "stages": 2},
    {"devices": 2, "stages": 1},
    {"devices": 4, "replicas": 2, "shard": "parameters"},
]


class Tasks(nn.Module):
    """A trunk with a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.a = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.b = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor, task: bool) -> Tensor:
        return (self.a if task else self.b)(self.trunk(x)).square().mean()


class Pair:
    """A pipeline that updates, and the plain script with an equal model."""

    def __init__(self, clip: float | None = 0.1, **layout: Any) -> None:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Tasks().double())
        self.own, self.plain = models
        self.clip, self.optimizer = clip, ADAMW(list(self.plain.named_parameters()))
        self.pipe = pipec.compile(self.own, microbatches=2, optimizer=ADAMW, clip_grad_norm=clip, **layout)
        self.batch = torch.randn(8, 6, dtype=torch.float64)

    def step(self, task: bool, update: bool = True) -> None:
        self.plain_step(task, update)
        if update:
            self.pipe.step(self.batch, task)
            self.compare()
            return
        with self.pipe.accumulate():
            self.pipe.step(self.batch, task)

    def plain_step(self, task: bool, update: bool = True) -> None:
        self.plain(self.batch, task).backward()
        if update:
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.plain.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def compare(self) -> None:
        whole = self.pipe.full_state_dict(all_ranks=True)
        for name, parameter in self.plain.state_dict().items():
            torch.testing.assert_close(whole[name], parameter, rtol=1e-9, atol=1e-12)

    def steps_of_state(self) -> dict[str, float]:
        groups, state = self.pipe.optimizer.param_groups, self.pipe.optimizer.state_dict()["state"]
        names = [name for group in groups for name in group["param_names"]]
        return {names[number]: float(entries["step"]) for number, entries in state.items()}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, LAYOUTS[2]))
def test_what_a_step_leaves_out_keeps_its_state_and_its_gradients(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    pair = Pair(**layout)
    pair.step(True)
    assert {name[0] for name in pair.steps_of_state()} == {"t", "a"}
    for task in (True, False, True, False):
        pair.step(task)
    assert {name[0]: steps for name, steps in pair.steps_of_state().items()} == {"t": 5, "a": 3, "b": 2}
    for tasks in ([True, False], [False, False], [True, False, False], [False, True]):
        for number, task in enumerate(tasks, start=1):
            pair.step(task, update=number == len(tasks))
    before = pair.steps_of_state()
    pair.pipe.save_checkpoint(tmp_path / "saved")
    pair.pipe.step(pair.batch, True)
    pair.pipe.load_checkpoint(tmp_path / "saved")
    assert pair.steps_of_state() == before
    for task in (True, False):
        pair.step(task)


@pytest.mark.slow
def test_state_that_is_loaded_waits_for_its_task() -> None:
    first, later = Pair(devices=1), Pair(devices=2, stages=1, shard="optimizer")
    for task in (True, False):
        first.step(task)
    later.step(False)
    later.pipe.load_state_dict(first.pipe.state_dict())
    later.pipe.optimizer.load_state_dict(first.pipe.optimizer.state_dict())
    later.plain, later.optimizer = first.plain, first.optimizer
    for task in (False, True):
        later.step(task)
