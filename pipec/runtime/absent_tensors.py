"""Tensors of a model whose values this process does not have: other processes hold them, or shards of them.

Or they are in files still, to be read once the stages are cut.

An absent tensor stays the object that it was, in a subclass, and keeps shape, dtype, device and
``requires_grad``. Its memory is one element. An optimizer passes it over, because its gradient is None. What
is computed of absent tensors and numbers element by element is absent, too: each rank updates and averages
what it holds. Everything else raises InputError.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import GetSetDescriptorType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from pipec.errors import InputError
from pipec.runtime.wrappers import calls_module, refuse_wrappers
from pipec.torch_compat import pytree

plain_tensors = torch.DisableTorchFunctionSubclass
"""Inside a ``with`` of it, absent tensors are plain ones: of NaN, each in the memory of one element."""


@dataclass(frozen=True)
class Absence:
    """The name of a tensor, where its values are, and what it was before: its class and its strides.

    One that is ``unread`` gets its values once it is known which process is to hold it.
    """

    name: str
    place: str
    is_sharded: bool
    kind: type[Tensor]
    stride: tuple[int, ...]
    is_unread: bool = False


class _Absent:
    """What the classes of absent tensors have in common."""

    absence: Absence
    grad: Tensor | None = None  # not a property as in torch: optimizers read it in each update

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA or (func in _TEMPLATES and not is_absent(args[0])):
            return _metadata(func, args, kwargs)
        if func == _SET_DATA:
            return _set_data(*args)
        if func in _ELEMENTWISE:
            return _elementwise(func, args, kwargs)
        if isinstance(getattr(func, "__self__", None), GetSetDescriptorType) and len(args) == 1:
            return _property(func, args[0])
        if func in _ELEMENTWISE_UPDATES:
            return _update(func, args, kwargs)
        if func in _UPDATES_OF_LISTS:
            return _update_lists(func, args, kwargs)
        _refuse(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse("copy.deepcopy", [self])

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse("saving", [self])

    def __repr__(self, *, tensor_contents: object = None) -> str:
        with plain_tensors():
            found = cast(Tensor, self)
            return f"<{self.absence.name}: {found.dtype}, {list(found.shape)}, {self.absence.place}>"


class AbsentParameter(_Absent, nn.Parameter):  # type: ignore[misc]
    """A parameter that other processes hold, or shards of it. A script may give the latter whole values."""


class AbsentBuffer(_Absent, Tensor):  # type: ignore[misc]
    """A buffer that other processes hold, or what was computed of absent tensors."""


def is_absent(tensor: object) -> bool:
    """Whether this process does not have the values of a tensor."""
    return isinstance(tensor, _Absent)


def is_unread(tensor: object) -> bool:
    """Whether the values of a tensor are still in a file."""
    return isinstance(tensor, _Absent) and tensor.absence.is_unread


def release_unread(name: str, tensor: Tensor, place: str) -> None:
    """Free the memory of a tensor whose values are to be read from a file."""
    _release(tensor, Absence(name, place, False, type(tensor), tensor.stride(), is_unread=True))


def release_elsewhere(name: str, tensor: Tensor, place: str) -> None:
    """Free the memory of a tensor that others hold, and of its gradient. It stays the same object."""
    if is_unread(tensor):
        absent = cast(_Absent, tensor)
        absent.absence = replace(absent.absence, place=place, is_unread=False)
    elif not is_absent(tensor):
        _release(tensor, Absence(name, place, False, type(tensor), tensor.stride()))


def release_sharded(name: str, parameter: nn.Parameter) -> None:
    """Free the memory of a parameter that is kept in shards. A gradient stays: it shows that there is one."""
    if not is_absent(parameter):
        gradient = parameter.grad
        _release(parameter, Absence(name, "kept in shards", True, type(parameter), parameter.stride()))
        parameter.grad = gradient


def hold(tensor: Tensor, values: Tensor) -> None:
    """Give an absent tensor these values as its memory. It is what it was before."""
    if is_absent(tensor):
        absent = cast(_Absent, tensor)
        gradient = vars(absent).pop("grad", None)
        tensor.__class__ = vars(absent).pop("absence").kind
        tensor.data = values
        tensor.grad = gradient
    else:
        tensor.data = values


@contextlib.contextmanager
def materialized(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give absent tensors undefined values inside a ``with``, to be captured.

    They are on the CPU, where memory that nobody touches takes no room, or stay on meta.
    """
    before: list[tuple[Tensor, type[Tensor], dict[str, Any], Tensor]] = []
    for tensor in filter(is_absent, tensors):
        with plain_tensors():
            memory, device = tensor.data, tensor.device if tensor.is_meta else "cpu"
        state, absence = dict(vars(tensor)), cast(_Absent, tensor).absence
        before.append((tensor, type(tensor), state, memory))
        size = memory.shape, absence.stride
        hold(tensor, torch.empty_strided(*size, dtype=memory.dtype, device=device))
    try:
        yield
    finally:
        for tensor, kind, state, memory in before:
            tensor.grad = None
            tensor.data = memory
            tensor.__class__ = kind
            vars(tensor).update(state)


