"""A user's own schedule: a function, or a text of compute orders.

The text has a line for each rank, with its computes in the order in which they run::

    # two ranks, three microbatches
    0: F0 F1 B0 W0 F2 B1 W1 B2 W2
    1: F0 B0 W0 F1 B1 W1 F2 B2 W2

``F3`` is the forward of microbatch 3, ``B3`` its backward, or its input gradient if the rank runs ``W3``, its
weight gradient, too. Where ranks hold several stages, a first line ``placement: 0 1 1 0`` gives the rank of
each stage, and ``F3.2`` is the forward of stage 2. In ``placement: 0,1 2`` ranks 0 and 1 are the replicas of
stage 0 and take its microbatches in turn. A ``#`` begins a comment.
"""

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pipec.errors import DAMAGED_DATA_ERRORS, InputError, PipecError
from pipec.ir import Compute, Phase, Placement, Schedule
from pipec.ir.argument_checks import MOST_MICROBATCHES, check_arguments, integer_between, short_repr
from pipec.ir.columns import ComputeColumns
from pipec.ir.stream import Stream
from pipec.ir.text_format import PHASE_LETTERS
from pipec.schedules.order_builder import linear_placement

_PLACEMENT = re.compile(r"\s*\d{1,9}((,|\s+)\d{1,9})*\s*")
_CELL = re.compile(r"([FBW])(\d{1,9})(?:\.(\d{1,9}))?")
_PHASES = {"F": Phase.FORWARD, "B": Phase.BACKWARD, "W": Phase.BACKWARD_WEIGHT}


FORMAT = "pipec schedule 1"


def custom_schedule(
    source: Callable[[int, int], Schedule] | Path, num_ranks: int, num_microbatches: int | None
) -> Schedule:
    """The schedule of a function of the numbers of ranks and microbatches, or of a file of compute orders.

    ``num_microbatches`` None takes the number in the file.

    Raises:
        InputError: there is no such file, it is for other numbers of ranks or microbatches, its text is none
            of compute orders, or the function raises or returns something else.
    """
    if isinstance(source, Path):
        schedule = _normalized(parse_orders(_read(source), source.stem), str(source))
        num_microbatches = num_microbatches or schedule.num_microbatches
    else:
        assert num_microbatches is not None
        schedule = _call(source, num_ranks, num_microbatches)
    found = (schedule.num_ranks, schedule.num_microbatches)
    if found != (num_ranks, num_microbatches):
        raise InputError(
            f"schedule {schedule.name!r} is for {found[0]} ranks and {found[1]} microbatches, but "
            f"{num_ranks} ranks and {num_microbatches} microbatches were asked for; "
            "pass these numbers on, or compile with those of the schedule"
        )
    return schedule


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; expected a file of compute orders") from error


def _call(function: Callable[[int, int], Schedule], num_ranks: int, num_microbatches: int) -> Schedule:
    name = getattr(function, "__name__", short_repr(function))
    called = f"the schedule function {name}({num_ranks}, {num_microbatches})"
    try:
        schedule = function(num_ranks, num_microbatches)
    except PipecError:
        raise
    except Exception as error:
        raise InputError(f"{called} raised {type(error).__name__}: {error}") from error
    if not isinstance(schedule, Schedule):
        raise InputError(f"{called} returned {short_repr(schedule)}; expected a Schedule")
    return _normalized(schedule, f"what {called} returned")


def _normalized(schedule: Schedule, where: str) -> Schedule:
    """The schedule as tuples and columns. The verifier checks its order.

    Raises:
        InputError: a field of it is malformed, or a rank has no stage.
    """
    count, stream = schedule.num_microbatches, schedule.stream
    check_arguments({"num_microbatches": integer_between(1, MOST_MICROBATCHES)}, {"num_microbatches": count})
    try:
        orders = [_columns(order) for order in schedule.orders]
        placement = tuple(tuple(map(operator.index, ranks)) for ranks in schedule.placement)
        if not isinstance(stream, Stream | None):
            raise TypeError(f"stream is {short_repr(stream)}")
    except DAMAGED_DATA_ERRORS as error:
        raise InputError(
            f"{where} is no schedule ({type(error).__name__}: {error}); expected as orders a sequence of "
            "Compute(phase, stage, microbatch) for each rank, as placement the ranks of each stage, and as "
            "stream a Stream or None"
        ) from error
    ranks = {rank for replicas in placement for rank in replicas}
    if ranks != {*range(len(orders))} or any(len({*each}) != len(each) or not each for each in placement):
        raise InputError(
            f"{where} has orders of {len(orders)} ranks and placement {short_repr(placement)}; expected "
            f"stages on ranks 0 to {len(orders) - 1}, each rank with a stage, and each stage with ranks"
        )
    return Schedule(str(schedule.name), count, placement, tuple(orders), stream)


