"""A pipeline trains as eager torch: the table of ``equality_rows``, random cuts, and transformers."""

import bisect
import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import worker_processes
from compile_variants import SIZES, Captured, assert_same_bits, captured, compiled, cut, generated, pipeline
from equality_rows import Row, covering, diagnosis, difference
from example_schedules import v_gpipe
from forward_modules import model as module
from huggingface_models import MODELS, Factory, bert, each, gpt2, resnet
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import WIDTH, RandomModel
from slow_params import slow
from torch import Tensor, nn
from unsplit_reference import microbatches, step_buffers
from worker_processes import run_ranks

from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.graph import Assignment, TrainingGraph, is_constant
from pipec.ir import Mode, Schedule
from pipec.passes.assign_stages import AssignStages
from pipec.schedules import make_schedule, zb_h1, zb_v

HELPERS = Path(__file__).parents[1] / "helpers"
NUM_FAST = 28
"""Rows of the fast suite: they have more than half of all pairs, and every value of every axis."""

ROWS = [row if number < NUM_FAST else slow(row) for number, row in enumerate(covering())]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_trains_as_eager_torch(row: Row) -> None:
    if difference(row):
        pytest.fail(diagnosis(row))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_ranks", "first", "last"), [(2, 0, 4), slow(2, 4, 24), slow(4, 0, 24)])
def test_rows_over_processes_train_as_eager_torch(
    num_ranks: int, first: int, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in one start of ``torchrun``."""
    monkeypatch.setattr(worker_processes, "TIMEOUT", 1500.0)
    numbers, rows = range(first, last), covering(num_ranks)
    printed = run_ranks(HELPERS / "equality_rows.py", num_ranks, tmp_path, [*map(str, numbers)])
    for rank, text in enumerate(printed):
        found = json.loads(text.splitlines()[-1])
        wrong = [f"row {k}, rank {rank}: {rows[int(k)]}: {text}" for k, text in found.items() if text]
        assert not wrong, "\n".join(wrong)


# random models, cut at any operators

NUM_MODELS, MAX_STAGES = 6, 4


@module(body=RandomModel)
def WithTarget(self: Any, x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(self.body(x), target)


def rows_of(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(number, 3, WIDTH, generator=generator).double() for name in ("x", "target")}


@functools.cache
def captured_graph(seed: int) -> Captured:
    """In double precision, in which another order of a sum cannot be taken for an error."""
    torch.manual_seed(seed)
    model, inputs = WithTarget(seed).double(), rows_of(2)
    return Captured(model, inputs, capture(CaptureRequest(model, None, Mode.TRAIN, ModelCall((), inputs))))


def cut_before(operators: Sequence[int]) -> AssignStages:
    """A new stage begins at each of these operators."""

    def assign(graph: TrainingGraph) -> Assignment:
        stages = (bisect.bisect_right(operators, op) for op in range(len(graph.operators)))
        return Assignment(tuple(stages), len(operators) + 1)

    return AssignStages(assign)


def schedules(num_stages: int, num_microbatches: int) -> list[Schedule]:
    """Schedules for so many stages; some have two stages on each rank, some split the backward."""
    made = [make_schedule(name, num_stages, num_microbatches) for name in ("gpipe", "1f1b")]
    made.append(zb_h1(num_stages, num_microbatches))
    if num_stages % 2 == 0:
        made += [make(num_stages // 2, num_microbatches) for make in (zb_v, v_gpipe)]
    return made


@pytest.mark.slow
@settings(max_examples=30)
@given(data=st.data())
def test_any_cut_under_any_schedule_has_the_bits_of_the_unsplit_model(data: st.DataObject) -> None:
    model = captured_graph(data.draw(st.integers(0, NUM_MODELS - 1)))
    busy = sorted({node.meta["operator"] for node in model.graph.nodes if not is_constant(node)})
    operators = sorted(data.draw(st.sets(st.sampled_from(busy[1:]), max_size=MAX_STAGES - 1)))
    recompute = data.draw(st.frozensets(st.integers(0, len(operators))))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    schedule = data.draw(st.sampled_from(schedules(len(operators) + 1, len(sizes))))
    artifact = generated(cut(model, cut_before(operators), recompute), schedule)
    assert_same_bits(artifact, model, rows_of(sum(sizes)), sizes)


# models of transformers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_stages", "schedule", "recompute"),
    [(2, "gpipe", False), (2, "1f1b", True), (4, "gpipe", True), (4, "1f1b", False)],
)
@pytest.mark.parametrize("factory", each(*MODELS))
def test_a_step_has_the_bits_of_the_unsplit_model(
    factory: Factory, num_stages: int, schedule: str, recompute: bool
) -> None:
    """Every two choices meet in one variant."""
    model = captured(factory)
    assert_same_bits(compiled(model, num_stages, schedule, recompute), model)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("factory", each(gpt2, resnet, bert))
def test_a_forward_returns_what_the_unsplit_model_returns(factory: Factory, training: bool) -> None:
    pipe, trained, model = pipeline(factory)
    pipe.train(training)
    unsplit = copy.deepcopy(trained).train(training)
    inputs = {**model.inputs, "use_cache": False} if factory is gpt2 else model.inputs
    found = pipe(**inputs)
    before, parts = step_buffers(unsplit), []
    with torch.no_grad():
        for rows in microbatches(inputs, SIZES):
            for buffer, value in before.items():
                buffer.copy_(value)
            parts.append(unsplit(**rows))
    assert (type(found), found.keys()) == (type(parts[0]), parts[0].keys())
    assert torch.equal(found.logits, torch.cat([part.logits for part in parts]))
    for (name, own), other in zip(trained.named_buffers(), unsplit.buffers(), strict=True):
        assert torch.equal(own, other), name
