"""The schedules whose order depends on the numbers of ranks and microbatches alone, as formulas.

Where a rank runs patterns, it is given them as pairs: so many times, these cells. ``F`` is a forward, ``B`` a
whole backward, ``I`` and ``W`` are its input and weight gradient; a digit is the stage, of those of the rank.
Each cell takes its next microbatch, and is left out once it has none.

In docstrings p is the number of ranks, s a rank, m the number of microbatches, and F, B and W are the times
of a forward, an input gradient and a weight gradient.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pipec.errors import InputError
from pipec.ir import Phase, Placement, Schedule, stages_on
from pipec.ir.columns import PHASE_CODE, ComputeColumns, Ints
from pipec.schedules.order_builder import (
    PHASES,
    Pattern,
    linear_placement,
    loop_placement,
    looped_name,
    pattern_order,
    schedule_from_orders,
    v_placement,
)


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe: every forward, then every backward (Huang et al., 2019).

    One stage per rank; the bubble is (p-1)(F+B+W) and every rank keeps all m microbatches in flight. Choose
    it if memory is no concern: it is the easiest to read.
    """
    m = num_microbatches
    return _patterned("gpipe", m, linear_placement(num_ranks), lambda s: [(m, "F"), (m, "B")])


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with a flush, also called PipeDream-Flush (Narayanan et al., 2019 and 2021).

    One stage per rank; GPipe's bubble, (p-1)(F+B+W), with min(p-s, m) microbatches in flight on rank s.
    Rank s warms up with p-s-1 forwards, alternates one forward and one backward in the steady state, and
    cools down with the backwards that are left. The schedule to start with: least memory of all that keep a
    microbatch's backward whole.
    """
    p, m = num_ranks, num_microbatches
    return _patterned("1f1b", m, linear_placement(p), lambda s: [(p - s - 1, "F"), (m, "F B")])


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: 1F1B over several smaller stages on each rank (Narayanan et al., SC 2021).

    Rank s holds stages s, s+p, ..., v of them; p microbatches go through one chunk, then the next. Rank s
    warms up with 2(p-s-1) + (v-1)p forwards, at most all v*m, and then alternates. With F, B and W of a whole
    rank the bubble is (p-1)(F+B+W)/v, v times shorter than that of 1F1B, for v times as many messages and
    2(p-s-1) + (v-1)p + 1 chunks in flight on rank s. For fast links and few microbatches.

    Raises:
        InputError: m is not a multiple of p, or v is below 1.
    """
    name = _checked_name("interleaved-1f1b", num_chunks)
    if num_microbatches % num_ranks:
        raise InputError(
            f"schedule {name!r} needs a number of microbatches that is a multiple of "
            f"the {num_ranks} ranks, got {num_microbatches}; "
            f"take {max(round(num_microbatches / num_ranks), 1) * num_ranks}"
        )
    numbers = np.arange(num_chunks * num_microbatches, dtype=np.int32)

    def computes(phase: Phase, rank: int) -> Ints:
        """The forwards or the backwards of a rank, in order."""
        turns, within = np.divmod(numbers, num_ranks * num_chunks)
        chunks, microbatches = np.divmod(within, num_ranks)
        if phase is Phase.BACKWARD:
            chunks = num_chunks - 1 - chunks
        codes = np.full_like(numbers, PHASE_CODE[phase])
        return np.stack([codes, chunks * num_ranks + rank, turns * num_ranks + microbatches])

    def order(rank: int) -> ComputeColumns:
        warmup = min(2 * (num_ranks - rank - 1) + (num_chunks - 1) * num_ranks, numbers.size)
        columns = np.empty((3, 2 * numbers.size), np.int32)
        columns[:, numbers + np.maximum(numbers - warmup, 0)] = computes(Phase.FORWARD, rank)
        columns[:, numbers + np.minimum(numbers + warmup + 1, numbers.size)] = computes(Phase.BACKWARD, rank)
        return ComputeColumns(columns)

    return schedule_from_orders(name, num_microbatches, loop_placement(num_ranks, num_chunks), order)


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Looped BFS: GPipe over several smaller stages on each rank (Lamy-Poirier, 2023).

    Rank s holds stages s, s+p, ..., v of them; all microbatches go through one, then through the next. For m
    of at least p and with F, B and W of a whole rank the bubble is (p-1)(F+B+W)/v, as for interleaved 1F1B,
    with every one of the v*m chunks in flight. Any m will do, and a stage's work is in one piece, which suits
    weights that are gathered before it and gradients that are reduced after it.

    Raises:
        InputError: v is below 1.
    """
    name, m = _checked_name("looped-bfs", num_chunks), num_microbatches
    forwards = [(m, f"F{chunk}") for chunk in range(num_chunks)]
    backwards = [(m, f"B{chunk}") for chunk in reversed(range(num_chunks))]
    return _patterned(name, m, loop_placement(num_ranks, num_chunks), lambda s: [*forwards, *backwards])


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with weight gradients moved into its bubbles (Qi et al., Zero Bubble, ICLR 2024).

    Rank s runs W(j) directly after B(j+s), and the weight gradients left over at the end. For m of at least
    2p-1 and W of at most F and B the span has a bubble of (p-1)(F+B-W), a third of that of 1F1B where the
    three cost the same, with the memory of 1F1B's first rank, p microbatches, on every rank.
    """
    p, m = num_ranks, num_microbatches

    def pattern(s: int) -> Pattern:
        return [(p - s - 1, "F"), (s, "F I"), (m - s, "F I W"), (m, "W")]

    return _patterned("zb-h1", m, linear_placement(p), pattern)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2: no bubble between the first and last compute of a rank (Qi et al., Zero Bubble, ICLR 2024).

    Rank s warms up with 2(p-s)-1 forwards; then B(j), W(j-2s), F in turn; then the remaining computes. For m
    of at least 2p-1 the span has a bubble of (p-1)(F+B-2W), none where the three cost the same, for 2p-1
    microbatches in flight on every rank: about twice the memory of 1F1B's first rank.
    """
    p, m = num_ranks, num_microbatches

    def pattern(s: int) -> Pattern:
        return [(2 * (p - s) - 1, "F"), (min(2 * s, m), "I F"), (m - 2 * s, "I W F"), (m, "W")]

    return _patterned("zb-h2", m, linear_placement(p), pattern)


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: no bubble with the memory of 1F1B, on a V of two stages per rank (Qi et al., 2024).

    Rank s holds stages s and 2p-1-s; forward, input and weight gradients of both alternate. If F, B and W of
    a stage all cost the same the span has no bubble, and the makespan is p-1 of them longer. At most 2p
    stage-microbatches are in flight, which take as much memory as p in a pipeline with one stage per rank.
    Suits stages whose three phases cost about the same.
    """
    p, m = num_ranks, max(num_microbatches, 2 * num_ranks - 1)

    def order(s: int) -> ComputeColumns:
        warmup: Pattern = [(2 * (p - s) - 1, "F0"), (s, "F1 F0"), (p - s, "F1 I1 W1")]
        steady: Pattern = [(m - p, "F0 I0 W0 F1 I1 W1")]
        cooldown: Pattern = [(s, "I0 I1"), (p - s, "I0 W0"), (m, "W1"), (m, "W0")]
        computes = pattern_order((s, 2 * p - 1 - s), m, [*warmup, *steady, *cooldown])
        return computes.where(computes.microbatches < num_microbatches)

    return schedule_from_orders("zb-v", num_microbatches, v_placement(p), order)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: a V whose ranks pair a forward of one stage with a backward of the other (DeepSeek, 2025).

    Rank s holds stages s and 2p-1-s; in the steady state each runs F of one next to B and W of the other. If
    the halves of a pair run one after the other, as here, the bubble is (p-1)(F+B-W) in stage times, where F
    and B cost the same and W no more. If they run as one compute of length F&B whose results are sent at its
    end, the bubble is (p-1)(F&B + B+W - 3W) for F of at most B. At most 2p+1 stage-microbatches are in
    flight. Suits stages whose communication, such as between experts, overlaps the other half of the pair.

    Raises:
        InputError: m is below 2p.
    """
    p, m = num_ranks, num_microbatches
    if m < 2 * p:
        raise InputError(
            f"schedule 'dualpipe-v' needs at least twice as many microbatches as its {p} ranks, "
            f"got {m}; take {2 * p} or more, or zb-v"
        )

    def pattern(s: int) -> Pattern:
        below = p - s - 1
        warmup = [(2 * below, "F0"), (s + 1, "F0 F1"), (below, "I1 W1 F1")]
        steady = [(m - 2 * p + s + 1, "F0 I1 W1 F1 I0 W0"), (below, "I1 W1 F1 I0 W0")]
        backwards = ["1", "0"] * (s + 1)
        whole, split = backwards[: s + 1], backwards[s + 1 :]
        postponed = [*(f"W{chunk}" for chunk in split), *["W0"] * below]
        cooldown = [
            *((1, f"I{chunk} W{chunk}") for chunk in whole),
            *((1, f"I{chunk}") for chunk in split),
            *((1, f"{weight} I0") for weight in postponed[:below]),
            *((1, weight) for weight in postponed[below:]),
        ]
        return [*warmup, *steady, *cooldown]

    return _patterned("dualpipe-v", m, v_placement(p), pattern)


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Half: half of 1F1B's memory, on a V of two stages per rank (Qi et al., Controllable Memory, 2024).

    At most 2 * ((p+2)//2) stage-microbatches are in flight: those of (p+2)//2 microbatches, where 1F1B has p.
    Choose it when ZB-V does not fit. Warmup and cooldown are longer, and the steady state has no bubbles if
    F, B and W of a stage all cost the same.
    """
    p, delta = num_ranks, 0 if num_ranks % 2 else 3

    def slots(s: int) -> tuple[int, int, int, int]:
        return 2 * s, 3 * p - s - 2, 3 * p + delta + 2 * s - 1, 6 * p + delta - s - 2

    return _squeezed("v-half", p, num_microbatches, slots, 2 * ((p + 2) // 2))


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Min: a third of 1F1B's memory, on a V of two stages per rank (Qi et al., Controllable Memory, 2024).

    At most 2 * ((p+4)//3) stage-microbatches are in flight: those of (p+4)//3 microbatches, where 1F1B has p.
    No other schedule needs less memory without recomputing. When the phases of a stage differ in length,
    bubbles return with every microbatch.
    """
    p, delta = num_ranks, 0 if num_ranks % 3 else 2

    def slots(s: int) -> tuple[int, int, int, int]:
        return s, 2 * p - s - 1, 2 * p + delta + s, 4 * p + delta - s - 1

    return _squeezed("v-min", p, num_microbatches, slots, 2 * ((p + 4) // 3))


def _patterned(
    name: str, num_microbatches: int, placement: Placement, pattern: Callable[[int], Pattern]
) -> Schedule:
    """The schedule whose rank s runs ``pattern(s)`` on its stages."""

    def order(rank: int) -> ComputeColumns:
        return pattern_order(stages_on(placement, rank), num_microbatches, pattern(rank))

    return schedule_from_orders(name, num_microbatches, placement, order)


def _checked_name(name: str, num_chunks: int) -> str:
    name = looped_name(name, num_chunks)
    if num_chunks < 1:
        raise InputError(f"schedule {name!r} needs num_chunks of at least 1, got {num_chunks}")
    return name


_REACHES = (0, 1, 2)


def _squeezed(
    name: str, p: int, m: int, slots: Callable[[int], tuple[int, int, int, int]], peak: int
) -> Schedule:
    """A V whose ranks follow a pattern that repeats every six slots, squeezed without raising the peak.

    ``slots(s)`` are those of F down, F up, B up and B down of microbatch 0 on rank s; they determine how long
    activations live. Of a few reaches, the fastest is taken for phases of equal length. Tasks are numbers:
    ``stage * m + microbatch``, and 2pm more for an input gradient, 4pm more for a weight gradient.
    """
    num, patterns = 2 * p * m, list[list[int]]()
    for s in range(p):
        firsts = s * m, num - (s + 1) * m, 2 * num - (s + 1) * m, num + s * m
        cells = zip(slots(s), firsts, strict=True)
        tasks = sorted((6 * k + slot, first + k) for slot, first in cells for k in range(m))
        patterns.append([task for _, task in tasks])
    found = filter(None, (_followed(patterns, m, peak, reach) for reach in _REACHES))
    _, orders = min(found, key=lambda each: each[0])
    codes = np.array([PHASE_CODE[PHASES[letter]] for letter in "FIW"], np.int32)

    def order(rank: int) -> ComputeColumns:
        tasks = np.array(orders[rank], np.int32)
        return ComputeColumns(np.stack([codes[tasks // num], tasks % num // m, tasks % m]))

    return schedule_from_orders(name, m, v_placement(p), order)


def _followed(
    patterns: Sequence[Sequence[int]], m: int, peak: int, reach: int
) -> tuple[int, list[list[int]]] | None:
    """The slots that ranks need to follow patterns, and their orders; None if they stop for lack of memory.

    Each rank runs the tasks of its pattern as early as it can, and a weight gradient where none can run. A
    forward, or a backward once the forwards are done, may overtake up to ``reach`` tasks that cannot run yet,
    if at most ``peak`` stage-microbatches are then in flight.
    """
    num, num_ranks = 2 * len(patterns) * m, len(patterns)
    ahead, orders = [[*reversed(pattern)] for pattern in patterns], [list[int]() for _ in patterns]
    in_flight, forwards, postponed = [0] * num_ranks, [2 * m] * num_ranks, [deque[int]() for _ in patterns]
    ready, now = (
        [0] * m + [3 * num] * (2 * num - m),
        0,
    )  # the slot from which a task can run, 3 * num if unknown

    def choose(rank: int) -> int | None:
        """The place of the next task in the rest of the pattern, from its end."""
        highest, held = in_flight[rank], in_flight[rank] - len(postponed[rank])
        for place, task in enumerate(ahead[rank][: -2 - reach : -1], 1):
            if ready[task] <= now and (highest < peak if task < num else place == 1 or not forwards[rank]):
                return -place
            held += 1 if task < num else -1
            highest = max(highest, held)
        return None

    while sum(map(len, orders)) < 3 * num:
        num_before = sum(map(len, orders))
        for rank, order in enumerate(orders):
            if (place := choose(rank)) is None:
                if postponed[rank]:
                    order.append(postponed[rank].popleft())
                    in_flight[rank] -= 1
                continue
            order.append(task := ahead[rank].pop(place))
            if task < num:
                in_flight[rank], forwards[rank] = in_flight[rank] + 1, forwards[rank] - 1
                ready[task + m if task < num - m else task + num] = now + 1
            else:
                postponed[rank].append(task + num)
                if task >= num + m:
                    ready[task - m] = now + 1
        if sum(map(len, orders)) == num_before:
            return None
        now += 1
    return now, orders


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved_1f1b,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}
"""Functions of the number of ranks and of microbatches. Programs may add their own."""

LOOPED_SCHEDULES: Mapping[str, Callable[[int, int, int], Schedule]] = {
    "interleaved-1f1b": interleaved_1f1b,
    "looped-bfs": looped_bfs,
}
"""Schedules that also depend on the number of stages per rank: ``looped-bfs-v3`` has three."""
