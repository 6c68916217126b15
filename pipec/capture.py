"""nn.Module to TrainingGraph: one graph of forward, loss and backward, every node knowing its operator.

Dynamo's full-graph capture comes first: it keeps torch-level operators, variable names, source lines and
custom backwards. Non-strict ``torch.export`` serves where Dynamo cannot. Both are asked for a symbolic
batch, and then, with a logged reason, for a fixed one.
"""

import itertools
import logging
import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import sympy
import torch
from torch import fx, nn

from pipec import torch_compat
from pipec.errors import CaptureError, InputError
from pipec.graph import (
    Argument,
    Buffer,
    Gradient,
    LossGradient,
    ModelInput,
    Operator,
    Output,
    Parameter,
    Result,
    TrainingGraph,
    UpdatedBuffer,
    is_constant,
    is_random,
)
from pipec.ir import Mode, Phase
from pipec.torch_compat import pytree

log = logging.getLogger("pipec")

OPERATOR_ID = "pipec_operator"

NO_OPS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default}


@dataclass(frozen=True)
class Call:
    """The arguments of one captured call, and which of their tensors are split along the batch."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any = None

    @property
    def leaves(self) -> list[Any]:
        return pytree.tree_leaves((self.args, self.kwargs, self.target))

    @property
    def paths(self) -> list[str]:
        """How a person would write each leaf: ``args[0]``, ``kwargs['mask']``, ``target``."""
        tree = {"args": self.args, "kwargs": self.kwargs, "target": self.target}
        return [_path(keys) for keys, _ in pytree.tree_flatten_with_path(tree)[0]]

    @property
    def batch_size(self) -> int:
        """Dimension 0 of the first tensor among the arguments."""
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor) and leaf.ndim:
                return leaf.shape[0]
        raise InputError(
            "pipec needs a batch to split: no argument is a tensor with at least one dimension. "
            "Pass the inputs of the whole mini-batch to step()."
        )

    def signature(self) -> Hashable:
        """What a compilation depends on: structure, dtypes, shapes but for the batch, and plain values."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs, self.target))
        return str(spec), tuple(map(_kind, leaves, self.batched()))

    def batched(self) -> list[bool]:
        """For each leaf, whether dimension 0 is the batch."""
        size = self.batch_size
        return [isinstance(x, torch.Tensor) and x.ndim > 0 and x.shape[0] == size for x in self.leaves]

    def rows(self, start: int, stop: int) -> "Call":
        """The call on some rows of the batch; rows past the end repeat from the first."""
        size = self.batch_size
        index = torch.arange(start, stop) % size
        flags = iter(self.batched())
        pick = lambda x: x.detach()[index.to(x.device)] if next(flags) else x  # noqa: E731
        args, kwargs, target = pytree.tree_map(pick, (self.args, self.kwargs, self.target))
        return Call(args, kwargs, target)


def _kind(leaf: Any, batched: bool) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape[batched:]), batched
    return type(leaf), leaf


