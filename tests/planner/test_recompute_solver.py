"""What is recomputed, in plain numbers: as good as trying everything."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pipec.planner.recompute_solver import (
    GAP,
    HIDDEN,
    ForwardValue,
    MemoryConstraint,
    OffloadCost,
    RecomputeSolution,
    StageValues,
    minimize_seconds,
    needed_recomputes,
    saved_values,
)


@st.composite
def stages(draw: st.DrawFn, most: int) -> StageValues:
    """A small graph: views and tuples, values that were received, values that nobody reads."""
    values = []
    for position in range(draw(st.integers(1, most))):
        inputs = draw(st.frozensets(st.integers(0, position - 1), max_size=3)) if position else frozenset()
        saves, replays = draw(st.sampled_from([(True, True), (True, True), (True, False), (False, True)]))
        figures = draw(st.integers(0, 9)), draw(st.integers(0, 9)), tuple(sorted(inputs)) * replays
        may_offload = saves and draw(st.booleans())
        values.append(ForwardValue(*figures, draw(st.booleans()), saves, replays, may_offload))
    return tuple(values)


def choices(values: StageValues) -> Iterator[frozenset[int]]:
    """Everything that could be recomputed, each way once."""
    able = [v for v, value in enumerate(values) if value.is_recomputable]
    subsets = itertools.chain(*(itertools.combinations(able, n) for n in range(len(able) + 1)))
    for recomputed in {needed_recomputes(values, frozenset(subset)) for subset in subsets}:
        if all(values[v].may_save for v in saved_values(values, recomputed)):
            yield recomputed


NO_HOST = OffloadCost(0.0, 0.0)


def seconds(stages: Sequence[StageValues], choice: RecomputeSolution, host: OffloadCost = NO_HOST) -> float:
    """The cost of a choice for a microbatch."""
    again, copied = (
        sum(getattr(stage[v], figure) for stage, own in zip(stages, chosen, strict=True) for v in own)
        for figure, chosen in (("seconds", choice.recomputed), ("num_bytes", choice.offloaded))
    )
    beyond = max(copied - host.free_bytes, 0.0)
    return again + 2 * host.seconds_per_byte * (beyond + HIDDEN * copied)


@settings(max_examples=40, deadline=None)
@given(stages(6), st.integers(5, 12), st.integers(0, 3), st.integers(0, 500))
def test_of_many_equal_stages_several_choose_alike(
    values: StageValues, times: int, saved: int, room: int
) -> None:
    """The choice fits, and is as fast as the best one that is the same for all."""
    many = (values,) * times
    limits = tuple(
        MemoryConstraint((saved,) * times, tuple(int(k == n) for k in range(times)), room, (0,) * times)
        for n in range(times)
    )
    found = minimize_seconds(many, limits)
    uniform = [RecomputeSolution((each,) * times, (frozenset(),) * times) for each in choices(values)]
    fitting = [each for each in uniform if each.excess_bytes(many, limits) <= 0]
    if found is not None:
        assert found.excess_bytes(many, limits) <= 0
        assert len({*found.recomputed}) <= 4
    if fitting:
        best = min(sum(values[v].seconds for v in each.recomputed[0]) for each in fitting)
        assert found is not None
        assert seconds(many, found) <= times * best * (1 + 2 * GAP) + 1e-9


moments = st.lists(
    st.builds(
        lambda saved, away, again, room: MemoryConstraint((saved + away,), (again,), room, (away,)),
        *(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1), st.integers(0, 120)),
    ),
    min_size=1,
    max_size=3,
).map(tuple)

hosts = st.builds(OffloadCost, st.integers(0, 30), st.sampled_from([0.25, 1.0, 3.0]))


def ways(values: StageValues, host: OffloadCost | None) -> Iterator[RecomputeSolution]:
    """Everything that could be recomputed or offloaded, each way once."""
    for recomputed in choices(values):
        able = [v for v in saved_values(values, recomputed) if values[v].may_offload and host]
        for offloaded in itertools.chain(*(itertools.combinations(able, n) for n in range(len(able) + 1))):
            yield RecomputeSolution((recomputed,), (frozenset(offloaded),))


@settings(max_examples=80, deadline=None)
@given(st.tuples(stages(10), st.none()) | st.tuples(stages(5), hosts), moments, st.integers(1, 40))
def test_the_choice_is_as_fast_as_any_within_the_budget(
    problem: tuple[StageValues, OffloadCost | None], limits: tuple[MemoryConstraint, ...], more: int
) -> None:
    values, host = problem
    found = minimize_seconds((values,), limits, host)
    possible = list(ways(values, host))
    fitting = [each for each in possible if each.excess_bytes((values,), limits) <= 0]
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert found.excess_bytes((values,), limits) <= 0
    assert found in possible
    cost = host or NO_HOST
    best, taken = min(seconds((values,), each, cost) for each in fitting), seconds((values,), found, cost)
    assert taken <= best * (1 + 2 * GAP) + 1e-9 if host else taken == best
    roomier = minimize_seconds((values,), tuple(replace(m, room=m.room + more) for m in limits), host)
    assert roomier is not None
    assert seconds((values,), roomier, cost) <= taken * (1 + 2 * GAP) + 1e-9
