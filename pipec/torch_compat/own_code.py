"""Tells torch's own functions from others, and lists the global state on which a compilation depends.

What torch and pipec do with a captured graph may be kept for other processes if the graph calls their own
functions alone, and nothing in torch was replaced.
"""

import ast
import builtins
import contextlib
import functools
import hashlib
import math
import operator
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GenericAlias,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from sympy.printing.str import StrPrinter
from torch._decomp import decomposition_table
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.backends import opt_einsum
from torch.fx.experimental import _config as fx_config
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._sympy.value_ranges import ValueRanges

from pipec.torch_compat.settings import SETTINGS, read_settings

_PIPEC, _TORCH = (
    f"{Path(each).parents[depth]}{os.sep}" for each, depth in ((__file__, 1), (torch.__file__, 0))
)

_HOMES: tuple[Any, ...] = (
    *(operator, math, builtins, torch, torch.Tensor, F, torch.special, torch.linalg, torch.fft),
    *(torch._C, torch._C._nn, *(sys.modules[f"torch._C._{name}"] for name in ("fft", "linalg", "special"))),
)
"""Where torch and Python have the functions that are not written in Python."""

_WRAPPING = tuple(str(sys.modules[name].__file__) for name in ("typing", "typing_extensions"))
"""Files of functions that torch holds, and has not written."""

_PYTHON, *_LIBRARIES = (
    f"{Path(str(sys.modules[name].__file__)).parent}{os.sep}"
    for name in ("contextlib", "sympy", "numpy", "torchgen")
    if name in sys.modules
)
"""Where the functions are that modules of torch import from elsewhere."""

_OTHER_CALLABLES = (
    *(type, GenericAlias, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType),
    *(ClassMethodDescriptorType, OpOverloadPacket),
)
_OTHER_MODULES = ("typing", "typing_extensions", "_sitebuiltins")
"""The classes of what torch and Python have under their names and can be called, besides functions in Python,
and the modules of more such classes."""


_UNUSED = ((torch, "compile"),)
"""Functions that some libraries replace, on which nothing that is kept depends: Lightning wraps it."""


def is_own(target: Any) -> bool:
    """Whether ``target`` is a function of torch, of pipec, or one of Python's operators.

    A higher-order operator is not, except that of ``torch.utils.checkpoint``: it calls a graph, and others
    call Python code.
    """
    match target:
        case OpOverload():
            return is_own(target.overloadpacket)
        case OpOverloadPacket():
            namespace, _, _ = target._qualified_op_name.partition("::")
            files = _files_of_kernels(target._qualified_op_name) if namespace == "pipec" else []
            return namespace == "aten" or (bool(files) and all(x.startswith(_PIPEC) for x in files))
        case HigherOrderOperator():
            return target is torch.ops.higher_order.tag_activation_checkpoint
        case FunctionType():
            home: Any = sys.modules.get(target.__module__)
            is_own_home = str(getattr(home, "__file__", "")).startswith((_PIPEC, _TORCH))
            return is_own_home and _is_own_code(target) and getattr(home, target.__name__, None) is target
        case type() | BuiltinFunctionType() | MethodDescriptorType() | WrapperDescriptorType():
            return any(getattr(home, target.__name__, None) is target for home in _HOMES)
        case str():  # a method
            found = getattr(torch.Tensor, target, None)
            is_own_code = isinstance(found, FunctionType) and _is_own_code(found)
            return isinstance(found, MethodDescriptorType) or is_own_code
    return False


def name_of(target: Any) -> str:
    """The name of a function of torch or Python, or of a method of tensors, with what it belongs to."""
    if isinstance(target, str):
        return target
    owner = getattr(target, "__self__", None) or getattr(target, "__objclass__", None)
    name = getattr(target, "__name__", type(target).__name__)
    return f"{getattr(target, '__module__', '')} {getattr(owner, '__name__', '')} {name}"


