"""What a front end returns, and the joint graph of forward and backward that torch makes of it."""

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import sympy
import torch
import torch._dynamo
import torch.fx.traceback as fx_traceback
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import tracing
from torch.fx.experimental.symbolic_shapes import CallMethodKey, ShapeEnv, free_unbacked_symbols

from pipec.torch_compat import pytree
from pipec.torch_compat.module_state import without_autocast

ASSERTIONS = (torch._check, torch.ops.aten._assert_scalar.default)
"""What ``torch._check`` becomes in a captured graph."""


@dataclass(frozen=True)
class CapturedGraph:
    """A forward graph, and the arguments to differentiate it with.

    ``changed_state`` names the Python objects that the forward would change, and tracing did not. Each is a
    path from the traced module, such as ``model.layers.0``; for an attribute, the path of its module.

    Of a graph of Dynamo's, ``dynamo_output`` is the record of everything that the code read, for ``Guards``.
    Of the fallback's, ``results`` is the tree of its results. If that graph includes its backward,
    ``trained`` names the parameters whose gradients follow the results, and the last argument is the gradient
    of the first result.
    """

    module: torch.fx.GraphModule
    args: tuple[Any, ...]
    changed_state: tuple[str, ...] = ()
    dynamo_output: Any = None
    results: pytree.TreeSpec | None = None
    trained: tuple[str, ...] | None = None

    @property
    def has_backward(self) -> bool:
        """Whether the graph includes its backward."""
        return self.trained is not None


SymbolicDims = Sequence[tuple[torch.Tensor, int]]
"""Tensors among the arguments, each with a dimension that becomes a symbol."""


def is_data_dependent(value: object, numbers: Collection[sympy.Symbol] = ()) -> bool:
    """Whether the shape of a fake tensor, or a symbolic number, depends on values of tensors.

    The symbols in ``numbers`` are numbers in the arguments, and do not count.
    """
    return not unbacked_symbols(value) <= {*numbers}


def unbacked_symbols(value: object) -> set[sympy.Symbol]:
    """The symbols in a shape, or in a symbolic number, that depend on values of tensors."""
    if isinstance(value, tuple | list):
        return set().union(*map(unbacked_symbols, value))
    is_symbolic = isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    return set(free_unbacked_symbols(value)) if is_symbolic else set()


def size_of_symbol(symbol: sympy.Symbol, number: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | None:
    """The size that a symbol in ``number`` had when it was traced; None if it is data-dependent."""
    shapes = number.node.shape_env
    sizes = shapes.backed_var_to_val if hasattr(shapes, "backed_var_to_val") else shapes.var_to_val
    return int(sizes[symbol]) if symbol in sizes else None


@dataclass(frozen=True)
class JointGraph:
    """A differentiated graph. ``arguments`` and ``results`` describe its placeholders and outputs.

    ``branches`` are the guards that come from branches in Python code, each with its line.
    ``specialized_by`` is the line of the model that made a symbol a constant, if one did. ``asserted`` has
    the conditions that were asserted of ``data_dependent_sizes``.
    """

    module: torch.fx.GraphModule
    arguments: tuple[tuple[str, str | int], ...]
    results: tuple[tuple[str, str | int], ...]
    guards: tuple[sympy.Basic, ...]
    branches: tuple[tuple[sympy.Basic, str], ...]
    replacements: dict[sympy.Symbol, sympy.Expr]
    output_spec: pytree.TreeSpec
    specialized_by: str
    data_dependent_sizes: tuple["DataDependentSize", ...] = ()
    asserted: tuple[sympy.Basic, ...] = ()


@dataclass(frozen=True)
class DataDependentSize:
    """A size that depends on values: dimension ``dim`` of ``node``, or of item ``item`` of its tuple.

    In the graph it is ``symbol``, or the replacement of the symbol in ``JointGraph.replacements``.
    """

    node: torch.fx.Node
    item: int | None
    dim: int
    symbol: sympy.Symbol


def differentiate(captured: CapturedGraph, training: bool) -> JointGraph:
    """The forward of a captured graph, and with ``training`` its backward, as one functional ATen graph.

    ``node.meta["custom"]`` of a captured node is copied to every node that it causes.
    """
    if captured.trained is not None:
        with without_autocast():  # tracing has converted dtypes already
            joint_graph = differentiate(replace(captured, trained=None), False)
        return _with_gradients(joint_graph, captured.trained)
    meta = captured.module.meta
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(meta.get("tracing_context")))
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(torch.set_grad_enabled(training))
        stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))  # as in loss.backward()
        joint = aot_export_joint_with_descriptors(stack, captured.module, captured.args)
    graph_module = joint.graph_module
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    shape_env = meta["fake_mode"].shape_env
    return JointGraph(
        module=graph_module,
        arguments=tuple(_argument(node) for node in placeholders),
        results=tuple(_result(desc) for desc in graph_module.graph.output_node().meta["desc"]),
        guards=tuple(guard.expr for guard in shape_env.guards) if shape_env else (),
        branches=tuple(_branches(shape_env)) if shape_env else (),
        replacements=dict(shape_env.replacements) if shape_env else {},
        output_spec=captured.results or joint.out_spec,
        specialized_by=_specialized_by(shape_env),
        data_dependent_sizes=tuple(_data_dependent_sizes(graph_module.graph)),
        asserted=tuple(_asserted(graph_module.graph, shape_env)),
    )


