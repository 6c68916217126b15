"""Turns torch's joint graph into a TrainingGraph: inputs and outputs get roles, no-ops are removed."""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from pipec.capture.data_dependent_sizes import lift_data_dependent_sizes
from pipec.capture.extract_batch_counts import extract_batch_counts, input_branches
from pipec.capture.graph_calls import at_line
from pipec.capture.graph_symbols import batch_symbol, check_evaluable, number_symbols, variable_symbols
from pipec.capture.markers import OUTPUT_GRADIENT, OUTPUT_MERGE, REQUIRE
from pipec.capture.model_call import ModelCall
from pipec.capture.operators import classify
from pipec.capture.output_merge import batch_first_output
from pipec.capture.traced_step import CaptureRequest
from pipec.errors import CaptureError, InputError, NoLossError
from pipec.graph import (
    NO_FINDINGS,
    ArgumentRole,
    BatchFindings,
    Buffer,
    Gradient,
    LossGradient,
    ModelInput,
    Operator,
    Output,
    OutputGradient,
    Parameter,
    ResultRole,
    TrainingGraph,
    UpdatedBuffer,
    has_data_dependent_size,
    is_check,
    is_forward,
    is_gradient_sum,
    storage_owner,
)
from pipec.graph.size_text import SymbolNames, format_size
from pipec.ir import Mode
from pipec.ir.batch_axis import BatchAxis
from pipec.ir.batch_split import variable_values
from pipec.ops import COLLECTIVES
from pipec.primitives import require
from pipec.torch_compat import pytree
from pipec.torch_compat.differentiation import JointGraph
from pipec.torch_compat.run_time import is_higher_order
from pipec.torch_compat.symbolic_numbers import formula

_aten = torch.ops.aten

NO_OPS = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default, _aten.lift_fresh_copy.default}

SQUEEZES = {_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims}
"""Operators that look at sizes when they run, to see which dimensions have one element."""

MATRIX_PRODUCTS = {
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
}
"""Operators whose tensors must have one dtype. Tracing on fake tensors does not check that."""

HIGHER_ORDER = {
    "cond": "Stages are straight-line code: compute both sides, and choose with torch.where or a mask.",
    "with_effects": "It checks the values of a result, as torch.linalg.inv, solve and cholesky do: call "
    "inv_ex, solve_ex or cholesky_ex, which do not.",
    "while_loop": "Stages are straight-line code: make a fixed number of rounds, and use torch.where.",
}
"""What to do instead of calling an operator that itself calls graphs."""


@dataclass(frozen=True)
class TracedCall:
    """A traced call of a request as a joint graph, with what is needed to read it.

    ``call`` is the sample that was traced, whose batch is ``symbolic`` or not. ``numbers`` has what the
    forward graph has for the variables that are numbers. ``fqns`` maps the names of tensors in the joint
    graph to their names in the model, where a tied tensor has one. ``constants`` are the tensors that belong
    to the loss function alone. ``findings`` say what was proved of the batch. ``first_collective`` is the
    first model collective, if any.
    """

    joint: JointGraph
    request: CaptureRequest
    operators: tuple[Operator, ...]
    call: ModelCall
    symbolic: bool
    numbers: Mapping[str, Sequence[Any]]
    fqns: Mapping[str, str]
    constants: Mapping[str, Tensor]
    findings: BatchFindings = NO_FINDINGS
    first_collective: str = ""