def copies_of_absent(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """A copy of each absent tensor by its ``id``, as ``copy.deepcopy`` takes them in ``memo``."""
    return {id(tensor): _alike(tensor) for tensor in tensors if is_absent(tensor)}


def _release(tensor: Tensor, absence: Absence) -> None:
    _refuse_scripting()
    tensor.grad = None
    tensor.data = _one_element(tensor).expand(tensor.shape)
    tensor.__class__ = AbsentParameter if isinstance(tensor, nn.Parameter) else AbsentBuffer
    cast(_Absent, tensor).absence = absence


@functools.cache
def _refuse_scripting() -> None:
    """Let ``torch.jit.script`` refuse modules with absent tensors, which it reads without calling any."""
    plain = torch.jit.script

    @functools.wraps(plain)
    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        for tensor in (*obj.parameters(), *obj.buffers()) if isinstance(obj, nn.Module) else ():
            if is_absent(tensor):
                _refuse("torch.jit.script", [tensor])
        return plain(obj, *args, **kwargs)

    torch.jit.script = script


def _one_element(like: Tensor) -> Tensor:
    """A number that shows where it should not be, of the dtype and on the device of a tensor."""
    number = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), number, dtype=like.dtype, device=like.device)


def _alike(tensor: Tensor) -> Tensor:
    """A copy of an absent tensor."""
    with plain_tensors():
        memory, trained = _one_element(tensor).expand(tensor.shape), tensor.requires_grad
    copied = nn.Parameter(memory, trained) if isinstance(tensor, nn.Parameter) else memory
    copied.__class__ = type(tensor)
    vars(copied).update({name: each for name, each in vars(tensor).items() if name != "grad"})
    return copied


def _number(value: Any) -> Any:
    """For an absent tensor, a tensor of one element of its dtype."""
    if not is_absent(value):
        return value
    with plain_tensors():
        return value.detach().as_strided((), ())


