"""Around the call of a stage's function: its arguments are fetched, and what it returns is kept."""

from collections.abc import Callable, Sequence
from typing import Any

from pipec.ir import Phase
from pipec.runtime.stages.stage import BoundStage
from pipec.runtime.step.results import Collector

Action = Callable[[], None]
Take = Callable[[], Sequence[Any]]


def bind_function(
    name: str,
    phase: Phase,
    is_last: bool,
    stage: BoundStage,
    microbatch: int,
    take: Take,
    results: Collector,
    sends_first: bool = False,
) -> Action:
    """The action that calls a function of ``stage`` on ``microbatch``. ``take`` returns the arguments.

    ``is_last`` tells the last function of ``phase`` from those that save something for the next one. If it
    ``sends_first``, somebody else lets the stage add the gradients, when what others wait for has been sent.

    Gradients are handed over in a list that replaces the tuple a function returned. Nothing but the list then
    holds them, and ``GradientSum`` keeps the memory of such a gradient instead of copying it.
    """
    frame = stage.frames[microbatch]
    function = stage.function(name, phase, microbatch)
    add = stage.gradients.add_later if sends_first else stage.gradients.add

    def forward() -> None:
        sent, saved, updates = function(*take())
        results.collect(microbatch, sent)
        stage.update_buffers(updates)
        frame.update(sent, saved=saved)

    def recompute() -> None:
        frame["saved"] = function(*take())

    def backward() -> None:
        sent, gradients = function(*take())
        frame.update(sent)
        add(gradients := [*gradients])

    def backward_input() -> None:
        sent, saved, gradients = function(*take())
        frame.update(sent, saved=saved)
        add(gradients := [*gradients])

    def backward_weight() -> None:
        gradients = function(*take())
        add(gradients := [*gradients])

    def part_of_backward_weight() -> None:
        frame["saved"], gradients = function(*take())
        add(gradients := [*gradients])

    actions = {
        Phase.FORWARD: forward,
        Phase.RECOMPUTE: recompute,
        Phase.BACKWARD: backward if is_last else backward_input,
        Phase.BACKWARD_INPUT: backward_input,
        Phase.BACKWARD_WEIGHT: backward_weight if is_last else part_of_backward_weight,
    }
    return actions[phase]
