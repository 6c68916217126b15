"""Plans: equal to trying every plan, monotone in devices, bandwidth and memory, bad problems refused."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from planner_problems import PlanningProblem, downsets, problems

from pipec.errors import InfeasibleError, PlanError
from pipec.hardware.topology import Device, Level, Topology, uniform_topology
from pipec.planner.cost_model import MAX_LOAD, PIPEC, PIPEDREAM
from pipec.planner.downsets import list_downsets
from pipec.planner.linear_orders import WideGraph, linear_orders
from pipec.planner.merge import MergedGraph
from pipec.planner.operator_graph import OperatorGraph, Transfer, topological_order
from pipec.planner.partition import Partition, partition_graph
from pipec.planner.work_windows import work_windows

FLAT = st.sampled_from([(4,), (3,), (2,), (1,)])
NESTED = st.sampled_from([(2, 2), (1, 4), (3, 1), (2, 1)])


def planned(problem: PlanningProblem) -> Partition:
    return partition_graph(problem.graph, problem.topology, problem.model, problem.max_replicas)


def seconds(problem: PlanningProblem) -> float:
    """Infinite if nothing fits in memory."""
    try:
        return planned(problem).seconds
    except InfeasibleError:
        return math.inf


def chain(num_operators: int, size: float = 1.0) -> OperatorGraph:
    """Equal operators of a second and a byte of parameters, each reading the one before."""
    one, none = [1.0] * num_operators, [0.0] * num_operators
    names = [f"op{k}" for k in range(num_operators)]
    transfers = [Transfer(k, (k + 1,), size, 0) for k in range(num_operators - 1)]
    return OperatorGraph(
        names, one, one, none, none, transfers, [(k, k + 1) for k in range(num_operators - 1)]
    )


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(problems(10, FLAT))
def test_a_plan_on_one_level_is_as_fast_as_the_best_of_all(problem: PlanningProblem) -> None:
    assert seconds(problem) == pytest.approx(problem.best_seconds(), rel=1e-9)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(problems(10, NESTED))
def test_a_plan_on_two_levels_is_as_fast_as_the_best_of_all(problem: PlanningProblem) -> None:
    assert seconds(problem) == pytest.approx(problem.best_seconds(), rel=1e-9)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(problems(8, st.one_of(FLAT, NESTED)))
def test_a_plan_on_every_device_leaves_none_unused_and_costs_no_less(problem: PlanningProblem) -> None:
    least = seconds(problem)
    arguments = problem.graph, problem.topology, problem.model, problem.max_replicas
    try:
        plan = partition_graph(*arguments, use_all_devices=True)
    except PlanError:
        return
    used = sorted(device for stage in plan.stages for device in stage.devices)
    assert used == list(range(len(problem.topology.devices)))
    assert plan.seconds >= least * (1 - 1e-9)
    if math.isfinite(least) and sum(stage.replicas for stage in planned(problem).stages) == len(used):
        assert plan.seconds == pytest.approx(least)


FEATURES = {
    "branches": lambda problem, plan: len(downsets(problem.graph)) > len(problem.graph.names) + 1,
    "ten operators": lambda problem, plan: len(problem.graph.names) == 10,
    "four devices": lambda problem, plan: sum(stage.replicas for stage in plan.stages) == 4,
    "replicas": lambda problem, plan: any(stage.replicas > 1 for stage in plan.stages),
    "unlike devices": lambda problem, plan: (
        len({problem.devices[s.devices[0]].speed for s in plan.stages}) > 1
    ),
    "slower for lack of memory": lambda problem, plan: seconds(with_memory(problem, math.inf)) < plan.seconds,
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [FLAT, NESTED], ids=["one level", "two levels"])
def test_plans_that_are_compared_have_all_features(sizes: st.SearchStrategy[tuple[int, ...]]) -> None:
    """Those for which the same is drawn as above; some have no plan at all."""
    seen: Counter[str] = Counter()

    @settings(max_examples=75, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(problems(10, sizes))
    def look(problem: PlanningProblem) -> None:
        if math.isinf(seconds(problem)):
            seen["no plan"] += 1
        else:
            plan = planned(problem)
            seen.update(name for name, has_it in FEATURES.items() if has_it(problem, plan))

    look()
    assert seen.keys() == {*FEATURES, "no plan"}


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(problems(7, FLAT | NESTED))
def test_bounds_narrow_the_search_without_missing_the_best(problem: PlanningProblem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        search_with(patch)
        narrowed = seconds(problem)
        search_with(patch, _MAX_WITHOUT_LOOSE_BOUND=0)
        assert seconds(problem) == pytest.approx(narrowed, rel=1e-9)
    assert narrowed == pytest.approx(seconds(problem), rel=1e-9)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(problems(10, FLAT | NESTED))
def test_bounds_of_a_line_do_not_miss_the_best_either(problem: PlanningProblem) -> None:
    before = [(k, k + 1) for k in range(len(problem.graph.names) - 1)]
    problem = replace(problem, graph=replace(problem.graph, before=before))
    with pytest.MonkeyPatch.context() as patch:
        search_with(patch, _MAX_WITHOUT_LOOSE_BOUND=0)
        narrowed = seconds(problem)
    assert narrowed == pytest.approx(problem.best_seconds(), rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(problems(9, FLAT))
def test_containment_tells_the_best_where_too_much_remains(problem: PlanningProblem) -> None:
    alike = (replace(problem.devices[0], memory_bytes=math.inf),) * len(problem.devices)
    problem = replace(problem, devices=alike, latency_seconds=0.0, model=PIPEDREAM)
    with pytest.MonkeyPatch.context() as patch:
        search_with(patch, _MAX_WITHOUT_LOOSE_BOUND=0, _MAX_PAIRED=3, _MAX_IN_CHAIN=3, _NUM_PROMISING=1)
        plan = planned(problem)
    assert plan.is_optimal
    assert plan.seconds == pytest.approx(problem.best_seconds(), rel=1e-9)


@settings(max_examples=15, deadline=None)
@given(problems(8, FLAT | NESTED))
def test_no_plan_is_below_the_bound_where_too_much_remains(problem: PlanningProblem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        search_with(
            patch, _MAX_WITHOUT_LOOSE_BOUND=0, _MAX_PAIRED=3, _MAX_IN_CHAIN=3, _MAX_NESTED=3, _NUM_PROMISING=1
        )
        try:
            plan = planned(problem)
        except InfeasibleError:
            return
    assert plan.lower_bound_seconds <= problem.best_seconds() * (1 + 1e-9) <= plan.seconds * (1 + 2e-9)


def prefixes(graph: OperatorGraph, value_seconds: list[float]) -> set[int]:
    """Those of all linear orders that the planner knows, as sets of bits."""
    ends = [sorted({value.producer, *value.consumers}) for value in graph.transfers]
    wide = WideGraph(np.array(graph.seconds), graph.before, ends, np.array(value_seconds))
    found = {0}
    for order in linear_orders(wide):
        assert sorted(order) == list(range(len(graph.names)))
        assert all(order.index(u) < order.index(v) for u, v in graph.before)
        found |= set(accumulate(1 << op for op in order))
    return found


@settings(max_examples=30, deadline=None)
@given(problems(9, FLAT))
def test_every_downset_falls_into_a_window_that_tells_no_more_than_is_true(problem: PlanningProblem) -> None:
    graph, order = problem.graph, topological_order(problem.graph)
    value_seconds = np.array([[value.forward_bytes for value in graph.transfers]])
    listed = list_downsets(graph, order, value_seconds)
    seconds, parameters = listed.totals[:2]
    wide = WideGraph(np.array(graph.seconds), graph.before, listed.ends, value_seconds[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipec.planner.work_windows._NUM_WINDOWS", 20)
        known = work_windows(wide, np.array([graph.seconds, graph.parameter_bytes]))
    for downset in range(len(listed)):
        fits = (known.least[0] <= seconds[downset]) & (seconds[downset] <= known.most[0])
        fits &= (known.least[1] <= parameters[downset]) & (parameters[downset] <= known.most[1])
        assert (fits & (known.cuts <= listed.cuts[0, downset] + 1e-9)).any()


def test_a_window_knows_what_must_cross() -> None:
    """Between the narrow places at 1 and 9 seconds, at least two values cross, of 5 and 6 seconds."""
    graph = OperatorGraph(
        names=list("abcdef"),
        seconds=[1.0, 0.0, 4.0, 4.0, 0.0, 1.0],
        parameter_bytes=[0.0] * 6,
        resident_bytes=[0.0] * 6,
        saved_bytes=[0.0] * 6,
        transfers=[Transfer(u, (v,), 0.0, 0.0) for u, v in [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)]],
        before=[(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)],
    )
    ends = [sorted({value.producer, *value.consumers}) for value in graph.transfers]
    wide = WideGraph(np.array(graph.seconds), graph.before, ends, np.array([1.0, 5.0, 6.0, 7.0, 8.0, 2.0]))
    known = work_windows(wide, np.array([graph.seconds, graph.parameter_bytes]))
    middle = np.flatnonzero((known.least[0] > 1.1) & (known.most[0] < 8.9))
    assert known.cuts[middle].min() == pytest.approx(11.0)


def without_merging(graph: OperatorGraph, order: Sequence[int], *_: object) -> MergedGraph:
    return MergedGraph(graph, [(op,) for op in range(len(order))])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(problems(9, FLAT | NESTED))
def test_a_wide_graph_gets_the_best_plan_of_its_linear_orders(problem: PlanningProblem) -> None:
    """No downset is listed but theirs. The bound holds for every plan."""
    fastest = [
        min(problem.model.value_seconds(value, level) for level in problem.topology.levels)
        for value in problem.graph.transfers
    ]
    best = problem.best_seconds(sorted(prefixes(problem.graph, fastest)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipec.planner.downsets.MOST_DOWNSETS", 0)
        patch.setattr("pipec.planner.work_windows._NUM_WINDOWS", 20)
        patch.setattr("pipec.planner.partition.merge_operators", without_merging)
        try:
            plan = planned(problem)
        except InfeasibleError:
            assert math.isinf(best)
            return
    assert plan.seconds == pytest.approx(best, rel=1e-9)
    assert plan.lower_bound_seconds <= problem.best_seconds() * (1 + 1e-9)


def test_a_graph_with_too_many_downsets_is_planned() -> None:
    """Of sixteen branches of eight operators there are 9 ** 16. One branch for each device is best."""
    branches = [range(1 + 8 * k, 9 + 8 * k) for k in range(16)]
    edges = [edge for branch in branches for edge in pairwise((0, *branch, 129))]
    seconds = [0.0, *(1.0 for branch in branches for _ in branch), 0.0]
    transfers = [Transfer(u, (v,), 1.0, 1.0) for u, v in edges]
    idle, names = [0.0] * 130, [f"op{k}" for k in range(130)]
    graph = OperatorGraph(names, seconds, idle, idle, idle, transfers, edges)
    plan = partition_graph(graph, uniform_topology([16], [4.0]), PIPEC, max_replicas=1)
    assert (plan.seconds, plan.lower_bound_seconds) == (8.0, 8.0)


def search_with(patch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Use bounds however small the problem; ``sizes`` are further thresholds."""
    for name, value in {"_FEW_STEPS": 0, "_FEW_OPTIONS": 0, **sizes}.items():
        patch.setattr(f"pipec.planner.solver.{name}", value)