def _is_own_code(function: Any) -> bool:
    """Whether a function, and each function that it wraps or encloses, is one of torch's or pipec's."""
    if not isinstance(function, FunctionType):
        return is_own(function)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None and not _is_own_code(wrapped):
        return False
    files = [each.__code__.co_filename for each in _enclosed(function)]
    return all(file.startswith((_PIPEC, _TORCH, *_WRAPPING)) for file in files)


def _enclosed(function: FunctionType) -> list[FunctionType]:
    """A function, and the functions in its closure, and in theirs."""
    found = [function]
    for each in found:
        for cell in each.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                held = cell.cell_contents
                if isinstance(held, FunctionType) and not any(held is other for other in found):
                    found.append(held)
    return found


def replaced_code() -> str:
    """What a program replaced in torch, or does to each of its calls, in words; empty if nothing is known."""
    if torch._C._len_torch_function_stack() or _get_current_dispatch_mode_stack():
        return "a mode of torch is active, such as a default device"
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks:
        return "hooks on saved tensors are active"
    for name, held in _functions():
        if isinstance(held, FunctionType):
            if not _is_own_code(held):
                return f"{name} was replaced by a function in {held.__code__.co_filename}"
        elif not isinstance(held, _OTHER_CALLABLES) and type(held).__module__ not in _OTHER_MODULES:
            return f"{name} was replaced by a {type(held).__qualname__}"
    return next(_foreign_functions(), "") or next(_foreign_kernels(), "")


def _functions() -> Iterator[tuple[str, Any]]:
    """What can be called of all that torch and Python have under their names, or for their operators."""
    for home in (*_HOMES, torch.functional, torch._VF):
        where = home.__name__ if isinstance(home, ModuleType) else "torch.Tensor"
        for name, held in vars(home).items():
            found = getattr(held, "__func__", None) or getattr(held, "fget", None) or held
            if isinstance(found, functools._lru_cache_wrapper):
                found = found.__wrapped__
            if callable(found) and (home, name) not in _UNUSED:
                yield f"{where}.{name}", found
    for overload, decomposition in decomposition_table.items():
        yield f"the decomposition of {overload.name()}", decomposition
    for packet in [each for each in vars(torch.ops.aten).values() if isinstance(each, OpOverloadPacket)]:
        for overload in [each for each in vars(packet).values() if isinstance(each, OpOverload)]:
            for key, kernel in (*overload.py_kernels.items(), *overload.python_key_table.items()):
                yield f"the kernel of {overload.name()} for {key}", kernel


_CALLABLES_OF = ("builtins", "types", "collections", "typing", "typing_extensions", "torch", "sympy")
"""The modules of classes of which torch's modules hold objects that can be called, besides functions."""


def _called(held: Any) -> Any:
    """What a partial, a cached function or a method calls; any other object itself."""
    kind = type(held)
    if kind is functools.partial:
        return _called(held.func)
    if kind is functools._lru_cache_wrapper:
        return _called(held.__wrapped__)
    return held.__func__ if kind is MethodType else held


def _foreign_functions() -> Iterator[str]:
    """The functions in torch's modules, and objects in their place, that are not torch's and not imported.

    Those of Dynamo may be any, because it runs in each process.
    """
    for home, module in [*sys.modules.items()]:
        is_of_torch = home.partition(".")[0] == "torch" and not home.startswith("torch._dynamo")
        if not is_of_torch or not isinstance(module, ModuleType):
            continue
        for name, held in [*vars(module).items()]:
            called = _called(held)
            if _may_hold(called) or (module, name) in _UNUSED or _imports(module, name, held):
                continue
            is_function = type(called) is FunctionType
            kind = f"function in {called.__code__.co_filename}" if is_function else type(called).__qualname__
            yield f"{home}.{name} was replaced by a {kind}"


def _may_hold(called: Any) -> bool:
    """Whether modules of torch may have an object: it is no callable, a class, or known by what it is."""
    kind = type(called)
    if kind is FunctionType:
        return _may_import(called)
    is_known = kind.__module__.partition(".")[0] in _CALLABLES_OF
    return is_known or not callable(called) or issubclass(kind, type)


