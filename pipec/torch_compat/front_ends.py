"""Two front ends that trace a module into a forward graph, and explanations of their errors."""

import contextlib
import logging
import re
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import functional_export
from torch._dynamo.convert_frame import CaptureOutput
from torch._dynamo.exc import TorchRuntimeError, Unsupported
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import builtin, functions, nn_module
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import NullContextVariable
from torch._dynamo.variables.misc import AutogradFunctionContextVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch._library import autograd as _library_autograd
from torch._subclasses.fake_tensor import (
    FakeTensor,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipec.torch_compat.export_regions import inline_regions
from pipec.torch_compat.foreign_classes import is_of_torch, keep_values
from pipec.torch_compat.lost_effects import LOST_GRADIENT, refuse_lost_effects
from pipec.torch_compat.module_state import silence_output
from pipec.torch_compat.repeated_regions import RegionTracing, repeated_modules
from pipec.torch_compat.values import fqn_of

log = logging.getLogger("pipec")

DYNAMO_CONFIG = {
    "allow_rnn": True,
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,
    "capture_dynamic_output_shape_ops": True,
}

NUMBERS = "numbers"
"""The attribute of a traced module that lists the arguments that it turns into symbolic numbers."""


IGNORED_LOGGING = ("debug", "info", "warning", "error", "exception", "critical", "log", "warning_once")
"""Methods of loggers, the last of Hugging Face's, that Dynamo skips: logging does not belong in a graph."""


GENERATED = "GeneratedBackwardFor_"
"""Prefix of the names of the autograd functions that torch.library generates."""


GRADIENT_ATTRIBUTES = {
    "_backward_hooks",
    "backward",
    "grad",
    "grad_fn",
    "is_inference",
    "is_leaf",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad",
    "requires_grad_",
    "retain_grad",
    "retains_grad",
}
"""Attributes and methods of tensors that differ, or fail, where gradients are disabled."""


LAYOUT_METHODS = ("is_contiguous", "stride", "dim_order")
"""Methods of tensors that tell how they are laid out."""


MEMORY_METHODS = (
    *("storage_offset", "data_ptr", "_is_view", "is_inference", "is_pinned", "is_shared"),
    "is_set_to",
)
"""Methods of tensors that tell of their memory, which is another in stages."""


IDENTITY_METHODS = ("get_id", "call_id", "hash_impl", "get_python_hash")
"""Methods of Dynamo's tensors, in one version or another, that make their ``id`` or their hash."""


GRADIENT_FUNCTIONS = (torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_inference)
"""Functions that tell whether gradients are enabled."""


LOST_HOOK = "the hook that forward() registers on the gradient of a parameter would be lost"


@dataclass(frozen=True)
class TracedBackward:
    """The outputs of a graph that includes its backward: ``results``, then the gradients of ``trained``.

    The last argument of the graph is the gradient of its first result.
    """

    results: pytree.TreeSpec
    trained: tuple[str, ...]


@dataclass(frozen=True)
class CapturedGraph:
    """A forward graph, and the arguments to differentiate it with.

    ``changed_state`` names the Python objects that the forward would change, and tracing did not. Each is a
    path from the traced module, such as ``model.layers.0``; for an attribute, the path of its module.
    ``dynamo_output`` is Dynamo's record of everything that the code read, for ``Guards``; other front ends
    have none. ``layout_reads`` says where the forward's own code asked for the strides of tensors.
    ``traced_backward`` is set if the graph includes its backward. ``depends_on_grad_mode`` is
    False if the trace is proved to be the same with gradients enabled and disabled, and ``compares_tensors``
    is False if it does not depend on which arguments are one tensor.
    """

    module: torch.fx.GraphModule
    args: tuple[Any, ...]
    changed_state: tuple[str, ...] = ()
    dynamo_output: CaptureOutput | None = None
    layout_reads: tuple[str, ...] = ()
    traced_backward: TracedBackward | None = None
    depends_on_grad_mode: bool = True
    compares_tensors: bool = True


SymbolicDims = Sequence[tuple[torch.Tensor, int]]
"""Tensors among the arguments, each with a dimension that becomes a symbol."""


def capture_with_dynamo(
    module: torch.nn.Module, args: tuple[Any, ...], symbolic: SymbolicDims
) -> CapturedGraph:
    """Trace ``module(*args)`` into one graph of torch-level calls. Equal blocks are traced once if possible.

    Dynamo's caches are neither read nor written, so functions that the user compiled stay compiled.
    """
    regions = RegionTracing(repeated_modules(module))
    if regions.blocks:
        try:
            captured = _trace_with_dynamo(module, args, symbolic, regions)
        except Exception as error:
            if not regions.failed:
                raise
            log.debug("equal blocks are traced one by one: %s", reason_of(error))
        else:
            if not regions.failed:
                return captured
    return _trace_with_dynamo(module, args, symbolic)


def _trace_with_dynamo(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    symbolic: SymbolicDims,
    regions: RegionTracing | None = None,
) -> CapturedGraph:
    for tensor, dimension in symbolic:
        torch._dynamo.mark_dynamic(tensor, dimension)
    ignored: set[Any] = torch._dynamo.config.ignore_logger_methods
    methods = {getattr(logging.Logger, name) for name in IGNORED_LOGGING if hasattr(logging.Logger, name)}
    config = DYNAMO_CONFIG | {"ignore_logger_methods": ignored | methods}
    config["capture_scalar_outputs"] = bool(getattr(module, NUMBERS, ()))
    with (
        warnings.catch_warnings(record=True) as caught,
        torch._dynamo.config.patch(config),
        _record_outputs() as outputs,
        _without_compiled_globals(module),
        _refuse_hooks_on_leaves(),
        _refuse_missing_gradients(),
        _allow_requires_grad(),
        _ignore_cudnn_flags(),
        _record_gradient_reads() as read,
        _record_traced_layout_reads() as layout_reads,
        _record_compared_tensors() as compared,
        torch_function_mode_stack_state_mgr,
        regions.active() if regions else contextlib.nullcontext(),
    ):
        warnings.simplefilter("always")
        graph_module: torch.fx.GraphModule = dynamo_graph_capture_for_export(module)(*args)
    if regions:
        regions.inline(graph_module)
        regions.failed |= "is_leaf" in read  # the results of copied subgraphs are leaves while Dynamo traces
    changed = _changed_state([str(warning.message) for warning in caught])
    depends = bool(read or layout_reads) or not all(map(_ignores_grad_mode, graph_module.graph.nodes))
    compares = any(left is not right for left, right in zip(compared[::2], compared[1::2], strict=True))
    return CapturedGraph(
        *(graph_module, args, changed, outputs[0], tuple(layout_reads)),
        depends_on_grad_mode=depends,
        compares_tensors=compares,
    )


@contextlib.contextmanager
def _record_gradient_reads() -> Iterator[list[str]]:
    """Collect what Python code may ask of gradients while Dynamo traces it, or runs it for a constant."""
    read = list[str]()
    get, call_method = TensorVariable.var_getattr, TensorVariable.call_method
    call, run = TorchInGraphFunctionVariable.call_function, functions.invoke_and_store_as_constant

    def attribute(self: TensorVariable, tx: Any, name: str) -> Any:
        read.extend([name] * (name in GRADIENT_ATTRIBUTES))
        return get(self, tx, name)

    def method(self: TensorVariable, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        read.extend([name] * (name in GRADIENT_ATTRIBUTES))
        return call_method(self, tx, name, *args, **kwargs)

    def called(self: TorchInGraphFunctionVariable, *args: Any, **kwargs: Any) -> Any:
        read.extend(each.__name__ for each in GRADIENT_FUNCTIONS if self.value is each)
        return call(self, *args, **kwargs)

    def ran(*args: Any, **kwargs: Any) -> Any:
        read.append("assume_constant_result")
        return run(*args, **kwargs)

    TensorVariable.var_getattr = attribute  # type: ignore[method-assign]
    TensorVariable.call_method = method  # type: ignore[method-assign]
    TorchInGraphFunctionVariable.call_function = called  # type: ignore[method-assign]
    functions.invoke_and_store_as_constant = nn_module.invoke_and_store_as_constant = ran
    try:
        yield read
    finally:
        TensorVariable.var_getattr = get  # type: ignore[method-assign]
        TensorVariable.call_method = call_method  # type: ignore[method-assign]
        TorchInGraphFunctionVariable.call_function = call  # type: ignore[method-assign]
        functions.invoke_and_store_as_constant = nn_module.invoke_and_store_as_constant = run


@contextlib.contextmanager
def _record_traced_layout_reads() -> Iterator[list[str]]:
    """Collect where code outside of torch asks for the strides of a tensor while Dynamo traces it."""
    reads, call_method = list[str](), TensorVariable.call_method

    def method(self: TensorVariable, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in LAYOUT_METHODS:
            _note_layout_read(reads, name, tx.f_code.co_filename, tx.lineno)
        return call_method(self, tx, name, *args, **kwargs)

    TensorVariable.call_method = method  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        TensorVariable.call_method = call_method  # type: ignore[method-assign]


@contextlib.contextmanager
def _record_compared_tensors() -> Iterator[list[object]]:
    """Collect the tensors, two at a time, of which Python code asks whether they are one object.

    With a tensor whose ``id`` or hash is asked for, the other is not known: None.
    """
    compared, example_of = list[object](), builtin.extract_fake_example_value
    own = dict(vars(TensorVariable))

    def noted(node: torch.fx.Node, *args: Any, **kwargs: Any) -> Any:
        compared.append(node)
        return example_of(node, *args, **kwargs)

    def noting(method: Any) -> Any:
        def ask(self: TensorVariable, *args: Any, **kwargs: Any) -> Any:
            compared.extend((self, None))
            return method(self, *args, **kwargs)

        return ask

    builtin.extract_fake_example_value = noted
    asked = [name for name in IDENTITY_METHODS if hasattr(TensorVariable, name)]
    for name in asked:
        setattr(TensorVariable, name, noting(getattr(TensorVariable, name)))
    try:
        yield compared
    finally:
        builtin.extract_fake_example_value = example_of
        _restore(TensorVariable, asked, own)


@contextlib.contextmanager
def record_layout_reads() -> Iterator[list[str]]:
    """Collect where code outside of torch asks for the strides of a tensor while it runs.

    Code that asks for its memory gets a TypeError.
    """
    methods = *LAYOUT_METHODS, *MEMORY_METHODS
    reads, own = list[str](), dict(vars(torch.Tensor))

    def recording(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            _note_layout_read(reads, name, caller.f_code.co_filename, caller.f_lineno)
            return method(self, *args, **kwargs)

        return read

    try:
        for name in methods:
            setattr(torch.Tensor, name, recording(name))
        yield reads
    finally:
        _restore(torch.Tensor, methods, own)


def _restore(kind: type, names: Sequence[str], own: Mapping[str, Any]) -> None:
    """Give a class the methods of these names back that are its own, and else those of its bases."""
    for name in names:
        if name in own:
            setattr(kind, name, own[name])
        else:
            delattr(kind, name)


def _note_layout_read(reads: list[str], name: str, file: str, line: int) -> None:
    if file.startswith(_TORCH):
        return
    reads.append(f"{name}() at {Path(file).name}:{line}")
    if name in MEMORY_METHODS:
        raise TypeError(f"forward() calls {reads[-1]}, which differs in stages")


def _ignores_grad_mode(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's graph computes the same with gradients enabled and disabled.

    An operator of torch does. Code of others could ask when it runs, and so could a graph inside the graph.
    """
    target: Any = node.target
    match node.op:
        case "call_module":
            return False
        case "call_method":
            return target not in GRADIENT_ATTRIBUTES
        case "call_function" if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
            names = [getattr(packet, name).name() for name in packet.overloads()]
            composite = "CompositeImplicitAutograd"
            is_own = packet._qualified_op_name.startswith(("aten::", "prims::", "pipec::"))
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
            return is_own or not any(has_kernel(name, composite) for name in names)
        case "call_function":
            module = getattr(target, "__module__", None) or ""
            return (
                not isinstance(target, torch._ops.HigherOrderOperator)
                and module.partition(".")[0] in _IGNORING_GRAD_MODE
                and not any(word in module for word in ("autograd", "functorch"))
            )
    return True


_IGNORING_GRAD_MODE = {"", "torch", "_operator", "math", "builtins", "pipec"}
"""Packages whose functions in a graph do not ask whether gradients are enabled."""


@contextlib.contextmanager
def _without_compiled_globals(module: torch.nn.Module) -> Iterator[None]:
    """Remove the compiled function that a capture leaves as a global beside ``forward``.

    Nothing calls it, and it would keep the model and its gradients alive.
    """
    scope: dict[str, Any] = type(module).forward.__globals__
    try:
        yield
    finally:
        for name in [each for each in scope if each.startswith("__compiled_fn_")]:
            del scope[name]


@contextlib.contextmanager
def _refuse_hooks_on_leaves() -> Iterator[None]:
    """Refuse hooks that the forward registers on parameters. Dynamo would register them after the graph."""
    register = SideEffects.register_hook

    def refuse(self: SideEffects, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(LOST_HOOK)

    SideEffects.register_hook = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        SideEffects.register_hook = register  # type: ignore[method-assign]


@contextlib.contextmanager
def _refuse_missing_gradients() -> Iterator[None]:
    """Refuse ``ctx.set_materialize_grads(False)``: Dynamo would pass zeros to a backward instead of None."""
    store = SideEffects.store_attr

    def refuse(self: SideEffects, item: VariableTracker, name: str, *args: Any, **kwargs: Any) -> None:
        if name == "materialize_grads" and isinstance(item, AutogradFunctionContextVariable):
            raise RuntimeError("the backward of a custom autograd function asks for gradients that are None")
        store(self, item, name, *args, **kwargs)

    SideEffects.store_attr = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        SideEffects.store_attr = store  # type: ignore[method-assign]


@contextlib.contextmanager
def _allow_requires_grad() -> Iterator[None]:
    """Let a forward set ``requires_grad`` of a value that it computes, as reentrant checkpoints need.

    This changes no gradient of a parameter. Other uses, such as ``torch.autograd.grad``, fail later, because
    the graph does not set it. A forward that sets ``grad`` is refused.
    """
    call = _SETATTR.call_function

    def called(self: Any, tx: Any, args: Sequence[VariableTracker], kwargs: Any) -> Any:
        if self.as_python_constant() is not setattr or len(args) != 3:
            return call(self, tx, args, kwargs)
        if _sets_gradient(args):
            raise RuntimeError(LOST_GRADIENT)
        if not _sets_requires_grad(args):
            return call(self, tx, args, kwargs)
        changed: Any = args[0].realize()
        changed.as_proxy().node.meta["example_value"].requires_grad_()
        changed.requires_grad = True
        return ConstantVariable.create(None)

    _SETATTR.call_function = called
    try:
        yield
    finally:
        _SETATTR.call_function = call


_SETATTR: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)
"""Dynamo's class for ``setattr``; in some versions its class for every builtin."""


def _sets_requires_grad(args: Sequence[VariableTracker]) -> bool:
    """Whether these arguments of ``setattr`` set ``requires_grad`` of a computed tensor."""
    changed, name, value = (each.realize() for each in args)
    if not (name.is_python_constant() and value.is_python_constant() and _is_computed(changed)):
        return False
    return name.as_python_constant() == "requires_grad" and value.as_python_constant() is True


def _sets_gradient(args: Sequence[VariableTracker]) -> bool:
    """Whether these arguments of ``setattr`` set ``grad`` of a tensor."""
    changed, name = (each.realize() for each in args[:2])
    return isinstance(changed, TensorVariable) and name.as_python_constant() == "grad"


def _is_computed(value: object) -> bool:
    """Whether a tensor is computed in the graph, so that nothing reads its gradient later."""
    return isinstance(value, TensorVariable) and value.as_proxy().node.op != "placeholder"


@contextlib.contextmanager
def _ignore_cudnn_flags() -> Iterator[None]:
    """Let Dynamo skip ``with torch.backends.cudnn.flags(...)``, which only chooses kernels."""
    call = TorchInGraphFunctionVariable.call_function

    def called(self: TorchInGraphFunctionVariable, *args: Any, **kwargs: Any) -> Any:
        is_flags = self.value is torch.backends.cudnn.flags
        return NullContextVariable() if is_flags else call(self, *args, **kwargs)

    TorchInGraphFunctionVariable.call_function = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        TorchInGraphFunctionVariable.call_function = call  # type: ignore[method-assign]


def draws_with_numpy(graph_module: torch.fx.GraphModule) -> bool:
    """Whether torch's random operators replace numpy's in a captured graph, and so ignore numpy's seed."""
    functions = [getattr(node.target, "f", None) for node in graph_module.graph.nodes]
    return any(getattr(function, "__module__", None) == "torch._numpy.random" for function in functions)


@contextlib.contextmanager
def _record_outputs() -> Iterator[list[CaptureOutput]]:
    """Collect the records of Dynamo's captures, which its front end for export drops."""
    capture, outputs = functional_export.fullgraph_capture, list[CaptureOutput]()

    def captured(*args: Any, **kwargs: Any) -> CaptureOutput:
        outputs.append(capture(*args, **kwargs))
        return outputs[-1]

    functional_export.fullgraph_capture = captured
    try:
        yield outputs
    finally:
        functional_export.fullgraph_capture = capture


def _changed_state(messages: Sequence[str]) -> tuple[str, ...]:
    """The objects that Dynamo's warning about side effects names: of the traced module, and global ones.

    Of global objects, containers and rebound names count. Others may be as they were before, such as context
    variables.
    """
    warning = "".join(message for message in messages if "side effects" in message)
    own = re.findall(r"\"(L\['self'\]\..*?)\"", warning)
    found = re.findall(r"\"G\['__import_(?!torch)(\w+)'\](?:\.(\w+))?\"", warning)
    named = [(module.replace("_dot_", "."), name) for module, name in found]
    shared = [
        f"{module}.{name}".rstrip(".")
        for module, name in named
        if not name or isinstance(getattr(sys.modules.get(module), name, None), Collection | Iterator)
    ]
    return *map(fqn_of, own), *shared


def capture_with_export(
    module: torch.nn.Module, args: tuple[Any, ...], symbolic: SymbolicDims
) -> CapturedGraph:
    """Trace ``module(*args)`` by running it on fake tensors.

    Raises:
        TypeError: the model uses a custom backward, or a hook on a gradient or on saved tensors, which would
            be lost.
    """
    dynamic: dict[int, dict[int, Any]] = defaultdict(dict)
    for tensor, dimension in symbolic:
        dynamic[id(tensor)][dimension] = torch.export.Dim.DYNAMIC
    shapes = pytree.tree_map(lambda leaf: dynamic.get(id(leaf)), args)
    with (
        _refuse_custom_backwards(),
        record_layout_reads() as layout_reads,
        refuse_lost_effects(),
        _restore_buffer_hooks(),
        silence_output(),
    ):
        program = torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
    graph_module = program.module()
    assert isinstance(graph_module, torch.fx.GraphModule)
    inline_regions(graph_module)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    inputs = iter(values[len(values) - len(program.graph_signature.user_inputs) :])
    fake_args = pytree.tree_map(lambda leaf: next(inputs), args)
    fake = next(value for value in values if isinstance(value, FakeTensor))
    graph_module.meta["fake_mode"] = fake.fake_mode
    return CapturedGraph(graph_module, fake_args, layout_reads=tuple(layout_reads))


@contextlib.contextmanager
def _restore_buffer_hooks() -> Iterator[None]:
    """Remove the hook on assigned buffers that a failed export of torch 2.11 leaves, and later traces."""
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    before = dict(hooks)
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(before)


@contextlib.contextmanager
def _refuse_custom_backwards() -> Iterator[None]:
    function, tensor = torch.autograd.Function, torch.Tensor
    apply = function.__dict__["apply"]  # not bound to the base class
    grad_fn: Any = torch._C.TensorBase.grad_fn
    hooks = {name: getattr(tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook")}
    autograd: Any = torch._C._autograd
    push = autograd._push_saved_tensors_default_hooks
    enter: Any = TorchDispatchMode.__enter__

    def refuse_function(cls: type, *args: Any, **kwargs: Any) -> Any:
        if _belongs_to_operator(cls):
            return apply.__func__(cls, *args, **kwargs)
        raise TypeError(f"the backward of the custom autograd function {cls.__qualname__} would be lost")

    def refuse_hook(self: torch.Tensor, hook: Any) -> Any:
        raise TypeError("the hook registered on a gradient with Tensor.register_hook would be lost")

    def refuse_node(self: torch.Tensor) -> Any:
        if not sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            raise TypeError("forward() uses grad_fn, a node of autograd's own graph, which would be lost")
        return grad_fn.__get__(self)

    def refuse_saved_tensors_hooks(*hooks: Any) -> Any:
        if not keep_values(hooks):
            raise TypeError("the hooks of saved_tensors_hooks in forward() would be lost")
        return push(*hooks)

    def refuse_mode(self: TorchDispatchMode) -> Any:
        if not is_of_torch(type(self)):
            raise TypeError(f"the TorchDispatchMode {type(self).__qualname__} would see other operators")
        return enter(self)

    autograd._push_saved_tensors_default_hooks = refuse_saved_tensors_hooks
    TorchDispatchMode.__enter__ = refuse_mode  # type: ignore[method-assign]
    function.apply = classmethod(refuse_function)  # type: ignore[method-assign,assignment]
    tensor.grad_fn = property(refuse_node)  # type: ignore[assignment]
    for name in hooks:
        setattr(tensor, name, refuse_hook)
    try:
        yield
    finally:
        autograd._push_saved_tensors_default_hooks = push
        TorchDispatchMode.__enter__ = enter  # type: ignore[method-assign]
        function.apply = apply  # type: ignore[method-assign]
        del tensor.grad_fn
        for name, hook in hooks.items():
            setattr(tensor, name, hook)


_TORCH = str(Path(torch.__file__).parent)


def _belongs_to_operator(function: type) -> bool:
    """Whether torch.library generated the autograd function for an operator, which any graph keeps."""
    return function.__module__ == _library_autograd.__name__ and function.__name__.startswith(GENERATED)


_MODEL_RAISED = ("Observed exception", "failed to bind arguments when attempting to inline")


def model_raised(error: BaseException) -> bool:
    """Whether Dynamo failed with an error that the model also raises on these arguments in eager mode."""
    return isinstance(error, TorchRuntimeError) or str(error).startswith(_MODEL_RAISED)


def is_data_dependent_error(error: BaseException) -> bool:
    """Whether a front end failed because it needs the value of a tensor."""
    return isinstance(error, GuardOnDataDependentSymNode) or "data-dependent expression" in str(error)


def reason_of(error: BaseException) -> str:
    """Why a front end failed, in a sentence or two."""
    if is_data_dependent_error(error):
        return "Data-dependent size or branch: torch needs the value of a tensor to go on"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, Unsupported):
        explained = [line.removeprefix("Explanation:") for line in lines if line.startswith("Explanation:")]
        text = " ".join([f"{lines[0].rstrip('.')}.", *map(str.strip, explained)]).strip()
        return re.sub(r"`/[^`]*/", "`", text)  # files without their folders
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The stack of the traced program where Dynamo failed, outermost frame first; empty for other errors."""
    return list(getattr(error, "real_stack", None) or [])
