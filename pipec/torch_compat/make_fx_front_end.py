"""The fallback: traces a module with ``make_fx`` while it runs on fake tensors.

No bytecode is interpreted, so what Dynamo cannot trace because of the model, this can; but it does not record
which Python state the code read. The forward is traced alone, before autograd, so that its loss can be
rewritten before it is differentiated. A model that differentiates something itself, or whose backward
a graph of operators would lose (custom functions, hooks), is traced together with its backward.
"""

import bisect
import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from pipec.torch_compat import pytree
from pipec.torch_compat.differentiation import CapturedGraph, SymbolicDims
from pipec.torch_compat.lost_effects import ForwardWatch, LostEffectError, OwnBackwardError
from pipec.torch_compat.module_state import (
    fake_tensor,
    silence_output,
    skipped_no_op_conversions,
    without_autocast,
)

CAUSE = "pipec_cause"
"""Key in the meta of backward nodes: the forward node that autograd differentiated; None if unknown."""

_ARGUMENTS = ("args", "kwargs", "target")


def capture_with_make_fx(module: nn.Module, args: tuple[Any, ...], symbolic: SymbolicDims) -> CapturedGraph:
    """Trace ``module(*args)`` on fake tensors; with its backward if it differentiates by itself.

    Raises:
        LostEffectError: a step would not do what the forward or the backward does, such as to change a
            parameter.
    """
    for path, each in module.named_modules():
        if each._backward_hooks or each._backward_pre_hooks:
            raise LostEffectError(f"the backward hook of {path} would run during capture but not in steps")
    try:
        return _trace(module, args, symbolic, with_backward=False)
    except OwnBackwardError:
        return _trace(module, args, symbolic, with_backward=True)


def _trace(
    module: nn.Module, args: tuple[Any, ...], symbolic: SymbolicDims, with_backward: bool
) -> CapturedGraph:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    traced = _TracedModule(module, with_backward)
    module_tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    fakes = {name: fake_tensor(tensor, tensor.device, mode) for name, tensor in module_tensors.items()}
    real_leaves, structure = pytree.tree_flatten(args)
    leaves = [_fake_argument(leaf, mode, symbolic) for leaf in real_leaves]

    def run(module_tensors: list[Tensor], tensors: list[Tensor], tangent: Tensor) -> list[Any]:
        given = iter(tensors)
        call = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        named = {f"module.{name}": x for name, x in zip(fakes, module_tensors, strict=True)}
        results: list[Any] = torch.func.functional_call(
            traced, named, (pytree.tree_unflatten(call, structure), tangent)
        )
        return results

    before = _attributes(module)
    with (
        mode,
        fx_traceback.preserve_node_meta(),
        silence_output(),
        skipped_no_op_conversions(module),
    ):
        device = next((each.device for each in fakes.values()), torch.device("cpu"))
        tangent = torch.ones((), device=device)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        make = make_fx(run, record_stack_traces=True, pre_dispatch=not with_backward)
        graph_module = make([*fakes.values()], tensors, tangent)
    after = _attributes(module)
    changed = tuple(path for path, attributes in before.items() if after.get(path) != attributes)
    _register_module_tensors(graph_module, fakes)
    _name_arguments(graph_module.graph, args, with_backward)
    graph_module.recompile()
    graph_module.meta["fake_mode"] = mode
    return CapturedGraph(
        graph_module,
        (*leaves, tangent) if with_backward else tuple(leaves),
        changed,
        results=traced.results,
        trained=traced.trained if with_backward else None,
    )


class _TracedModule(nn.Module):
    """Calls a module and, with ``with_backward``, differentiates its first result.

    It is given the module's tensors in a call, because backwards may read parameters, too.
    """

    def __init__(self, module: nn.Module, with_backward: bool) -> None:
        super().__init__()
        self.module = module
        self.results: pytree.TreeSpec | None = None
        self.trained: tuple[str, ...] = ()
        self._with_backward = with_backward

    def forward(self, args: tuple[Any, ...], tangent: Tensor) -> list[Any]:
        recorder, watch = _NodeRecorder(self.module), ForwardWatch(self._with_backward)
        with recorder.forward(self._with_backward), watch.watching(self.module):
            results, self.results = pytree.tree_flatten(self.module.forward(*args))
        watch.look_at(results)
        if not self._with_backward:
            return results
        loss = results[0]
        if not (isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad):
            return results  # callers refuse other losses
        trained = {name: each for name, each in self.module.named_parameters() if each.requires_grad}
        self.trained = tuple(trained)
        with recorder.backward(), without_autocast():
            tangent = tangent.to(loss.dtype)
            gradients = torch.autograd.grad(loss, [*trained.values()], tangent, allow_unused=True)
        if any(parameter.grad is not None for parameter in trained.values()):
            raise LostEffectError("the backward writes to the .grad of a parameter, which would be lost")
        return [*results, *gradients]