def _may_import(function: FunctionType) -> bool:
    """Whether modules of torch may have a function: it is torch's, Python's, or of a library of torch's."""
    file = function.__code__.co_filename
    is_of_python = file.startswith((_PYTHON, "<frozen ")) and "site-packages" not in file
    return is_of_python or file.startswith((_PIPEC, _TORCH, *_WRAPPING, *_LIBRARIES))


def _imports(module: ModuleType, name: str, held: Any) -> bool:
    """Whether the source of a module imports ``held`` under ``name``, as of an optional library."""
    file = Path(str(getattr(module, "__file__", "")))
    tree = ast.parse(file.read_bytes() if file.is_file() else b"")
    imports = [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and not each.level]
    homes = [
        (sys.modules.get(str(each.module)), name if alias.name == "*" else alias.name)
        for each in imports
        for alias in each.names
        if (alias.asname or alias.name) in (name, "*")
    ]
    return any(getattr(home, imported, None) is held for home, imported in homes)


def _functions_digest() -> str:
    """A digest of which function is where: one that another one of torch replaced changes it, too."""
    lines = sorted(f"{place} is {name_of(held)} {_code_text(held)}" for place, held in _functions())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _code_text(held: Any) -> str:
    """Where a function in Python is written, what it does, and the defaults of its arguments."""
    if not isinstance(held, FunctionType):
        return ""
    defaults = (*(held.__defaults__ or ()), *(held.__kwdefaults__ or {}).values())
    plain = [each for each in defaults if isinstance(each, bool | int | float | str | None)]
    return f"{held.__code__.co_filename}:{held.__code__.co_firstlineno} {_bytecode(held.__code__)} {plain}"