def training_graph(traced: TracedCall) -> TrainingGraph:
    """Read the joint graph as a training graph, in place.

    Raises:
        CaptureError, InputError: pipec refuses the model, whichever front end traces it.
        DataDependentError, SpecializedBatchError, SpecializedVariableError: another attempt may succeed.
    """
    module, request = traced.joint.module, traced.request
    graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())  # torch's expects the arguments nested as they were
    data_dependent_sizes = lift_data_dependent_sizes(
        traced.joint, number_symbols(graph) if request.variables else set()
    )
    _check_calls(node for node in graph.nodes if str(node.target) == "with_effects")
    for node in graph.find_nodes(op="call_function", target=REQUIRE):
        node.target = require
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    for node, described in zip(arguments, traced.joint.arguments, strict=True):
        node.meta["role"] = _argument(described, traced)
    batch = batch_symbol(arguments, traced.joint.specialized_by) if traced.symbolic else None
    symbols = variable_symbols(arguments, batch, request.variables, traced.numbers, traced.joint)
    results = _read_results(graph, traced)
    _take_output_gradients(graph)
    _merge_tied_arguments(graph)
    changed = {role.fqn for role in results.roles if isinstance(role, UpdatedBuffer)}
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["role"], Buffer):
            node.meta["updated"] = node.meta["role"].fqn in changed
    squeezed_at = _fix_squeezes(graph, batch)
    _drop_what_does_nothing(graph, NO_OPS if (request.num_replicas or 1) > 1 else NO_OPS.union(COLLECTIVES))
    _check_calls(graph.nodes)
    lifted = _lift_constants(module, request.mode)
    batch_counts = extract_batch_counts(graph)
    classify(graph)
    keeps_outputs = request.mode is Mode.OUTPUTS and not request.outputs
    _copy_outer_gradients(graph, results.roles, len(traced.operators) - 1)
    if keeps_outputs:
        _gather_outputs(graph, results.roles, len(traced.operators) - 1)
    decided = input_branches(graph, batch_counts)
    owner = "the model" if request.loss_fn is None else "loss_fn"
    return _checked(
        TrainingGraph(
            module,
            request.mode,
            traced.operators,
            _merge_tied_gradients(graph, results.roles),
            request.call.batch_size,
            batch,
            _guards(traced.joint),
            variables=tuple(request.variables),
            planned_sizes=variable_values(request.variables, request.call.leaves),
            variable_symbols=symbols,
            data_dependent_sizes=data_dependent_sizes,
            constants={**_used(graph, batch_counts, traced.constants), **lifted},
            batch_counts=batch_counts,
            microbatches_are_batches=not request.rewrite_loss,
            keeps_outputs=keeps_outputs,
            findings=replace(
                traced.findings,
                output=results.unproven,
                branches=tuple((x.subs(traced.joint.replacements), at) for x, at in traced.joint.branches),
            ),
            first_collective=traced.first_collective,
            squeezed_at=squeezed_at,
            logs=results.logs,
            output_spec=results.output_spec,
            paths=tuple(traced.call.paths),
            axes=traced.call.axes,
            training=request.model.training,
            input_branches=decided,
        ),
        f"{owner} returned {results.first_value}",
    )


def _guards(joint: JointGraph) -> tuple[sympy.Basic, ...]:
    """The conditions that a call may violate. Equalities that merged two symbols always hold."""
    guards = (guard.subs(joint.replacements) for guard in joint.guards)
    return tuple(each for guard in guards for each in sympy.And.make_args(guard) if each != sympy.true)


