"""Binds the call of a stage's function: fetches its arguments and stores its results."""

from collections.abc import Callable, Sequence
from typing import Any

from pipec.ir import Phase
from pipec.runtime.stages.bound_stage import BoundStage
from pipec.runtime.step.step_results import ResultCollector

Action = Callable[[], None]
FetchArguments = Callable[[], Sequence[Any]]


def nothing() -> None:
    """The action that does nothing."""


def bind_function(
    name: str,
    phase: Phase,
    is_last: bool,
    stage: BoundStage,
    microbatch: int,
    fetch_arguments: FetchArguments,
    results: ResultCollector,
) -> Action:
    """The action that calls a function of ``stage`` on ``microbatch`` with what ``fetch_arguments`` returns.

    ``is_last`` tells the last function of ``phase`` from those that save something for the next one. The
    stage keeps gradients until they are accumulated.

    Gradients are handed over in a list that replaces the tuple a function returned. Nothing but the list then
    holds them, and ``GradientAccumulator`` keeps the memory of such a gradient instead of copying it.
    """
    frame = stage.frames[microbatch]
    function = stage.function(name)
    keep = stage.gradients.keep

    def forward() -> None:
        sent, saved, updates = function(*fetch_arguments())
        results.collect(microbatch, sent)
        stage.update_buffers(updates)
        frame.update(sent, saved=saved)

    def recompute() -> None:
        frame["saved"] = function(*fetch_arguments())

    def backward() -> None:
        sent, gradients = function(*fetch_arguments())
        frame.update(sent)
        keep([*gradients])

    def backward_input() -> None:
        sent, saved, gradients = function(*fetch_arguments())
        frame.update(sent, saved=saved)
        keep([*gradients])

    def backward_weight() -> None:
        gradients = function(*fetch_arguments())
        keep([*gradients])

    def part_of_backward_weight() -> None:
        frame["saved"], gradients = function(*fetch_arguments())
        keep([*gradients])

    actions = {
        Phase.FORWARD: forward,
        Phase.RECOMPUTE: recompute,
        Phase.BACKWARD: backward if is_last else backward_input,
        Phase.BACKWARD_INPUT: backward_input,
        Phase.BACKWARD_WEIGHT: backward_weight if is_last else part_of_backward_weight,
    }
    return actions[phase]
