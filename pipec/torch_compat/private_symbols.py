"""The private symbols of torch that pipec uses, the functions that it replaces, and the error if one is gone.

A symbol is private if a part of its dotted path begins with one underscore. Public, by decision, are
``torch._dynamo.config``, ``torch._dynamo.mark_dynamic``, ``torch._functorch.config``,
``torch._inductor.config`` and ``torch._check``;
operators, whatever their name (``aten._softmax``, ``torch._foreach_add_``, ``tensor._version``); and
``_modules``, ``_parameters`` and ``_buffers`` of a module. An attribute of objects is listed under their
class, or under an object: ``torch.nn.Module()._forward_hooks``, ``torch.ops.aten.add.Tensor._schema``.

``tests/torch_compat/test_private_symbols.py`` compares both tables with the source and with the installed
torch.
"""

import importlib
import re
import types
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from pipec.errors import UnsupportedTorchError

OLDEST, NEWEST = (2, 11), (2, 15)
"""The first and the last tested version, without its patch level."""


def parsed_version(version: str) -> tuple[int, int]:
    """``"2.15.0+cu132"`` is (2, 15)."""
    major, minor = map(int, re.findall(r"\d+", version)[:2])
    return major, minor


def version_text(version: tuple[int, int]) -> str:
    """(2, 15) is ``"2.15"``."""
    return ".".join(map(str, version))


def untested_version(version: str) -> str | None:
    """One line about torch of an untested ``version``, which is used all the same; None for a tested one."""
    number = parsed_version(version)
    if OLDEST <= number <= NEWEST:
        return None
    age = "older" if number < OLDEST else "newer"
    tested = f"{version_text(OLDEST)} to {version_text(NEWEST)}"
    return f"torch {version} is {age} than the versions that this pipec was tested with, {tested}"


class Symbol(NamedTuple):
    """A part of torch by its dotted path, and what pipec needs it for.

    Every supported version of torch has it. ``needed`` is the time at which pipec finds out that it is gone,
    one of ``GONE``.
    """

    name: str
    purpose: str
    needed: Literal["start", "capture", "inductor"] = "capture"


GONE = {
    "start": "pipec raises UnsupportedTorchError when it is imported",
    "capture": "the first call that is captured raises UnsupportedTorchError; saved artifacts run",
    "inductor": 'with kernels="inductor" stages run as their source, and a warning names the symbol',
}
"""What happens without a symbol, by when it is needed."""

SYMBOLS = (
    # what runs a pipeline
    Symbol("torch._ops.OpOverload", "is an operator of a graph, as against a function", "start"),
    Symbol(
        "torch.ops.aten.add.Tensor._schema",
        "the arguments and results of an operator: their types, names and aliases",
        "start",
    ),
    Symbol(
        "torch._C._storage_Use_Count",
        "whether anything else still uses the memory of a buffer or a gradient",
        "start",
    ),
    Symbol(
        "torch.UntypedStorage._cdata",
        "the argument of the former, and whether two tensors share memory",
        "start",
    ),
    Symbol(
        "torch._C._will_engine_execute_node",
        "whether a backward is one of all gradients, or of some `inputs` alone",
        "start",
    ),
    Symbol(
        "torch.nn.Module._apply",
        "`to`, `half`, `cuda` and their kin of a pipeline link its artifacts again",
        "start",
    ),
    Symbol(
        "torch.nn.Module()._non_persistent_buffers_set",
        "a pipeline has the buffers of its model, which are in `state_dict` or not",
        "start",
    ),
    Symbol(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "sees each operator: to measure memory, and to notice what tracing would lose",
        "start",
    ),
    Symbol(
        "torch.utils._pytree.tree_flatten", "the leaves and the structure of arguments and results", "start"
    ),
    Symbol("torch.utils._pytree.tree_flatten_with_path", "the same with the name of each leaf", "start"),
    Symbol("torch.utils._pytree.tree_unflatten", "arguments and results of these leaves", "start"),
    Symbol("torch.utils._pytree.register_pytree_node", "a value of the step that is no leaf", "start"),
    Symbol("torch.utils._pytree.treespec_dumps", "a saved artifact names the structure of outputs", "start"),
    Symbol("torch.utils._pytree.treespec_loads", "a loaded artifact returns this structure", "start"),
    Symbol("torch._inductor.compile_fx.compile_fx_inner", 'the compiler of kernels="inductor"', "inductor"),
    Symbol("torch._inductor.decomposition.select_decomp_table", "the operators that it takes", "inductor"),
    Symbol(
        "torch._dynamo.functional_export._compiling_state_context",
        "lets the code of stages know that it is compiled",
        "inductor",
    ),
    # what a later call is compared with
    Symbol(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "whether a script has hooks on saved tensors",
        "start",
    ),
    Symbol(
        "torch.overrides._get_current_function_mode_stack",
        "which function mode a script has entered",
        "start",
    ),
    Symbol(
        "torch.Tensor._post_accumulate_grad_hooks",
        "hooks of a parameter, which a pipeline does not call",
        "start",
    ),
    Symbol(
        "torch.nn.Module()._backward_hooks",
        "hooks of a module or parameter, which a pipeline does not call",
        "start",
    ),
    Symbol(
        "torch.nn.Module()._backward_pre_hooks", "hooks of a module, which a pipeline does not call", "start"
    ),
    Symbol("torch.nn.Module()._forward_hooks", "hooks of a module, which are captured", "start"),
    Symbol("torch.nn.Module()._forward_pre_hooks", "hooks of a module, which are captured", "start"),
    Symbol("torch.nn.modules.module._global_backward_hooks", "hooks of all modules", "start"),
    Symbol(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "makes tensors without values, and tells their class from classes of a script",
        "start",
    ),
    # tracing with Dynamo
    Symbol("torch._dynamo.convert_frame.fullgraph_capture", "traces the bytecode of a module"),
    Symbol("torch._dynamo.functional_export.create_fx_graph_from_captured_output", "a graph module of that"),
    Symbol("torch._dynamo.exc.TorchRuntimeError", "the model raised an error"),
    Symbol(
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase",
        "branches on values: the instructions that take one",
    ),
    Symbol(
        "torch._dynamo.variables.tensor.TensorVariable", "branches on values: `item` of a tensor, the answer"
    ),
    Symbol(
        "torch._dynamo.variables.torch_function.torch_function_mode_stack_state_mgr",
        "function modes, while Dynamo's own calls are recorded",
    ),
    Symbol("torch._dynamo.utils.dynamo_timed", "makes the guards of a trace a function"),
    Symbol("torch._dynamo.utils.get_metrics_context", "traces, and makes the guards of a trace a function"),
    # differentiation
    Symbol("torch._guards.tracing", "joins tracing and differentiation"),
    Symbol(
        "torch._functorch.aot_autograd.aot_export_joint_with_descriptors", "the graph of forward and backward"
    ),
    *(
        Symbol(f"torch._functorch._aot_autograd.descriptors.{name}", "what an input of that graph is")
        for name in ("BufferAOTInput", "ParamAOTInput", "PlainAOTInput", "TangentAOTInput")
    ),
    *(
        Symbol(f"torch._functorch._aot_autograd.descriptors.{name}", "what an output of that graph is")
        for name in ("GradAOTOutput", "InputMutationAOTOutput", "PlainAOTOutput")
    ),
    Symbol("torch.utils._sympy.printers.PythonPrinter", "a formula of sizes as Python", "start"),
    Symbol("torch.fx.Graph()._codegen", "a graph without equal blocks takes arguments as the whole graph"),
    # the fallback, make_fx
    Symbol("torch._C._current_autograd_node", "which node of autograd made an operator of the backward"),
    Symbol(
        "torch.autograd.graph.Node._sequence_nr", "which node of autograd made an operator of the backward"
    ),
    Symbol(
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "whether a forward has entered a mode that sees operators",
    ),
    # operators that stay whole, and rules for others
    Symbol("torch._decomp.decomposition_table", "the operators that torch decomposes"),
    Symbol("torch.ops.aten.add.Tensor._dispatch_cache", "the kernel of an operator to replace"),
)
"""The private symbols, in the order of what needs them."""