def _check_calls(nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        target: Any = node.target
        if is_higher_order(target):
            name, ordinary = target.name(), "Write what it computes with ordinary operations of torch."
            raise CaptureError(
                f"the model calls the higher-order operator {name!r}, which no stage can run{at_line(node)}\n"
                + HIGHER_ORDER.get(name, ordinary)
            )


def _argument(described: tuple[str, str | int], traced: TracedCall) -> ArgumentRole:
    match described:
        case ("parameter", str(name)) if traced.fqns[name] not in traced.constants:
            return Parameter(traced.fqns[name])
        case ("parameter" | "buffer", str(name)):
            return Buffer(traced.fqns[name])
        case ("input", int(index)):
            return ModelInput(index, traced.call.paths[index], traced.call.batched[index])
        case ("tangent", _):
            return LossGradient()
    raise CaptureError(f"the captured graph takes an argument that pipec does not know: {described[1]}")


class _Fixed:
    """Replaces a value that is no tensor in the tree of the output.

    To pytree it is a node without leaves; unflattening the tree puts the value in its place.
    """

    def __init__(self, value: object) -> None:
        self.value = value


pytree.register_pytree_node(_Fixed, lambda fixed: ([], fixed.value), lambda _, value: value)


@dataclass(frozen=True)
class _Results:
    """The results of a graph: the roles of its tensors, and the tree of the model's output.

    ``logs`` are the names of the tensors after the loss that belong to no output. ``first_value`` describes
    the first result if it is no tensor.
    """

    roles: tuple[ResultRole, ...]
    logs: tuple[str, ...]
    output_spec: pytree.TreeSpec
    unproven: str
    first_value: str


def _take_output_gradients(graph: fx.Graph) -> None:
    """Let the graph take gradients of outputs as arguments, in place of those of what stands for a loss."""
    for node in graph.find_nodes(op="call_function", target=OUTPUT_GRADIENT):
        position: Any = node.args[2]
        with graph.inserting_before(next(iter(graph.nodes))):
            argument = graph.placeholder(f"output_gradient_{position}")
        argument.meta.update(val=node.meta["val"], role=OutputGradient(position))
        node.replace_all_uses_with(argument)
        graph.erase_node(node)


def _copy_outer_gradients(graph: fx.Graph, roles: Sequence[ResultRole], last: int) -> None:
    """Let copies be the gradients of parameters that are added to the loss, as learned weights of tasks are.

    So it is with a parameter that is an output, and with the output. The copies belong to the ``last``
    operator, whose stage has the loss's own gradient, and holds the parameter then.
    """
    given = [
        x
        for x in graph.find_nodes(op="placeholder")
        if isinstance(x.meta["role"], LossGradient | OutputGradient)
    ]
    for gradient, reader in [(each, user) for each in given for user in each.users]:
        if reader.op == "output" or is_gradient_sum(reader):
            reader.replace_input_with(gradient, _copy(gradient, reader, last))
    output = graph.output_node()
    results: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    for place, (role, node) in enumerate(zip(roles, results, strict=True)):
        if isinstance(role, Output) and isinstance(node.meta.get("role"), Parameter):
            results[place] = _copy(node, output, last)
    output.args = (tuple(results),)


def _gather_outputs(graph: fx.Graph, roles: Sequence[ResultRole], last: int) -> None:
    """Let the ``last`` operator return all outputs, and hand their gradients on.

    So the edges of the graph carry an output of an earlier stage to the last one, and its gradient back.
    """
    output, alias = graph.output_node(), _aten.alias.default
    results: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    returned = dict.fromkeys(x for role, x in zip(roles, results, strict=True) if isinstance(role, Output))
    gathered = {node: _copy(node, output, last, alias) for node in returned}
    output.args = (
        tuple(gathered[x] if isinstance(role, Output) else x for role, x in zip(roles, results, strict=True)),
    )
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["role"], OutputGradient) and node.users:
            readers, first = [*node.users], next(x for x in graph.nodes if x in node.users)
            own = _copy(node, first, last, alias)
            for reader in readers:
                reader.replace_input_with(node, own)


def _copy(node: fx.Node, reader: fx.Node, operator: int, target: Any = _aten.clone.default) -> fx.Node:
    with reader.graph.inserting_before(reader):
        copied = reader.graph.call_function(target, (node,))
    copied.meta = {key: node.meta[key] for key in ("val", "phase")}
    copied.meta |= {"operator": operator, "constant": False}
    return copied


def _read_results(graph: fx.Graph, traced: TracedCall) -> _Results:
    """Read the results, and leave in the graph those that are tensors.

    The traced module returned the results, and by name the tensors that replaced buffers.
    """
    output = graph.output_node()
    values: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    described = traced.joint.results
    num_leaves = sum(kind == "output" for kind, _ in described)
    returned, replaced = pytree.tree_unflatten(list(range(num_leaves)), traced.joint.output_spec)
    names = {position: name for name, position in replaced.items()}
    kept: list[tuple[fx.Node, ResultRole]] = []
    fixed: dict[int, object] = {}
    unproven, owners = "", dict[fx.Node, str]()
    for marked, (kind, what) in zip(values, described, strict=True):
        is_marked = isinstance(marked, fx.Node) and marked.target is OUTPUT_MERGE
        value = marked.args[0] if is_marked else marked
        if kind == "output" and what in names:
            fqn = traced.fqns[names[what]]
            _refuse_alias(fqn, value, owners)
            owners[storage_owner(value)] = fqn
            kept.append((value, UpdatedBuffer(fqn)))
        elif kind == "output" and what == 0 and traced.request.mode is Mode.OUTPUTS:
            continue  # stands for a loss
        elif kind == "output" and not _is_tensor_node(value):
            fixed[int(what)] = value
        elif isinstance(value, fx.Node) and kind != "ignored":
            role = _result((kind, what), traced, value)
            if is_marked and isinstance(role, Output):
                role, value = _marked(role, marked, traced)
                unproven = unproven or str(marked.args[1])
            kept.append((value, role))
    output.args = (tuple(value for value, _ in kept),)
    logs, model_output = _logs_and_output(returned, fixed, traced.request.mode)
    tree = pytree.tree_map(lambda i: _Fixed(fixed[i]) if i in fixed else i, model_output)
    first = f"a {type(fixed[0]).__name__}" if fixed.get(0) is not None else "None" if 0 in fixed else ""
    roles = tuple(role for _, role in kept)
    return _Results(roles, logs, pytree.tree_structure(tree), unproven, first)


