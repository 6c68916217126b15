"""Measure a training step of a model on one device: the time of every node of its graph.

Two measurements are combined. The generated code of the whole model, run as one stage, gives the time of a
forward and of a backward in training. The nodes, run one by one, give the fraction of each. Their own times
would be too long, because each includes the call and reading the clock.
"""

import platform
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from pipec.capture.model_call import ModelCall
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.staged_graph import StagedGraph
from pipec.cost.graph_fingerprint import graph_fingerprint, profiled_nodes, target_name
from pipec.cost.profile import Profile, ProfiledNode, ProfiledOperator
from pipec.errors import InputError
from pipec.graph import (
    BatchCount,
    BatchFraction,
    Buffer,
    LossGradient,
    ModelInput,
    Parameter,
    TrainingGraph,
)
from pipec.hardware.calibration import default_device_model
from pipec.hardware.topology import equal_devices
from pipec.ir import Phase
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.merge_slice_gradients import MergeSliceGradients
from pipec.passes.simplify import Simplify
from pipec.runtime.messages.cuda import current_device
from pipec.runtime.processes.launch import SINGLE_PROCESS
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.execution import Execution
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.step.timestamps import Moment, RecordedStep, clock_of
from pipec.schedules import one_f_one_b
from pipec.timeline.trace import measured_timeline

NUM_WARMUP_RUNS = 2
"""Runs that are not measured: they allocate memory and let kernels choose their algorithms."""

_MICROBATCHES = 3
"""In a step of the whole model: the first sets gradients, the others add to them.

A backward follows each forward, as in most of a step: it is faster with its memory in the cache.
"""


def profile_graph(
    graph: TrainingGraph,
    model: nn.Module,
    call: ModelCall,
    device: torch.device,
    repeats: int = 10,
    ranks: int = 1,
) -> Profile:
    """Measure ``graph``, as captured, on the microbatch ``call``, in ``ranks`` copies at a time.

    The model's tensors are used as they are, or copied to ``device``; for those on meta, small random values
    are used. Their gradients are not touched.
    """
    if device.type == "meta":
        raise InputError("the meta device computes nothing: profile on a device like those that will train")
    tensors = _tensors(graph, model, device)
    graph = MergeSliceGradients()(Simplify()(graph))
    nodes = _Timer(graph, call.batch_size, device)
    whole = _ModelTimer(graph, tensors, call, device, ranks)
    arguments = list(_arguments(graph, tensors, call, device))
    with torch.no_grad():
        for number in range(NUM_WARMUP_RUNS + repeats):
            if number == NUM_WARMUP_RUNS:
                nodes.seconds.clear()
                whole.seconds.clear()
            nodes.measure(*arguments)
            whole.run()
    phases = {phase: statistics.median(times) for phase, times in whole.seconds.items()}
    return Profile(
        fingerprint=graph_fingerprint(graph),
        device=_describe(device),
        torch=torch.__version__,
        microbatch_size=call.batch_size,
        operators=tuple(_operators(graph, _scaled(nodes.medians(), phases))),
    )


class _ModelTimer:
    """The model as one stage, run by the interpreter of training, in several copies at a time."""

    def __init__(
        self,
        graph: TrainingGraph,
        tensors: Mapping[str, Tensor],
        call: ModelCall,
        device: torch.device,
        ranks: int,
    ) -> None:
        model = default_device_model(device)
        options = CompilerOptions(model, equal_devices(1, model.link))
        staged = StagedGraph(graph, AssignStages(CutStages(options.topology, call.batch_size)), options)
        artifact = staged.evaluate(one_f_one_b(1, _MICROBATCHES), call.batch_size).artifact()
        self.seconds: dict[Phase, list[float]] = defaultdict(list)
        self._parameters = [
            {fqn: nn.Parameter(tensor, tensor.is_floating_point()) for fqn, tensor in tensors.items()}
            for _ in range(ranks)
        ]
        roles = (node.meta["role"] for node in graph.arguments)
        buffers = [role.fqn for role in roles if isinstance(role, Buffer)]
        self._executions = [
            Execution(
                artifact,
                parameters,
                {fqn: tensors[fqn].clone() for fqn in buffers},  # which a step changes
                Ranks([device], timeout=300.0, here=SINGLE_PROCESS),
            )
            for parameters in self._parameters
        ]
        sizes = [call.batch_size] * _MICROBATCHES
        self._span = BatchSlice(sizes, sum(sizes), values=[graph.planned_sizes] * len(sizes))
        self._leaves = _repeated(call, device)

    def run(self) -> None:
        first, *others = self._executions
        with ThreadPoolExecutor(len(self._executions)) as threads:
            running = [threads.submit(self._step, other) for other in others]
            steps = [self._step(first), *(step.result() for step in running)]
        for step in steps:
            for event in measured_timeline(step.programs, step.timestamps).computes:
                assert event.instruction.op.phase
                self.seconds[event.instruction.op.phase].append(event.end - event.start)
        for parameter in (parameter for copy in self._parameters for parameter in copy.values()):
            parameter.grad = None

    def _step(self, execution: Execution) -> RecordedStep:
        recorded: list[RecordedStep] = []
        execution.run([self._leaves], self._span, seed=0, recorded=recorded)
        return recorded[0]


