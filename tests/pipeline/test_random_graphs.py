"""Random models, cut anywhere, under any schedule: the bits of the unsplit model."""

import bisect
import copy
import functools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from compile_variants import Captured, TrainingRun, cut, generated, tied_parameters
from example_schedules import v_gpipe
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from unsplit_reference import StepResult, assert_equal, unsplit_step

from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.graph import Assignment, TrainingGraph, is_constant
from pipec.ir import Mode, Schedule
from pipec.passes.assign_stages import AssignStages
from pipec.schedules import make_schedule, zb_h1, zb_v

WIDTH, NUM_STEPS, NUM_MODELS, MAX_STAGES = 8, 12, 6, 4

Combine = Callable[..., Tensor]

ELEMENTWISE: tuple[Combine, ...] = (torch.tanh, torch.relu, nn.functional.gelu, torch.square)
JOINING: tuple[Combine, ...] = (torch.add, torch.mul, lambda a, b: (a @ b.transpose(1, 2)).softmax(-1) @ b)

KINDS = {"layer": 4, "map": len(ELEMENTWISE), "join": len(JOINING), "scale": 1, "chunks": 1}
"""The kinds of steps, and how many there are of each."""


class RandomModel(nn.Module):
    """Twelve steps, each of values made before: branches, skips, and layers that are used again."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]
        )
        self.scale = nn.Parameter(torch.randn(WIDTH))
        choose = random.Random(seed)
        self.steps = [self._step(choose, number) for number in range(NUM_STEPS)]

    def _step(self, choose: random.Random, number: int) -> tuple[str, int, int, int]:
        """What is done, with which of its kind, and to which values; the last one is never left out."""
        kind = choose.choice(list(KINDS))
        return kind, choose.randrange(KINDS[kind]), number, choose.randint(0, number)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        values = [x]
        for kind, which, last, other in self.steps:
            values.append(self._result(kind, which, values[last], values[other]))
        return nn.functional.mse_loss(values[-1], target)

    def _result(self, kind: str, which: int, value: Tensor, other: Tensor) -> Tensor:
        match kind:
            case "layer":
                return self.layers[which](value) + other
            case "map":
                return ELEMENTWISE[which](value)
            case "join":
                return JOINING[which](value, other)
            case "scale":
                return value * self.scale
        left, right = value.chunk(2, dim=-1)
        return torch.cat([right, left.sigmoid()], dim=-1)


def batch(num_rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    made = [torch.randn(num_rows, 3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]
    return dict(zip(("x", "target"), made, strict=True))


@functools.cache
def captured(seed: int) -> Captured:
    """In double precision, in which another order of a sum cannot be taken for an error."""
    model, inputs = RandomModel(seed).double(), batch(2)
    return Captured(model, inputs, capture(CaptureRequest(model, None, Mode.TRAIN, ModelCall((), inputs))))


def cut_before(operators: Sequence[int]) -> AssignStages:
    """A new stage begins at each of these operators."""

    def assign(graph: TrainingGraph) -> Assignment:
        stages = (bisect.bisect_right(operators, op) for op in range(len(graph.operators)))
        return Assignment(tuple(stages), len(operators) + 1)

    return AssignStages(assign)


def schedules(num_stages: int, num_microbatches: int) -> list[Schedule]:
    """Every schedule for so many stages; some have two stages on each rank, some split the backward."""
    made = [make_schedule(name, num_stages, num_microbatches) for name in ("gpipe", "1f1b")]
    made.append(zb_h1(num_stages, num_microbatches))
    if num_stages % 2 == 0:
        made += [make(num_stages // 2, num_microbatches) for make in (zb_v, v_gpipe)]
    return made


@dataclass(frozen=True)
class Case:
    """One way to cut and run the model of ``seed``."""

    seed: int
    cuts: tuple[int, ...]
    recompute: frozenset[int]
    sizes: tuple[int, ...]
    schedule: Schedule


@st.composite
def cases(draw: st.DrawFn) -> Case:
    seed = draw(st.integers(0, NUM_MODELS - 1))
    graph = captured(seed).graph
    busy = sorted({node.meta["operator"] for node in graph.nodes if not is_constant(node)})
    cuts = tuple(sorted(draw(st.sets(st.sampled_from(busy[1:]), max_size=MAX_STAGES - 1))))
    recompute = draw(st.frozensets(st.integers(0, len(cuts))))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    schedule = draw(st.sampled_from(schedules(len(cuts) + 1, len(sizes))))
    return Case(seed, cuts, recompute, tuple(sizes), schedule)


@pytest.mark.slow
@settings(max_examples=30)
@given(cases())
def test_any_cut_under_any_schedule_has_the_bits_of_the_unsplit_model(case: Case) -> None:
    model = captured(case.seed)
    artifact = generated(cut(model, cut_before(case.cuts), case.recompute), case.schedule)
    run, unsplit = TrainingRun(artifact, model.model), copy.deepcopy(model.model)
    inputs = batch(sum(case.sizes))
    found = StepResult.of(run.step(inputs, case.sizes), run.model)
    expected = StepResult.of(unsplit_step(unsplit, inputs, case.sizes), unsplit)
    assert_equal(found, expected, tied_parameters(artifact))


@pytest.mark.slow
def test_the_models_vary_and_the_backward_is_really_split() -> None:
    """That the cases above are what they are meant to be."""
    steps = [step for seed in range(NUM_MODELS) for step in RandomModel(seed).steps]
    assert {kind for kind, *_ in steps} == KINDS.keys()
    model = captured(0)
    graph = cut(model, cut_before([len(model.graph.operators) // 2]), frozenset())
    for source in generated(graph, zb_h1(2, 3)).sources:
        assert re.findall(r"^def (backward\w*)", source, re.MULTILINE) == [
            "backward_input",
            "backward_weight",
        ]
