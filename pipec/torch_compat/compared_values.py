"""What a later call is compared with: modules and tensors, torch's settings, and values that a trace read.

The state of all modules and tensors is read in few calls: thousands of attributes before each step.
"""

import array
import importlib
import itertools
import operator
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.modules import module
from torch.utils.hooks import RemovableHandle

_MODULE_FIELDS = operator.attrgetter(
    "training",
    "_modules",
    "_parameters",
    "_buffers",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_TENSOR_FIELDS = operator.attrgetter("shape", "dtype", "requires_grad")
_HOOKS = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_values = operator.methodcaller("values")


def module_contents(modules: Sequence[torch.nn.Module]) -> tuple[list[Any], list[Any]]:
    """The current contents of modules: what is compared by value, and the objects compared by identity.

    The values are modes, hooks, classes, and the numbers and names of children, parameters and buffers. The
    objects are these children, parameters and buffers; some may be None.
    """
    training, children, parameters, buffers, *hooks = zip(*map(_MODULE_FIELDS, modules), strict=True)
    registries = (*children, *parameters, *buffers)
    filled = [*filter(None, registries)]
    values = [
        training,
        [*map(_numbers, zip(*hooks, strict=True))] if _any_in(hooks) else [],
        [*map(type, modules)],
        [*map(len, registries)],
        [*itertools.chain.from_iterable(filled)],
    ]
    return values, [*itertools.chain.from_iterable(map(_values, filled))]


def tensor_contents(tensors: Sequence[Tensor]) -> tuple[list[Any], list[bool]]:
    """The shape, dtype and ``requires_grad`` of tensors; if any has a gradient hook, also which have one."""
    with torch.DisableTorchFunctionSubclass():  # a tenth of the time, for tensors of a subclass
        hooked = [*map(has_gradient_hook, tensors)] if _any_in(map(_HOOKS, tensors)) else []
        return [*map(_TENSOR_FIELDS, tensors)], hooked


def _registry(register: Callable[..., RemovableHandle]) -> Any:
    """Where torch keeps the hooks that a function registers. No hook stays there."""
    handle = register(lambda *call: None)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks


_FORWARD_HOOKS = _registry(module.register_module_forward_hook)
_FORWARD_PRE_HOOKS = _registry(module.register_module_forward_pre_hook)
_BACKWARD_PRE_HOOKS = _registry(module.register_module_full_backward_pre_hook)


def num_global_hooks() -> int:
    """The number of the hooks that torch calls for every module."""
    backward = len(module._global_backward_hooks) + len(_BACKWARD_PRE_HOOKS)
    return len(_FORWARD_HOOKS) + len(_FORWARD_PRE_HOOKS) + backward


def has_global_forward_hooks() -> bool:
    """Whether torch calls hooks around the forward of every module."""
    return bool(_FORWARD_HOOKS or _FORWARD_PRE_HOOKS)


def has_forward_pre_hooks(owner: torch.nn.Module) -> bool:
    """Whether hooks may change the arguments of a module."""
    return bool(owner._forward_pre_hooks)


def has_gradient_hook(tensor: torch.Tensor) -> bool:
    """Whether the leaf ``tensor`` has a hook that autograd calls with its gradient."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def num_changes(tensor: torch.Tensor) -> int:
    """How often the tensor has been changed in place."""
    return tensor._version


def _numbers(hooks: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """The numbers that torch gave the forward and backward hooks of a module."""
    return tuple(itertools.chain.from_iterable(hooks))


def _any_in(collections: Iterable[Iterable[object]]) -> bool:
    return any(itertools.chain.from_iterable(collections))


uninitialized: Any = torch.utils.deterministic
cudnn: Any = torch.backends.cudnn
mkldnn: Any = torch.backends.mkldnn


def _precision(operators: Any) -> Callable[[], str]:
    """Reads the precision of float32 products, which torch's older settings change too; "ieee" if unset."""
    return lambda: "ieee" if (precision := operators.fp32_precision) == "none" else precision


SETTINGS: Mapping[str, Callable[[], Any]] = {
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "warnings only for nondeterministic algorithms": torch.is_deterministic_algorithms_warn_only_enabled,
    "filling of uninitialized memory": lambda: uninitialized.fill_uninitialized_memory,
    "float32 precision": _precision(torch.backends),
    "float32 matmul precision on GPUs": _precision(cuda.matmul),
    "float32 convolution precision on GPUs": _precision(cudnn.conv),
    "float32 RNN precision on GPUs": _precision(cudnn.rnn),
    "float32 matmul precision on CPUs": _precision(mkldnn.matmul),
    "float32 convolution precision on CPUs": _precision(mkldnn.conv),
    "float32 RNN precision on CPUs": _precision(mkldnn.rnn),
    "reduced precision of float16 sums": lambda: cuda.matmul.allow_fp16_reduced_precision_reduction,
    "reduced precision of bfloat16 sums": lambda: cuda.matmul.allow_bf16_reduced_precision_reduction,
    "cudnn": lambda: cudnn.enabled,
    "cudnn deterministic": lambda: cudnn.deterministic,
    "cudnn benchmark": lambda: cudnn.benchmark,
    "oneDNN": lambda: mkldnn.enabled,
    "oneDNN deterministic": lambda: mkldnn.deterministic,
    "flash attention": cuda.flash_sdp_enabled,
    "memory-efficient attention": cuda.mem_efficient_sdp_enabled,
    "math attention": cuda.math_sdp_enabled,
    "cudnn attention": cuda.cudnn_sdp_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "default device": lambda: torch.get_default_device().type,
}
"""Functions that read the settings, by name."""


def read_settings() -> tuple[Any, ...]:
    """The current values, in the order of ``SETTINGS``."""
    return tuple([read() for read in SETTINGS.values()])


ARRAYS = (np.ndarray, np.generic, array.array, bytearray)
"""Classes of mutable values that are compared by their bytes."""


class _Imports(dict[str, Any]):
    """The modules that Dynamo names in the globals of a traced function: ``__import_a_dot_b`` is ``a.b``."""

    def __missing__(self, name: str) -> Any:
        if not name.startswith(_IMPORTED):
            raise KeyError(name)
        self[name] = importlib.import_module(name.removeprefix(_IMPORTED).replace("_dot_", "."))
        return self[name]


_IMPORTED = "__import_"
_imports = _Imports()


def evaluate(source: str | CodeType, traced: torch.nn.Module) -> Any:
    """The value of an expression of Dynamo's, such as ``L['self'].model.h[0].p``; ABSENT if there is none.

    The same in every process: the expression begins at the traced module or at an imported Python module.
    """
    try:
        return eval(source, {"L": {"self": traced}, "G": _imports})
    except Exception:  # attributes of the model's objects may raise any error
        return ABSENT


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def fqn_of(source: str) -> str:
    """``L['self']._modules['model'].h[0]`` and ``getattr(L['self'].model.h, '0')`` as ``model.h.0``."""
    source = re.sub(r"^___(from_numpy|as_tensor)\((.*)\)$", r"\2", source)
    dotted, changed = re.sub(rf"G\['{_IMPORTED}(\w+)'\]", lambda x: x[1].replace("_dot_", "."), source), 1
    while changed:
        dotted, changed = re.subn(r"getattr\(([^()]*), '(.*?)'\)", r"\1.\2", dotted)
    dotted = re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", dotted)
    dotted = re.sub(r"\.(__dict__|_modules)\b", "", dotted)
    return dotted.removeprefix("L.self").removeprefix(".")


def by_name(found: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """These pairs as a dict. A second value of the same name, as written, gets a longer one."""
    named = dict[str, Any]()
    for name, value in found:
        while name in named:
            name += "'"
        named[name] = value
    return named


@dataclass(frozen=True)
class Compared:
    """The parts of a value that are compared, the first of which says what it is.

    The value is held, so that no other one gets its ``id``.
    """

    parts: tuple[Any, ...]
    held: object = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.parts[0]} ({zlib.crc32(repr(self.parts).encode()):08x})"


def comparable(value: Any) -> Any:
    """What a later call compares of a value: of a tensor that it is the same one, not changed in place."""
    if isinstance(value, torch.Tensor):
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided
        address = value.data_ptr() if is_plain else 0
        return Compared(("a tensor", id(value), num_changes(value), address), value)
    if isinstance(value, np.ndarray | np.generic):
        return Compared((f"{type(value).__name__} {value.dtype}{list(value.shape)}", value.tobytes()))
    if isinstance(value, array.array | bytearray):
        return Compared((type(value).__name__, bytes(value)))
    return frozenset(value) if isinstance(value, set) else value
