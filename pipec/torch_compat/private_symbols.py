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
        "torch._C._get_cublas_allow_bf16_reduced_precision_reduction",
        "a setting that operators depend on",
        "start",
    ),
    PrivateSymbol(
        "torch._C._get_cublas_allow_fp16_reduced_precision_reduction",
        "a setting that operators depend on",
        "start",
    ),
    PrivateSymbol("torch._C._get_cudnn_benchmark", "a setting that operators depend on", "start"),
    PrivateSymbol("torch._C._get_cudnn_deterministic", "a setting that operators depend on", "start"),
    PrivateSymbol("torch._C._get_cudnn_enabled", "a setting that operators depend on", "start"),
    PrivateSymbol("torch._C._get_cudnn_sdp_enabled", "a setting that operators depend on", "start"),
    PrivateSymbol("torch._C._get_deterministic_algorithms", "a setting that operators depend on", "start"),
    PrivateSymbol(
        "torch._C._get_deterministic_algorithms_warn_only", "a setting that operators depend on", "start"
    ),
    PrivateSymbol(
        "torch._C._get_deterministic_fill_uninitialized_memory", "a setting that operators depend on", "start"
    ),
    PrivateSymbol("torch._C._get_flash_sdp_enabled", "a setting that operators depend on", "start"),
    PrivateSymbol("torch._C._get_fp32_precision_getter", "a setting that operators depend on", "start"),
    PrivateSymbol("torch._C._get_math_sdp_enabled", "a setting that operators depend on", "start"),
    PrivateSymbol("torch._C._get_mem_efficient_sdp_enabled", "a setting that operators depend on", "start"),
    PrivateSymbol("torch._C._get_mkldnn_deterministic", "a setting that operators depend on", "start"),
    PrivateSymbol("torch._C._get_mkldnn_enabled", "a setting that operators depend on", "start"),
    PrivateSymbol("torch.utils._device.CURRENT_DEVICE", "the default device that a script has set", "start"),
    PrivateSymbol(
        "torch._C.DisableTorchFunctionSubclass", "reads tensors of a subclass in a tenth of the time", "start"
    ),
    PrivateSymbol(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "whether a script has hooks on saved tensors",
        "start",
    ),
    PrivateSymbol(
        "torch._C._disabled_torch_dispatch_impl", "whether a class of tensors changes operators", "start"
    ),
    PrivateSymbol(
        "torch._C._disabled_torch_function_impl", "whether a class of tensors changes operators", "start"
    ),
    PrivateSymbol(
        "torch._C._len_torch_function_stack", "whether a script has entered a function mode", "start"
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
    PrivateSymbol("torch.nn.Module._forward_hooks", "hooks of a module, which are captured", "start"),
    PrivateSymbol("torch.nn.Module._forward_pre_hooks", "hooks of a module, which are captured", "start"),
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
    PrivateSymbol("torch._dynamo.functional_export.dynamo_graph_capture_for_export", "traces a module"),
    PrivateSymbol(
        "torch._dynamo.functional_export.fullgraph_capture",
        "the guards of a trace",
        replaced="the public capture returns the graph without its guards",
    ),
    PrivateSymbol("torch._dynamo.exc.TorchRuntimeError", "the model raised an error"),
    PrivateSymbol("torch._dynamo.exc.Unsupported", "Dynamo does not trace this"),
    PrivateSymbol(
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase",
        "branches on values: where the traced code is",
    ),
    PrivateSymbol("torch._dynamo.variables.base.VariableTracker", "a traced value"),
    PrivateSymbol(
        "torch._dynamo.variables.builder.wrap_fx_proxy", "branches on values: a number as a node of the graph"
    ),
    PrivateSymbol("torch._dynamo.variables.builtin.BuiltinVariable", "assignments of `requires_grad`"),
    PrivateSymbol(
        "torch._dynamo.variables.builtin.SetAttrBuiltinVariable",
        "assignments of `requires_grad`",
        since=(2, 13),
    ),
    PrivateSymbol(
        "torch._dynamo.variables.builtin.extract_fake_example_value",
        "questions for the memory format of a value",
        replaced="it goes with this part",
    ),
    PrivateSymbol(
        "torch._dynamo.variables.constant.ConstantVariable", "branches on values: the answer, a constant"
    ),
    PrivateSymbol(
        "torch._dynamo.variables.ctx_manager.NullContextVariable",
        "context managers that change no gradient are skipped",
    ),
    PrivateSymbol("torch._dynamo.variables.functions.UserFunctionVariable", "regions of equal blocks"),
    PrivateSymbol(
        "torch._dynamo.variables.functions.invoke_and_store_as_constant",
        "reads of a tensor's identity",
        replaced="it goes with this part",
    ),
    PrivateSymbol("torch._dynamo.variables.lists.ListVariable", "regions of equal blocks"),
    PrivateSymbol("torch._dynamo.variables.lists.TupleVariable", "regions of equal blocks"),
    PrivateSymbol(
        "torch._dynamo.variables.misc.AutogradFunctionContextVariable",
        "context of a custom `autograd.Function`",
    ),
    PrivateSymbol(
        "torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable", "regions of equal blocks"
    ),
    PrivateSymbol(
        "torch._dynamo.variables.nn_module.invoke_and_store_as_constant",
        "reads of a tensor's identity",
        replaced="it goes with this part",
    ),
    PrivateSymbol("torch._dynamo.variables.nn_module.record_nn_module_stack", "regions of equal blocks"),
    PrivateSymbol("torch._dynamo.variables.tensor.SymNodeVariable", "branches on values: a number"),
    PrivateSymbol("torch._dynamo.variables.tensor.TensorVariable", "branches on values: a tensor"),
    PrivateSymbol(
        "torch._dynamo.variables.tensor.TensorVariable.call_method",
        "reads of identity, strides and gradient modes",
        replaced="it goes with this part",
    ),
    PrivateSymbol(
        "torch._dynamo.variables.tensor.TensorVariable.method_item",
        "branches on values",
        replaced="Dynamo asks nobody for the value of a tensor",
    ),
    PrivateSymbol(
        "torch._dynamo.variables.tensor.TensorVariable.var_getattr",
        "reads of identity, strides and gradient modes",
        replaced="it goes with this part",
    ),
    PrivateSymbol(
        "torch._dynamo.variables.torch.TorchInGraphFunctionVariable", "a call of a function of torch"
    ),
    PrivateSymbol(
        "torch._dynamo.variables.torch.TorchInGraphFunctionVariable.call_function",
        "reads of identity, strides and gradient modes",
        replaced="it goes with this part",
    ),
    PrivateSymbol(
        "torch._dynamo.variables.torch_function.torch_function_mode_stack_state_mgr",
        "function modes, while Dynamo's own calls are recorded",
    ),
    PrivateSymbol("torch._dynamo.side_effects.SideEffects", "hooks and attributes that a forward sets"),
    PrivateSymbol(
        "torch._dynamo.side_effects.SideEffects.register_hook",
        "hooks that a forward adds to a parameter",
        replaced="it goes with this part",
    ),
    PrivateSymbol(
        "torch._dynamo.side_effects.SideEffects.store_attr",
        "attributes that a forward sets",
        replaced="it goes with this part",
    ),
    PrivateSymbol("torch._dynamo.source.LocalSource", "regions of equal blocks"),
    PrivateSymbol("torch._C._dynamo.guards.GlobalStateGuard", "regions of equal blocks"),
    PrivateSymbol("torch._C._functorch.get_dynamic_layer_stack_depth", "regions of equal blocks"),
    # guards of a trace
    PrivateSymbol("torch._dynamo.guards.GUARD_VALUE_DISPATCH", "regions of equal blocks", since=(2, 13)),
    PrivateSymbol("torch._dynamo.guards.GuardBuilder", "regions of equal blocks"),
    PrivateSymbol("torch._dynamo.guards.GuardCheckSpec", "regions of equal blocks", since=(2, 13)),
    PrivateSymbol("torch._dynamo.guards.SKIP_GUARD", "regions of equal blocks", since=(2, 13)),
    PrivateSymbol("torch._dynamo.guards._get_closure_vars", "makes the guards of a trace a function"),
    PrivateSymbol("torch._dynamo.guards.install_guard", "regions of equal blocks"),
    PrivateSymbol("torch._dynamo.hooks.Hooks", "which guards to keep"),
    PrivateSymbol("torch._dynamo.types.GuardFilterEntry", "which guards to keep"),
    PrivateSymbol("torch._dynamo.utils.dynamo_timed", "makes the guards of a trace a function"),
    PrivateSymbol("torch._dynamo.utils.get_metrics_context", "makes the guards of a trace a function"),
    PrivateSymbol("torch._guards.Guard", "a guard of a trace"),
    PrivateSymbol("torch._guards.GuardsSet", "the guards of a trace"),
    PrivateSymbol("torch._guards.Source", "where a guarded value is"),
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
    PrivateSymbol("torch.nn.utils.stateless._reparametrize_module", "calls a module with other parameters"),
    PrivateSymbol("torch.utils._pytree.keystr", "the name of an argument"),
    PrivateSymbol("torch.amp.autocast_mode._enter_autocast", "autocast in a graph of torch.export"),
    PrivateSymbol("torch.amp.autocast_mode._exit_autocast", "autocast in a graph of torch.export"),
    PrivateSymbol("torch._C._set_grad_enabled", "gradient modes in a graph of torch.export"),
    PrivateSymbol(
        "torch._C._dispatch_has_kernel_for_dispatch_key", "whether an operator has a backward of its own"
    ),
    PrivateSymbol("torch._C.TensorBase", "reads of `grad_fn`"),
    PrivateSymbol("torch.cuda.random._lazy_call", "calls that seed a GPU", replaced="it goes with this part"),
    PrivateSymbol(
        "torch.nn.modules.module._global_buffer_registration_hooks", "buffers that a forward registers"
    ),
    PrivateSymbol(
        "torch.utils._python_dispatch.TorchDispatchMode.__enter__",
        "modes that a forward enters",
        replaced="it goes with this part",
    ),
    PrivateSymbol("torch._ops.HigherOrderOperator", "an operator with graphs of its own", "start"),
    PrivateSymbol("torch._ops.OpOverloadPacket", "an operator without its variant"),
    PrivateSymbol("torch.ops.aten.add._qualified_op_name", "the name of an operator"),
    PrivateSymbol("torch.utils._pytree.tree_leaves", "the leaves of arguments"),
    PrivateSymbol("torch.utils._pytree.tree_map", "arguments with other leaves"),
    PrivateSymbol("torch.utils._pytree.tree_map_only", "arguments with other leaves"),
    PrivateSymbol("torch.utils._pytree.TreeSpec", "the structure of results"),
    # operators that stay whole
    PrivateSymbol("torch._C.DispatchKey", "the kernel of an operator to replace"),
    PrivateSymbol("torch._decomp.decomposition_table", "the operators that torch decomposes"),
    PrivateSymbol(
        "torch._decomp.decompositions.upsample_compute_output_size", "the size of an interpolation"
    ),
    PrivateSymbol("torch._library.simple_registry.singleton", "the fake kernel of an operator"),
    PrivateSymbol("torch._library.utils.Kernel", "the fake kernel of an operator"),
    PrivateSymbol("torch._prims_common.suggest_memory_format", "the memory format of an interpolation"),
    PrivateSymbol("torch.ops.aten.add.Tensor._dispatch_cache", "the kernel of an operator to replace"),
    PrivateSymbol(
        "torch.distributions.Distribution._validate_args",
        "distributions check no values while a model is captured",
    ),
    # the key of a capture on disk
    PrivateSymbol("torch._C._dispatch_dump", "which kernels a script has registered"),
    PrivateSymbol("torch._C._dispatch_tls_local_exclude_set", "the state of a thread"),
    PrivateSymbol("torch._C._dispatch_tls_local_include_set", "the state of a thread"),
    PrivateSymbol("torch._C._get_sdp_priority_order", "the state of a thread"),
    PrivateSymbol("torch._C._is_fwd_grad_enabled", "the state of a thread"),
    PrivateSymbol("torch._C._is_multithreading_enabled", "the state of a thread"),
    PrivateSymbol("torch._C._is_torch_function_enabled", "the state of a thread"),
    PrivateSymbol("torch._C._is_view_replay_enabled", "the state of a thread"),
    PrivateSymbol("torch.library._impls", "which kernels a script has registered"),
    PrivateSymbol("torch.utils._python_dispatch._get_current_dispatch_mode_stack", "the state of a thread"),
    PrivateSymbol("torch.utils._sympy.value_ranges.ValueRanges", "the range of a size"),
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
