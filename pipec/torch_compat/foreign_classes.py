"""Tells what a script defines that changes what operators of torch compute, and that a graph would lose."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack

_INHERITED: Any = (
    *(Tensor.__torch_function__.__func__, torch.nn.Parameter.__torch_function__),  # type: ignore[attr-defined]
    Tensor.__torch_dispatch__,
)
"""What torch's own classes of tensors have, which leaves operators as they are."""

_MARKS = ("_dynamo", "_has_dynamo", "_specialize_on")


def active_mode() -> str:
    """The first function mode, or hooks on saved tensors, that a script has entered; empty if there are none.

    Modes of torch do not count: tracing knows a default device.
    """
    for mode in _get_current_function_mode_stack():
        if not is_of_torch(type(mode)):
            return f"the mode {type(mode).__qualname__}"
    return "saved_tensors_hooks" if active_saved_tensors_hooks() else ""


def active_saved_tensors_hooks() -> bool:
    """Whether hooks on saved tensors are active that may change values."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not keep_values(hooks)


def keep_values(hooks: Iterable[object]) -> bool:
    """Whether hooks on saved tensors are of ``save_on_cpu`` or of checkpoints, which change no value."""
    modules = "torch.autograd.graph", "torch.utils.checkpoint"
    return all(getattr(hook, "__module__", "") in modules for hook in hooks)


def is_of_torch(definition: object) -> bool:
    """Whether torch or pipec defines a class or a function."""
    return str(getattr(definition, "__module__", "")).startswith(("torch.", "pipec."))


def changes_operators(tensor: Tensor) -> bool:
    """Whether the class of a tensor says what operators compute with it."""
    kind: Any = type(tensor)
    if _is_known(kind) or is_lazy(tensor):
        return False
    function, dispatch = kind.__torch_function__, kind.__torch_dispatch__
    return getattr(function, "__func__", function) not in _INHERITED or dispatch not in _INHERITED


def attributes(tensor: Tensor) -> list[str]:
    """The attributes that a script gave to a tensor, without those by which torch marks its dimensions."""
    return [name for name in vars(tensor) if not name.startswith(_MARKS)]


def is_plain_tensor(tensor: Tensor) -> bool:
    """Whether the class of a tensor adds nothing to what torch's own tensors do."""
    return type(tensor) in (Tensor, torch.nn.Parameter) or _is_known(type(tensor))


def _is_known(kind: type) -> bool:
    """Whether a class of tensors is pipec's own, such as that of results, or of tensors without values."""
    return kind.__module__.startswith("pipec.") or is_fake(kind)


def is_fake(kind: type) -> bool:
    """Whether tensors of a class have no values, only shapes: it is that of the tensors of a capture."""
    return issubclass(kind, Tensor) and kind.__module__ == FakeTensorMode.__module__