class _Step(nn.Module):
    """What is traced: the model, and on top of it the loss."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, mode: Mode, batched: Sequence[bool]
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.mode = mode
        self.batched = tuple(batched)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs, target))
        sizes = [leaf.shape[0] for leaf, batched in zip(leaves, self.batched, strict=True) if batched]
        for size in sizes[1:]:
            torch._check(size == sizes[0])  # else each tensor would have a batch symbol of its own
        output = self.model(*args, **kwargs)
        if self.mode is Mode.FORWARD:
            return pytree.tree_map(_result_leaf, output)
        if self.loss_fn is not None:
            return self.loss_fn(output, target)
        if isinstance(output, torch.Tensor):
            return output
        return output["loss"] if isinstance(output, Mapping) else output.loss


def _result_leaf(leaf: Any) -> Any:
    """Objects that are neither tensors nor plain values, such as caches, come back as None."""
    return leaf if leaf is None or isinstance(leaf, torch.Tensor | bool | int | float | str) else None


def capture(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    mode: Mode,
    call: Call,
    canonical: Mapping[str, str] | None = None,
    fixed_batch: bool = False,
) -> TrainingGraph:
    """Trace ``call`` of ``model`` into one graph.

    ``call`` holds one microbatch. With a symbolic batch it is padded to at least two rows, because a
    dimension of size one is always traced as a constant. ``fixed_batch`` asks for this very size.
    ``canonical`` maps every name of a tied tensor to the one to use.

    Raises :class:`CaptureError` naming the model's source line when no front end can capture it.
    """
    step = _Step(model, loss_fn, mode, call.batched())
    step.training = model.training
    size = call.batch_size
    example = call if fixed_batch else call.rows(0, max(size, 2))
    with torch.set_grad_enabled(mode is Mode.TRAIN):
        captured, args, dynamic = _front_end(step, example, fixed_batch)
        operators = _number_operators(captured)
        joint = torch_compat.differentiate(captured, args, training=mode is Mode.TRAIN)
    graph = _training_graph(joint, mode, operators, example, size, dynamic)
    return _merge_tied(graph, canonical or {})


def _front_end(step: _Step, call: Call, fixed: bool) -> tuple[fx.GraphModule, tuple[Any, ...], bool]:
    args = (call.args, dict(call.kwargs), call.target)
    batched = [] if fixed else [x for x, flag in zip(call.leaves, call.batched(), strict=True) if flag]

    def dynamo(tensors: Sequence[torch.Tensor]) -> tuple[fx.GraphModule, tuple[Any, ...]]:
        return torch_compat.capture_with_dynamo(step, args, tensors), args

    def export(tensors: Sequence[torch.Tensor]) -> tuple[fx.GraphModule, tuple[Any, ...]]:
        return torch_compat.capture_with_export(step, args, tensors)

    errors: list[Exception] = []
    for name, trace in (("Dynamo", dynamo), ("torch.export", export)):
        for tensors in [batched, []] if batched else [[]]:
            try:
                graph_module, traced_args = trace(tensors)
            except Exception as error:
                log.info("%s could not capture the model%s: %s", name, _with_batch(tensors), _brief(error))
                errors.append(error)
                continue
            if batched and not tensors:
                log.warning(
                    "the batch dimension is fixed at %d rows a microbatch, so another size is captured anew: %s",
                    call.batch_size,
                    _brief(errors[-1]),
                )
            return graph_module, traced_args, bool(tensors)
    raise _capture_error(errors) from errors[0]


def _with_batch(tensors: Sequence[torch.Tensor]) -> str:
    return " with a symbolic batch" if tensors else ""


def _brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _capture_error(errors: Sequence[Exception]) -> CaptureError:
    first = errors[0]
    frame = torch_compat.user_frame(first)
    where = f"\n  at {frame[0]}:{frame[1]}\n     {frame[2]}" if frame else ""
    tried = "".join(f"\n  - {_brief(error)}" for error in dict.fromkeys(errors))
    return CaptureError(
        f"the model cannot be captured as one graph{where}\n"
        f"Control flow that depends on tensor values, .item() and calls into untraceable libraries break the "
        f"graph.\nRewrite that line with tensor operations (torch.where, masks), or move it out of the model."
        f"\nWhat was tried:{tried}"
    )


def _number_operators(captured: fx.GraphModule) -> tuple[Operator, ...]:
    """Give every torch-level call its id, to be carried to all nodes it causes."""
    operators = []
    for node in captured.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        node.meta["custom"] = {OPERATOR_ID: len(operators)}
        module, module_type = _module_of(node)
        operators.append(Operator(node.name, module, module_type, _source_of(node)))
    return tuple(operators)


def _module_of(node: fx.Node) -> tuple[str, str]:
    """FQN and class name of the innermost module of the user's model that a captured node belongs to."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", ""
    path, module_type = stack[-1]
    name = module_type if isinstance(module_type, str) else module_type.__name__
    return _fqn(path), name.rsplit(".", 1)[-1]


def _fqn(path: str) -> str:
    """``L['self']._modules['model'].h[0]`` and ``model.h.0`` both give ``h.0``."""
    dotted = re.sub(r"\._modules\b", "", path)
    dotted = re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", dotted)
    return re.sub(r"^(L\.self\.?)?(model(\.|$))?", "", dotted)


