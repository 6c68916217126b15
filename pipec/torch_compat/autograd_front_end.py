"""The third front end: traces forward and backward together, while autograd differentiates.

No bytecode is interpreted, and the graph is not differentiated again. So this front end supports forwards
that differentiate something themselves, custom backwards, and hooks. It does not record which Python state
the code read, and the loss cannot be rewritten before it is differentiated.
"""

import bisect
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from pipec.torch_compat.front_ends import (
    LOST_HOOK,
    CapturedGraph,
    SymbolicDims,
    TracedBackward,
    record_layout_reads,
)
from pipec.torch_compat.lost_effects import refuse_lost_effects
from pipec.torch_compat.module_state import silence_output, skip_no_op_conversions, without_autocast

CAUSE = "pipec_cause"
"""Key in the meta of backward nodes: the forward node that autograd differentiated; None if unknown."""

_ARGUMENTS = ("args", "kwargs", "target")


def capture_with_autograd(module: nn.Module, args: tuple[Any, ...], symbolic: SymbolicDims) -> CapturedGraph:
    """Trace ``module(*args)`` on fake tensors and, with gradients enabled, the gradients of its first result.

    Raises:
        TypeError: the backward would do something that a graph loses, such as calling a hook.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    module_tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    fakes = {name: _fake(tensor, mode) for name, tensor in module_tensors.items()}
    trained = [
        name for name, tensor in module_tensors.items() if tensor.requires_grad and torch.is_grad_enabled()
    ]
    real_leaves, structure = pytree.tree_flatten(args)
    leaves = [_fake_argument(leaf, mode, symbolic) for leaf in real_leaves]
    recorder, specs = _NodeRecorder(module), list[pytree.TreeSpec]()

    def step(module_tensors: list[Tensor], tensors: list[Tensor], tangent: Tensor) -> list[Any]:
        named, arguments = dict(zip(fakes, module_tensors, strict=True)), iter(tensors)
        with _reparametrize_module(module, named, tie_weights=True):  # backwards may read parameters, too
            with recorder.forward(), refuse_lost_effects():
                call = [next(arguments) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                results, spec = pytree.tree_flatten(module.forward(*pytree.tree_unflatten(call, structure)))
            specs.append(spec)
            return results + _gradients(results[0], [named[name] for name in trained], tangent)

    before = _plain_attributes(module)
    with (
        mode,
        fx_traceback.preserve_node_meta(),
        silence_output(),
        skip_no_op_conversions(),
        recorder.recording(),
        _refuse_hooks(module),
        record_layout_reads() as layout_reads,
    ):
        device = next((each.device for each in module_tensors.values()), torch.device("cpu"))
        tangent = torch.ones((), device=device)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        traced = make_fx(step, record_stack_traces=True)([*fakes.values()], tensors, tangent)
    after = _plain_attributes(module)
    changed = tuple(path for path, attributes in before.items() if after.get(path) != attributes)
    _register_module_tensors(traced, fakes)
    _name_arguments(traced.graph, args)
    traced.recompile()
    traced.meta["fake_mode"] = mode
    returned: Any = traced.graph.output_node().args[0]
    names = trained if len(returned) > specs[-1].num_leaves else []
    backward = TracedBackward(specs[-1], tuple(names))
    return CapturedGraph(
        traced, (*leaves, tangent), changed, layout_reads=tuple(layout_reads), traced_backward=backward
    )


def _gradients(loss: Any, parameters: list[Tensor], tangent: Tensor) -> list[Tensor | None]:
    """The gradients of the parameters; none if ``loss`` is not a scalar, which callers refuse."""
    if not parameters or not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        return []
    with without_autocast():
        gradients = torch.autograd.grad(loss, parameters, tangent.to(loss.dtype), allow_unused=True)
    if any(parameter.grad is not None for parameter in parameters):
        raise TypeError("the backward writes to the .grad of a parameter, which would be lost")
    return [*gradients]


@contextlib.contextmanager
def _refuse_hooks(module: nn.Module) -> Iterator[None]:
    """Refuse hooks on gradients that would run during capture but not in steps."""
    for path, each in module.named_modules():
        if each._backward_hooks or each._backward_pre_hooks:
            raise TypeError(f"the backward hook of {path} would run during capture but not in steps")
    names = ("register_hook", "register_post_accumulate_grad_hook")
    hooks = {name: getattr(Tensor, name) for name in names}

    def refusing(name: str) -> Callable[[Tensor, Any], Any]:
        def register(tensor: Tensor, hook: Any) -> Any:
            if tensor.is_leaf:
                raise RuntimeError(LOST_HOOK)
            return hooks[name](tensor, hook)

        return register

    try:
        for name in names:
            setattr(Tensor, name, refusing(name))
        yield
    finally:
        for name, hook in hooks.items():
            setattr(Tensor, name, hook)


def _plain_attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of modules that are numbers, booleans or strings, by module name."""
    plain = (int, float, str, bool)
    return {
        path: {name: x for name, x in vars(each).items() if isinstance(x, plain)}
        for path, each in module.named_modules()
    }


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _fake_argument(leaf: Any, mode: FakeTensorMode, symbolic: SymbolicDims) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    dynamic = {dim for tensor, dim in symbolic if tensor is leaf}
    sizes = [DimDynamic.DYNAMIC if dim in dynamic else DimDynamic.STATIC for dim in range(leaf.ndim)]
    return mode.from_tensor(leaf, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def _register_module_tensors(traced: fx.GraphModule, module_tensors: Mapping[str, Tensor]) -> None:
    """Turn the graph's first arguments into parameters and buffers of the graph module, under their names.

    Raises:
        TypeError: the graph has a trainable tensor as a constant, which was not read from its module.
    """
    for node in traced.graph.find_nodes(op="get_attr"):
        tensor = getattr(traced, str(node.target))
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise TypeError(f"a trainable tensor of shape {tuple(tensor.shape)} was not read from its module")
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
        read.meta = node.meta
        node.replace_all_uses_with(read)
        traced.graph.erase_node(node)


def _name_arguments(graph: fx.Graph, args: tuple[Any, ...]) -> None:
    """Give each leaf of the arguments a placeholder, named as in other graphs, such as ``args_0``."""
    graph.set_codegen(fx.graph.CodeGen())
    placeholders = graph.find_nodes(op="placeholder")
    flat: Any = pytree.tree_flatten_with_path(args)[0]
    for (root, *keys), leaf in flat:
        name = re.sub(r"\W+", "_", f"{_ARGUMENTS[root.idx]}{pytree.keystr(tuple(keys))}").strip("_")
        if isinstance(leaf, Tensor):
            placeholders[0].target = name
            placeholders = placeholders[1:]
        else:
            with graph.inserting_before(placeholders[0]):
                graph.placeholder(name)


class _NodeRecorder:
    """Records in the meta of each node during tracing where it comes from.

    A forward node gets its module. A backward node gets the forward node that it differentiates, as
    ``CAUSE``; so do nodes that this backward differentiates itself.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._paths = {id(each): path for path, each in module.named_modules()}
        self._modules: list[nn.Module] = []
        self._is_forward = False
        self._numbers: list[int] = []
        self._forward_nodes: list[fx.Node] = []
        self._cause: fx.Node | None = None

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        self._is_forward = True
        self._modules = [self._module]
        with (
            register_module_forward_pre_hook(lambda module, args: self._modules.append(module)),
            register_module_forward_hook(lambda *call: self._leave(), always_call=True),
        ):
            yield
        self._is_forward = False

    def _leave(self) -> None:  # a hook must return None, unlike pop
        self._modules.pop()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record every node that the tracer creates."""
        create = PythonKeyTracer.create_node

        def create_and_record(tracer: Any, *args: Any, **kwargs: Any) -> fx.Node:
            node = create(tracer, *args, **kwargs)
            if node.op == "call_function":
                self._record(node)
            return node

        PythonKeyTracer.create_node = create_and_record  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            PythonKeyTracer.create_node = create  # type: ignore[method-assign]

    def _record(self, node: fx.Node) -> None:
        current: Any = torch._C._current_autograd_node()
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if draws and (current is not None or not self._is_forward):
            raise TypeError("a backward draws random numbers, which would differ from those of its forward")
        if self._is_forward:
            self._numbers.append(torch.autograd._get_sequence_nr() - 1)
            self._forward_nodes.append(node)
            path = self._paths.get(id(self._modules[-1]), "")
            node.meta["nn_module_stack"] = {path: (path, type(self._modules[-1]).__name__)}
            return
        if current is not None:
            self._cause = self._forward_node(current._sequence_nr()) or self._cause
        node.meta[CAUSE] = self._cause

    def _forward_node(self, number: int) -> fx.Node | None:
        """The first forward node that was created after this many nodes of autograd's own graph."""
        at = bisect.bisect_left(self._numbers, number)
        return self._forward_nodes[at] if at < len(self._forward_nodes) else None
