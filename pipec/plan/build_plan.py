"""Builds the Plan of a classified graph: stages with costs, links between them, inputs and outputs."""

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from pipec import ops
from pipec.cost.formulas import node_bytes
from pipec.cost.symbolic_sizes import evaluate_cost
from pipec.graph import (
    ModelInput,
    TailGradient,
    TailInput,
    TrainingGraph,
    depends_on_inputs_only,
    is_contiguous,
    is_forward,
    is_view,
    recv,
    source_parameters,
    stage_of,
    storage_owner,
)
from pipec.graph.in_place import owns_new_storage
from pipec.graph.lifetimes import BytesOf, FunctionMemory, storage_bytes, storage_owners
from pipec.graph.phase_functions import PhaseFunction, StageFunctions, batch_count_nodes
from pipec.graph.size_text import format_guard
from pipec.hardware.collective_costs import all_reduce_seconds, unshard_seconds
from pipec.hardware.devices import LinkModel
from pipec.hardware.topology import Topology
from pipec.ir import (
    SCHEDULED_PHASES,
    InputLeaf,
    Link,
    ModelCollective,
    Op,
    Payload,
    Phase,
    Placement,
    Plan,
    Schedule,
    SegmentMemory,
    Sizes,
    Stage,
    StageCost,
    StageMemory,
    SyncSpec,
    Tail,
    Value,
)
from pipec.ir.batch_axis import LEADING, BatchAxis
from pipec.ir.columns import ComputeColumns
from pipec.ir.text_format import value_bytes
from pipec.plan.buckets import plan_value
from pipec.plan.sync_spec import build_sync_spec
from pipec.programs.messages import messages
from pipec.programs.shared_receives import runs_stages_in_order

Names = Mapping[fx.Node, str]


def build_plan(
    graph: TrainingGraph,
    stages: Sequence[StageFunctions],
    names: Names,
    schedule: Schedule,
    microbatch_size: int,
    topology: Topology,
    sync_spec: SyncSpec,
) -> Plan:
    """The plan of a cut graph under a schedule, for microbatches of ``microbatch_size`` rows.

    Rank r is device r of the topology. ``sync_spec`` says what a training step is to do with its gradients.
    """
    owners = _owners(stages)
    links = (
        *_message_links(graph, stages, names, schedule),
        *_tied_links(graph, stages, owners),
        *_result_links(graph, stages, names, schedule.stream is not None),
    )
    parameters = _model_tensors(graph, (node for stage in stages for node in stage.parameters))
    values = {value.name: value for value in parameters}
    sizes = {"b": microbatch_size, **graph.planned_sizes}
    link_bytes = list(_link_memory(links, stages, names, microbatch_size))
    planned = tuple(
        _stage(graph, stage, names, owners, microbatch_size, schedule, topology) for stage in stages
    )
    spec = build_sync_spec(sync_spec, graph.mode, stages, values, links, schedule.placement, topology)
    averaged = (each.index for each in planned if each.averaged_buffers)
    return Plan(
        mode=graph.mode,
        schedule=schedule.name,
        num_microbatches=schedule.num_microbatches,
        microbatch_size=microbatch_size,
        placement=schedule.placement,
        stages=planned,
        links=links,
        link_seconds=tuple(_link_seconds(each, schedule.placement, topology, sizes) for each in links),
        link_sender_bytes=tuple(own for own, _ in link_bytes),
        link_saved_bytes=tuple(saved for _, saved in link_bytes),
        link_reader_phases=tuple(_last_reader(each, stages, names) for each in links),
        parameters=parameters,
        buffers=_model_tensors(graph, (node for stage in stages for node in stage.buffers)),
        inputs=tuple(_inputs(graph, stages, names)),
        outputs=tuple(names[node] for _, node in graph.returned),
        summed_outputs=tuple(names[node] for role, node in graph.returned if role.is_sum),
        log_names=graph.logs,
        dynamic_batch=graph.batch is not None,
        arguments=graph.paths,
        batch_axes=graph.axes,
        training=graph.training,
        variables=graph.variables,
        planned_sizes=graph.planned_sizes,
        fixed_sizes=graph.fixed_sizes,
        repeated=graph.repeated,
        guards=tuple(_guards(graph)),
        sync_spec=replace(
            spec, buffer_sync_stages=tuple(each for each in averaged if len(schedule.placement[each]) > 1)
        ),
    )


