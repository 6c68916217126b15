"""The private symbols of torch that pipec uses: a table, and the error that names those that are gone.

A symbol is private if a part of its dotted path begins with one underscore. Public, by decision, are
``torch._dynamo.config``, ``torch._dynamo.mark_dynamic``, ``torch._inductor.config`` and ``torch._check``;
operators, whatever their name (``aten._softmax``, ``torch._foreach_add_``, ``tensor._version``); and
``_modules``, ``_parameters`` and ``_buffers`` of a module. An attribute of objects is listed under their
class, or under one object: ``torch.ops.aten.add.Tensor._schema``.

``tests/torch_compat/test_private_symbols.py`` compares the table with the source and with the installed
torch, and writes ``docs/reference/private_torch.md``.
"""

import importlib
import types
from typing import Any, Literal, NamedTuple

import torch

from pipec.errors import UnsupportedTorchError
from pipec.torch_compat.versions import NEWEST, OLDEST, parsed_version, version_text


class PrivateSymbol(NamedTuple):
    """A private symbol of torch, and what pipec needs it for.

    ``needed`` is the time at which pipec finds out that it is gone, one of ``GONE``. ``since`` is the first
    supported version of torch that has it. ``replaced`` says why pipec puts a function of its own in its
    place, where it does: what public part of torch does not do it.
    """

    name: str
    purpose: str
    needed: Literal["start", "capture", "inductor"] = "capture"
    since: tuple[int, int] = OLDEST
    replaced: str = ""


GONE = {
    "start": "pipec raises UnsupportedTorchError when it is imported",
    "capture": "the first call that is captured raises UnsupportedTorchError; saved artifacts run",
    "inductor": 'with kernels="inductor" stages run as their source, and a warning names the symbol',
}
"""What happens without a symbol, by when it is needed."""