def _refuse_alias(fqn: str, value: fx.Node, replaced: Mapping[fx.Node, str]) -> None:
    """Refuse a replaced buffer that would share its memory with a tensor that a later step may change.

    ``replaced`` are the other replaced buffers, by the node that owns their memory.
    """
    owner = storage_owner(value)
    role = owner.meta.get("role")
    if owner not in replaced and (role is None or role == Buffer(fqn)):
        return
    other = replaced.get(owner) or getattr(role, "fqn", "") or f"argument {getattr(role, 'path', '')}"
    raise CaptureError(
        f"forward() assigns {other}, or a view of it, to the buffer {fqn}{at_line(value)}\n"
        f"They would share memory, which stages do not. Assign a copy, with .clone(), or write into the "
        "buffer, with .copy_()"
    )


def _marked(role: Output, marked: fx.Node, traced: TracedCall) -> tuple[Output, fx.Node]:
    """The declaration of an ``OUTPUT_MERGE``, and the output that the graph returns."""
    value, unproven, *fields = marked.args
    assert isinstance(value, fx.Node)
    if not fields:
        return replace(role, is_sum=not unproven), value
    axis = BatchAxis(*fields[0])  # type: ignore[misc]
    if axis.has_outer:
        value = batch_first_output(marked, axis, _rows(marked.graph, traced))
    return replace(role, axis=axis), value


def _rows(graph: fx.Graph, traced: TracedCall) -> Any:
    """The rows of the microbatch: a symbolic size if the batch is one."""
    if not traced.symbolic:
        return traced.request.call.batch_size
    roles = ((node, node.meta["role"]) for node in graph.find_nodes(op="placeholder"))
    split = (node for node, role in roles if isinstance(role, ModelInput) and role.batched)
    sizes = (node.meta["val"].shape[0] for node in split)
    return next(size for size in sizes if isinstance(size, torch.SymInt))


def _logs_and_output(returned: Any, fixed: Mapping[int, object], mode: Mode) -> tuple[tuple[str, ...], Any]:
    """The names of logs, and the tree of the model's output, in what a traced module returned."""
    if mode is Mode.FORWARD:
        return (), returned
    if not (isinstance(returned, tuple) and len(returned) == 3):
        num_leaves = len(pytree.tree_leaves(returned))
        if num_leaves > 1:
            raise _no_loss(f"the model or loss_fn returned {num_leaves} tensors")
        return (), returned
    _, logs, output = returned
    for name, position in logs.items() if isinstance(logs, dict) else [("", logs)]:
        if not isinstance(position, int) or position in fixed:
            found = fixed.get(position) if isinstance(position, int) else position
            raise InputError(
                f"loss_fn returned a {type(found).__name__} as logs[{name!r}]; expected (loss, logs), where "
                "logs is a dict of tensors by name"
            )
    return tuple(map(str, logs)), output


def _is_tensor_node(value: object) -> bool:
    if not isinstance(value, fx.Node):
        return False
    if isinstance(value.meta.get("val"), Tensor):
        if not has_data_dependent_size(value):
            return True
        raise CaptureError(
            f"the model returns a tensor whose size depends on values{at_line(value)}\n"
            "Microbatches cannot be joined to it. Return one of fixed size, such as a mask, or leave it out."
        )
    raise CaptureError(
        f"the model returns a number that depends on the size of the batch{at_line(value)}\n"
        "Microbatches cannot be joined to it. Return it as a tensor, or leave it out."
    )