def _bytecode(code: CodeType) -> str:
    """The instructions of a code, its names, and its constants but for objects."""
    constants = [
        _bytecode(each) if isinstance(each, CodeType) else repr(each)
        for each in code.co_consts
        if isinstance(each, CodeType | bool | int | float | str | tuple | None)
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _foreign_kernels() -> Iterator[str]:
    """The operators of torch that a program defined, or registered a kernel for, in Python."""
    entries = {each.rpartition("/")[0] for each in torch.library._impls}
    for entry in sorted(each for each in entries if each.startswith(("aten/", "prims/"))):
        name = entry.replace("/", "::", 1).removesuffix(".default")
        for file in _files_of_kernels(name):
            by_function = file.startswith(_REGISTERING[: 1 if entry.startswith("prims") else None])
            if by_function or not file.startswith(_TORCH):
                yield f"{name} has a kernel that is registered in {file}"


def _files_of_kernels(operator: str) -> list[str]:
    """The files in Python in which kernels of an operator are registered, or ``<stdin>`` and the like."""
    places = re.findall(r"registered at (.*):\d+", torch._C._dispatch_dump(operator))
    return [place for place in places if not place.endswith(_COMPILED)]


_COMPILED = (".cpp", ".cc", ".cu", ".h", ".hpp", ".mm")


_REGISTERING = (f"{_TORCH}library.py", f"{_TORCH}_library")
"""Where torch has the functions with which programs register kernels, the second of which made ``prims``."""


def global_state(gpu: bool) -> dict[str, object]:
    """The settings, configurations and versions that decide what torch makes of a traced call, by name."""
    configs = {"dynamo": dynamo_config, "functorch": functorch_config, "fx": fx_config}
    return {
        **dict(zip(SETTINGS, map(str, read_settings()), strict=True)),
        **{f"configuration of {name}": _config_text(config) for name, config in configs.items()},
        "autocast": [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")],
        "autocast caches": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "this thread": _thread_text(),
        "functions": _functions_digest(),
        "order of attention kernels": torch._C._get_sdp_priority_order(),
        "einsum": (opt_einsum.is_available(), opt_einsum.enabled, opt_einsum.strategy),
        "packages": {name: _version(name) for name in ("numpy", "scipy", "sympy")},
        "torch": (str(torch.__version__), str(torch.version.git_version), torch.__file__),
        "Python": (sys.version, sys.flags.optimize, platform.machine()),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "GPU": _gpu() if gpu else None,
    }


_autograd: Any = torch._C._autograd

_OF_THREAD: tuple[Callable[[], object], ...] = (
    *(torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set),
    *(torch._C._is_fwd_grad_enabled, torch._C._is_view_replay_enabled, torch._C._is_multithreading_enabled),
    *(_autograd._saved_tensors_hooks_is_enabled, torch._C._is_torch_function_enabled),
)


def _thread_text() -> str:
    """What the dispatcher and autograd are asked to do and to leave out, but for gradients and inference."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        return ", ".join(str(read()) for read in _OF_THREAD)


def _version(package: str) -> str:
    """The version that is loaded; on disk there may be another one by now."""
    loaded = sys.modules.get(package)
    return str(loaded.__version__) if loaded else metadata.version(package)


def _config_text(config: Any) -> str:
    """The values of a configuration, but for the working folder. Functions are by name, and sets in order."""

    def text(value: object) -> str:
        if isinstance(value, set | frozenset):
            return str(sorted(map(text, value)))
        return str(getattr(value, "__qualname__", value))

    values = {name: value for name, value in config.get_config_copy().items() if name != "debug_dir_root"}
    return ", ".join(f"{name}={text(value)}" for name, value in sorted(values.items()))


def _gpu() -> tuple[str, ...]:
    return (
        str(torch.cuda.get_device_properties()),
        str(torch.version.cuda),
        str(torch.backends.cudnn.version()),
    )


_SHAPE_FACTS = (
    *("var_to_hint_override", "replacements"),
    *("unbacked_renamings", "unbacked_inputs", "divisible", "size_like", "specializations", "settings"),
)
"""What a trace has found out about its symbols, besides guards, ranges and sizes."""


def shape_facts(shapes: ShapeEnv) -> Iterator[str]:
    """What a trace found out about its sizes, as text: symbols, guards, and the lines that they come from."""
    for name in _SHAPE_FACTS:
        yield f"{name}: {exact_text(getattr(shapes, name, None))}"
    for guard in shapes.guards:
        yield f"guard {exact_text(guard.expr)} {_place(guard.sloc)}"
    for symbol, place in shapes.replacements_slocs.items():
        yield f"replaced {symbol} {_place(place)}"
    for symbol, asserts in shapes.deferred_runtime_asserts.items():
        yield f"asserted of {symbol}: {exact_text([each.expr for each in asserts])}"


def symbol_texts(shapes: ShapeEnv, text: str, sizes: bool) -> Iterator[str]:
    """The ranges of the symbols in the text of a trace and, with ``sizes``, the sizes of this call.

    Others are the values of integers in tensors, such as the number of batches of a batch norm, which the
    trace does not read.
    """
    known = shapes.backed_var_to_val if hasattr(shapes, "backed_var_to_val") else shapes.var_to_val
    used = {*re.findall(r"\w+", text)}
    for symbol, bounds in shapes.var_to_range.items():
        if str(symbol) in used:
            yield f"{symbol} in {exact_text(bounds)} {exact_text(known.get(symbol)) if sizes else ''}"


class _ExactPrinter(StrPrinter):  # type: ignore[misc]
    """Prints formulas with all digits of their numbers; ``str`` rounds them."""

    def _print_Float(self, number: sympy.Float) -> str:
        return f"Float{number._mpf_}"


def exact_text(value: object) -> str:
    """The text of formulas, ranges, and containers of them: equal texts mean equal values."""
    match value:
        case sympy.Basic():
            return str(_ExactPrinter().doprint(value))
        case ValueRanges():
            return f"[{exact_text(value.lower)}, {exact_text(value.upper)}]"
        case Mapping():
            return f"{{{', '.join(f'{exact_text(key)}: {exact_text(held)}' for key, held in value.items())}}}"
        case Set():
            return f"set({', '.join(sorted(map(exact_text, value)))})"
        case list() | tuple():
            return f"({', '.join(map(exact_text, value))})"
    return repr(value)


def _place(place: Any) -> str:
    frame = place.framework_loc
    return f"{frame} {getattr(frame, 'line', '')} {place.maybe_user_loc}"