def _guards(graph: TrainingGraph) -> Iterator[str]:
    """The conditions under which the code is right. Torch gives sizes of 0 and 1 graphs of their own."""
    if graph.findings.has_norm_over_rows_alone:
        yield "b >= 2"
    for name in dict.fromkeys(graph.variable_symbols.values()):
        if isinstance(graph.planned_sizes[name], int):
            yield f"{name} >= 2"
    for guard in graph.guards:
        if guard.free_symbols & {*graph.variable_symbols}:
            yield format_guard(guard, graph.symbols)


def stage_speed(topology: Topology, ranks: Sequence[int]) -> float:
    """The speed of the slowest of the ranks that run a stage."""
    return min(topology.devices[rank].speed for rank in ranks)


def _link_seconds(link: Link, placement: Placement, topology: Topology, sizes: Sizes) -> float:
    """How long a message takes on the slowest of its ways; a result goes to every other rank."""
    num_bytes = sum(value_bytes(value, sizes) for value in link.values)
    if link.payload.is_result:
        return topology.slowest_link.seconds(num_bytes)
    turns = math.lcm(len(placement[link.source]), len(placement[link.target]))
    found = messages([link], placement, turns)
    pairs = {*zip(found.sources.tolist(), found.targets.tolist(), strict=True)}
    ways = {topology.link_between(*pair) for pair in pairs}
    return max(way.seconds(num_bytes) for way in ways)


def _link_memory(
    links: Sequence[Link], stages: Sequence[StageFunctions], names: Names, size: int
) -> Iterator[tuple[float, float]]:
    """The bytes that the sender of each link holds for a message: copies, and saved values.

    A value that is not contiguous is copied before it is sent.
    """
    held: dict[tuple[int, str], tuple[int, int]] = {}
    for function in (function for stage in stages for function in stage.functions):
        elsewhere = storage_owners(function.saved_out)
        for node in function.sent:
            value, owner = node.all_input_nodes[0], storage_owner(node.all_input_nodes[0])
            num_bytes = node_bytes(value, size)
            if not is_contiguous(value):
                held[function.stage, names[node]] = num_bytes, 0
            elif owns_new_storage(owner):
                kept = owner in elsewhere
                held[function.stage, names[node]] = (0, num_bytes) if kept else (num_bytes, 0)
    for link in links:
        amounts = [held.get((link.source, value.name), (0, 0)) for value in link.values]
        yield sum(own for own, _ in amounts), sum(saved for _, saved in amounts)


def _last_reader(link: Link, stages: Sequence[StageFunctions], names: Names) -> Phase:
    """The last phase of the target that reads or saves a value of a link."""
    values, last = {value.name for value in link.values}, Phase.FORWARD
    for function in stages[link.target].functions if link.payload.per_microbatch else ():
        read = (*function.received, *(each for each in function.saved_in if each.target is recv))
        if not values.isdisjoint(names[each.all_input_nodes[0]] for each in read):
            last = function.phase
    return last


def _owners(stages: Sequence[StageFunctions]) -> dict[str, int]:
    """The first stage that uses a parameter owns it; the others borrow it."""
    owners: dict[str, int] = {}
    for stage in stages:
        for fqn in _fqns(stage.parameters):
            owners.setdefault(fqn, stage.index)
    return owners


def _model_tensors(graph: TrainingGraph, nodes: Iterable[fx.Node]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(plan_value(graph, node, node.meta["role"].fqn) for node in nodes))


def _fqns(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.meta["role"].fqn for node in nodes)


