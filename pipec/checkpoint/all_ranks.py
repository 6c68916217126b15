"""Calls that succeed in all processes, or raise in all of them."""

from collections.abc import Callable, Sequence
from typing import Any

from pipec.errors import CheckpointError, InputError, PipecError, TransportError
from pipec.runtime.step.ranks import BackgroundRanks, Ranks

RankCalls = Ranks | BackgroundRanks
"""The processes, called from the main thread or from a background thread."""


def call_on_all_ranks(ranks: RankCalls, activity: str, function: Callable[[], Any]) -> list[Any]:
    """The results of ``function`` from all processes. All raise the error of any.

    The call takes as long as the slowest process; if a process dies, the others fail at once.
    """
    failure, result = None, None
    try:
        result = function()
    except TransportError:  # all processes raise it
        raise
    except Exception as error:
        failure = as_pipec_error(error, activity)
    said = "" if failure is None else str(failure)
    own = said, isinstance(failure, InputError), result
    every = ranks.all_gather(own, f"{activity} on every rank")
    if failure is not None:
        raise failure
    for rank, (said, is_input, _) in enumerate(every):
        if said:
            raise (InputError if is_input else CheckpointError)(f"rank {rank}: {said}")
    return [result for _, _, result in every]


def call_on_rank_0(ranks: RankCalls, activity: str, function: Callable[[], Any]) -> Any:
    """The result of ``function``, which rank 0 alone calls. All processes raise its error."""
    return call_on_all_ranks(ranks, activity, lambda: function() if ranks.world.rank == 0 else None)[0]


def require_equal(every: Sequence[Any], what: str, remedy: str) -> None:
    """Raise InputError unless all values of ``every``, one per process, are equal."""
    if other := [rank for rank, each in enumerate(every) if each != every[0]]:
        raise InputError(f"{what} of rank {other[0]} differs from rank 0's; {remedy}")


def as_pipec_error(error: BaseException, activity: str) -> PipecError:
    """The error, as a PipecError."""
    if isinstance(error, PipecError):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}{error.strerror}"
    wrapped = CheckpointError(f"{activity} failed: {text}")
    wrapped.__cause__ = error
    return wrapped
