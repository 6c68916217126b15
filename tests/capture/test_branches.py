"""Branches on values of tensors: a pipeline goes the way that the model goes, or fails with the line."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from awkward_modules import Pair, asserted_below
from slow_params import slow
from torch import Tensor, fx, nn

from pipec.capture.batch.branch_conditions import is_batch_condition
from pipec.capture.batch.dependence import Dependence, PerRow, Unproven
from pipec.errors import BranchError, CaptureError, ExecutionError

ROWS, WIDTH = 8, 4


class Layers(nn.Module):
    """Two layers, between which ``branch`` may change what the second one gets."""

    def __init__(self, branch: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.branch = branch
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        h = self.first(x)
        return (self.second(self.branch(h, mask)) * (1 + mask)).square().mean()


def inputs(masked: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(ROWS) < masked).float()[:, None].expand(ROWS, WIDTH).contiguous()
    return {"x": torch.randn(ROWS, WIDTH, generator=generator), "mask": mask}


def pair_of(branch: Callable[[Tensor, Tensor], Tensor]) -> Pair:
    return Pair(Layers(branch), microbatches=4)


def any_masked(h: Tensor, mask: Tensor) -> Tensor:
    return h * 2 if mask.any().item() else h


def more_than_half_are_masked(h: Tensor, mask: Tensor) -> Tensor:
    count = (mask > 0).sum()
    number = count.item()
    count += 100  # the number stays what it was
    return h + 1 if number > 16 else h


@pytest.mark.parametrize("branch", [any_masked, slow(more_than_half_are_masked)])
def test_a_branch_on_arguments_goes_as_the_whole_batch_says(branch: Callable[..., Tensor]) -> None:
    """No microbatch but the first has masked rows, and the unsplit model sees all."""
    pair = pair_of(branch)
    for masked in (0, 2, 8, 2, 0):
        pair.step(**inputs(masked))
    assert len(pair.pipe._executions.compiler.cache.staged_graphs) == 2, "each way is compiled once"


def clamped(h: Tensor, mask: Tensor) -> Tensor:
    if not torch.isfinite(h).all() or torch.isnan(h).any():
        h = torch.clamp(h, -1, 1)
    return h


@pytest.mark.slow
def test_a_condition_that_flips_is_an_error_and_leaves_nothing_behind() -> None:
    pair, given = pair_of(clamped), inputs()
    pair.step(**given)
    calls = pair.model.calls.clone()
    pair.model.zero_grad()
    with pytest.raises(ExecutionError, match="was True when the model was captured") as caught:
        pair.pipe.step(given["x"].index_fill(0, torch.tensor([5]), float("inf")), given["mask"])
    assert isinstance(caught.value.__cause__, BranchError)
    for text in ("microbatch 2", "if not torch.isfinite(h).all()", "test_branches.py:"):
        assert text in str(caught.value)
    assert torch.equal(pair.model.calls, calls)
    pair.step(**given)


def compares_numbers(h: Tensor, mask: Tensor) -> Tensor:
    """The mask is 0.1 of 32 bits, which is more than 0.1."""
    small = asserted_below(h, 1e6)
    return h * 0 if int((h > 9.0).sum()) or mask.max().item() <= 0.1 else small + 1


def test_numbers_taken_out_of_tensors_are_compared_as_python_compares_them() -> None:
    pair, given = pair_of(compares_numbers), {**inputs(), "mask": torch.full((ROWS, WIDTH), 0.1)}
    pair.step(**given)
    for scale, message in ((1e9, "this check fails for a microbatch"), (1e3, "the condition is True")):
        with pytest.raises(ExecutionError, match=message):
            pair.pipe.step(x=given["x"] * scale, mask=given["mask"])


def test_code_says_what_is_assumed_and_capture_leaves_buffers_alone() -> None:
    pair = pair_of(lambda h, mask: clamped(nn.functional.dropout(h, 0.5), mask))
    pair.pipe.prepare(**inputs())
    assert pair.model.calls == 0
    source = pair.pipe.source(0) + pair.pipe.source(1)
    assert re.search(r"    check_branch\(all_1, True,\n +'test_branches.py:", source)


def spread(h: Tensor, mask: Tensor) -> Tensor:
    return h / 2 if h.std() > 1 else h


def at_random(h: Tensor, mask: Tensor) -> Tensor:
    return h if torch.rand([]) < 0.1 else h + 1


@pytest.mark.parametrize(
    ("branch", "message"),
    [
        (spread, "all could go one way there, and the whole mini-batch the other"),
        (at_random, "by a number that is drawn at random"),
    ],
)
def test_what_cannot_be_followed_is_refused(branch: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        pair_of(branch).pipe.step(**inputs())
    assert "test_branches.py:" in str(caught.value)


def test_layer_drop_that_is_off_is_no_branch() -> None:
    pair = pair_of(lambda h, mask: h if torch.rand([]) < 0.0 else h + 1)
    pair.step(**inputs())
    assert "check_branch" not in pair.pipe.source(0) + pair.pipe.source(1)


CONDITIONS: list[tuple[Callable[[Tensor], Any], bool]] = [
    (lambda x: (x > 0).any(), True),
    (lambda x: (x > 0).all().logical_not(), True),
    (lambda x: x.max() > 1, True),
    (lambda x: x.amin() < 1, True),
    (lambda x: x.max().logical_not(), False),
    (lambda x: (x > 1).any() | torch.isnan(x).any(), False),
    (lambda x: (x > 1).any() & torch.isnan(x).any(), False),
    (lambda x: x.max() > x.min(), False),
    (lambda x: x.max() == 1, False),
    (lambda x: (x > 1).sum() == 0, True),
    (lambda x: (x > 1).sum().double() != 0, True),
    (lambda x: x.count_nonzero() > 0, True),
    (lambda x: torch.isnan(x.max()).sum() == 0, False),
    (lambda x: (x > 1).sum() == 2, False),
    (lambda x: (x > 1).sum() > 3, False),
    (lambda x: (x > 1).sum() < 0.5, False),
    (lambda x: x.sum() == 0, False),
    (lambda x: x.mean() == 0, False),
    (lambda x: x.std() > 1, False),
    (lambda x: x.amax(0).any(), False),
    (lambda x: (x > 0).any(0).all(), False),
    (lambda x: x.sum() > 0, False),
]


class Valued(fx.Interpreter):
    """Notes what each node is, as capture does."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["val"] = super().run_node(n)
        return n.meta["val"]


@pytest.mark.parametrize(("condition", "allowed"), CONDITIONS)
def test_rules_of_conditions(condition: Callable[[Tensor], Any], allowed: bool) -> None:
    """What is allowed holds of random rows, however they are divided."""
    graph = fx.symbolic_trace(condition).graph
    Valued(fx.GraphModule(nn.Module(), graph)).run(torch.zeros(4, 2))
    reducing = {"any", "all", "max", "amin", "amax", "min", "std", "sum", "mean", "count_nonzero"}

    def dependence_of(node: fx.Node) -> Dependence:
        names = {str(each.target).rpartition(".")[2] for each in [node, *ancestors(node)]}
        return Unproven("reduces") if names & reducing else PerRow(0)

    assert is_batch_condition(graph.output_node().args[0], dependence_of) is allowed  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for _ in range(500 if allowed else 0):
        rows = torch.randint(-2, 4, (4, 2), generator=generator).float()
        parts = {bool(condition(part)) for part in rows.split(2)}
        assert len(parts) == 2 or parts == {bool(condition(rows))}, rows


def ancestors(node: fx.Node) -> set[fx.Node]:
    found = set(node.all_input_nodes)
    return found.union(*map(ancestors, found)) if found else found