def _stage(
    graph: TrainingGraph,
    stage: StageFunctions,
    names: Names,
    owners: Mapping[str, int],
    size: int,
    schedule: Schedule,
    topology: Topology,
) -> Stage:
    ranks = schedule.placement[stage.index]
    forwards = stage.phase_functions(Phase.FORWARD)
    operators = _operators(node for function in forwards for node in function.body)
    parameters = _fqns(stage.parameters)
    step_buffers = graph.step_buffers
    updated = {fqn for function in stage.all_functions for fqn, _ in function.buffer_updates}
    return Stage(
        index=stage.index,
        first_operator=operators[0] if operators else 0,
        last_operator=operators[-1] if operators else -1,
        modules=_modules(graph, operators),
        parameters=parameters,
        borrowed_parameters=tuple(fqn for fqn in parameters if owners[fqn] != stage.index),
        buffers=_fqns(stage.buffers),
        updated_buffers=tuple(fqn for fqn in _fqns(stage.buffers) if fqn in updated),
        step_buffers=tuple(fqn for fqn in _fqns(stage.buffers) if fqn in updated & step_buffers),
        batch_counts=tuple(names[node] for node in stage.batch_counts),
        batch_count_sums=tuple(
            plan_value(graph, node, names[node]) for node in stage.batch_counts if node.meta["role"].is_sum
        ),
        precomputed_phases=tuple(
            phase
            for phase in SCHEDULED_PHASES
            if any(function.reads_precomputed for function in stage.phase_functions(phase))
        ),
        recompute=bool(stage.phase_functions(Phase.RECOMPUTE)),
        recomputes_in_backward=any(
            node.meta.get("recompute") is Phase.BACKWARD
            for function in stage.functions
            for node in function.body
        ),
        offloaded=tuple(k for k, node in enumerate(forwards[-1].saved_out) if node.meta.get("offload")),
        segments=_segment_fractions(stage, size),
        model_collectives=tuple(_model_collectives(graph, stage, names, ranks, topology, size)),
        tail=_tail(graph, stage, names, size, schedule.num_microbatches, ranks, topology),
        cost=stage_cost(graph, stage, size, stage_speed(topology, ranks)),
    )


def _tail(
    graph: TrainingGraph,
    stage: StageFunctions,
    names: Mapping[fx.Node, str],
    microbatch_size: int,
    num_microbatches: int,
    ranks: Sequence[int],
    topology: Topology,
) -> Tail | None:
    """The tail of a stage, which computes with the rows of all microbatches; None if it has none."""
    tail, num_rows = stage.tail, microbatch_size * num_microbatches
    if tail is None:
        return None

    def bytes_of(node: fx.Node) -> int:
        return node_bytes(node, num_rows)

    inputs = [node for node in tail.inputs if isinstance(node.meta["role"], TailInput)]
    gradients = [node for node in graph.arguments if isinstance(node.meta["role"], TailGradient)]
    read = {fqn for node in tail.read_nodes for fqn in source_parameters(node)}
    rows = [node for function in stage.functions for _, node in function.tail_values]
    return Tail(
        inputs=tuple(plan_value(graph, node, names[node]) for node in inputs),
        gradients=tuple(plan_value(graph, node, names[node]) for node in gradients),
        results=tuple(names[node] for node in tail.outputs),
        parameters=tuple(fqn for node in stage.parameters if (fqn := node.meta["role"].fqn) in read),
        updated_buffers=tuple(fqn for fqn, _ in tail.buffer_updates),
        location=graph.findings.tail,
        flops=sum(evaluate_cost(node.meta["cost"].flops, num_rows) for node in tail.body),
        seconds=sum(node.meta["cost"].seconds(num_rows) for node in tail.body) / stage_speed(topology, ranks),
        gather_seconds=unshard_seconds(topology, ranks, sum(map(bytes_of, inputs))),
        transient_bytes=tail.lifetimes.memory(bytes_of).peak,
        unsaved_bytes=sum(node_bytes(node, microbatch_size) for node in _kept(stage, rows)),
    )


def _kept(stage: StageFunctions, rows: Sequence[fx.Node]) -> Collection[fx.Node]:
    """The values that each forward keeps for the tail alone."""
    return storage_owners(rows) - storage_owners(stage.phase_functions(Phase.FORWARD)[-1].saved_out)


