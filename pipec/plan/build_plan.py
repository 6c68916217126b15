"""Builds the Plan of a classified graph: stages with costs, links between them, inputs and outputs."""

import functools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from pipec import ops
from pipec.cost.formulas import node_bytes
from pipec.cost.symbolic_sizes import evaluate_cost
from pipec.graph import (
    Gradient,
    ModelInput,
    OutputGradient,
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
from pipec.graph.module_cuts import ModulePart, module_parts
from pipec.graph.phase_functions import PhaseFunction, StageFunctions, batch_count_nodes
from pipec.graph.size_text import format_guard
from pipec.hardware.collective_costs import all_reduce_seconds, unshard_seconds
from pipec.hardware.devices import LinkModel
from pipec.hardware.topology import Topology
from pipec.ir import (
    SCHEDULED_PHASES,
    Bucket,
    InputLeaf,
    Link,
    ModelCollective,
    Op,
    Payload,
    Phase,
    Plan,
    Schedule,
    SegmentMemory,
    Stage,
    StageCost,
    StageMemory,
    SyncSpec,
    Tail,
    TrainedOutput,
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
    return _PlanBuilder(graph, stages, names, schedule, microbatch_size, topology).plan(sync_spec)


@dataclass(frozen=True, eq=False)
class _PlanBuilder:
    """What a plan is read off. ``size`` is the number of rows of a microbatch."""

    graph: TrainingGraph
    stages: Sequence[StageFunctions]
    names: Names
    schedule: Schedule
    size: int
    topology: Topology

    def plan(self, requested: SyncSpec) -> Plan:
        graph, names, placement = self.graph, self.names, self.schedule.placement
        links = (*self.message_links(), *self.tied_links(), *self.result_links())
        parameters = self.model_tensors(node for stage in self.stages for node in stage.parameters)
        values = {value.name: value for value in parameters}
        link_bytes = list(self.link_memory(links))
        stages = tuple(map(self.stage, self.stages))
        spec = build_sync_spec(requested, graph.mode, self.stages, values, links, placement, self.topology)
        averaged = (each.index for each in stages if each.averaged_buffers)
        return Plan(
            mode=graph.mode,
            schedule=self.schedule.name,
            num_microbatches=self.schedule.num_microbatches,
            microbatch_size=self.size,
            placement=placement,
            stages=stages,
            links=links,
            link_seconds=tuple(map(self.link_seconds, links)),
            link_sender_bytes=tuple(own for own, _ in link_bytes),
            link_saved_bytes=tuple(saved for _, saved in link_bytes),
            link_reader_phases=tuple(map(self.last_readers, links)),
            parameters=parameters,
            buffers=self.model_tensors(node for stage in self.stages for node in stage.buffers),
            inputs=tuple(self.inputs()),
            outputs=tuple(names[node] for _, node in graph.returned),
            trained_outputs=tuple(self.trained_outputs()),
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
            guards=tuple(self.guards()),
            sync_spec=replace(
                spec, buffer_sync_stages=tuple(each for each in averaged if len(placement[each]) > 1)
            ),
        )

    @functools.cached_property
    def owners(self) -> dict[str, int]:
        """The first stage that uses a parameter owns it; the others borrow it."""
        owners: dict[str, int] = {}
        for stage in self.stages:
            for fqn in _fqns(stage.parameters):
                owners.setdefault(fqn, stage.index)
        return owners

    def value(self, node: fx.Node) -> Value:
        return plan_value(self.graph, node, self.names[node])

    def model_tensors(self, nodes: Iterable[fx.Node]) -> tuple[Value, ...]:
        return tuple(dict.fromkeys(plan_value(self.graph, node, node.meta["role"].fqn) for node in nodes))

    def speed(self, stage: StageFunctions) -> float:
        """The speed of the slowest of the ranks that run a stage."""
        return min(self.topology.devices[rank].speed for rank in self.schedule.placement[stage.index])

    def guards(self) -> Iterator[str]:
        """The conditions under which the code is right. Torch gives sizes of 0 and 1 graphs of their own."""
        graph = self.graph
        if graph.findings.has_norm_over_rows_alone:
            yield "b >= 2"
        for name in dict.fromkeys(graph.variable_symbols.values()):
            if isinstance(graph.planned_sizes[name], int):
                yield f"{name} >= 2"
        for guard in graph.guards:
            if guard.free_symbols & {*graph.variable_symbols}:
                yield format_guard(guard, graph.symbols)

    def inputs(self) -> Iterator[InputLeaf]:
        counted = (
            node for stage in self.stages for node in batch_count_nodes(self.graph, stage.batch_counts)
        )
        functions = (function for stage in self.stages for function in stage.all_functions)
        read = {n.meta["role"] for function in functions for n in function.inputs}
        read |= {node.meta.get("role") for node in counted}
        for node in self.graph.arguments:
            role = node.meta["role"]
            if role in read and isinstance(role, ModelInput):
                value = self.value(node)
                if role.batched:  # dimension 0 may be a number in the graph
                    value = replace(value, shape=("b", *value.shape[1:]))
                yield InputLeaf(role.position, role.path, role.batched, value)

    def trained_outputs(self) -> Iterator[TrainedOutput]:
        """The outputs of which the script gives gradients, each with the parameters that it trains."""
        given = {
            node: node.meta["role"].position
            for node in self.graph.arguments
            if isinstance(node.meta["role"], OutputGradient)
        }
        if not given:
            return
        needed: dict[fx.Node, frozenset[int]] = {}
        for node in self.graph.module.graph.nodes:
            sources = (needed[each] for each in node.all_input_nodes)
            needed[node] = frozenset({given[node]} if node in given else ()).union(*sources)
        trained = [(role.fqn, needed[x]) for role, x in self.graph.outputs if isinstance(role, Gradient)]
        outputs = {role.position: self.names[node] for role, node in self.graph.returned}
        for node, position in given.items():
            parameters = dict.fromkeys(fqn for fqn, read in trained if position in read)
            yield TrainedOutput(outputs[position], self.names[node], tuple(parameters))

    # stages

    @functools.cached_property
    def module_parts(self) -> Sequence[ModulePart]:
        """What each stage has of the model's modules."""
        cut = self.graph.assignment
        return module_parts(self.graph.operators, cut.stages[: len(self.graph.operators)], len(self.stages))

    def stage(self, stage: StageFunctions) -> Stage:
        forwards = stage.phase_functions(Phase.FORWARD)
        operators = _operators(node for function in forwards for node in function.body)
        modules = (self.graph.operators[op].module for op in operators if self.graph.operators)
        part = self.module_parts[stage.index]
        parameters, buffers = _fqns(stage.parameters), _fqns(stage.buffers)
        updated = {fqn for function in stage.all_functions for fqn, _ in function.buffer_updates}
        return Stage(
            index=stage.index,
            first_operator=operators[0] if operators else 0,
            last_operator=operators[-1] if operators else -1,
            modules=tuple(dict.fromkeys(filter(None, modules))),
            whole_modules=part.modules,
            divided_module=part.divided,
            parameters=parameters,
            borrowed_parameters=tuple(fqn for fqn in parameters if self.owners[fqn] != stage.index),
            buffers=buffers,
            updated_buffers=tuple(fqn for fqn in buffers if fqn in updated),
            step_buffers=tuple(fqn for fqn in buffers if fqn in updated & self.graph.step_buffers),
            batch_counts=tuple(self.names[node] for node in stage.batch_counts),
            batch_count_sums=tuple(
                self.value(node) for node in stage.batch_counts if node.meta["role"].is_sum
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
            segments=_segment_fractions(stage, self.size),
            model_collectives=tuple(self.model_collectives(stage)),
            tail=self.tail(stage),
            cost=StageCost(
                seconds={
                    phase: _seconds(stage.phase_functions(phase), self.size) / self.speed(stage)
                    for phase in stage.phases
                },
                flops=sum(
                    evaluate_cost(n.meta["cost"].flops, self.size) for f in stage.functions for n in f.body
                ),
                memory=_stage_memory(stage, self.size, self.graph.has_given_microbatches),
            ),
        )

    def tail(self, stage: StageFunctions) -> Tail | None:
        """The tail of a stage, which computes with the rows of all microbatches; None if it has none."""
        tail, num_rows = stage.tail, self.size * self.schedule.num_microbatches
        if tail is None:
            return None

        def bytes_of(node: fx.Node) -> int:
            return node_bytes(node, num_rows)

        inputs = [node for node in tail.inputs if isinstance(node.meta["role"], TailInput)]
        gradients = [node for node in self.graph.arguments if isinstance(node.meta["role"], TailGradient)]
        read = {fqn for node in tail.read_nodes for fqn in source_parameters(node)}
        rows = [node for function in stage.functions for _, node in function.tail_values]
        ranks, gathered = self.schedule.placement[stage.index], sum(map(bytes_of, inputs))
        return Tail(
            inputs=tuple(map(self.value, inputs)),
            gradients=tuple(map(self.value, gradients)),
            results=tuple(self.names[node] for node in tail.outputs),
            parameters=tuple(fqn for node in stage.parameters if (fqn := node.meta["role"].fqn) in read),
            updated_buffers=tuple(fqn for fqn, _ in tail.buffer_updates),
            location=self.graph.findings.tail,
            flops=sum(evaluate_cost(node.meta["cost"].flops, num_rows) for node in tail.body),
            seconds=sum(node.meta["cost"].seconds(num_rows) for node in tail.body) / self.speed(stage),
            gather_seconds=unshard_seconds(self.topology, ranks, gathered),
            transient_bytes=tail.lifetimes.memory(bytes_of).peak,
            unsaved_bytes=sum(node_bytes(node, self.size) for node in _kept(stage, rows)),
        )

    def model_collectives(self, stage: StageFunctions) -> Iterator[ModelCollective]:
        """The model collectives of a stage, in the order in which a microbatch reaches them."""
        ranks = self.schedule.placement[stage.index]
        for function in stage.functions:
            for node in function.collectives:
                op = _OPS[node.target]  # type: ignore[index]
                num_bytes = node_bytes(node, self.size) * (len(ranks) if op is Op.REDUCE_SCATTER else 1)
                seconds_of = all_reduce_seconds if op is Op.ALL_REDUCE else unshard_seconds
                seconds = seconds_of(self.topology, ranks, num_bytes)
                yield ModelCollective(op, function.phase, function.segment + 1, self.value(node), seconds)

    # links

    def message_links(self) -> Iterator[Link]:
        """One link for all values from one stage to another, for each direction.

        Of several stages on the same ranks, the first reader receives a value and hands it on to the others.
        """
        groups: dict[tuple[int, int, Payload], list[Value]] = {}
        functions = [function for stage in self.stages for function in stage.functions]
        handed_on = self.handed_on(functions)
        for function in functions:
            payload = Payload.ACTIVATION if function.phase is Phase.FORWARD else Payload.GRADIENT
            for node in function.sent:
                ends = handed_on.get(node, function.stage), _target(node)
                groups.setdefault((*ends, payload), []).append(self.value(node))
        return (Link(*ends_and_payload, tuple(values)) for ends_and_payload, values in groups.items())

    def handed_on(self, functions: Sequence[PhaseFunction]) -> dict[fx.Node, int]:
        """The stage that hands a value on, by send node, where the target's ranks have received it before."""
        if not runs_stages_in_order(map(ComputeColumns.of, self.schedule.orders)):
            return {}
        placement = self.schedule.placement
        first: dict[tuple[fx.Node, tuple[int, ...]], int] = {}
        found: dict[fx.Node, int] = {}
        sends = (node for function in functions for node in function.sent)
        for node in sorted(sends, key=_send_order):
            target, ranks = _target(node), placement[_target(node)]
            if ranks != placement[stage_of(node)]:
                reader = first.setdefault((node.all_input_nodes[0], ranks), target)
                found |= {node: reader} if reader != target else {}
        return found

    def tied_links(self) -> Iterator[Link]:
        """A link that sends a tied weight to its borrower, and one that returns the gradient to the owner."""
        for stage in self.stages:
            trained = {fqn for function in stage.all_functions for fqn, _ in function.gradients}
            for node in stage.parameters:
                fqn = node.meta["role"].fqn
                if self.owners[fqn] != stage.index:
                    value = plan_value(self.graph, node, fqn)
                    yield Link(self.owners[fqn], stage.index, Payload.WEIGHT, (value,))
                    if fqn in trained:
                        yield Link(stage.index, self.owners[fqn], Payload.WEIGHT_GRADIENT, (value,))

    def result_links(self) -> Iterator[Link]:
        """The links of a step's results to all other ranks; in a stream, one for each microbatch.

        Outputs that a stage keeps go to its other ranks alone. Results of the tail have a link of their own:
        each has the rows of all microbatches.
        """
        payload = Payload.MICROBATCH_RESULT if self.schedule.stream else Payload.RESULT
        axes = {node: role.axis or LEADING for role, node in self.graph.returned}
        for stage in self.stages:
            for functions in (stage.functions, [stage.tail] if stage.tail else []):
                nodes = [node for function in functions for node in dict.fromkeys(function.outputs)]
                if values := tuple(self.result(node, axes[node]) for node in nodes):
                    target = stage.index if self.graph.keeps_outputs else -1
                    yield Link(stage.index, target, payload, values)

    def result(self, node: fx.Node, axis: BatchAxis) -> Value:
        """A result of the graph, its rows moved to the front where they are not one block each."""
        value, rows = self.value(node), self.graph.batch_size
        dim, inner = (0, 1) if axis.has_outer else (axis.dim, axis.inner)
        if self.graph.batch is None and value.shape[dim : dim + 1] == (rows * inner,):
            size = f"{inner}*b" if inner > 1 else "b"
            return replace(value, shape=(*value.shape[:dim], size, *value.shape[dim + 1 :]))
        return value

    def link_seconds(self, link: Link) -> float:
        """How long a message takes on the slowest of its ways; a result goes to every other rank."""
        sizes, placement = {"b": self.size, **self.graph.planned_sizes}, self.schedule.placement
        num_bytes = sum(value_bytes(value, sizes) for value in link.values)
        if link.payload.is_result:
            return self.topology.slowest_link.seconds(num_bytes)
        turns = math.lcm(len(placement[link.source]), len(placement[link.target]))
        found = messages([link], placement, turns)
        pairs = {*zip(found.sources.tolist(), found.targets.tolist(), strict=True)}
        ways = {self.topology.link_between(*pair) for pair in pairs}
        return max(way.seconds(num_bytes) for way in ways)

    def link_memory(self, links: Sequence[Link]) -> Iterator[tuple[tuple[float, ...], float]]:
        """The bytes that the sender of each link holds for a message: copies of each value, and saved values.

        A value that is not contiguous is copied before it is sent.
        """
        held: dict[tuple[int, str], tuple[int, int]] = {}
        for function in (function for stage in self.stages for function in stage.functions):
            elsewhere = storage_owners(function.saved_out)
            for node in function.sent:
                value, owner = node.all_input_nodes[0], storage_owner(node.all_input_nodes[0])
                num_bytes = node_bytes(value, self.size)
                if not is_contiguous(value):
                    held[function.stage, self.names[node]] = num_bytes, 0
                elif owns_new_storage(owner):
                    kept = owner in elsewhere
                    held[function.stage, self.names[node]] = (0, num_bytes) if kept else (num_bytes, 0)
        for link in links:
            amounts = [held.get((link.source, value.name), (0, 0)) for value in link.values]
            yield tuple(own for own, _ in amounts), sum(saved for _, saved in amounts)

    def last_readers(self, link: Link) -> tuple[Phase, ...]:
        """The last phase of the target that reads or saves each value of a link."""
        last = {value.name: Phase.FORWARD for value in link.values}
        for function in self.stages[link.target].functions if link.payload.per_microbatch else ():
            read = (*function.received, *(each for each in function.saved_in if each.target is recv))
            names = (self.names[each.all_input_nodes[0]] for each in read)
            last |= {name: function.phase for name in names if name in last}
        return tuple(last.values())


def _fqns(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.meta["role"].fqn for node in nodes)


def _kept(stage: StageFunctions, rows: Sequence[fx.Node]) -> Collection[fx.Node]:
    """The values that each forward keeps for the tail alone."""
    return storage_owners(rows) - storage_owners(stage.phase_functions(Phase.FORWARD)[-1].saved_out)


_OPS = {
    ops.ALL_REDUCE: Op.ALL_REDUCE,
    ops.ALL_GATHER: Op.ALL_GATHER,
    ops.REDUCE_SCATTER: Op.REDUCE_SCATTER,
}


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


def _stage_memory(stage: StageFunctions, size: int, is_given: bool) -> StageMemory:
    """The memory of a stage. If microbatches are given, each has inputs of its own."""
    trained = {fqn for function in stage.all_functions for fqn, _ in function.gradients}

    def bytes_of(node: fx.Node) -> int:
        return node_bytes(node, size)

    held = {
        phase: [function.lifetimes.memory(bytes_of) for function in stage.phase_functions(phase)]
        for phase in stage.phases
    }
    after = {phase: of_phase[-1].after for phase, of_phase in held.items()}
    peaks = {phase: max(each.peak for each in of_phase) for phase, of_phase in held.items()}
    given = {node: node.meta["role"] for function in stage.functions for node in function.inputs}
    of_model = {
        node: role.batched or is_given for node, role in given.items() if isinstance(role, ModelInput)
    }
    split, whole = ([n for n in of_model if of_model[n] is batched] for batched in (True, False))
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


def _constant_bytes(stage: StageFunctions, bytes_of: BytesOf) -> int:
    """The bytes of constants that the stage's functions read."""
    read = {node for function in stage.functions for node in function.read_nodes}
    return sum(map(bytes_of, {storage_owner(node) for node in stage.constants if node in read}))


def _seconds(functions: Iterable[PhaseFunction], size: int) -> float:
    return float(sum(node.meta["cost"].seconds(size) for function in functions for node in function.body))


def _send_order(node: fx.Node) -> tuple[bool, int]:
    """A sort key: send nodes in the order in which values are read, forwards before backwards."""
    return (False, _target(node)) if is_forward(node) else (True, -_target(node))


def _target(node: fx.Node) -> int:
    """The stage that a send node is for."""
    return stage_of(next(iter(node.users)))


def with_host_memory(plan: Plan, link: LinkModel) -> Plan:
    """The plan with the seconds of copies to the host and back, and without the weights that are there.

    A rank copies its shard of a bucket before the others gather it, and after the sums were scattered.
    """
    on_host = [0] * len(plan.stages)
    buckets = list[Bucket]()
    for bucket in plan.sync_spec.buckets:
        num_bytes = sum(value_bytes(value, {}) for value in bucket.parameters)
        if bucket.on_host:
            on_host[bucket.stage] += num_bytes
            seconds = _copy_seconds(link, len(bucket.parameters), num_bytes)
            bucket = replace(bucket, reduce_seconds=seconds, unshard_seconds=seconds)
        elif plan.mode.trains and plan.sync_spec.is_in_host_memory(bucket):
            seconds = _copy_seconds(link, 1, num_bytes / len(plan.placement[bucket.stage]))
            bucket = replace(
                bucket,
                reduce_seconds=bucket.reduce_seconds + seconds,
                unshard_seconds=bucket.unshard_seconds + seconds,
            )
        buckets.append(bucket)
    stages = []
    for stage in plan.stages:
        memory = stage.cost.memory
        seconds = _copy_seconds(link, len(stage.offloaded), memory.offloaded)
        weights = on_host[stage.index]
        memory = replace(memory, weights=memory.weights - weights, host=memory.host + weights)
        stages.append(replace(stage, cost=replace(stage.cost, copy_seconds=seconds, memory=memory)))
    sync_spec = replace(plan.sync_spec, buckets=tuple(buckets))
    return replace(plan, stages=tuple(stages), sync_spec=sync_spec)


def _copy_seconds(link: LinkModel, count: int, num_bytes: float) -> float:
    return count * link.latency_seconds + num_bytes / link.bytes_per_second