def argument_tensors(captured: CapturedGraph) -> dict[torch.fx.Node, object]:
    """What Dynamo's graph takes for each argument: a tensor of the traced module, or a given one."""
    graph = captured.module.graph
    given = graph.process_inputs(*captured.args)
    return dict(zip(graph.find_nodes(op="placeholder"), given, strict=True))


def returns_loss_first(captured: CapturedGraph) -> bool:
    """Whether the first result of a graph of Dynamo's is what the traced module returned first.

    Objects that the module made, and their tensors, may come before the loss.
    """
    graph = captured.module.graph
    results: Any = graph.output_node().args[0]
    if len(results) < 2:
        return True
    argument_tensors(captured)
    values = torch.fx.node.map_arg(results, lambda node: node.meta["example_value"])
    return pytree.tree_leaves(graph.process_outputs(values))[0] is values[0]


@contextlib.contextmanager
def replaced_graph(captured: CapturedGraph, graph: torch.fx.Graph) -> Iterator[None]:
    """Let a captured module have another graph of the same arguments and results."""
    own = captured.module.graph
    graph.set_codegen(own._codegen)
    captured.module.graph = graph
    try:
        yield
    finally:
        captured.module.graph = own


def _data_dependent_sizes(graph: torch.fx.Graph) -> Iterator[DataDependentSize]:
    for node in graph.nodes:
        for symbol, path in (node.meta.get("unbacked_bindings") or {}).items():
            match path:
                case (CallMethodKey("size"), object(idx=dim)):
                    yield DataDependentSize(node, None, dim, symbol)
                case (object(idx=item), CallMethodKey("size"), object(idx=dim)):
                    yield DataDependentSize(node, item, dim, symbol)


def _asserted(graph: torch.fx.Graph, shape_env: ShapeEnv | None) -> Iterator[sympy.Basic]:
    """The conditions that the model and torch assert of data-dependent symbols."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        condition = node.args[0].meta["val"] if isinstance(node.args[0], torch.fx.Node) else True
        if isinstance(condition, torch.SymBool):
            yield condition.node.expr
    for asserts in (shape_env.deferred_runtime_asserts if shape_env else {}).values():
        yield from (each.expr for each in asserts)


def _with_gradients(joint: JointGraph, trained: Sequence[str]) -> JointGraph:
    """The same graph, with its tangent and the gradients of ``trained`` described as such."""
    num_results, (*arguments, tangent) = joint.output_spec.num_leaves, joint.arguments
    assert tangent[0] == "input", tangent
    names = dict(enumerate(trained, num_results))

    def result(described: tuple[str, str | int]) -> tuple[str, str | int]:
        kind, index = described
        return ("gradient", names[index]) if kind == "output" and index in names else described

    return replace(
        joint,
        arguments=(*arguments, ("tangent", 0)),
        results=tuple(map(result, joint.results)),
    )


def _branches(shape_env: ShapeEnv) -> Iterator[tuple[sympy.Basic, str]]:
    """The guards of Python code that Dynamo traced, or that read a size; not those of torch's operators."""
    for guard in shape_env.guards:
        frame, line = guard.sloc.framework_loc, guard.sloc.maybe_user_loc
        file = frame.filename if isinstance(frame, FrameSummary) else ""
        if line and file.startswith(str(_TORCH / "_dynamo")):
            code, _, place = line.rpartition("  # ")
            yield guard.expr, f"{Path(place.partition(' in ')[0]).name}: {code}"
        elif isinstance(frame, FrameSummary) and not Path(file).is_relative_to(_TORCH):
            yield guard.expr, f"{Path(file).name}:{frame.lineno}: {frame.line}"


_TORCH = Path(torch.__file__).parent


def _specialized_by(shape_env: ShapeEnv | None) -> str:
    """``x = x.view(4, -1)  # model.py:12 in forward``, without the brackets that torch appends."""
    if shape_env is None:
        return ""
    constants = [symbol for symbol, value in shape_env.replacements.items() if value.is_number]
    lines = [str(shape_env.replacements_slocs[symbol]) for symbol in constants]
    if not lines:
        return "the model"
    if lines[-1].startswith("("):  # a line of torch alone
        return "its backward" if "_engine_run_backward" in lines[-1] else "torch's own code"
    return re.sub(r" \([^()]*\)$", "", lines[-1])


def _argument(node: torch.fx.Node) -> tuple[str, str | int]:
    match node.meta.get("desc"):
        case descriptors.ParamAOTInput(target=name):
            return "parameter", name
        case descriptors.BufferAOTInput(target=name):
            return "buffer", name
        case descriptors.PlainAOTInput(idx=index):
            return "input", index
        case descriptors.TangentAOTInput():
            return "tangent", 0
        case other:
            return "unknown", repr(other)


def _result(descriptor: object) -> tuple[str, str | int]:
    match descriptor:
        case descriptors.PlainAOTOutput(idx=index):
            return "output", index
        case descriptors.InputMutationAOTOutput(mutated_input=descriptors.BufferAOTInput(target=name)):
            return "buffer", name
        case descriptors.InputMutationAOTOutput(mutated_input=descriptors.ParamAOTInput(target=name)):
            return "changed parameter", name
        case descriptors.InputMutationAOTOutput(mutated_input=descriptors.PlainAOTInput(idx=index)):
            return "changed input", index
        case descriptors.GradAOTOutput(grad_of=descriptors.ParamAOTInput(target=name)):
            return "gradient", name
        case None | descriptors.GradAOTOutput():
            return "ignored", 0
        case other:
            return "unknown", repr(other)