_OPS = {
    ops.ALL_REDUCE: Op.ALL_REDUCE,
    ops.ALL_GATHER: Op.ALL_GATHER,
    ops.REDUCE_SCATTER: Op.REDUCE_SCATTER,
}


def _model_collectives(
    graph: TrainingGraph,
    stage: StageFunctions,
    names: Mapping[fx.Node, str],
    ranks: Sequence[int],
    topology: Topology,
    size: int,
) -> Iterator[ModelCollective]:
    """The model collectives of a stage on ``ranks``, in the order in which a microbatch reaches them."""
    for function in stage.functions:
        for node in function.collectives:
            op = _OPS[node.target]  # type: ignore[index]
            num_bytes = node_bytes(node, size) * (len(ranks) if op is Op.REDUCE_SCATTER else 1)
            seconds_of = all_reduce_seconds if op is Op.ALL_REDUCE else unshard_seconds
            seconds = seconds_of(topology, ranks, num_bytes)
            value = plan_value(graph, node, names[node])
            yield ModelCollective(op, function.phase, function.segment + 1, value, seconds)


def _unsaved(stage: StageFunctions) -> Iterator[fx.Node]:
    """The values that backwards read and that are computed again for them."""
    for function in stage.phase_functions(Phase.FORWARD):
        for made in function.body:
            items = (user for user in made.users if user.target is operator.getitem)
            if made.meta.get("recompute"):
                yield from (node for node in (made, *items) if any(map(_is_of_backward, node.users)))


def _is_of_backward(node: fx.Node) -> bool:
    if node.op == "output":
        return False
    return not is_forward(node) or (is_view(node) and any(map(_is_of_backward, node.users)))


def _segment_fractions(stage: StageFunctions, size: int) -> dict[Phase, tuple[float, ...]]:
    """The phases with several segments, and the fraction of the phase's time that each takes."""
    found = {}
    for phase in stage.phases:
        seconds = [_seconds([function], size) for function in stage.phase_functions(phase)]
        if len(seconds) > 1:
            total = sum(seconds)
            found[phase] = tuple(each / total if total else 1 / len(seconds) for each in seconds)
    return found


def _operators(nodes: Iterable[fx.Node]) -> list[int]:
    """The forward operators that a stage has to itself.

    Views, and values of the model's inputs alone such as masks, are computed by each stage that reads them.
    """
    every = list(nodes)
    own = [node for node in every if not is_view(node) and not depends_on_inputs_only(node)]
    return sorted({node.meta["operator"] for node in own or every})


def _modules(graph: TrainingGraph, operators: Sequence[int]) -> tuple[str, ...]:
    """FQNs of the modules the stage's operators belong to, in order."""
    named = (graph.operators[op].module for op in operators if graph.operators)
    return tuple(dict.fromkeys(filter(None, named)))


def stage_cost(graph: TrainingGraph, stage: StageFunctions, size: int, speed: float) -> StageCost:
    return StageCost(
        seconds={phase: _seconds(stage.phase_functions(phase), size) / speed for phase in stage.phases},
        flops=sum(evaluate_cost(n.meta["cost"].flops, size) for f in stage.functions for n in f.body),
        memory=_stage_memory(stage, size),
    )


