"""A value that several stages of a rank read is sent there once, and handed on from the first of them."""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from unsplit_reference import StepResult, assert_equal

import pipec
from pipec.compiler.schedule_policy import ScheduleSource
from pipec.ir import Op, Program
from pipec.ir.text_format import format_link
from pipec.pipeline import Pipeline

WIDTH = 256
X, Y = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
LOSS = nn.functional.mse_loss


class Skips(nn.Module):
    """Every layer reads what the first one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.layers[0](x).tanh()
        for layer in self.layers[1:]:
            h = layer(h).tanh() * first
        return h


class Towers(Skips):
    """The fourth layer reads what the first one makes, and nothing of the second."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth, fifth, last = self.layers
        shared = first(x)
        aside = second(shared)
        return last(fifth(fourth(third(shared).tanh()) * shared).tanh()) + aside


class Sums(Skips):
    """The gradient of what the last layer reads is that of what the third and the fifth make."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth, fifth, last = self.layers
        h = second(first(x))
        aside = third(h)
        return last(fifth(fourth(h).tanh()) + aside)


def compiled(make: type[nn.Module], schedule: ScheduleSource) -> tuple[Pipeline, nn.Module]:
    """A pipeline after a step, and the model that autograd has given the same gradients."""
    torch.manual_seed(0)
    model = make()
    unsplit = copy.deepcopy(model)
    pipe = pipec.compile(model, 2, loss_fn=LOSS, schedule=schedule, microbatches=4)
    loss = pipe.step(X, target=Y)
    parts = [LOSS(unsplit(x), y) / 4 for x, y in zip(X.split(4), Y.split(4), strict=True)]
    for part in parts:
        part.backward()
    assert_equal(StepResult.of(loss, model), StepResult.of(sum(parts).detach(), unsplit))
    return pipe, unsplit


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


@pytest.mark.slow
def test_a_rank_receives_a_value_once_for_all_of_its_stages() -> None:
    pipe, unsplit = compiled(Skips, "interleaved-1f1b-v3")
    assert {*received(pipe.programs).values()} == {1}
    assert list(handed_on(pipe)) == ["first (1 -> 5)", "first (1 -> 3)"]
    assert torch.equal(pipe(X), torch.cat([unsplit(x) for x in X.split(4)]))


def test_a_schedule_that_runs_the_stages_of_a_rank_out_of_order_sends_to_each(tmp_path: Path) -> None:
    """Rank 1 runs the forward of stage 3 before that of stage 1."""
    path, orders = tmp_path / "orders.csv", ("0F 2F 4F 4B 2B 0B", "3F 1F 5F 5B 3B 1B")
    rows = [[f"{cell}{mb}" for mb in range(4) for cell in order.split()] for order in orders]
    path.write_text("\n".join(map(",".join, rows)))
    pipe, _ = compiled(Towers, path)
    twice = [key for key, count in received(pipe.programs).items() if count == 2]
    assert twice == [(1, mb, "shared") for mb in range(4)]
    assert not list(handed_on(pipe))


def test_a_gradient_that_stages_of_a_rank_read_is_received_once() -> None:
    pipe, _ = compiled(Sums, "interleaved-1f1b-v3")
    assert {*received(pipe.programs).values()} == {1}
    assert list(handed_on(pipe)) == ["grad_linear_4 (4 -> 2)"]
