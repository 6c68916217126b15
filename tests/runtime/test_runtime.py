"""The runtime on hand-written stages: the same bits as autograd, and errors that say where and why."""

import contextlib
import itertools
import logging
import re
import threading
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from handwritten_stages import (
    CPU,
    NUM_RANKS,
    SIZES,
    STAGES,
    FailingStage1,
    Pipeline,
    Stage0,
    Stage1,
    Stage2,
    make_model,
    reference_step,
    whole_batch,
)
from torch import Tensor, nn

import pipec
from pipec.errors import ExecutionError
from pipec.ir import Compute, Phase, Schedule, one_rank_per_stage
from pipec.runtime.messages import transport
from pipec.runtime.stages.gradients import GradientAccumulator
from pipec.runtime.step import interpreter
from pipec.schedules import make_schedule


def in_order(*parts: tuple[Phase, int]) -> tuple[Compute, ...]:
    """Each of these cells for every microbatch before the next."""
    return tuple(Compute(phase, stage, mb) for phase, stage in parts for mb in range(len(SIZES)))


F, B = Phase.FORWARD, Phase.BACKWARD
SCHEDULES = {
    "gpipe": make_schedule("gpipe", NUM_RANKS, len(SIZES)),
    "1f1b": make_schedule("1f1b", NUM_RANKS, len(SIZES)),
    "zb-h1": make_schedule("zb-h1", NUM_RANKS, len(SIZES)),
    "folded onto two ranks": Schedule(
        "folded",
        len(SIZES),
        one_rank_per_stage((0, 1, 0)),
        (in_order((F, 0), (F, 2), (B, 2), (B, 0)), in_order((F, 1), (B, 1))),
    ),
    "one rank": Schedule(
        "sequential",
        len(SIZES),
        one_rank_per_stage((0, 0, 0)),
        (in_order((F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (B, 0)),),
    ),
}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.parameters.items()}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_steps_have_the_bits_of_autograd(schedule: Schedule) -> None:
    """Two steps without clearing gradients: uneven microbatches, dropout, a tied weight, a running mean."""
    pipeline, model = Pipeline(schedule), make_model()
    for step in range(2):
        expected = reference_step(model, SIZES, step)
        for results in pipeline.step(SIZES, step):
            assert_same_bits(results, expected)
        assert_same_bits(gradients_of(pipeline.model), gradients_of(model))
        assert_same_bits(pipeline.model.buffers, model.buffers)


# what a rank holds on to


def test_a_received_value_is_dropped_by_its_last_reader_and_saved_values_when_the_backward_took_them() -> (
    None
):
    received, alive = [], []

    class Watching(Stage1):
        @staticmethod
        def forward(frame):
            alive.append([reference() is not None for reference in received])
            hidden_1 = frame.pop("hidden_1")
            received.append(weakref.ref(hidden_1))
            sent, (_, z, mask), updates = Stage1.computed(frame, hidden_1)
            return sent, [hidden_1.clone(), z, mask], updates

    class Careless(Stage0):
        @staticmethod
        def forward(frame):
            sent, saved, updates = Stage0.forward(frame)
            return sent, [saved[0], saved[1].clone()], updates

    Pipeline(SCHEDULES["gpipe"], {**STAGES, 0: Careless, 1: Watching}).step(SIZES)
    assert alive == [[False] * number for number in range(len(SIZES))]