REPLACED = (
    Symbol(
        "torch.jit.script",
        "refuses a module whose tensors other processes hold. It reads them without any call",
        "start",
    ),
    Symbol("torch.random.default_generator", "refuses a forward that seeds the CPU"),
    Symbol(
        "torch.nn.Module.to",
        "an adapter of PEFT keeps its values while its model is on meta, where PEFT moves it",
        "start",
    ),
    Symbol(
        "torch.fx.experimental.sym_node.SymNode.*",
        "arithmetic on sizes is computed once. Torch caches none of it",
    ),
    Symbol(
        "torch._dynamo.variables.tensor.TensorVariable.call_method",
        "branches on values: decides `item` of a boolean. Torch asks nobody, and breaks the graph",
    ),
    Symbol(
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase.dispatch_table",
        "branches on values: decides the instructions that take one. Torch asks nobody, and breaks the graph",
    ),
    Symbol(
        "torch.backends.cudnn.flags",
        "chooses kernels alone, and Dynamo refuses it. `torch.compiler.substitute_in_graph` would change "
        "what the user compiles, too",
    ),
    Symbol(
        "torch.ops.aten.lstm.input.py_kernels",
        "recurrent networks stay whole while they are traced. A kernel of `torch.library` would run "
        "outside of traces, too",
    ),
    Symbol(
        "torch.utils.checkpoint.CheckpointFunction.apply",
        "a reentrant checkpoint is a plain call while it is traced. Its backward adds to `.grad`, which no "
        "graph has",
    ),
)
"""Functions of torch, private or not, in whose place pipec puts its own. A star stands for some of a class.

The purpose says why nothing public does it.
"""


def resolve(name: str) -> Any:
    """What the installed torch has at a dotted path. Raises AttributeError or ImportError without it."""
    parts = name.removesuffix(".*").split(".")
    found: Any = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 1):
        member = part.removesuffix("()")
        if isinstance(found, types.ModuleType) and not hasattr(found, member):
            found = importlib.import_module(".".join(parts[: place + 1]))
        else:
            found = getattr(found, member)
        if member != part:
            found = found()
    return found


def require(needed: str) -> None:
    """Raise UnsupportedTorchError if symbols that are needed now are gone; it names all of them."""
    if gone := [each for each in (*SYMBOLS, *REPLACED) if each.needed == needed and not _exists(each)]:
        raise _unsupported(gone)


def _exists(symbol: Symbol) -> bool:
    try:
        resolve(symbol.name)
    except (AttributeError, ImportError):
        return False
    return True


def _unsupported(gone: Sequence[Symbol]) -> UnsupportedTorchError:
    listed = "".join(f"\n  {each.name}: {each.purpose}" for each in gone)
    return UnsupportedTorchError(
        f"torch {torch.__version__} has no longer what this pipec needs of it:{listed}\n"
        f"Install torch {version_text(OLDEST)} to {version_text(NEWEST)}, or a later pipec"
    )


require("start")  # when pipec is imported, not in the middle of a step
