"""The only compiler file that names a private part of torch; ``tests/test_torch_compat.py`` pins each of them.

Supported: torch 2.11 to 2.13.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch._dynamo
import torch.fx.traceback as fx_traceback
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
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

__all__ = [
    "CONSTRAINT_ERRORS",
    "JointGraph",
    "OpOverload",
    "capture_with_dynamo",
    "capture_with_export",
    "differentiate",
    "pytree",
    "python_expression",
    "user_frame",
]

DYNAMO_CONFIG = {
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "allow_rnn": True,
    "ignore_logger_methods": frozenset(
        getattr(logging.Logger, name) for name in ("warning_once", "info") if hasattr(logging.Logger, name)
    ),
}

CONSTRAINT_ERRORS = (ConstraintViolationError,)
"""Raised when a dimension asked to be symbolic must be a constant."""


@contextlib.contextmanager
def quiet_dynamo(verbose_loggers: Sequence[str] = ("torch._dynamo", "torch.fx.experimental")) -> Iterator[None]:
    """Keep Dynamo's advice about side effects and recompiles out of the user's terminal."""
    loggers = [logging.getLogger(name) for name in verbose_loggers]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def capture_with_dynamo(
    module: torch.nn.Module, args: tuple[Any, ...], batched: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    """Trace ``module(*args)`` into one graph of torch-level calls; dimension 0 of ``batched`` becomes symbolic."""
    torch._dynamo.reset()
    for tensor in batched:
        torch._dynamo.mark_dynamic(tensor, 0)
    with quiet_dynamo(), torch._dynamo.config.patch(DYNAMO_CONFIG):  # type: ignore[attr-defined]
        graph_module: torch.fx.GraphModule = dynamo_graph_capture_for_export(module)(*args)
    return graph_module


def capture_with_export(
    module: torch.nn.Module, args: tuple[Any, ...], batched: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, tuple[Any, ...]]:
    """Trace ``module(*args)`` by running it, and the fake arguments to differentiate it with.

    Raises TypeError when the model applies a ``torch.autograd.Function``, whose backward would be lost.
    """
    batch = torch.export.Dim.DYNAMIC if batched else None
    dynamic = {id(tensor) for tensor in batched}
    shapes = pytree.tree_map(lambda leaf: {0: batch} if id(leaf) in dynamic else None, args)
    with quiet_dynamo(), _refuse_custom_functions():
        program = torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
    graph_module = program.module()
    assert isinstance(graph_module, torch.fx.GraphModule)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    inputs = iter(values[len(values) - len(program.graph_signature.user_inputs) :])
    fake_args = pytree.tree_map(lambda leaf: next(inputs), args)
    fake = next(v for v in values if isinstance(v, FakeTensor))
    graph_module.meta["fake_mode"] = fake.fake_mode
    return graph_module, fake_args


@contextlib.contextmanager
def _refuse_custom_functions() -> Iterator[None]:
    original = torch.autograd.Function.apply

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"the backward of the custom autograd function {cls.__qualname__} would be lost")

    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def user_frame(error: BaseException) -> tuple[str, int, str] | None:
    """The line of the user's code on which Dynamo gave up: file, line number, text."""
    stack = getattr(error, "real_stack", None)
    if not stack:
        return None
    frame = stack[-1]
    return frame.filename, frame.lineno or 0, (frame.line or "").strip()


@dataclass(frozen=True)
class JointGraph:
    """What differentiation yields. ``arguments`` and ``results`` describe placeholders and outputs, in order."""

    module: torch.fx.GraphModule
    arguments: tuple[tuple[str, str | int], ...]
    results: tuple[tuple[str, str | int], ...]
    guards: tuple[sympy.Basic, ...]
    replacements: dict[sympy.Symbol, sympy.Expr]
    output_spec: pytree.TreeSpec


def differentiate(captured: torch.fx.GraphModule, args: tuple[Any, ...], training: bool) -> JointGraph:
    """Forward, and when ``training`` backward, of a captured graph as one functional ATen graph.

    ``node.meta["custom"]`` of the captured nodes is copied to every node they cause.
    """
    context = captured.meta.get("tracing_context") or TracingContext(captured.meta["fake_mode"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_dynamo())
        stack.enter_context(tracing(context))
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(torch.set_grad_enabled(training))
        joint = aot_export_joint_with_descriptors(stack, captured, args)
    graph_module = joint.graph_module
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    shape_env = context.fake_mode.shape_env
    return JointGraph(
        module=graph_module,
        arguments=tuple(_argument(node) for node in placeholders),
        results=tuple(_result(desc) for desc in graph_module.graph.output_node().meta["desc"]),
        guards=tuple(guard.expr for guard in shape_env.guards) if shape_env else (),
        replacements=dict(shape_env.replacements) if shape_env else {},
        output_spec=joint.out_spec,
    )


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
        case GradAOTOutput(grad_of=ParamAOTInput(target=name)):
            return "gradient", name
        case None | GradAOTOutput():
            return "ignored", 0
        case other:
            return "unknown", repr(other)


class _Printer(PythonPrinter):
    """sympy to Python source over plain ints."""


def python_expression(expression: sympy.Expr) -> str:
    """Python source of an integer or float expression of shapes (floor divisions, minima ... included)."""
    return str(_Printer().doprint(expression))

