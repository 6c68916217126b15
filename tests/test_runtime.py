"""The runtime on hand-written stages: the same bits as autograd, and errors that say where and why."""

from collections.abc import Sequence

import pytest
import torch
from runtime_stages import (
    STAGES,
    Pipeline,
    ReplayedStage1,
    make_model,
    reference_step,
    split_backward,
)
from torch import Tensor

from pipec.ir import Compute, Phase, Schedule
from pipec.schedules import make_schedule

SIZES = (4, 4, 3, 4, 1)
REPLAYED = {**STAGES, 1: ReplayedStage1}


def two_ranks(num_microbatches: int) -> Schedule:
    """Stages 0 and 2 on rank 0, so that they hand values to each other, and stage 1 on rank 1."""

    def cells(phase: Phase, stage: int) -> list[Compute]:
        return [Compute(phase, stage, microbatch) for microbatch in range(num_microbatches)]

    outer = [*cells(Phase.FORWARD, 0), *cells(Phase.FORWARD, 2), *cells(Phase.BACKWARD, 2), *cells(Phase.BACKWARD, 0)]
    inner = [*cells(Phase.FORWARD, 1), *cells(Phase.BACKWARD, 1)]
    return Schedule("folded", num_microbatches, (0, 1, 0), (tuple(outer), tuple(inner)))


SCHEDULES = {
    "gpipe": make_schedule("gpipe", 3, len(SIZES)),
    "1f1b": make_schedule("1f1b", 3, len(SIZES)),
    "1f1b, split backward": split_backward(make_schedule("1f1b", 3, len(SIZES))),
    "two ranks": two_ranks(len(SIZES)),
    "one rank": Schedule(
        "sequential",
        len(SIZES),
        (0, 0, 0),
        (
            tuple(
                Compute(phase, stage, microbatch)
                for microbatch in range(len(SIZES))
                for phase, order in ((Phase.FORWARD, (0, 1, 2)), (Phase.BACKWARD, (2, 1, 0)))
                for stage in order
            ),
        ),
    ),
}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("stages", [STAGES, REPLAYED], ids=["saved", "replayed"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_steps_have_the_bits_of_autograd(schedule: Schedule, stages: dict[int, type]) -> None:
    """Two steps without clearing gradients: uneven microbatches, dropout, a tied weight, a running mean."""
    pipeline, model = Pipeline(schedule, stages), make_model()
    for step in range(2):
        expected = reference_step(model, SIZES, step)
        for results in pipeline.step(SIZES, step):
            assert_same_bits(results, expected)
        for name, parameter in model.parameters.items():
            assert torch.equal(pipeline.model.parameters[name].grad, parameter.grad), name
        assert_same_bits(pipeline.model.buffers, model.buffers)
