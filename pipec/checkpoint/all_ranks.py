"""What every process does for a checkpoint succeeds on all of them, or is an error on all of them."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from pipec.errors import CheckpointError, InputError, PipecError, TransportError
from pipec.runtime.step.execution import BackgroundRanks, Ranks

RankCalls = Ranks | BackgroundRanks
"""The processes, for the thread that steps or for one beside it."""


def call_on_all_ranks(ranks: RankCalls, activity: str, make: Callable[[], Any]) -> list[Any]:
    """What ``make`` returns in each process, JSON each. An error of one process is raised by all.

    Nobody waits for longer than the slowest takes; a process that dies is noticed at once.
    """
    failure, made = None, None
    try:
        made = make()
    except TransportError:  # which the others know of
        raise
    except Exception as error:
        failure = as_pipec_error(error, activity)
    is_input = isinstance(failure, InputError)
    outcome = {"made": made} if failure is None else {"failed": str(failure), "input": is_input}
    every = [
        json.loads(text)
        for text in ranks.all_gather_text_no_timeout(json.dumps(outcome), f"{activity} on every rank")
    ]
    if failure is not None:
        raise failure
    for rank, each in enumerate(every):
        if "failed" in each:
            raise (InputError if each["input"] else CheckpointError)(f"rank {rank}: {each['failed']}")
    return [each["made"] for each in every]


def call_on_rank_0(ranks: RankCalls, activity: str, make: Callable[[], Any]) -> Any:
    """What ``make`` returns on rank 0, which alone calls it; an error of its is raised by all."""
    return call_on_all_ranks(ranks, activity, make if ranks.world.rank == 0 else _nothing)[0]


def _nothing() -> None:
    return None


def require_equal(every: Sequence[Any], what: str, remedy: str) -> None:
    """Raise InputError unless all processes have the same."""
    if other := [rank for rank, each in enumerate(every) if each != every[0]]:
        raise InputError(f"{what} of rank {other[0]} differs from that of rank 0; {remedy}")


def as_pipec_error(error: Exception, activity: str) -> PipecError:
    """The error as one of pipec's own."""
    if isinstance(error, PipecError):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}{error.strerror}"
    made = CheckpointError(f"{activity} failed: {text}")
    made.__cause__ = error
    return made