@pytest.mark.parametrize("sizes", [SIZES, (4, 0, 3, 4, 0)], ids=["all", "some without rows"])
def test_what_a_backward_sends_leaves_before_its_gradients_are_added(
    sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: dict[str, list[str]] = defaultdict(list)

    def noting(what: str, function: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any) -> None:
            events[threading.current_thread().name].append(what)
            function(*args)

        return noted

    monkeypatch.setattr(transport._Mailbox, "send", noting("send", transport._Mailbox.send))
    monkeypatch.setattr(GradientAccumulator, "_add", noting("add", GradientAccumulator._add))
    Pipeline(SCHEDULES["1f1b"]).step(sizes)
    found = events["pipec rank 1"]
    before = [what for what, behind in itertools.pairwise(found) if behind == "add"]
    assert before == ["send"] * sum(map(bool, sizes))
    assert found.count("send") == 2 * len(before)


def test_instructions_run_with_their_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels and extensions ask for it, and a step may be made on any thread."""
    current = list[object]()

    @contextlib.contextmanager
    def current_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.append("another")

    class Watching(Stage1):
        @staticmethod
        def forward(frame):
            assert current == [CPU]
            return Stage1.forward(frame)

    monkeypatch.setattr(interpreter, "current_device", current_device)
    Pipeline(SCHEDULES["one rank"], {**STAGES, 1: Watching}).step(SIZES)
    assert current == [CPU, "another"]


# failing


def test_a_failing_rank_stops_all_and_the_pipeline_works_again_afterwards() -> None:
    broken = iter([True])

    class Once(Stage1):
        @staticmethod
        def backward(frame):
            return (FailingStage1 if next(broken, False) else Stage1).backward(frame)

    pipeline, model = Pipeline(SCHEDULES["1f1b"], {**STAGES, 1: Once}), make_model()
    buffers = {name: buffer.clone() for name, buffer in pipeline.model.buffers.items()}
    with pytest.raises(ExecutionError) as caught:
        pipeline.step(SIZES)
    first, *lines = str(caught.value).splitlines()
    assert re.fullmatch(
        r"rank 1, stage 1, microbatch 0, backward: ValueError: the backward of stage 1 is broken "
        r"\(handwritten_stages.py, line \d+, in backward\)",
        first,
    )
    assert lines == [
        "last instructions of rank 1:",
        "     7  wait_recv   stage 1  mb 1  hidden_1 (0 -> 1)               from rank 0",
        "     8  forward     stage 1  mb 1",
        "     9  send        stage 1  mb 1  hidden_2 (1 -> 2)               to rank 2",
        "    10  wait_recv   stage 1  mb 0  grad_hidden_2 (2 -> 1)          from rank 2",
        "    11  backward    stage 1  mb 0",
    ]
    assert isinstance(caught.value.__cause__, ValueError)
    assert_same_bits(pipeline.model.buffers, buffers)

    for parameter in pipeline.model.parameters.values():
        parameter.grad = None
    expected = reference_step(model, SIZES, 0)
    assert_same_bits(pipeline.step(SIZES)[0], expected)
    assert_same_bits(gradients_of(pipeline.model), gradients_of(model))


def test_ctrl_c_on_one_rank_stops_all() -> None:
    class Interrupted(Stage1):
        @staticmethod
        def backward(frame):
            raise KeyboardInterrupt

    pipeline = Pipeline(SCHEDULES["1f1b"], {**STAGES, 1: Interrupted})
    with pytest.raises(KeyboardInterrupt):
        pipeline.step(SIZES)


def test_an_error_before_the_first_and_after_the_last_instruction_says_so() -> None:
    pipeline = Pipeline(SCHEDULES["one rank"])
    with pytest.raises(ExecutionError, match="rank 0, preparing the step: KeyError: 'x'"):
        pipeline.interpreters[0].run([{}] * len(SIZES), whole_batch(SIZES))

    class Counting(Stage2):
        @staticmethod
        def forward(frame):
            sent, saved, updates = Stage2.forward(frame)
            return {**sent, "loss": torch.tensor(len(frame["target"]))}, saved, updates

    pipeline = Pipeline(SCHEDULES["one rank"], {**STAGES, 2: Counting})
    with pytest.raises(ExecutionError, match="rank 0, finishing the step: InputError: the result loss"):
        pipeline.step(SIZES)


def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the loss is not to be had")


def test_an_error_shows_the_frames_of_the_script_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pipec")
    pipe = pipec.compile(nn.Linear(2, 2), devices=1, loss_fn=failing)
    with pytest.raises(pipec.InputError, match="the loss is not to be had") as caught:
        pipe.step(torch.ones(2, 2), target=torch.ones(2, 2))
    shown = traceback.format_exception(caught.value)
    files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert files == {__file__}
    assert not any("torch/_dynamo" in line for line in shown)
    assert sum(each.count("\n") for each in shown) < 20
    logged = next(record for record in caplog.records if record.exc_info)
    assert logged.levelno == logging.DEBUG