def _stage_memory(stage: StageFunctions, size: int) -> StageMemory:
    trained = {fqn for function in stage.all_functions for fqn, _ in function.gradients}

    def bytes_of(node: fx.Node) -> int:
        return node_bytes(node, size)

    held = {
        phase: [function.lifetimes.memory(bytes_of) for function in stage.phase_functions(phase)]
        for phase in stage.phases
    }
    after = {phase: of_phase[-1].after for phase, of_phase in held.items()}
    peaks = {phase: max(each.peak for each in of_phase) for phase, of_phase in held.items()}
    given = {node for function in stage.functions for node in function.inputs}
    split, whole = ([n for n in given if _is_given(n, batched)] for batched in (True, False))
    buffers = storage_bytes(
        (node for function in stage.functions for _, node in function.buffer_updates), bytes_of
    )
    saved, forwards = after[Phase.FORWARD], stage.phase_functions(Phase.FORWARD)
    full = after.get(Phase.RECOMPUTE, saved)
    kept = after.get(Phase.BACKWARD_INPUT, 0)
    floors = {Phase.FORWARD: saved, Phase.BACKWARD_WEIGHT: kept}
    memory = StageMemory(
        weights=sum(map(bytes_of, stage.parameters)),
        buffers=sum(map(bytes_of, (*stage.buffers, *whole))) + _constant_bytes(stage, bytes_of),
        precomputed=sum(map(bytes_of, stage.precomputed)),
        inputs=sum(map(bytes_of, split)),
        gradients=sum(bytes_of(node) for node in stage.parameters if node.meta["role"].fqn in trained),
        saved=saved + buffers,
        weight_gradient_saved=kept + buffers * (Phase.BACKWARD_INPUT in peaks),
        transient={phase: peak - floors.get(phase, full) for phase, peak in peaks.items()},
        recomputed=full - saved,
        unsaved=storage_bytes(_unsaved(stage), bytes_of),
        offloaded=storage_bytes((n for n in forwards[-1].saved_out if n.meta.get("offload")), bytes_of),
    )
    sizes = {node.meta["role"].fqn: bytes_of(node) for node in stage.parameters}
    parts = {
        phase: tuple(
            _segment_memory(stage.phase_functions(phase), of_phase, sum(memory.growth(phase)), sizes)
        )
        for phase, of_phase in held.items()
        if len(of_phase) > 1
    }
    return replace(memory, segments=parts)


def _segment_memory(
    functions: Sequence[PhaseFunction],
    held: Sequence[FunctionMemory],
    growth: float,
    sizes: Mapping[str, int],
) -> Iterator[SegmentMemory]:
    """The memory of each function of a phase. Together they save ``growth`` more bytes than before."""
    left = growth
    for function, own in zip(functions, held, strict=True):
        change = left if function.is_last else own.after - own.before
        left -= change
        yield SegmentMemory(own.peak - own.before, change, sum(sizes[fqn] for fqn, _ in function.gradients))


def _is_given(node: fx.Node, batched: bool) -> bool:
    role = node.meta["role"]
    return isinstance(role, ModelInput) and role.batched is batched


def _constant_bytes(stage: StageFunctions, bytes_of: BytesOf) -> int:
    """The bytes of constants that the stage's functions read."""
    read = {node for function in stage.functions for node in function.read_nodes}
    return sum(map(bytes_of, {storage_owner(node) for node in stage.constants if node in read}))


def _seconds(functions: Iterable[PhaseFunction], size: int) -> float:
    return float(sum(node.meta["cost"].seconds(size) for function in functions for node in function.body))


def _batched(value: Value) -> Value:
    """The same value with the batch in place of dimension 0, which the graph has as a number."""
    return Value(value.name, value.dtype, ("b", *value.shape[1:]))


def _message_links(
    graph: TrainingGraph, stages: Sequence[StageFunctions], names: Names, schedule: Schedule
) -> Iterator[Link]:
    """One link for all values from one stage to another, for each direction.

    Of several stages on the same ranks, the first reader receives a value and hands it on to the others.
    """
    groups: dict[tuple[int, int, Payload], list[Value]] = {}
    functions = [function for stage in stages for function in stage.functions]
    handed_on = _handed_on(functions, schedule)
    for function in functions:
        payload = Payload.ACTIVATION if function.phase is Phase.FORWARD else Payload.GRADIENT
        for node in function.sent:
            ends = handed_on.get(node, function.stage), _target(node)
            value = plan_value(graph, node, names[node])
            groups.setdefault((*ends, payload), []).append(value)
    return (
        Link(source, target, payload, tuple(values)) for (source, target, payload), values in groups.items()
    )


