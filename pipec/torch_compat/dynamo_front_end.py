"""The main front end: Dynamo traces the bytecode of a module into one forward graph.

Nothing inside Dynamo is replaced. What its graph would lose is read off its record of the capture, and
refused: hooks on leaves, gradients that a backward wants as None.
"""

import contextlib
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.convert_frame import fullgraph_capture
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.functional_export import create_fx_graph_from_captured_output
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pipec.errors import UnsupportedTorchError
from pipec.torch_compat.compared_values import fqn_of
from pipec.torch_compat.differentiation import CapturedGraph, SymbolicDims
from pipec.torch_compat.lost_effects import LOST_GRADIENT, LostEffectError

DYNAMO_CONFIG = {
    "allow_rnn": True,
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,
    "capture_dynamic_output_shape_ops": True,
    "replay_side_effects": False,
    "side_effect_replay_policy": "warn",
}

NUMBERS = "numbers"
"""The attribute of a traced module that lists the arguments that it turns into symbolic numbers."""


IGNORED_LOGGING = ("debug", "info", "warning", "error", "exception", "critical", "log", "warning_once")
"""Methods of loggers, the last of Hugging Face's, that Dynamo skips: logging does not belong in a graph."""


def capture_with_dynamo(
    module: torch.nn.Module, args: tuple[Any, ...], symbolic: SymbolicDims
) -> CapturedGraph:
    """Trace ``module(*args)`` into one graph of torch-level calls.

    Dynamo's caches are neither read nor written, so functions that the user compiled stay compiled.
    """
    for tensor, dimension in symbolic:
        torch._dynamo.mark_dynamic(tensor, dimension)
    with (
        warnings.catch_warnings(record=True) as caught,
        torch._dynamo.config.patch(_config(module)),
        torch_function_mode_stack_state_mgr,
        get_metrics_context(),
        dynamo_timed("fullgraph_capture"),
    ):
        warnings.simplefilter("always")
        try:
            output = fullgraph_capture(module, args)
            graph_module = create_fx_graph_from_captured_output(output, module, args, {})
        finally:
            _remove_compiled_globals(module)
    changed = tuple(_changed_state([str(warning.message) for warning in caught]))
    _refuse_lost_effects(module, output, changed)
    if torch.is_grad_enabled():
        _refuse_cut_checkpoints(graph_module)
    return CapturedGraph(graph_module, args, changed, output)


def _config(module: torch.nn.Module) -> dict[str, Any]:
    ignored: set[Any] = torch._dynamo.config.ignore_logger_methods
    methods = {getattr(logging.Logger, name) for name in IGNORED_LOGGING if hasattr(logging.Logger, name)}
    return DYNAMO_CONFIG | {
        "ignore_logger_methods": ignored | methods | {warnings.warn},
        "capture_scalar_outputs": bool(getattr(module, NUMBERS, ())),
    }


def _remove_compiled_globals(module: torch.nn.Module) -> None:
    """Remove the compiled function that a capture leaves as a global beside ``forward``.

    Nothing calls it, and it would keep the model and its gradients alive.
    """
    scope: dict[str, Any] = type(module).forward.__globals__
    for name in [each for each in scope if each.startswith("__compiled_fn_")]:
        del scope[name]


def _refuse_lost_effects(module: torch.nn.Module, output: Any, changed: Collection[str]) -> None:
    """Refuse what Dynamo traced and its graph does not do.

    Raises:
        LostEffectError: a forward sets the gradient of a parameter, or a backward wants gradients that are
            None, for which Dynamo would pass zeros.
    """
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if any(path.replace("._parameters.", ".") in parameters for path in changed):
        raise LostEffectError(LOST_GRADIENT)
    codes = output.graph_capture_output.traced_code
    if any("set_materialize_grads" in (*code.co_names, *code.co_consts) for code in codes):
        raise LostEffectError("the backward of a custom autograd function asks for gradients that are None")