def _result(described: tuple[str, str | int], traced: TracedCall, value: fx.Node) -> ResultRole:
    match described:
        case ("output", int(index)):
            return Output(index)
        case ("buffer", str(name)) if traced.fqns[name] not in traced.constants:
            return UpdatedBuffer(traced.fqns[name])
        case ("gradient", str(name)):
            return Gradient(traced.fqns[name])
        case (_, int(index)):
            what = f"its argument {traced.call.paths[index]}{at_line(value)}\nChange a clone of it instead."
        case (_, name):
            fqn = traced.fqns.get(str(name), name)
            what = f"{fqn}{at_line(value)}\nOnly buffers of the model can be changed."
    raise CaptureError(f"forward() changes {what}")


def _fix_squeezes(graph: fx.Graph, batch: sympy.Symbol | None) -> str:
    """Let each squeeze name the dimensions that had one element in the capture.

    A microbatch of one row keeps its dimension of rows, as the batch does in eager torch. Returns where the
    first squeeze is that would remove it.
    """
    squeezed_at = ""
    for node in graph.nodes:
        if node.target in SQUEEZES:
            source, *given = node.args
            shape = source.meta["val"].shape
            dims = sorted({dim % len(shape) for dim in _dims(given, len(shape))}) if shape else []
            ones = [dim for dim in dims if isinstance(shape[dim], int) and shape[dim] == 1]
            if any(isinstance(shape[dim], torch.SymInt) and shape[dim].node.expr == batch for dim in dims):
                squeezed_at = squeezed_at or at_line(node) or f" by {node.name}"
            if ones:
                one = len(ones) == 1
                node.target = _aten.squeeze.dim if one else _aten.squeeze.dims
                node.args = (source, ones[0] if one else ones)
            else:
                node.target, node.args = _aten.alias.default, (source,)
    return squeezed_at


def _dims(given: Sequence[Any], rank: int) -> Iterable[int]:
    """The dimensions that a squeeze may remove."""
    if not given:
        return range(rank)
    return [given[0]] if isinstance(given[0], int) else given[0]


def _drop_what_does_nothing(graph: fx.Graph, no_ops: Collection[Any]) -> None:
    """Remove ``no_ops`` and assertions, and replace reads of size nodes by formulas."""
    for node in list(graph.nodes):
        if _does_nothing(node, no_ops):
            node.replace_all_uses_with(node.args[0])
        elif _is_number(node.meta.get("val")) and node.op != "output" and not has_data_dependent_size(node):
            value = node.meta["val"]
            _replace_by(node, formula(value))
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("output", "placeholder") and not is_check(node):
            graph.erase_node(node)


def _does_nothing(node: fx.Node, no_ops: Collection[Any]) -> bool:
    if node.op != "call_function":
        return False
    if node.target is _aten.slice.Tensor:
        return tuple(node.args[2:]) == (0, sys.maxsize)
    return node.target in no_ops


def _is_number(value: object) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _replace_by(node: fx.Node, value: Any) -> None:
    """Replace a node by a number."""

    def replaced(read: fx.Node) -> Any:
        return value if read is node else read

    for user in list(node.users):
        user.args = fx.map_arg(user.args, replaced)
        user.kwargs = fx.map_arg(user.kwargs, replaced)