def _handed_on(functions: Sequence[PhaseFunction], schedule: Schedule) -> dict[fx.Node, int]:
    """The stage that hands a value on, by send node, where the target's ranks have received it before."""
    if not runs_stages_in_order(map(ComputeColumns.of, schedule.orders)):
        return {}
    first: dict[tuple[fx.Node, tuple[int, ...]], int] = {}
    found: dict[fx.Node, int] = {}
    sends = (node for function in functions for node in function.sent)
    for node in sorted(sends, key=_send_order):
        target, ranks = _target(node), schedule.placement[_target(node)]
        if ranks != schedule.placement[stage_of(node)]:
            reader = first.setdefault((node.all_input_nodes[0], ranks), target)
            found |= {node: reader} if reader != target else {}
    return found


def _send_order(node: fx.Node) -> tuple[bool, int]:
    """A sort key: send nodes in the order in which values are read, forwards before backwards."""
    return (False, _target(node)) if is_forward(node) else (True, -_target(node))


def _target(node: fx.Node) -> int:
    """The stage that a send node is for."""
    return stage_of(next(iter(node.users)))


def _tied_links(
    graph: TrainingGraph, stages: Sequence[StageFunctions], owners: Mapping[str, int]
) -> Iterator[Link]:
    """A link that sends a tied weight to its borrower, and one that returns the gradient to the owner."""
    for stage in stages:
        trained = {fqn for function in stage.all_functions for fqn, _ in function.gradients}
        for node in stage.parameters:
            fqn = node.meta["role"].fqn
            if owners[fqn] != stage.index:
                value = plan_value(graph, node, fqn)
                yield Link(owners[fqn], stage.index, Payload.WEIGHT, (value,))
                if fqn in trained:
                    yield Link(stage.index, owners[fqn], Payload.WEIGHT_GRADIENT, (value,))


def _result_links(
    graph: TrainingGraph, stages: Sequence[StageFunctions], names: Names, streams: bool
) -> Iterator[Link]:
    """The links of a step's results to all other ranks; in a stream, one for each microbatch.

    Results of the tail have a link of their own: each has the rows of all microbatches.
    """
    payload = Payload.MICROBATCH_RESULT if streams else Payload.RESULT
    axes = {node: role.axis or LEADING for role, node in graph.returned}
    for stage in stages:
        for functions in (stage.functions, [stage.tail] if stage.tail else []):
            nodes = [node for function in functions for node in dict.fromkeys(function.outputs)]
            if values := tuple(_result(graph, node, names[node], axes[node]) for node in nodes):
                yield Link(stage.index, -1, payload, values)


def _result(graph: TrainingGraph, node: fx.Node, name: str, axis: BatchAxis) -> Value:
    """A result of the graph, its rows moved to the front where they are not one block each."""
    value, rows = plan_value(graph, node, name), graph.batch_size
    dim, inner = (0, 1) if axis.has_outer else (axis.dim, axis.inner)
    if graph.batch is None and value.shape[dim : dim + 1] == (rows * inner,):
        size = f"{inner}*b" if inner > 1 else "b"
        return Value(name, value.dtype, (*value.shape[:dim], size, *value.shape[dim + 1 :]))
    return value


def _inputs(graph: TrainingGraph, stages: Sequence[StageFunctions], names: Names) -> Iterator[InputLeaf]:
    read = {n.meta["role"] for stage in stages for function in stage.all_functions for n in function.inputs}
    read |= {n.meta.get("role") for stage in stages for n in batch_count_nodes(graph, stage.batch_counts)}
    for node in graph.arguments:
        role = node.meta["role"]
        if role in read and isinstance(role, ModelInput):
            value = plan_value(graph, node, names[node])
            yield InputLeaf(
                role.position, role.path, role.batched, _batched(value) if role.batched else value
            )


def with_offload_seconds(plan: Plan, link: LinkModel) -> Plan:
    """The plan with the seconds of each stage's offloads and prefetches."""
    stages = []
    for stage in plan.stages:
        num_bytes = stage.cost.memory.offloaded
        seconds = len(stage.offloaded) * link.latency_seconds + num_bytes / link.bytes_per_second
        stages.append(replace(stage, cost=replace(stage.cost, copy_seconds=seconds)))
    return replace(plan, stages=tuple(stages))