def _refuse_cut_checkpoints(module: torch.fx.GraphModule) -> None:
    """Refuse reentrant checkpoints without an input that requires a gradient, for which Dynamo computes some.

    Their operands are their inputs and parameters.
    """
    for graph in (each.graph for each in module.modules() if isinstance(each, torch.fx.GraphModule)):
        for node in graph.nodes:
            if str(node.target) == "tag_activation_checkpoint" and node.kwargs.get("use_reentrant"):
                operands = [each.meta.get("example_value") for each in node.all_input_nodes]
                trained = [x for x in operands if isinstance(x, torch.Tensor) and x.requires_grad]
                if trained and all(isinstance(x, torch.nn.Parameter) for x in trained):
                    raise LostEffectError(
                        "torch.utils.checkpoint with use_reentrant=True has no input that requires a "
                        "gradient, so that what it calls is not trained"
                    )


@contextlib.contextmanager
def ignored_cudnn_flags() -> Iterator[None]:
    """Let Dynamo skip ``with torch.backends.cudnn.flags(...)``, which only chooses kernels."""
    cudnn: Any = torch.backends.cudnn
    flags = cudnn.flags
    cudnn.flags = lambda *args, **kwargs: contextlib.nullcontext()
    try:
        yield
    finally:
        cudnn.flags = flags


def draws_with_numpy(graph_module: torch.fx.GraphModule) -> bool:
    """Whether torch's random operators replace numpy's in a captured graph, and so ignore numpy's seed."""
    functions = [getattr(node.target, "f", None) for node in graph_module.graph.nodes]
    return any(getattr(function, "__module__", None) == "torch._numpy.random" for function in functions)


def _changed_state(messages: Sequence[str]) -> Iterator[str]:
    """The objects that Dynamo's warning about side effects names: of the traced module, and global ones.

    Of global objects, containers and rebound names count. Others may be as they were before, such as context
    variables.
    """
    warning = "".join(message for message in messages if "side effects" in message)
    if warning and "sources you can double check: [" not in warning:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} writes its warning of side effects in a way that pipec does not "
            f"know: {warning}"
        )
    yield from map(fqn_of, re.findall(r"\"(L\['self'\]\..*?)\"", warning))
    for name, attribute in re.findall(r"\"G\['__import_(?!torch)(\w+)'\](?:\.(\w+))?\"", warning):
        module = name.replace("_dot_", ".")
        found = getattr(sys.modules.get(module), attribute, None)
        if not attribute or isinstance(found, Collection | Iterator):
            yield f"{module}.{attribute}".rstrip(".")


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
    explained = [line.removeprefix("Explanation:") for line in lines if line.startswith("Explanation:")]
    if explained:
        text = " ".join([f"{lines[0].rstrip('.')}.", *map(str.strip, explained)]).strip()
        return re.sub(r"`/[^`]*/", "`", text)  # files without their folders
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The stack of the traced program where Dynamo failed, outermost frame first; empty for other errors."""
    return list(getattr(error, "real_stack", None) or [])


_HERE = str(Path(__file__).parent)

_OF_CODE = (AttributeError, ImportError, NameError, TypeError)
"""What Python raises where a name is gone or a function takes other arguments."""


def raise_if_unsupported(error: BaseException) -> None:
    """Raise UnsupportedTorchError if ``error`` arose in the code that uses private parts of torch.

    What that code raises itself is of another class. So no model is captured in a quieter way because a part
    of torch has changed.
    """
    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        if isinstance(cause, UnsupportedTorchError):
            raise cause
        if type(cause) in _OF_CODE and frames and frames[-1].filename.startswith(_HERE):
            place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}"
            raise UnsupportedTorchError(
                f"torch {torch.__version__} is not as pipec knows it: {type(cause).__name__}: {cause}\n"
                f"  at {place}\nInstall a version of torch that docs/stability.md names, or a pipec that "
                "knows this one"
            ) from error
        cause = cause.__cause__ or cause.__context__
