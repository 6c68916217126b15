"""What surrounds the call of a phase function: fetching its arguments and keeping what it returns."""

from collections.abc import Callable, Sequence
from typing import Any

from pipec.ir import Phase
from pipec.runtime.results import Results
from pipec.runtime.stage import BoundStage

Action = Callable[[], None]
Take = Callable[[], Sequence[Any]]


def bind_phase(phase: Phase, stage: BoundStage, microbatch: int, take: Take, results: Results) -> Action:
    """The call that runs ``phase`` of ``stage`` on ``microbatch``. ``take`` returns the arguments.

    A tuple of gradients is let go of before they are added, so that a gradient nobody else holds can be kept.
    """
    frame = stage.frames[microbatch]
    function = getattr(stage.code, phase)

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
        stage.gradients.add(gradients := [*gradients])

    def backward_input() -> None:
        sent, saved, gradients = function(*take())
        frame.update(sent, saved=saved)
        stage.gradients.add(gradients := [*gradients])

    def backward_weight() -> None:
        gradients = function(*take())
        stage.gradients.add(gradients := [*gradients])

    calls = {
        Phase.FORWARD: forward,
        Phase.RECOMPUTE: recompute,
        Phase.BACKWARD: backward,
        Phase.BACKWARD_INPUT: backward_input,
        Phase.BACKWARD_WEIGHT: backward_weight,
    }
    return calls[phase]