SYMBOLS = (
    # what runs a pipeline
    PrivateSymbol("torch._ops.OpOverload", "is an operator of a graph, as against a function", "start"),
    PrivateSymbol(
        "torch.ops.aten.add.Tensor._schema",
        "the arguments and results of an operator: their types, names and aliases",
        "start",
    ),
    PrivateSymbol(
        "torch._C._storage_Use_Count",
        "whether anything else still uses the memory of a buffer or a gradient",
        "start",
    ),
    PrivateSymbol("torch.UntypedStorage._cdata", "the argument of the former", "start"),
    PrivateSymbol(
        "torch.nn.Module._apply",
        "`to`, `half`, `cuda` and their kin of a pipeline link its artifacts again",
        "start",
    ),
    PrivateSymbol(
        "torch.nn.Module._non_persistent_buffers_set",
        "a pipeline has the buffers of its model, which are in `state_dict` or not",
        "start",
    ),
    PrivateSymbol(
        "torch.nn.utils.clip_grad._get_total_norm",
        "`clip_grad_norm_` has the norm of the whole model, not of one rank",
        "start",
        replaced="it has no hook, and scripts import it by name before they import pipec",
    ),
    PrivateSymbol(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "sees each operator: to measure memory, and to notice what tracing would lose",
        "start",
    ),
    PrivateSymbol(
        "torch.utils._pytree.tree_flatten", "the leaves and the structure of arguments and results", "start"
    ),
    PrivateSymbol(
        "torch.utils._pytree.tree_flatten_with_path", "the same with the name of each leaf", "start"
    ),
    PrivateSymbol("torch.utils._pytree.tree_unflatten", "arguments and results of these leaves", "start"),
    PrivateSymbol("torch.utils._pytree.register_pytree_node", "a value of the step that is no leaf", "start"),
    PrivateSymbol("torch._dynamo.lookup_backend", 'the compiler of kernels="inductor"', "inductor"),
    PrivateSymbol(
        "torch._inductor.codecache.PyCodeCache",
        "the code that inductor generated, whose large values reuse memory",
        "inductor",
    ),
    # what a later call is compared with
    PrivateSymbol(
        "torch._C.DisableTorchFunctionSubclass", "reads tensors of a subclass in a tenth of the time", "start"
    ),
    PrivateSymbol(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "whether a script has hooks on saved tensors",
        "start",
    ),
    PrivateSymbol(
        "torch.overrides._get_current_function_mode_stack",
        "which function mode a script has entered",
        "start",
    ),
    PrivateSymbol(
        "torch._C._nn._parse_to",
        "the arguments of `nn.Module.to`, when a model is loaded from files",
        "start",
    ),
    PrivateSymbol(
        "torch.Tensor._post_accumulate_grad_hooks",
        "hooks of a parameter, which a pipeline does not call",
        "start",
    ),
    PrivateSymbol(
        "torch.nn.Module._backward_hooks",
        "hooks of a module or parameter, which a pipeline does not call",
        "start",
    ),
    PrivateSymbol(
        "torch.nn.Module._backward_pre_hooks", "hooks of a module, which a pipeline does not call", "start"
    ),
    PrivateSymbol("torch.nn.modules.module._global_forward_hooks", "hooks of all modules", "start"),
    PrivateSymbol("torch.nn.modules.module._global_forward_pre_hooks", "hooks of all modules", "start"),
    PrivateSymbol(
        "torch._subclasses.fake_tensor.FakeTensor",
        "a tensor without values: those of a capture are known",
        "start",
    ),
    # tracing with Dynamo
    PrivateSymbol(
        "torch._dynamo.convert_frame.CaptureOutput", "what Dynamo returns: the graph and its guards"
    ),
    PrivateSymbol("torch._dynamo.convert_frame.fullgraph_capture", "traces the bytecode of a module"),
    PrivateSymbol(
        "torch._dynamo.functional_export.create_fx_graph_from_captured_output", "a graph module of that"
    ),
    PrivateSymbol(
        "torch._dynamo.functional_export._compiling_state_context", "code that asks knows that it is traced"
    ),
    PrivateSymbol("torch._dynamo.exc.TorchRuntimeError", "the model raised an error"),
    PrivateSymbol("torch._dynamo.exc.Unsupported", "Dynamo does not trace this"),
    PrivateSymbol(
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase",
        "branches on values: where the traced code is",
    ),
    PrivateSymbol(
        "torch._dynamo.variables.builder.wrap_fx_proxy", "branches on values: a number as a node of the graph"
    ),
    PrivateSymbol(
        "torch._dynamo.variables.constant.ConstantVariable", "branches on values: the answer, a constant"
    ),
    PrivateSymbol("torch._dynamo.variables.tensor.SymNodeVariable", "branches on values: a number"),
    PrivateSymbol("torch._dynamo.variables.tensor.TensorVariable", "branches on values: a tensor"),
    PrivateSymbol(
        "torch._dynamo.variables.tensor.TensorVariable.method_item",
        "branches on values",
        replaced="Dynamo asks nobody for the value of a tensor",
    ),
    PrivateSymbol(
        "torch._dynamo.variables.torch_function.torch_function_mode_stack_state_mgr",
        "function modes, while Dynamo's own calls are recorded",
    ),
    # guards of a trace
    PrivateSymbol("torch._dynamo.guards._get_closure_vars", "makes the guards of a trace a function"),
    PrivateSymbol("torch._dynamo.hooks.Hooks", "which guards to keep"),
    PrivateSymbol("torch._dynamo.types.GuardFilterEntry", "which guards to keep"),
    PrivateSymbol("torch._dynamo.utils.dynamo_timed", "makes the guards of a trace a function"),
    PrivateSymbol("torch._dynamo.utils.get_metrics_context", "makes the guards of a trace a function"),
    PrivateSymbol("torch._guards.TracingContext", "joins tracing and differentiation"),
    PrivateSymbol("torch._guards.tracing", "joins tracing and differentiation"),
    # differentiation
    PrivateSymbol(
        "torch._functorch.aot_autograd.aot_export_joint_with_descriptors", "the graph of forward and backward"
    ),
    PrivateSymbol("torch._functorch.config.patch", "settings of differentiation"),
    PrivateSymbol(
        "torch._functorch._aot_autograd.descriptors.BufferAOTInput", "what an input of that graph is"
    ),
    PrivateSymbol(
        "torch._functorch._aot_autograd.descriptors.GradAOTOutput", "what an output of that graph is"
    ),
    PrivateSymbol(
        "torch._functorch._aot_autograd.descriptors.InputMutationAOTOutput", "what an output of that graph is"
    ),
    PrivateSymbol(
        "torch._functorch._aot_autograd.descriptors.ParamAOTInput", "what an input of that graph is"
    ),
    PrivateSymbol(
        "torch._functorch._aot_autograd.descriptors.PlainAOTInput", "what an input of that graph is"
    ),
    PrivateSymbol(
        "torch._functorch._aot_autograd.descriptors.PlainAOTOutput", "what an output of that graph is"
    ),
    PrivateSymbol(
        "torch._functorch._aot_autograd.descriptors.TangentAOTInput", "what an input of that graph is"
    ),
    PrivateSymbol("torch._subclasses.fake_tensor.FakeTensorMode", "makes tensors without values"),
    PrivateSymbol(
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "a call with tensors without values needs one",
    ),
    PrivateSymbol(
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "a call with tensors without values needs one",
    ),
    PrivateSymbol(
        "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
        "a call with tensors without values needs one",
    ),
    PrivateSymbol(
        "torch._subclasses.fake_tensor.UnsupportedOperatorException",
        "a call with tensors without values needs one",
    ),
    PrivateSymbol("torch.utils._pytree.SequenceKey", "the path of a symbolic size"),
    PrivateSymbol("torch.utils._sympy.printers.PythonPrinter", "a formula of sizes as Python"),
    PrivateSymbol(
        "torch.fx._lazy_graph_module._LazyGraphModule",
        "a graph whose Python code is generated when it is called",
        "start",
    ),
    PrivateSymbol(
        "torch.fx._lazy_graph_module._use_lazy_graph_module",
        "a graph whose Python code is generated when it is called",
        "start",
    ),
    # tracing with autograd and with export
    PrivateSymbol(
        "torch._C._current_autograd_node", "which node of autograd made an operator of the backward"
    ),
    PrivateSymbol(
        "torch.autograd.graph.Node._sequence_nr", "which node of autograd made an operator of the backward"
    ),
    PrivateSymbol(
        "torch.autograd._get_sequence_nr", "which node of autograd made an operator of the backward"
    ),
    PrivateSymbol("torch.nn.Module._is_full_backward_hook", "backward hooks of the older kind"),
    PrivateSymbol("torch.utils._pytree.keystr", "the name of an argument"),
    PrivateSymbol("torch._ops.HigherOrderOperator", "an operator with graphs of its own", "start"),
    PrivateSymbol("torch.utils._pytree.tree_leaves", "the leaves of arguments"),
    PrivateSymbol("torch.utils._pytree.tree_map_only", "arguments with other leaves"),
    PrivateSymbol("torch.utils._pytree.TreeSpec", "the structure of results"),
    # operators that stay whole
    PrivateSymbol("torch._C.DispatchKey", "the kernel of an operator to replace"),
    PrivateSymbol("torch._decomp.decomposition_table", "the operators that torch decomposes"),
    PrivateSymbol("torch.ops.aten.add.Tensor._dispatch_cache", "the kernel of an operator to replace"),
    PrivateSymbol(
        "torch.distributions.Distribution._validate_args",
        "distributions check no values while a model is captured",
    ),
    # the key of a capture on disk
    PrivateSymbol("torch.utils._python_dispatch._get_current_dispatch_mode_stack", "the state of a thread"),
)