def _columns(order: Sequence[Compute]) -> ComputeColumns:
    """The order of a rank as columns. Numbers may be those of numpy."""
    if isinstance(order, ComputeColumns):
        return order
    index = operator.index
    return ComputeColumns.of([Compute(Phase(x.phase), index(x.stage), index(x.microbatch)) for x in order])


def parse_orders(text: str, name: str) -> Schedule:
    """The schedule written in ``text``; ``format_orders`` writes such a text.

    A line ``format: pipec schedule 1`` may name the version of the format.

    Raises:
        InputError: a line is neither a rank's order nor the placement; the message names the line.
    """
    placement: Placement | None = None
    orders: list[list[Compute]] = []
    for number, line in enumerate(text.splitlines(), 1):
        head, _, body = line.partition("#")[0].partition(":")
        if head.strip() == "placement" and _PLACEMENT.fullmatch(body):
            placement = tuple(tuple(map(int, word.split(","))) for word in body.split())
        elif head.strip() == "format":
            if body.strip() != FORMAT:
                raise InputError(
                    f"{name}, line {number}: the format is {body.strip()!r}, and this version of pipec reads "
                    f"{FORMAT!r}; use a later version of pipec"
                )
        elif head.strip() == str(len(orders)) and ":" in line:
            orders.append(_split(list(_parse_computes(body, len(orders), f"{name}, line {number}"))))
        elif head.strip() or body.strip():
            raise InputError(
                f"{name}, line {number}: found {line.strip()!r}; expected '{len(orders)}: F0 B0 ...', the "
                f"order of rank {len(orders)}, or 'placement: 0 1 ...'"
            )
    computes = [compute for order in orders for compute in order]
    if not computes:
        raise InputError(f"{name}: no rank computes anything; expected lines such as '0: F0 B0'")
    num_microbatches = max(compute.microbatch for compute in computes) + 1
    placement = placement or linear_placement(len(orders))
    return Schedule(name, num_microbatches, placement, tuple(map(ComputeColumns.of, orders)))


def _parse_computes(body: str, rank: int, where: str) -> Iterator[Compute]:
    for word in body.split():
        match = _CELL.fullmatch(word)
        if not match:
            raise InputError(
                f"{where}: found {word!r}; expected F, B or W and a microbatch: F3, or F3.2 of stage 2"
            )
        letter, microbatch, stage = match.groups()
        yield Compute(_PHASES[letter], rank if stage is None else int(stage), int(microbatch))


def _split(order: list[Compute]) -> list[Compute]:
    """The same order, with input gradients for backwards whose weight gradients are in the order, too."""
    weights = {
        (compute.stage, compute.microbatch) for compute in order if compute.phase is Phase.BACKWARD_WEIGHT
    }
    return [
        Compute(Phase.BACKWARD_INPUT, compute.stage, compute.microbatch)
        if compute.phase is Phase.BACKWARD and (compute.stage, compute.microbatch) in weights
        else compute
        for compute in order
    ]


def format_orders(schedule: Schedule) -> str:
    """The text from which ``parse_orders`` makes the same schedule."""
    several = schedule.placement != linear_placement(schedule.num_ranks)
    words = (",".join(map(str, ranks)) for ranks in schedule.placement)
    lines = [f"placement: {' '.join(words)}"] if several else []
    for rank, order in enumerate(schedule.orders):
        labels = (
            f"{PHASE_LETTERS[compute.phase]}{compute.microbatch}" + (f".{compute.stage}" if several else "")
            for compute in order
        )
        lines.append(f"{rank}: {' '.join(labels)}")
    return "\n".join([*lines, ""])