def _metadata(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``func`` returns, which does not depend on values."""
    refuse_wrappers()
    with plain_tensors():
        return func(*args, **kwargs)


def _property(get: Callable[..., Any], tensor: Tensor) -> Any:
    """A property of an absent tensor such as ``shape``. Raises InputError if it is a tensor, as ``mT`` is."""
    found = _metadata(get, [tensor], {})
    if isinstance(found, Tensor):
        _refuse(get, [tensor])
    return found


def _elementwise(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An absent tensor, of the dtype and on the device that ``func`` of these arguments has."""
    first = _require_all_absent(func, args, kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    with plain_tensors(), torch.no_grad():
        made: Tensor = func(*map(_number, args), **pytree.tree_map(_number, kwargs)).expand(first.shape)
    made.__class__ = AbsentBuffer
    cast(_Absent, made).absence = cast(_Absent, first).absence
    return made


def _update(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Nothing: the process that holds the values makes the update."""
    _require_all_absent(func, args, kwargs, may_be_sharded=False)
    return cast(Tensor, args[0])


def _update_lists(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The update of the tensors of lists that are not absent."""
    lists = [each for each in args if isinstance(each, list | tuple)]
    for row in zip(*lists, strict=True):
        if any(map(is_absent, row)):
            _require_all_absent(func, row, {}, may_be_sharded=False)
    there = [not is_absent(each) for each in lists[0]]
    kept = [
        [x for x, here in zip(each, there, strict=True) if here] if isinstance(each, list | tuple) else each
        for each in args
    ]
    return func(*kept, **kwargs) if any(there) else None


def _require_all_absent(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], may_be_sharded: bool = True
) -> Tensor:
    """The first absent tensor. Raises InputError if one of the others is neither absent nor a number."""
    tensors = _tensors(args, kwargs)
    absent = [each for each in tensors if is_absent(each)]
    if any(each.dim() for each in tensors if not is_absent(each)) or len({each.shape for each in absent}) > 1:
        _refuse(func, args, kwargs)
    sharded = [each for each in absent if cast(_Absent, each).absence.is_sharded]
    if sharded and not may_be_sharded:
        _refuse(func, sharded)
    return (sharded or absent)[0]


def _set_data(tensor: Tensor, values: Tensor) -> None:
    """``tensor.data = values``."""
    if not is_absent(tensor):
        _refuse("writing to .data", [values])
    if is_absent(values):
        with plain_tensors():
            tensor.data = _one_element(values).expand(values.shape)
    elif cast(_Absent, tensor).absence.is_sharded and isinstance(tensor, nn.Parameter):
        hold(tensor, values)
    else:
        _refuse("writing to .data", [tensor])


def _tensors(args: object, kwargs: object) -> list[Tensor]:
    return [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]


def _refuse(func: Callable[..., Any] | str, args: Sequence[Any], kwargs: Any = None) -> NoReturn:
    refuse_wrappers()
    absence = next(cast(_Absent, each).absence for each in _tensors(args, kwargs or {}) if is_absent(each))
    refuse_unread(*[each for each in _tensors(args, kwargs or {}) if is_unread(each)])
    found = f"{absence.name} is {absence.place}, and this process has none of its values"
    if calls_module():
        raise InputError(
            f"the model was called, not the pipeline: {found}. Call pipe(...), pipe.eval_step(...) or "
            "pipe.step(...), in which all ranks run their stages. For what a pipeline has no method for, as "
            "generate(), every rank calls pipe.gather_into(model); then rank 0 has the whole model until "
            "the next step"
        )
    name = func if isinstance(func, str) else getattr(func, "__qualname__", str(func)).split(".")[-1]
    if name == "__get__":
        read = getattr(func, "__self__")  # noqa: B009
        name = f"reading .{getattr(read, '__name__', None) or read.fget.__name__}"
    raise InputError(
        f"{name} cannot use {absence.name}: it is {absence.place}, and this process has none of its values. "
        "Every rank calls one of these: pipe.state_dict(), which is the whole model's on rank 0; "
        "pipe.gather_into(model), after which rank 0 has the whole model; pipe.save_checkpoint(...), "
        "pipe.load_state_dict(...) or copy.deepcopy(pipe). An average of parameters, such as "
        "AveragedModel(pipe), is right if it is made once the pipeline is compiled, by a step or "
        "pipe.prepare(...); a penalty on parameters belongs into the model's forward or the optimizer"
    )


def refuse_unread(*tensors: Tensor) -> None:
    """Raise InputError if the values of a tensor are still in a file."""
    for tensor in tensors:
        if is_unread(tensor):
            absence = cast(_Absent, tensor).absence
            raise InputError(
                f"{absence.name} is {absence.place}: each rank reads the weights of its own stages once "
                "these are cut, in the first call. Make that before, or pipe.prepare(...), which takes what "
                "step takes and runs nothing"
            )


def _functions(owner: object, names: str) -> frozenset[Callable[..., Any]]:
    return frozenset(getattr(owner, name) for name in names.split() if hasattr(owner, name))


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

_METADATA = (
    _functions(
        Tensor,
        "size dim numel nelement element_size ndimension is_floating_point is_complex is_signed is_inference "
        "get_device requires_grad_ register_hook register_post_accumulate_grad_hook __len__ __format__ "
        "has_names is_conj is_neg is_distributed new_zeros new_ones new_full new_empty new_tensor",
    )
    | _functions(torch, "is_floating_point is_complex is_signed numel is_conj is_neg is_inference")
    | {
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        torch._has_compatible_shallow_copy_type,
    }
)
"""What does not depend on the values."""

_TEMPLATES = _functions(Tensor, "to type_as expand_as view_as reshape_as") | _functions(torch, "result_type")
"""What reads the dtype, the device or the shape of its second argument alone."""

_ELEMENTWISE = (
    _functions(
        Tensor,
        "to half float double bfloat16 cpu cuda clone detach add sub mul div true_divide lerp rsub neg "
        "__radd__ __rsub__ __rmul__ __rtruediv__",
    )
    | _functions(
        torch, "clone add sub mul div true_divide lerp rsub neg empty_like zeros_like ones_like full_like"
    )
    | {Tensor.data.__get__}  # type: ignore[attr-defined]
)
"""What gives absent tensors of absent tensors and numbers."""

_ELEMENTWISE_UPDATES = _functions(
    Tensor, "copy_ add_ sub_ mul_ div_ true_divide_ lerp_ zero_ fill_ clamp_ clamp_min_ clamp_max_ detach_"
)
"""What changes an absent tensor by absent tensors and numbers alone."""

_UPDATES_OF_LISTS = _functions(
    torch,
    "_foreach_copy_ _foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_lerp_ _foreach_zero_",
)
"""The same for lists of tensors, of which some may be absent."""
