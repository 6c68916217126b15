"""The one file of the compiler that names private parts of torch. ``tests/test_torch_compat.py`` pins each.

torch 2.11 to 2.13 are supported.
"""

import contextlib
import copy
import functools
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch._dynamo
import torch.fx.traceback as fx_traceback
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size
from torch._dynamo.exc import TorchRuntimeError, Unsupported
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._library import autograd as _library_autograd
from torch._library.simple_registry import singleton as fake_kernels
from torch._library.utils import Kernel
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

__all__ = [
    "ASSERTIONS",
    "Captured",
    "DryRun",
    "HigherOrderOperator",
    "JointGraph",
    "OpOverload",
    "bounded_ctc_losses",
    "capture_with_dynamo",
    "capture_with_export",
    "depends_on_values",
    "differentiate",
    "dry_run",
    "fqn_of",
    "has_gradient_hook",
    "leave_meta",
    "model_raised",
    "python_expression",
    "pytree",
    "quiet",
    "reason_of",
    "unchanged",
    "unvalidated_distributions",
    "user_frames",
    "whole_interpolations",
]

DYNAMO_CONFIG = {"automatic_dynamic_shapes": False, "assume_static_by_default": True, "allow_rnn": True}

IGNORED_LOGGING = ("debug", "info", "warning", "error", "exception", "critical", "log", "warning_once")
"""Methods of loggers, the last one of Hugging Face's. What a model logs is no part of its graph."""

ASSERTIONS = (torch._check, torch.ops.aten._assert_scalar.default)
"""What ``torch._check`` becomes in a captured graph."""

GENERATED = "GeneratedBackwardFor_"
"""How torch.library begins the names of the autograd functions that it makes."""

NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""What operators raise on fake tensors that would work on real ones."""

NEEDS_MEMORY = ("not allocated yet", "access data pointer", "access storage", "for tensor subclasses")
"""What kernels and ``Tensor.numpy`` say where they find that a tensor has no memory."""

INTERPOLATIONS = ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")
"""Operators of which torch takes the forward apart before it differentiates."""

LOGGERS = (
    "torch._dynamo",
    "torch._export",
    "torch._functorch",
    "torch._subclasses",
    "torch.export",
    "torch.fx",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's advice about tracing off the terminal, except from loggers that TORCH_LOGS turned up."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            if logger.level not in (logging.DEBUG, logging.INFO):
                logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextlib.contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Put back every attribute, parameter, buffer and hook that tracing replaced, such as by a fake tensor.

    Differentiation swaps the tensors of a module for its own, and does not undo that for a module that is
    registered under two names. Dynamo leaves marks on the tensors themselves.
    """
    containers = _containers(module)
    containers += [vars(tensor) for tensor in (*module.parameters(), *module.buffers())]
    before = [copy.copy(container) for container in containers]
    try:
        yield
    finally:
        for container, kept in zip(containers, before, strict=True):
            _restore(container, kept)


Container = dict[Any, Any] | list[Any] | set[Any]


def _containers(module: torch.nn.Module) -> list[Container]:
    """The attributes of the module and of those below it, and the dicts, lists and sets among them."""
    found: list[Container] = []
    for each in module.modules():
        found += [each.__dict__, *(x for x in each.__dict__.values() if isinstance(x, dict | list | set))]
    return found


def _restore(container: Container, kept: Container) -> None:
    if isinstance(container, list):
        container[:] = kept
    else:
        container.clear()
        container.update(kept)


def _registries(module: torch.nn.Module) -> list[dict[str, Any]]:
    """The dicts in which the module and those below it keep their tensors and attributes."""
    return [r for m in module.modules() for r in (m.__dict__, m._parameters, m._buffers)]


def leave_meta(module: torch.nn.Module, device: torch.device) -> None:
    """Replace parameters and buffers on meta by fake ones on ``device``, which hold no memory either.

    On meta, torch takes attention apart; and a composite operator that has a kernel for meta, such as
    ``nll_loss``, silently gets no gradient. ``unchanged`` puts the tensors back. Tensors on meta that are
    registered nowhere stay, and torch refuses to compute with them: nothing could give them values later.
    """
    mode = FakeTensorMode()
    tensors = (*module.parameters(), *module.buffers())
    _replace_tensors(
        module, {id(tensor): _fake(tensor, device, mode) for tensor in tensors if tensor.is_meta}
    )


def _replace_tensors(module: torch.nn.Module, fakes: Mapping[int, torch.Tensor]) -> None:
    for registry in _registries(module):
        for name, value in registry.items():
            registry[name] = fakes.get(id(value), value)