def test_a_bound_that_rounds_two_ways_keeps_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bisection comes to 22 less one rounding error, which stages of 22 keep forwards, but not backwards."""
    graph = replace(chain(7), seconds=[0.0, 0.0, 5.0, 5.0, 6.0, 8.0, 8.0], transfers=[], before=[])
    search_with(monkeypatch, _MAX_WITHOUT_LOOSE_BOUND=0)
    placement = partition_graph(graph, uniform_topology([3], [0.5], Device(speed=0.5)), PIPEC, max_replicas=1)
    assert placement.seconds == 26.0


def test_bounds_of_nothing_find_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    search_with(monkeypatch)
    graph = replace(chain(1), seconds=[0.0], saved_bytes=[5.0])
    with pytest.raises(InfeasibleError, match="no plan fits in the memory"):
        partition_graph(graph, uniform_topology([1], [1.0], Device(memory_bytes=4.0)), PIPEC)


@settings(max_examples=20, deadline=None)
@given(problems(8, FLAT))
def test_every_operator_is_placed_once_and_none_before_what_it_must_follow(problem: PlanningProblem) -> None:
    try:
        stages = planned(problem).stages
    except InfeasibleError:
        return
    stage_of = {op: index for index, stage in enumerate(stages) for op in stage.operators}
    assert sorted(op for stage in stages for op in stage.operators) == list(range(len(problem.graph.names)))
    assert all(stage_of[u] <= stage_of[v] for u, v in problem.graph.before)
    devices = [device for stage in stages for device in stage.devices]
    assert len(devices) == len(set(devices)) <= math.prod(problem.sizes)
    for stage in stages:
        assert stage.memory_bytes <= min(problem.devices[device].memory_bytes for device in stage.devices)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(problems(8, FLAT | NESTED))
def test_more_of_anything_is_never_worse(problem: PlanningProblem) -> None:
    more = [with_memory(problem, 2.0)]
    for level, rate in enumerate(problem.rates):
        more.append(replace(problem, rates=(*problem.rates[:level], 2 * rate, *problem.rates[level + 1 :])))
        more.append(with_another_member(problem, level))
    known = seconds(problem) * (1 + 1e-9)
    assert all(seconds(each) <= known for each in more)


def with_memory(problem: PlanningProblem, factor: float) -> PlanningProblem:
    devices = [replace(device, memory_bytes=device.memory_bytes * factor) for device in problem.devices]
    return replace(problem, devices=tuple(devices))


def with_another_member(problem: PlanningProblem, level: int) -> PlanningProblem:
    """In each group of the level one more, like another one; groups that were alike still are."""
    size = math.prod(problem.sizes[:level])
    members = [tuple(sorted(problem.devices[k : k + size])) for k in range(0, len(problem.devices), size)]
    count = problem.sizes[level]
    groups = [members[k : k + count] for k in range(0, len(members), count)]
    devices = tuple(device for group in groups for member in (*group, min(group)) for device in member)
    return replace(
        problem, devices=devices, sizes=(*problem.sizes[:level], count + 1, *problem.sizes[level + 1 :])
    )


def test_an_unused_device_of_a_later_group_costs_no_memory() -> None:
    """Links between hosts are the faster ones. The first stage has no room for a third microbatch."""
    graph = replace(chain(2), resident_bytes=[0.0, 1.0], saved_bytes=[8.0, 8.0])
    for devices in (1, 2):
        topology = uniform_topology([devices, 2], [0.5, 1.0], Device(memory_bytes=16.0))
        first, second = partition_graph(graph, topology, PIPEDREAM, max_replicas=1).stages
        assert (first.seconds, first.in_flight, first.devices) == (1.0, 2, (0,))
        assert (second.seconds, second.in_flight, second.devices) == (1.0, 1, (devices,))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(problems(8, FLAT | NESTED), st.sampled_from([1e-3, 0.5, 1000.0]))
def test_scaling_all_costs_scales_the_answer(problem: PlanningProblem, factor: float) -> None:
    scaled = replace(
        problem,
        graph=replace(problem.graph, seconds=[factor * each for each in problem.graph.seconds]),
        rates=tuple(rate / factor for rate in problem.rates),
        latency_seconds=problem.latency_seconds * factor,
    )
    assert seconds(scaled) == pytest.approx(factor * seconds(problem), rel=1e-9)


def test_plans_are_deterministic() -> None:
    graph = chain(30)
    assert partition_graph(graph, uniform_topology([6], [1.0]), PIPEC) == partition_graph(
        graph, uniform_topology([6], [1.0]), PIPEC
    )


def test_of_equally_fast_plans_the_one_on_the_fewest_devices_is_taken() -> None:
    graph = replace(chain(3, size=0), seconds=[4.0, 1.0, 1.0])
    stages = partition_graph(graph, uniform_topology([8], [1.0]), PIPEC, max_replicas=1).stages
    assert [stage.operators for stage in stages] == [(0,), (1, 2)]


def test_of_equally_fast_plans_on_as_many_devices_the_one_that_communicates_least_is_taken() -> None:
    graph = replace(chain(4), seconds=[2.0, 1.0, 1.0, 2.0])
    graph = replace(graph, transfers=[Transfer(0, (1,), 1.0, 0), Transfer(1, (2,), 0.5, 0)])
    first, second = partition_graph(graph, uniform_topology([2], [1.0]), PIPEDREAM, max_replicas=1).stages
    assert (first.operators, second.operators) == ((0, 1), (2, 3))


def test_a_slow_device_gets_little() -> None:
    topology = Topology((Device(speed=1.0), Device(speed=0.25)), (Level(2, math.inf),))
    stages = partition_graph(chain(5), topology, PIPEC, max_replicas=1).stages
    assert sorted((len(stage.operators), stage.devices) for stage in stages) == [(1, (1,)), (4, (0,))]


def test_a_latency_is_paid_for_each_message() -> None:
    """Links work beside the operators. Activation and gradient share one in PipeDream's model alone."""
    topology = Topology((Device(),) * 2, (Level(2, 1.0, latency_seconds=0.5),))
    there_and_back = replace(chain(2), transfers=[Transfer(0, (1,), 0.25, 0.25)])
    assert partition_graph(chain(2), topology, PIPEC, max_replicas=1).seconds == 1.5
    assert partition_graph(there_and_back, topology, PIPEC, max_replicas=1).seconds == 1.0
    assert partition_graph(there_and_back, topology, PIPEDREAM, max_replicas=1).seconds == 1.5
    assert partition_graph(there_and_back, topology, MAX_LOAD, max_replicas=1).seconds == 2.0


