"""V-Half and V-Min: half and a third of 1F1B's memory, on a V of two stages per rank (Qi et al., 2024).

Pipeline Parallelism with Controllable Memory builds a schedule from the cells of one microbatch at fixed
slots, repeated every six slots; where the slots lie sets how long activations live. What is left then is to
squeeze: here each rank takes the cells in the order of their slots as early as it can, weight gradients
where nothing else can run, and a forward, or a backward once the forwards are done, may overtake up to
``reach`` cells that cannot run yet, if that keeps the peak. The best of a few reaches is taken, for phases
of equal length.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pipec.ir import Compute, Phase, Schedule
from pipec.schedules.orders import ordered, v_placement

_PERIOD = 6
_REACHES = (0, 1, 2)
_LONG_REACH = 3

Slots = Callable[[int, int], tuple[int, int, int, int]]
"""Of rank i of p: the slots of F down, F up, B up and B down of microbatch 0."""


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """At most 2 * ((p+2)//2) stage-microbatches in flight: those of (p+2)//2 microbatches, 1F1B has p.

    For when ZB-V does not fit: a longer warmup and cooldown, and a steady state without bubbles if F, B and
    W of a stage all cost the same.
    """
    return _best("v-half", num_ranks, num_microbatches, _half_slots, (num_ranks + 2) // 2)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """At most 2 * ((p+4)//3) stage-microbatches in flight: those of (p+4)//3 microbatches, 1F1B has p.

    The least memory of all without recomputing. When the phases of a stage differ in length, bubbles
    return with every microbatch.
    """
    return _best("v-min", num_ranks, num_microbatches, _min_slots, (num_ranks + 4) // 3)


def _half_slots(p: int, i: int) -> tuple[int, int, int, int]:
    delta = 0 if p % 2 else 3
    return 2 * i, 3 * p - i - 2, 3 * p + delta + 2 * i - 1, 6 * p + delta - i - 2


def _min_slots(p: int, i: int) -> tuple[int, int, int, int]:
    delta = 0 if p % 3 else 2
    return i, 2 * p - i - 1, 2 * p + delta + i, 4 * p + delta - i - 1


def within_peak(num_ranks: int, num_microbatches: int, peak: int) -> Iterator[Schedule]:
    """Both patterns squeezed to ``peak`` stage-microbatches on each rank, in every way that finishes."""
    for slots in (_half_slots, _min_slots):
        for reach in (*_REACHES, _LONG_REACH):
            found = _squeeze(_patterns(slots, num_ranks, num_microbatches), peak, reach)
            if found:
                yield _schedule("v", num_ranks, num_microbatches, found[1])


def _best(name: str, num_ranks: int, num_microbatches: int, slots: Slots, peak: int) -> Schedule:
    patterns = _patterns(slots, num_ranks, num_microbatches)
    found = filter(None, (_squeeze(patterns, 2 * peak, reach) for reach in _REACHES))
    _, orders = min(found, key=lambda each: each[0])
    return _schedule(name, num_ranks, num_microbatches, orders)


def _schedule(name: str, num_ranks: int, num_microbatches: int, orders: list[list[Compute]]) -> Schedule:
    return ordered(name, num_microbatches, v_placement(num_ranks), lambda rank: orders[rank])


def _patterns(slots: Slots, num_ranks: int, num_microbatches: int) -> list[list[Compute]]:
    return [list(_pattern(slots, num_ranks, rank, num_microbatches)) for rank in range(num_ranks)]


def _pattern(slots: Slots, num_ranks: int, rank: int, num_microbatches: int) -> Iterator[Compute]:
    """Forwards and input gradients of a rank in the order of their slots; no two share one."""
    down, up = rank, 2 * num_ranks - 1 - rank
    kinds = [
        (Phase.FORWARD, down),
        (Phase.FORWARD, up),
        (Phase.BACKWARD_INPUT, up),
        (Phase.BACKWARD_INPUT, down),
    ]
    cells = [
        (_PERIOD * microbatch + slot, Compute(*kind, microbatch))
        for kind, slot in zip(kinds, slots(num_ranks, rank), strict=True)
        for microbatch in range(num_microbatches)
    ]
    return (cell for _, cell in sorted(cells, key=lambda item: item[0]))


def _squeeze(patterns: list[list[Compute]], peak: int, reach: int) -> tuple[int, list[list[Compute]]] | None:
    """The time that the cells take, one unit each, and the order of each rank; None if they get stuck."""
    ranks = [_Rank(list(reversed(pattern)), peak, reach) for pattern in patterns]
    done: set[Compute] = set()
    time, ended = 0, -1
    while any(rank.ahead or rank.weights for rank in ranks):
        ran = [cell for rank in ranks if (cell := rank.step(done, last_stage=2 * len(ranks) - 1))]
        done.update(ran)
        time, before, ended = time + 1, ended, sum(len(rank.order) for rank in ranks)
        if ended == before:
            return None
    return time, [rank.order for rank in ranks]


@dataclass
class _Rank:
    """One rank while it is squeezed. ``ahead`` are the cells to come, the next one at the end."""

    ahead: list[Compute]
    peak: int
    reach: int
    order: list[Compute] = field(default_factory=list)
    weights: list[Compute] = field(default_factory=list)
    in_flight: int = 0
    forwards: int = field(init=False)

    def __post_init__(self) -> None:
        self.forwards = sum(cell.phase is Phase.FORWARD for cell in self.ahead)

    def step(self, done: set[Compute], last_stage: int) -> Compute | None:
        """Run a cell whose inputs are ``done``, or a weight gradient; returns what others may wait for."""
        number = self._choose(done, last_stage)
        if number is None:
            if self.weights:
                self.order.append(self.weights.pop(0))
                self.in_flight -= 1
            return None
        cell = self.ahead.pop(-1 - number)
        if cell.phase is Phase.FORWARD:
            self.forwards -= 1
            self.in_flight += 1
        else:
            self.weights.append(Compute(Phase.BACKWARD_WEIGHT, cell.stage, cell.microbatch))
        self.order.append(cell)
        return cell

    def _choose(self, done: set[Compute], last_stage: int) -> int | None:
        """How many cells to overtake; None if no cell within ``reach`` can run.

        A forward holds memory while those it overtakes run, each backward followed by its weight gradient.
        """
        held = self.in_flight - len(self.weights)
        highest = self.in_flight
        for number, cell in enumerate(reversed(self.ahead[-1 - self.reach :])):
            forward = cell.phase is Phase.FORWARD
            fits = highest < self.peak if forward else number == 0 or not self.forwards
            if fits and ((needed := _input(cell, last_stage)) is None or needed in done):
                return number
            held += 1 if forward else -1
            highest = max(highest, held)
        return None


def _input(cell: Compute, last_stage: int) -> Compute | None:
    """The cell whose result ``cell`` reads from another stage, or from its own at the end of the pipeline."""
    stage, microbatch = cell.stage, cell.microbatch
    if cell.phase is Phase.FORWARD:
        return Compute(Phase.FORWARD, stage - 1, microbatch) if stage else None
    if stage == last_stage:
        return Compute(Phase.FORWARD, stage, microbatch)
    return Compute(Phase.BACKWARD_INPUT, stage + 1, microbatch)