def _attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes and children of modules, by module name: plain values, and the ``id`` of any others."""
    plain = (int, float, str, bool)
    return {
        path: {
            name: x if isinstance(x, plain) else id(x) for name, x in {**vars(each), **each._modules}.items()
        }
        for path, each in module.named_modules()
    }


def _fake_argument(leaf: Any, mode: FakeTensorMode, symbolic: SymbolicDims) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    dynamic = {dim for tensor, dim in symbolic if tensor is leaf}
    sizes = [DimDynamic.DYNAMIC if dim in dynamic else DimDynamic.STATIC for dim in range(leaf.ndim)]
    return mode.from_tensor(leaf, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def _register_module_tensors(traced: fx.GraphModule, module_tensors: Mapping[str, Tensor]) -> None:
    """Turn the graph's first arguments into parameters and buffers of the graph module, under their names.

    Raises:
        LostEffectError: the graph has a trainable tensor as a constant, which was not read from its module.
    """
    for node in traced.graph.find_nodes(op="get_attr"):
        tensor = getattr(traced, str(node.target))
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise LostEffectError(
                f"a trainable tensor of shape {tuple(tensor.shape)} was not read from its module"
            )
    for name, constant in dict(traced._buffers).items():
        delattr(traced, name)
        object.__setattr__(traced, name, constant)  # differentiation would make a buffer an argument
    placeholders = traced.graph.find_nodes(op="placeholder")
    for node, (name, tensor) in zip(placeholders, module_tensors.items(), strict=False):
        path, _, attribute = name.rpartition(".")
        if path and path not in dict(traced.named_modules()):
            traced.add_submodule(path, nn.Module())
        owner = traced.get_submodule(path)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(attribute, tensor)
        else:
            owner.register_buffer(attribute, tensor)
        with traced.graph.inserting_before(node):
            read = traced.graph.get_attr(name)
        read.meta = {**node.meta, "val": tensor}  # which requires a gradient, unlike what was traced
        node.replace_all_uses_with(read)
        traced.graph.erase_node(node)


def _name_arguments(graph: fx.Graph, args: tuple[Any, ...], with_backward: bool) -> None:
    """Give each leaf of the arguments a placeholder, named as in other graphs, such as ``args_0``."""
    graph.set_codegen(fx.graph.CodeGen())
    placeholders = graph.find_nodes(op="placeholder")
    if not with_backward:
        graph.erase_node(placeholders.pop())
    flat: Any = pytree.tree_flatten_with_path(args)[0]
    for (root, *keys), leaf in flat:
        name = re.sub(r"\W+", "_", f"{_ARGUMENTS[root.idx]}{''.join(map(str, keys))}").strip("_")
        if isinstance(leaf, Tensor):
            placeholders[0].target = name
            placeholders = placeholders[1:]
        elif placeholders:
            with graph.inserting_before(placeholders[0]):
                graph.placeholder(name)
        else:
            last = graph.find_nodes(op="placeholder")[-1]
            with graph.inserting_after(last):
                graph.placeholder(name)


class _NodeRecorder(TorchDispatchMode):
    """Records in the meta of each node during tracing where it comes from.

    A forward node gets its module. A backward node gets the forward node that it differentiates, as
    ``CAUSE``; so do nodes that this backward differentiates itself.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paths = {id(each): path for path, each in module.named_modules()}
        self._modules: list[nn.Module] = [module]
        self._is_forward = True
        self._numbers: list[int] = []
        self._forward_nodes: list[fx.Node] = []
        self._cause: fx.Node | None = None
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        self._graph: fx.Graph = proxy_mode.tracer.graph
        self._last = next(iter(reversed(self._graph.nodes)))

    @contextlib.contextmanager
    def forward(self, with_backward: bool) -> Iterator[None]:
        """Record the nodes of a forward; with what a backward reads of them."""

        def enter(module: nn.Module, args: Any) -> None:
            self._record()
            self._modules.append(module)

        def leave(*call: Any) -> None:
            self._record()
            self._modules.pop()

        with (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
            self if with_backward else contextlib.nullcontext(),
        ):
            yield
        self._record()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Record the nodes of the backward that autograd runs."""
        self._is_forward = False
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._record()
        return result

    def _record(self) -> None:
        """Record all nodes that were made since the last call."""
        found, node = list[fx.Node](), next(iter(reversed(self._graph.nodes)))
        newest = node
        while node is not self._last:
            found.append(node)
            node = node.prev
        self._last = newest
        for node in reversed(found):
            if node.op == "call_function":
                self._record_node(node)

    def _record_node(self, node: fx.Node) -> None:
        current: Any = torch._C._current_autograd_node()
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if draws and (current is not None or not self._is_forward):
            raise LostEffectError(
                "a backward draws random numbers, which would differ from those of its forward"
            )
        if self._is_forward:
            self._numbers.append(node.meta["seq_nr"])
            self._forward_nodes.append(node)
            calls = [(self._paths.get(id(each), ""), type(each).__name__) for each in self._modules]
            node.meta["nn_module_stack"] = {str(depth): call for depth, call in enumerate(calls)}
            return
        if current is not None:
            self._cause = self._forward_node(current._sequence_nr()) or self._cause
        node.meta[CAUSE] = self._cause

    def _forward_node(self, number: int) -> fx.Node | None:
        """The first forward node that was created after this many nodes of autograd's own graph."""
        at = bisect.bisect_left(self._numbers, number)
        return self._forward_nodes[at] if at < len(self._forward_nodes) else None