def resolve(name: str) -> Any:
    """What the installed torch has at a dotted path. Raises AttributeError or ImportError without it."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 1):
        if isinstance(found, types.ModuleType) and not hasattr(found, part):
            found = importlib.import_module(".".join(parts[: place + 1]))
        elif part in getattr(found, "__annotations__", ()) and not hasattr(found, part):
            found = None  # objects have it
        else:
            found = getattr(found, part)
    return found


def needs(name: str) -> Any:
    """The private symbol of this path, which is one of ``SYMBOLS``.

    Raises:
        UnsupportedTorchError: the installed torch does not have it.
    """
    (symbol,) = [each for each in SYMBOLS if each.name == name]
    try:
        return resolve(name)
    except (AttributeError, ImportError) as error:
        raise _unsupported([symbol]) from error


def require(needed: str) -> None:
    """Raise UnsupportedTorchError if symbols that are needed now are gone; it names all of them."""
    if gone := [each for each in SYMBOLS if each.needed == needed and not _exists(each)]:
        raise _unsupported(gone)


def _exists(symbol: PrivateSymbol) -> bool:
    try:
        resolve(symbol.name)
    except (AttributeError, ImportError):
        return parsed_version(torch.__version__) < symbol.since
    return True


def _unsupported(gone: list[PrivateSymbol]) -> UnsupportedTorchError:
    listed = "".join(f"\n  {each.name}: {each.purpose}" for each in gone)
    return UnsupportedTorchError(
        f"torch {torch.__version__} has no longer what this pipec needs of it:{listed}\n"
        f"Install torch {version_text(OLDEST)} to {version_text(NEWEST)}, or a later pipec"
    )