class _Timer(fx.Interpreter):
    """Runs a graph and measures the time of each node; values are dropped after their last use."""

    def __init__(self, graph: TrainingGraph, size: int, device: torch.device) -> None:
        super().__init__(graph.module)
        self._graph = graph
        self.seconds: dict[fx.Node, list[float]] = defaultdict(list)
        sizes = {"b": size, **graph.planned_sizes}
        self._sizes = {symbol: sizes[name] for symbol, name in graph.symbols.items()}
        self._device, self._clock = device, clock_of(device)
        self._marks: list[Moment] = []

    def measure(self, *arguments: Any) -> None:
        """Run the graph, and append the seconds of each node."""
        self._marks.clear()
        with current_device(self._device):
            self._clock.begin()
            self.run(*arguments)
            timestamps = self._clock.times(self._marks)
        called = [node for node in self._graph.module.graph.nodes if node.op == "call_function"]
        for node, start, end in zip(called, timestamps[::2], timestamps[1::2], strict=True):
            self.seconds[node].append(1e-9 * (end - start))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = map_aggregate((args, kwargs), self._resolved)
        self._marks.append(self._clock.now())
        value = target(*args, **kwargs)
        self._marks.append(self._clock.now())
        return value

    def medians(self) -> dict[fx.Node, float]:
        """The median seconds of the nodes that run once per microbatch."""
        return {node: statistics.median(self.seconds[node]) for node in profiled_nodes(self._graph)}

    def _resolved(self, argument: Any) -> Any:
        """The argument with sizes as numbers, and every device as the measured one."""
        if isinstance(argument, sympy.Basic):
            number = argument.subs(self._sizes)
            if not number.is_number:
                return number  # the rest depends on values
            return int(number) if number.is_integer else float(number)
        return self._device if isinstance(argument, torch.device) else argument


def _scaled(nodes: Mapping[fx.Node, float], whole: Mapping[Phase, float]) -> dict[fx.Node, float]:
    """The times of nodes, scaled such that those of each phase add up to the phase's time."""
    alone: dict[Phase, float] = defaultdict(float)
    for node, seconds in nodes.items():
        alone[node.meta["phase"]] += seconds
    return {
        node: seconds * whole[node.meta["phase"]] / alone[node.meta["phase"]]
        for node, seconds in nodes.items()
    }


def _tensors(graph: TrainingGraph, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Parameters, buffers and constants on ``device``, sharing the model's memory if possible."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants}
    return {fqn: _on(tensor.detach(), device) for fqn, tensor in named.items()}


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_meta:
        return tensor.to(device)
    made = torch.empty_like(tensor, device=device)
    return made.normal_(std=0.02) if made.is_floating_point() else made.zero_()


def _arguments(
    graph: TrainingGraph, tensors: Mapping[str, Tensor], call: ModelCall, device: torch.device
) -> Iterator[Any]:
    for node in graph.arguments:
        match node.meta["role"]:
            case Parameter(fqn) | Buffer(fqn):
                yield tensors[fqn]
            case ModelInput(position=position):
                leaf = call.leaves[position]
                yield _on(leaf, device) if isinstance(leaf, Tensor) else leaf
            case LossGradient() | BatchFraction() | BatchCount():
                val = node.meta["val"]  # fake, so tensors made like it are fake, too
                yield torch.ones([int(size) for size in val.shape], dtype=val.dtype, device=device)


def _repeated(call: ModelCall, device: torch.device) -> list[Any]:
    """The leaves of a mini-batch whose microbatches are all ``call``."""
    return [
        torch.cat([_on(leaf, device)] * _MICROBATCHES) if batched else leaf
        for leaf, batched in zip(call.leaves, call.batched, strict=True)
    ]


def _operators(graph: TrainingGraph, medians: Mapping[fx.Node, float]) -> Iterator[ProfiledOperator]:
    caused: dict[int, list[ProfiledNode]] = defaultdict(list)
    for node in profiled_nodes(graph):
        caused[node.meta["operator"]].append(
            ProfiledNode(node.name, target_name(node), str(node.meta["phase"]), round(medians[node], 9))
        )
    for number, operator in enumerate(graph.operators):
        yield ProfiledOperator(operator.name, operator.module, tuple(caused[number]))


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads"