def _merge_tied_arguments(graph: fx.Graph) -> None:
    """Let every user of a tied tensor read the same argument."""
    first: dict[ArgumentRole, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if first.setdefault(node.meta["role"], node) is not node:
            node.replace_all_uses_with(first[node.meta["role"]])
            graph.erase_node(node)


def _merge_tied_gradients(graph: fx.Graph, results: Iterable[ResultRole]) -> tuple[ResultRole, ...]:
    """Sum the gradients of a tied parameter's names in the order of the graph, as autograd does."""
    output = graph.output_node()
    found: dict[ResultRole, list[fx.Node]] = {}
    for role, node in zip(results, output.args[0], strict=True):  # type: ignore[arg-type]
        found.setdefault(role, []).append(node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for role, nodes in found.items():
        if len(nodes) > 1:
            terms = sorted((term for node in nodes for term in _terms(node)), key=order.__getitem__)
            found[role] = [_sum(graph, terms)]
    output.args = (tuple(node for [node] in found.values()),)
    for node in reversed(order):
        if not node.users and is_gradient_sum(node):
            graph.erase_node(node)
    return tuple(found)


def _terms(node: fx.Node) -> list[fx.Node]:
    if not is_gradient_sum(node):
        return [node]
    return [term for source in node.all_input_nodes for term in _terms(source)]


def _sum(graph: fx.Graph, terms: Sequence[fx.Node]) -> fx.Node:
    total = terms[0]
    for term in terms[1:]:
        with graph.inserting_after(term):
            dense_first = (term, total) if total.meta["val"].is_sparse else (total, term)
            partial = graph.call_function(torch.ops.aten.add.Tensor, dense_first)
        partial.meta = {key: dense_first[0].meta[key] for key in ("val", "phase")}
        partial.meta["operator"] = min(total.meta["operator"], term.meta["operator"])
        partial.meta["constant"] = False
        total = partial
    return total


def _lift_constants(module: fx.GraphModule, mode: Mode) -> dict[str, Tensor]:
    """Turn tensors that the graph itself holds into buffers named ``constant.N``."""
    graph, constants, lifted = module.graph, dict[str, Tensor](), dict[str, fx.Node]()
    for node in graph.find_nodes(op="get_attr"):
        attribute = str(node.target)
        if attribute not in lifted:
            value: Tensor = getattr(module, attribute)
            if value.requires_grad and mode.trains:
                place = at_line(next(iter(node.users)))
                raise InputError(
                    f"a tensor of shape {tuple(value.shape)} requires a gradient but is no parameter of the "
                    f"model{place}\nRegister it as an nn.Parameter of the model, or detach it."
                )
            fqn = f"constant.{len(constants)}"
            constants[fqn] = value
            with graph.inserting_before(next(iter(graph.nodes))):
                lifted[attribute] = graph.placeholder(f"constant_{len(lifted)}")
            lifted[attribute].meta.update(node.meta, role=Buffer(fqn), updated=False)
            lifted[attribute].meta.setdefault("val", value)
        node.replace_all_uses_with(lifted[attribute])
        graph.erase_node(node)
    return constants


def _used(
    graph: fx.Graph, batch_counts: fx.Graph | None, constants: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    arguments = [x for each in (graph, batch_counts) if each for x in each.find_nodes(op="placeholder")]
    read = {node.meta["role"] for node in arguments if node.users}
    return {fqn: value for fqn, value in constants.items() if Buffer(fqn) in read}


def _checked(graph: TrainingGraph, first_result: str) -> TrainingGraph:
    _check_loss(graph, first_result)
    for role, node in graph.outputs:
        if isinstance(role, UpdatedBuffer) and node.op == "call_function" and not is_forward(node):
            raise CaptureError(
                f"the backward changes {role.fqn}, as batch normalization does in torch.utils.checkpoint; "
                "only the forward can change buffers. Leave the checkpoint out: what is computed again "
                "follows from memory_limit=... and recompute=..."
            )
    if graph.batch is not None:
        check_evaluable(graph)
    for node in graph.nodes:
        if node.target in MATRIX_PRODUCTS:
            dtypes = {source.meta["val"].dtype for source in node.all_input_nodes}
            if len(dtypes) > 1:
                raise InputError(
                    f"the model multiplies tensors of different dtypes, {', '.join(sorted(map(str, dtypes)))}"
                    f"{at_line(node)}\nPass inputs of the model's dtype, or convert them there."
                )
    return graph


def _described(value: Tensor, symbols: SymbolNames) -> str:
    """``torch.float32 of shape [b, 4]``"""
    return f"{value.dtype} of shape [{', '.join(format_size(size, symbols) for size in value.shape)}]"


def _check_loss(graph: TrainingGraph, first_result: str) -> None:
    if not graph.mode.has_loss:
        return
    losses = [n for role, n in graph.outputs if isinstance(role, Output) and role.position == 0]
    value = losses[0].meta["val"] if len(losses) == 1 else None
    if value is None or value.ndim != 0 or not value.is_floating_point():
        raise _no_loss(first_result + (_described(value, graph.symbols) if value is not None else ""))


def _no_loss(found: str) -> NoLossError:
    return NoLossError(
        f"the loss must be one floating-point number, but {found}. "
        "Reduce it, for example with .mean(), or pass loss_fn=..."
    )
