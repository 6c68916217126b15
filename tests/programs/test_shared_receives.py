"""A value that several stages of a rank read is sent there once, and handed on from the first of them."""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forward_modules import model
from slow_params import slow
from torch import Tensor, nn
from unsplit_reference import StepResult, assert_equal, unsplit_step

import pipec
from pipec.compiler.schedule_policy import ScheduleSource
from pipec.ir import Op, Program
from pipec.ir.text_format import format_link
from pipec.pipeline import Pipeline

WIDTH = 256
X, Y = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
LOSS = nn.functional.mse_loss


six_layers = model(layers=lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


@six_layers
def Skips(self: Any, x: Tensor) -> Tensor:
    """Every layer reads what the first one makes."""
    first = h = self.layers[0](x).tanh()
    for layer in self.layers[1:]:
        h = layer(h).tanh() * first
    return h


@six_layers
def Towers(self: Any, x: Tensor) -> Tensor:
    """The fourth layer reads what the first one makes, and nothing of the second."""
    first, second, third, fourth, fifth, last = self.layers
    shared = first(x)
    aside = second(shared)
    return last(fifth(fourth(third(shared).tanh()) * shared).tanh()) + aside


@six_layers
def Sums(self: Any, x: Tensor) -> Tensor:
    """The gradient of what the last layer reads is that of what the third and the fifth make."""
    first, second, third, fourth, fifth, last = self.layers
    h = second(first(x))
    aside = third(h)
    return last(fifth(fourth(h).tanh()) + aside)


def compiled(make: type[nn.Module], schedule: ScheduleSource) -> Pipeline:
    """A pipeline after a step and an evaluation, which are those of the model."""
    torch.manual_seed(0)
    trained = make()
    unsplit = copy.deepcopy(trained)
    pipe = pipec.compile(trained, 2, loss_fn=LOSS, schedule=schedule, microbatches=4)
    found = StepResult.of(pipe.step(X, target=Y), trained)
    loss = unsplit_step(lambda x, y: LOSS(unsplit(x), y), {"x": X, "y": Y}, [4] * 4)
    assert_equal(found, StepResult.of(loss, unsplit))
    assert torch.equal(pipe(X), torch.cat([unsplit(x) for x in X.split(4)]))
    return pipe


def received(programs: Sequence[Program]) -> Counter[tuple[int, int, str]]:
    """How often each rank receives a value for a microbatch."""
    return Counter(
        (program.rank, each.microbatch, value.name)
        for program in programs
        for each in program.instructions
        if each.op is Op.RECV and each.link and each.link.payload.per_microbatch
        for value in each.link.values
    )


def handed_on(pipe: Pipeline) -> Iterator[str]:
    """The links that carry what their source has received."""
    received = {(link.target, value) for link in pipe.plan.links for value in link.values}
    for link in pipe.plan.links:
        if any((link.source, value) in received for value in link.values):
            yield format_link(link)


@pytest.mark.parametrize(
    ("make", "handed"),
    [slow(Skips, ["first (1 -> 5)", "first (1 -> 3)"]), (Sums, ["grad_linear_4 (4 -> 2)"])],
    ids=["activation", "gradient"],
)
def test_a_rank_receives_a_value_once_for_all_of_its_stages(make: type[nn.Module], handed: list[str]) -> None:
    pipe = compiled(make, "interleaved-1f1b-v3")
    assert {*received(pipe.programs).values()} == {1}
    assert list(handed_on(pipe)) == handed


def test_a_schedule_that_runs_the_stages_of_a_rank_out_of_order_sends_to_each(tmp_path: Path) -> None:
    """Rank 1 runs the forward of stage 3 before that of stage 1."""
    path, orders = tmp_path / "orders.csv", ("0F 2F 4F 4B 2B 0B", "3F 1F 5F 5B 3B 1B")
    rows = [[f"{cell}{mb}" for mb in range(4) for cell in order.split()] for order in orders]
    path.write_text("\n".join(map(",".join, rows)))
    pipe = compiled(Towers, path)
    twice = [key for key, count in received(pipe.programs).items() if count == 2]
    assert twice == [(1, mb, "shared") for mb in range(4)]
    assert not list(handed_on(pipe))