def _fake(tensor: torch.Tensor, device: torch.device, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return torch.nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fake


@contextlib.contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """Let ``torch.distributions`` check no values, for they do not exist at capture."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextlib.contextmanager
def whole_interpolations() -> Iterator[None]:
    """Keep ``interpolate`` one operator, as it is in eager mode.

    torch takes it apart into some hundred operators that compute the last bit otherwise. What then runs needs
    Python for a symbolic batch, which torch lacks: the sizes of the result, and the shape of the gradient.
    """
    before: list[tuple[OpOverload, dict[Any, Any]]] = []
    for name in INTERPOLATIONS:
        forward, backward = getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_backward").default
        before += [
            (operator, dict(operator.py_kernels)) for operator in (forward.default, forward.vec, backward)
        ]
        forward.default.py_kernels.pop(DispatchKey.Autograd, None)
        for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
            forward.vec.py_kernels[key] = functools.partial(_interpolate, forward.default)
        backward.py_kernels[DispatchKey.Meta] = _interpolated_from
    try:
        for operator, _ in before:
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in before:
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def _interpolate(
    operator: OpOverload,
    x: torch.Tensor,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None = None,
) -> Any:
    sizes = upsample_compute_output_size(x.size(), output_size, scale_factors)
    return operator(x, sizes, align_corners, *(scale_factors or ()))


def _interpolated_from(
    gradient: torch.Tensor, output_size: Sequence[int], input_size: Sequence[int], *options: object
) -> torch.Tensor:
    layout = suggest_memory_format(gradient)
    return torch.empty(input_size, dtype=gradient.dtype, device=gradient.device, memory_format=layout)


@contextlib.contextmanager
def bounded_ctc_losses() -> Iterator[None]:
    """Give the table that ``ctc_loss`` keeps for its backward the size that it has for the longest target.

    Its real size depends on the lengths' values, so that torch refuses the operator. No other operator reads
    the table. Lengths that are Python numbers make the batch a constant, and stay refused.
    """
    operators = {
        torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
        torch.ops.aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    }
    holders = [fake_kernels.find(operator.name()).fake_impl for operator in operators]
    before = [list(holder.kernels) for holder in holders]
    for holder, fake in zip(holders, operators.values(), strict=True):
        holder.kernels = [Kernel(fake, "pipec")]
    try:
        yield
    finally:
        for holder, kernels in zip(holders, before, strict=True):
            holder.kernels = kernels


def _ctc_loss(
    log_probabilities: torch.Tensor, targets: torch.Tensor, *options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    length, rows, _ = log_probabilities.shape
    table = log_probabilities.new_empty(rows, length, 2 * targets.shape[-1] + 1)
    return log_probabilities.new_empty(rows), table


def _ctc_loss_backward(gradient: torch.Tensor, log_probabilities: torch.Tensor, *options: object) -> Any:
    return log_probabilities.new_empty(log_probabilities.shape)


@dataclass(frozen=True)
class DryRun:
    """What came of a call on fake tensors: the error that it raised, and whether it changed any object.

    A call that needs values fails on fake tensors alone, so that such an error says nothing of the model.
    """

    error: Exception | None
    changed: bool

    @property
    def failed(self) -> bool:
        if self.error is None or isinstance(self.error, NEEDS_VALUES):
            return False
        return not any(text in str(self.error) for text in NEEDS_MEMORY)


def dry_run(module: torch.nn.Module, args: tuple[Any, ...]) -> DryRun:
    """Call ``module(*args)`` in eager mode on fake tensors.

    What the first call of a model sets up stays, such as hooks; tensors and what holds tensors are put back.
    """
    containers = _containers(module)
    before = [copy.copy(container) for container in containers]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = (*module.parameters(), *module.buffers())
    error = None
    try:
        _replace_tensors(module, {id(tensor): _fake(tensor, tensor.device, mode) for tensor in tensors})
        fake_args = pytree.tree_map_only(torch.Tensor, lambda leaf: _fake(leaf, leaf.device, mode), args)
        with mode, _no_output():
            module(*fake_args)
    except Exception as raised:
        error = raised
    finally:
        changed = [_without_tensors(*pair) for pair in zip(containers, before, strict=True)]
    return DryRun(error, any(changed))


def _without_tensors(container: Container, before: Container) -> bool:
    """Undo the changes of a container in which there are tensors. Returns whether any other is left."""
    if not isinstance(container, dict) or not isinstance(before, dict):
        _restore(container, before)
        return False
    new = {key: x for key, x in container.items() if x is not before.get(key) and not _holds_tensor(x)}
    _restore(container, {**before, **new})
    return bool(new)


def _holds_tensor(value: object) -> bool:
    leaves = pytree.tree_leaves(value)
    leaves += [held for leaf in leaves for held in pytree.tree_leaves(getattr(leaf, "__dict__", None))]
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves)


@dataclass(frozen=True)
class Captured:
    """A forward graph, and the arguments to differentiate it with.

    ``changed_state`` names the Python objects that the forward would change, which tracing left as they were.
    Each is a path from the traced module, such as ``model.layers.0``; an attribute counts as its module.
    """

    module: torch.fx.GraphModule
    args: tuple[Any, ...]
    changed_state: tuple[str, ...] = ()


def capture_with_dynamo(
    module: torch.nn.Module, args: tuple[Any, ...], batched: Sequence[torch.Tensor]
) -> Captured:
    """Trace ``module(*args)`` into one graph of torch-level calls, dimension 0 of ``batched`` symbolic.

    Dynamo's caches are neither read nor written, so functions the user compiled stay compiled.
    """
    for tensor in batched:
        torch._dynamo.mark_dynamic(tensor, 0)
    known: set[Any] = torch._dynamo.config.ignore_logger_methods
    methods = {getattr(logging.Logger, name) for name in IGNORED_LOGGING if hasattr(logging.Logger, name)}
    config = DYNAMO_CONFIG | {"ignore_logger_methods": known | methods}
    with warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(config):
        warnings.simplefilter("always")
        graph_module: torch.fx.GraphModule = dynamo_graph_capture_for_export(module)(*args)
    return Captured(graph_module, args, _changed_state([str(warning.message) for warning in caught]))


def _changed_state(messages: Sequence[str]) -> tuple[str, ...]:
    """The objects below the traced module that Dynamo's warning about side effects names."""
    listed = "".join(message for message in messages if "side effects" in message)
    return tuple(fqn_of(source) for source in re.findall(r"\"(L\['self'\]\..*?)\"", listed))


def fqn_of(source: str) -> str:
    """``L['self']._modules['model'].h[0]`` and ``getattr(L['self'].model.h, '0')`` as ``model.h.0``."""
    dotted, changed = source, 1
    while changed:
        dotted, changed = re.subn(r"getattr\(([^()]*), '(.*?)'\)", r"\1.\2", dotted)
    dotted = re.sub(r"\._modules\b", "", dotted)
    dotted = re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", dotted)
    return dotted.removeprefix("L.self").removeprefix(".")


def capture_with_export(
    module: torch.nn.Module, args: tuple[Any, ...], batched: Sequence[torch.Tensor]
) -> Captured:
    """Trace ``module(*args)`` by running it on fake tensors.

    Raises:
        TypeError: the model uses a custom backward or a hook on a gradient, which would be lost.
    """
    batch = torch.export.Dim.DYNAMIC
    dynamic = {id(tensor) for tensor in batched}
    shapes = pytree.tree_map(lambda leaf: {0: batch} if id(leaf) in dynamic else None, args)
    with _refuse_custom_backwards(), _buffer_hooks_removed(), _no_output():
        program = torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
    graph_module = program.module()
    assert isinstance(graph_module, torch.fx.GraphModule)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    inputs = iter(values[len(values) - len(program.graph_signature.user_inputs) :])
    fake_args = pytree.tree_map(lambda leaf: next(inputs), args)
    fake = next(value for value in values if isinstance(value, FakeTensor))
    graph_module.meta["fake_mode"] = fake.fake_mode
    return Captured(graph_module, fake_args)


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """Keep what is printed off the terminal: the model may print fake tensors, and torch a failed graph."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def _buffer_hooks_removed() -> Iterator[None]:
    """Remove the hook on assigned buffers that a failed export of torch 2.11 leaves, and would then trace."""
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
    apply, register_hook = function.__dict__["apply"], tensor.register_hook  # not bound to the base class

    def refuse_function(cls: type, *args: Any, **kwargs: Any) -> Any:
        if _is_of_an_operator(cls):
            return apply.__func__(cls, *args, **kwargs)
        raise TypeError(f"the backward of the custom autograd function {cls.__qualname__} would be lost")

    def refuse_hook(self: torch.Tensor, hook: Any) -> Any:
        raise TypeError("the hook registered on a gradient with Tensor.register_hook would be lost")

    function.apply = classmethod(refuse_function)  # type: ignore[method-assign,assignment]
    tensor.register_hook = refuse_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        function.apply = apply  # type: ignore[method-assign]
        tensor.register_hook = register_hook  # type: ignore[method-assign]


def _is_of_an_operator(function: type) -> bool:
    """Whether torch.library made the autograd function for an operator, which keeps it in any graph."""
    return function.__module__ == _library_autograd.__name__ and function.__name__.startswith(GENERATED)


_MODEL_RAISED = ("Observed exception", "failed to bind arguments when attempting to inline")


def model_raised(error: BaseException) -> bool:
    """Whether Dynamo stopped at an error that the model would raise on these arguments in eager mode too."""
    return isinstance(error, TorchRuntimeError) or str(error).startswith(_MODEL_RAISED)


def reason_of(error: BaseException) -> str:
    """Why a front end stopped, in a sentence or two."""
    if isinstance(error, GuardOnDataDependentSymNode):
        return "Data-dependent size or branch: torch needs a value of a tensor to go on"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, Unsupported):
        explained = [line.removeprefix("Explanation:") for line in lines if line.startswith("Explanation:")]
        return " ".join([f"{lines[0].rstrip('.')}.", *map(str.strip, explained)]).strip()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The stack of the traced program where Dynamo gave up, outermost frame first. Other errors have none."""
    return list(getattr(error, "real_stack", None) or [])


def has_gradient_hook(tensor: torch.Tensor) -> bool:
    """Whether autograd calls a function of the user's with the gradient of the leaf ``tensor``."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def depends_on_values(value: object) -> bool:
    """Whether the shape of a fake tensor, or a symbolic number, depends on the values of tensors."""
    if isinstance(value, tuple | list):
        return any(map(depends_on_values, value))
    symbolic = isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    return symbolic and bool(free_unbacked_symbols(value))


@dataclass(frozen=True)
class JointGraph:
    """A differentiated graph. ``arguments`` and ``results`` describe its placeholders and outputs.

    ``fixed_by`` is the line of the model that made a constant of a symbol, if one did.
    """

    module: torch.fx.GraphModule
    arguments: tuple[tuple[str, str | int], ...]
    results: tuple[tuple[str, str | int], ...]
    guards: tuple[sympy.Basic, ...]
    replacements: dict[sympy.Symbol, sympy.Expr]
    output_spec: pytree.TreeSpec
    fixed_by: str


def differentiate(captured: Captured, training: bool) -> JointGraph:
    """The forward of a captured graph, and when ``training`` its backward, as one functional ATen graph.

    ``node.meta["custom"]`` of a captured node is copied to every node that it causes.
    """
    meta = captured.module.meta
    context = meta.get("tracing_context") or TracingContext(meta["fake_mode"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(context))
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(torch.set_grad_enabled(training))
        # torch takes an LSTM apart into oneDNN's layer for inference, which has no backward
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        joint = aot_export_joint_with_descriptors(stack, captured.module, captured.args)
    graph_module = joint.graph_module
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    fake_mode = context.fake_mode
    shape_env = fake_mode.shape_env if fake_mode else None
    return JointGraph(
        module=graph_module,
        arguments=tuple(_argument(node) for node in placeholders),
        results=tuple(_result(desc) for desc in graph_module.graph.output_node().meta["desc"]),
        guards=tuple(guard.expr for guard in shape_env.guards) if shape_env else (),
        replacements=dict(shape_env.replacements) if shape_env else {},
        output_spec=joint.out_spec,
        fixed_by=_fixed_by(shape_env),
    )


def _fixed_by(shape_env: ShapeEnv | None) -> str:
    """``x = x.view(4, -1)  # model.py:12 in forward``, without what torch adds to it in brackets."""
    if shape_env is None:
        return ""
    fixed = [symbol for symbol, value in shape_env.replacements.items() if value.is_number]
    places = [str(shape_env.replacements_slocs[symbol]) for symbol in fixed]
    return re.sub(r" \([^()]*\)$", "", places[-1]) if places else "the model"


def _argument(node: torch.fx.Node) -> tuple[str, str | int]:
    match node.meta.get("desc"):
        case ParamAOTInput(target=name):
            return "parameter", name
        case BufferAOTInput(target=name):
            return "buffer", name
        case PlainAOTInput(idx=index):
            return "input", index
        case TangentAOTInput():
            return "tangent", 0
        case other:
            return "unknown", repr(other)


def _result(descriptor: object) -> tuple[str, str | int]:
    match descriptor:
        case PlainAOTOutput(idx=index):
            return "output", index
        case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=name)):
            return "buffer", name
        case InputMutationAOTOutput(mutated_input=ParamAOTInput(target=name)):
            return "changed parameter", name
        case InputMutationAOTOutput(mutated_input=PlainAOTInput(idx=index)):
            return "changed input", index
        case GradAOTOutput(grad_of=ParamAOTInput(target=name)):
            return "gradient", name
        case None | GradAOTOutput():
            return "ignored", 0
        case other:
            return "unknown", repr(other)


class _Printer(PythonPrinter):
    """Prints sympy as Python over plain ints. torch's printer is for symbolic ints as well."""

    def _print_ToFloat(self, expression: sympy.Expr) -> str:
        return f"float({self._print(expression.args[0])})"

    def _print_OpaqueUnaryFn_sqrt(self, expression: sympy.Expr) -> str:
        return f"math.sqrt({self._print(expression.args[0])})"


def python_expression(expression: sympy.Expr) -> str:
    """Python source of a formula over sizes. It may call builtins and ``math``."""
    return str(_Printer().doprint(expression))