def test_what_does_not_fit_is_explained_stage_by_stage() -> None:
    graph = replace(chain(4), resident_bytes=[6.0] * 4, saved_bytes=[1.0] * 4)
    with pytest.raises(InfeasibleError, match="no plan fits in the memory of the devices") as caught:
        partition_graph(
            graph, uniform_topology([2], [math.inf], Device(memory_bytes=10)), PIPEC, max_replicas=1
        )
    bytes_of = "12 bytes resident + 2 saved for each of"
    assert f"stage 0: {bytes_of} 2 microbatches in flight = 16 of 10, 6 too many" in str(caught.value)
    assert f"stage 1: {bytes_of} 1 microbatches in flight = 14 of 10, 4 too many" in str(caught.value)


def test_a_bound_is_told_where_too_much_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    search_with(monkeypatch, _MAX_PAIRED=6, _MAX_WITHOUT_LOOSE_BOUND=0)
    graph = replace(chain(12), before=[(k, k + 2) for k in range(10)])
    placement = partition_graph(graph, uniform_topology([4], [1.0]), PIPEDREAM)
    best = partition_graph(chain(12), uniform_topology([4], [1.0]), PIPEDREAM)
    assert placement.lower_bound_seconds <= best.seconds * (1 + 1e-9)
    assert placement.lower_bound_seconds <= placement.seconds


