"""What surrounds the call of a phase function: fetching its arguments and keeping what it returns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pipec.ir import Phase
from pipec.runtime.results import Results
from pipec.runtime.stage import BoundStage

Call = Callable[[], None]
Take = Callable[[], Sequence[Any]]


def bind_phase(
    phase: Phase, stage: BoundStage, microbatch: int, take: Take, unread: Sequence[str], results: Results
) -> Call:
    """The call that runs ``phase`` of ``stage`` on ``microbatch``.

    ``take`` returns the arguments; ``unread`` names what the phase returns and nobody reads.
    """
    frame = stage.frames[microbatch]
    function = getattr(stage.code, phase)

    def keep(values: Mapping[str, Tensor], **others: Any) -> None:
        frame.update(values, **others)
        for name in unread:
            del frame[name]

    def forward() -> None:
        sent, saved, updates = function(*take())
        results.collect(microbatch, sent)
        stage.update_buffers(updates)
        keep(sent, saved=saved)

    def recompute() -> None:
        keep({}, saved=function(*take()))

    def backward() -> None:
        sent, gradients = function(*take())
        keep(sent)
        stage.gradients.add(gradients := [*gradients])

    def backward_input() -> None:
        sent, saved, gradients = function(*take())
        keep(sent, saved=saved)
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
