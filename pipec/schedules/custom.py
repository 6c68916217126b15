"""A user's own schedule: a function, or a CSV file of compute orders in the form of torch's pipelining.

The file has a row for each rank, with its computes in the order in which they run::

    0F0,0F1,0I0,0F2,0W0,0I1,0W1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2

``0F2`` is the forward of stage 0 on microbatch 2, ``0B2`` its backward, and ``0I1`` and ``0W1`` are the
halves of a backward: the gradients of the input and of the weights. The ranks of the stages follow from the
rows. An empty cell, in which a rank waits, says nothing here.
"""

import csv
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pipec.errors import DAMAGED_DATA_ERRORS, InputError, PipecError
from pipec.ir import Compute, Phase, Placement, Schedule, one_rank_per_stage
from pipec.ir.argument_checks import MOST_MICROBATCHES, check_arguments, integer_between, short_repr
from pipec.ir.columns import PHASE_CODE, ComputeColumns
from pipec.ir.stream import Stream
from pipec.schedules.order_builder import PHASES

ORDERS_SUFFIX = ".csv"
"""Names of schedules that end so are those of files of compute orders."""

_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_LETTERS = {phase: letter for letter, phase in PHASES.items()}


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
    return Schedule(str(schedule.name), count, placement, tuple(_split_alike(orders)), stream)


def _split_alike(orders: Sequence[ComputeColumns]) -> Sequence[ComputeColumns]:
    """The orders with each whole backward in two halves, one after the other, if others are split.

    The stages have either whole backwards or halves.
    """
    whole, half, rest = (
        PHASE_CODE[phase] for phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
    )
    if not any((order.phases == half).any() for order in orders):
        return orders
    found = list[ComputeColumns]()
    for order in orders:
        matrix = order.repeated(1 + (order.phases == whole)).matrix
        (halves,) = np.nonzero(matrix[0] == whole)
        matrix[0, halves[::2]], matrix[0, halves[1::2]] = half, rest
        found.append(ComputeColumns(matrix))
    return found


def _columns(order: Sequence[Compute]) -> ComputeColumns:
    """The order of a rank as columns. Numbers may be those of numpy."""
    if isinstance(order, ComputeColumns):
        return order
    index = operator.index
    return ComputeColumns.of([Compute(Phase(x.phase), index(x.stage), index(x.microbatch)) for x in order])


def parse_orders(text: str, name: str) -> Schedule:
    """The schedule that the rows of ``text`` hold; ``format_orders`` writes such a text.

    Raises:
        InputError: a cell is no compute, or a stage is on no rank or on several.
    """
    rows = list(csv.reader(text.splitlines()))
    orders = [[*_parse_computes(row, f"{name}, line {line}")] for line, row in enumerate(rows, 1)]
    computes = [compute for order in orders for compute in order]
    if not computes:
        raise InputError(f"{name}: no rank computes anything; expected a row for each rank such as 0F0,0B0")
    num_microbatches = max(compute.microbatch for compute in computes) + 1
    return Schedule(name, num_microbatches, _placement(orders, name), tuple(map(ComputeColumns.of, orders)))


def _parse_computes(cells: Sequence[str], where: str) -> Iterator[Compute]:
    for cell in map(str.strip, cells):
        pair = _OVERLAP.fullmatch(cell)
        for word in map(str.strip, pair[1].split(";") if pair else [cell] * bool(cell)):
            match = _CELL.fullmatch(word)
            if not match and _COMMUNICATION.fullmatch(word):
                raise InputError(
                    f"{where}: found {word}, which computes nothing; pipec adds all communication itself. "
                    'Write the computes alone, as torch does in the format "compute_only"'
                )
            if not match:
                raise InputError(
                    f"{where}: found {word!r}; expected a stage, F, B, I or W, and a microbatch, such as 0F3"
                )
            stage, letter, microbatch = match.groups()
            yield Compute(PHASES[letter], int(stage), int(microbatch))


def _placement(orders: Sequence[Sequence[Compute]], name: str) -> Placement:
    """The rank of each stage: the one whose row has its computes."""
    ranks: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for compute in order:
            if (found := ranks.setdefault(compute.stage, rank)) != rank:
                raise InputError(
                    f"{name}, line {rank + 1}: stage {compute.stage} is on rank {rank}, and in line "
                    f"{found + 1} on rank {found}; expected each stage in one row. A file has the orders of "
                    "one pipeline: pass replicas=... for several"
                )
    if missing := [stage for stage in range(len(ranks)) if stage not in ranks]:
        raise InputError(
            f"{name}: stage {max(ranks)} is in a row, but stage {missing[0]} in none; expected stages from "
            "0 on without gaps"
        )
    return one_rank_per_stage(rank for _, rank in sorted(ranks.items()))


def format_orders(schedule: Schedule) -> str:
    """The text from which ``parse_orders`` makes the same schedule, of one rank for each stage."""
    return "".join(
        ",".join(f"{each.stage}{_LETTERS[each.phase]}{each.microbatch}" for each in order) + "\n"
        for order in schedule.orders
    )