def test_a_plan_that_may_be_missed_is_not_called_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages fit in memory only if the second is on the device with more."""
    search_with(monkeypatch, _MAX_PAIRED=2, _MAX_WITHOUT_LOOSE_BOUND=0)
    graph = replace(chain(6), resident_bytes=[1.0] * 6, before=[(k, k + 2) for k in range(4)])
    topology = Topology((Device(memory_bytes=2.0), Device(memory_bytes=4.0)), (Level(2, 1.0),))
    with pytest.raises(InfeasibleError, match="of the plans that could be searched, none fits in the memory"):
        partition_graph(graph, topology, PIPEC, max_replicas=1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"names": [], "seconds": []}, "there are no operators to plan for"),
        ({"seconds": [1.0, -1.0, 1.0]}, "op1 has seconds -1.0: expected a finite number, 0 or more"),
        ({"seconds": [1.0, math.nan, 1.0]}, "op1 has seconds nan"),
        ({"saved_bytes": [0.0, 0.0, math.inf]}, "op2 has saved_bytes inf"),
        ({"transfers": [Transfer(0, (1,), -1, 0)]}, "the value of op0 has -1 bytes"),
        ({"transfers": [Transfer(0, (5,), 1, 0)]}, "operator 5 reads or makes a value, but there are 3"),
        ({"before": [(0, 1), (1, 7)]}, "operator 7 is ordered, but there are 3 operators"),
        ({"before": [(0, 1), (1, 2), (2, 0)]}, "the operators form a cycle, .*Remove one of these edges"),
    ],
)
def test_a_malformed_graph_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        partition_graph(replace(chain(3), **changed), uniform_topology([2], [1.0]), PIPEC)