def _source_of(node: fx.Node) -> str:
    frames = re.findall(r'File "(.*?)", line (\d+)', node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line = frames[-1]
    return f"{PurePath(file).name}:{line}"


def _training_graph(
    joint: torch_compat.JointGraph,
    mode: Mode,
    operators: tuple[Operator, ...],
    call: Call,
    size: int,
    dynamic: bool,
) -> TrainingGraph:
    graph = joint.module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, described in zip(placeholders, joint.arguments, strict=True):
        node.meta["role"] = _argument(described, call)
    batch = _batch_symbol(placeholders) if dynamic else None
    if dynamic and batch is None:
        log.warning("the model turns its batch dimension into a constant; another size is captured anew")
    results = _keep_results(graph, joint.results)
    changed = {role.fqn for role in results if isinstance(role, UpdatedBuffer)}
    for node in placeholders:
        if isinstance(node.meta["role"], Buffer):
            node.meta["changed"] = node.meta["role"].fqn in changed
    _drop_what_does_nothing(graph)
    _classify(graph)
    trained = TrainingGraph(
        joint.module,
        mode,
        operators,
        results,
        size,
        batch,
        tuple(guard.subs(joint.replacements) for guard in joint.guards),
        constants=_lift_constants(joint.module),
        output_spec=joint.output_spec,
    )
    _check_loss(trained)
    return trained


def _argument(described: tuple[str, str | int], call: Call) -> Argument:
    match described:
        case ("parameter", str(name)):
            return Parameter(_model_fqn(name))
        case ("buffer", str(name)):
            return Buffer(_model_fqn(name))
        case ("input", int(index)):
            return ModelInput(index, call.paths[index], call.batched()[index])
        case ("tangent", _):
            return LossGradient()
    raise CaptureError(f"the captured graph takes an argument that pipec does not know: {described[1]}")


def _result(described: tuple[str, str | int]) -> Result:
    match described:
        case ("output", int(index)):
            return Output(index)
        case ("buffer", str(name)):
            return UpdatedBuffer(_model_fqn(name))
        case ("gradient", str(name)):
            return Gradient(_model_fqn(name))
    raise CaptureError(
        f"the model changes something that pipec cannot carry: {described[1]}. "
        "Only registered buffers may be changed in forward()."
    )


def _keep_results(graph: fx.Graph, described: Sequence[tuple[str, str | int]]) -> tuple[Result, ...]:
    """Drop the outputs that hold nothing, such as gradients of inputs."""
    output = graph.output_node()
    kept = [
        (value, _result(what))
        for value, what in zip(output.args[0], described, strict=True)  # type: ignore[arg-type]
        if isinstance(value, fx.Node) and what[0] != "ignored"
    ]
    output.args = (tuple(value for value, _ in kept),)
    return tuple(role for _, role in kept)


def _model_fqn(name: str) -> str:
    return name.removeprefix("model.")


def _path(keys: tuple[Any, ...]) -> str:
    return str(keys[0].key) + "".join(str(key) for key in keys[1:])


def _batch_symbol(placeholders: Sequence[fx.Node]) -> sympy.Symbol | None:
    for node in placeholders:
        role = node.meta["role"]
        if isinstance(role, ModelInput) and role.batched:
            size = node.meta["val"].shape[0]
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                return size.node.expr
    return None


def _drop_what_does_nothing(graph: fx.Graph) -> None:
    """Remove aliases and assertions, and write every size as an expression instead of a node."""
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
    for node in list(graph.nodes):
        if _does_nothing(node):
            node.replace_all_uses_with(node.args[0])
        elif isinstance(value := node.meta.get("val"), numbers) and node.op != "output":
            for user in list(node.users):
                user.args = fx.map_arg(user.args, lambda n, old=node, new=value: new if n is old else n)
                user.kwargs = fx.map_arg(user.kwargs, lambda n, old=node, new=value: new if n is old else n)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("output", "placeholder"):
            graph.erase_node(node)


def _does_nothing(node: fx.Node) -> bool:
    if node.target is torch.ops.aten.slice.Tensor:
        return tuple(node.args[2:]) == (0, sys.maxsize)
    return node.op == "call_function" and node.target in NO_OPS


def _classify(graph: fx.Graph) -> None:
    """Give every node its phase and its operator, from its own annotation or from its neighbours."""
    draws = itertools.count()
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            backward = isinstance(node.meta["role"], LossGradient)
        else:
            tag = node.meta.get("partitioner_tag")
            inherited = any(n.meta["phase"] is Phase.BACKWARD for n in node.all_input_nodes)
            backward = inherited or tag in ("is_backward", "must_be_in_backward")
        node.meta["phase"] = Phase.BACKWARD if backward else Phase.FORWARD
        if node.op in ("call_function", "get_attr"):
            node.meta["op"] = _operator_of(node)
        if node.op == "call_function":
            if is_random(node):
                node.meta["draw"] = next(draws)
            node.meta["constant"] = (
                not backward and not is_random(node) and all(map(is_constant, node.all_input_nodes))
            )


def _operator_of(node: fx.Node) -> int:
    """Own annotation; else forward: the latest producer among its inputs, backward: the earliest."""
    own = (node.meta.get("custom") or {}).get(OPERATOR_ID)
    if own is not None:
        return int(own)
    phase = node.meta["phase"]
    inputs = [n for n in node.all_input_nodes if "op" in n.meta]
    same = [n.meta["op"] for n in inputs if n.meta["phase"] is phase] or [n.meta["op"] for n in inputs]
    if not same:
        return 0
    return max(same) if phase is Phase.FORWARD else min(same)


def _lift_constants(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Tensors that the graph holds itself become buffers named ``constant.N``."""
    constants: dict[str, torch.Tensor] = {}
    graph = module.graph
    names: dict[str, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        attribute = str(node.target)
        if attribute not in names:
            value = getattr(module, attribute)
            fqn = f"constant.{len(constants)}"
            constants[fqn] = value
            with graph.inserting_before(next(iter(graph.nodes))):
                lifted = graph.placeholder(f"constant_{len(names)}")
            lifted.meta.update(node.meta, role=Buffer(fqn), changed=False)
            lifted.meta.setdefault("val", value)
            names[attribute] = lifted
        node.replace_all_uses_with(names[attribute])
        graph.erase_node(node)
    return constants


def _merge_tied(graph: TrainingGraph, canonical: Mapping[str, str]) -> TrainingGraph:
    """Let every use of a tied tensor read one argument, and sum the gradients of its names."""
    arguments: dict[str, fx.Node] = {}
    for node in graph.arguments:
        role = node.meta["role"]
        if isinstance(role, Parameter | Buffer):
            fqn = canonical.get(role.fqn, role.fqn)
            node.meta["role"] = replace(role, fqn=fqn)
            if arguments.setdefault(fqn, node) is not node:
                node.replace_all_uses_with(arguments[fqn])
                graph.module.graph.erase_node(node)
    merged: dict[Result, fx.Node] = {}
    for role, node in graph.outputs:
        if not isinstance(role, Output):
            role = replace(role, fqn=canonical.get(role.fqn, role.fqn))
        merged[role] = _plus(graph, merged[role], node) if role in merged else node
    graph.module.graph.output_node().args = (tuple(merged.values()),)
    return replace(graph, results=tuple(merged))


def _plus(graph: TrainingGraph, one: fx.Node, other: fx.Node) -> fx.Node:
    with graph.module.graph.inserting_before(graph.module.graph.output_node()):
        total = graph.module.graph.call_function(torch.ops.aten.add.Tensor, (one, other))
    total.meta = {"val": one.meta["val"], "phase": one.meta["phase"]}
    total.meta["op"] = min(one.meta["op"], other.meta["op"])
    return total


def _check_loss(graph: TrainingGraph) -> None:
    if graph.mode is Mode.FORWARD:
        return
    losses = [node for role, node in graph.outputs if isinstance(role, Output)]
    value = losses[0].meta["val"] if len(losses) == 1 else None
    if value is None or value.ndim != 0 or not value.is_floating_point():
        found = "nothing" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"
        raise InputError(
            f"the loss must be one floating-point number, but the model or loss_fn returned {found}. "
            "Reduce it, for example with .mean(), or pass loss_fn=..."
        )
