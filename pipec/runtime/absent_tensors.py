"""Tensors of a model whose values this process does not have: other processes hold them, or shards of them.

Or they are in files still, to be read once the stages are cut.

An absent tensor stays the object that it was, in a subclass, and keeps shape, dtype, device and
``requires_grad``. Its memory is one element. An optimizer passes it over, because its gradient is None. What
is computed of absent tensors and numbers element by element is absent, too: each rank updates and averages
what it holds. Everything else raises InputError.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipec.errors import InputError
from pipec.torch_compat import pytree
from pipec.torch_compat.run_time import TorchDispatchMode, memory_id

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
        if func == _SET_DATA:
            return _set_data(*args)
        if func in _READ_MEMORY:
            _refuse(func, args, kwargs)
        with plain_tensors(), _Elementwise(func) as mode:
            found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            return mode.checked(found, _tensors(args, kwargs))
        if not isinstance(found, _METADATA):
            _refuse(func, args, kwargs)
        return found

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


class _Elementwise(TorchDispatchMode):
    """Lets operators that ``func`` runs work on absent tensors element by element, and refuses all others.

    Shapes and types need no operator. What reads values, or puts them into another shape, does.
    """

    def __init__(self, func: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._func = func
        self._last: Tensor | None = None

    def __torch_dispatch__(self, op: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(op).split(".")[1]
        absent = [each for each in _tensors(args, kwargs) if is_absent(each)]
        if not absent or name.startswith("new_"):
            return op(*args, **kwargs)
        if name.startswith("_foreach_") and name.endswith("_"):
            return self._update_lists(op, args, kwargs)
        is_elementwise = torch.Tag.pointwise in op.tags or name in _ELEMENTWISE
        if not is_elementwise or torch.Tag.nondeterministic_seeded in op.tags or "out" in kwargs:
            _refuse(self._func, absent)
        first = self._first(args, kwargs)
        if name.endswith("_"):
            if not is_absent(args[0]) or _is_sharded(args[0]):  # no process would change it
                _refuse(self._func, absent)
            return args[0]
        numbers, options = pytree.tree_map(_number, (list(args), kwargs))
        options.pop("memory_format", None)
        self._last = first
        with torch.no_grad():
            return _like(op(*numbers, **options).expand(first.shape), first)

    def checked(self, found: Tensor, given: Sequence[Tensor]) -> Tensor:
        """A result, which is absent if it was computed of absent tensors, or has the memory of one."""
        if is_absent(found) or any(found is each for each in given):
            return found
        with plain_tensors():
            memory = memory_id(found)
            aliases = [each for each in given if is_absent(each) and memory_id(each) == memory]
            source = aliases[0] if aliases else self._last
            if source is None:
                return found
            if found.shape == source.shape:
                return _like(found, source)
        _refuse(self._func, given)

    def _first(self, args: object, kwargs: object = None) -> Tensor:
        """The first absent tensor. Raises InputError if one of the others is neither absent nor a number."""
        tensors = _tensors(args, kwargs)
        absent = [each for each in tensors if is_absent(each)]
        shapes = {each.shape for each in tensors if is_absent(each) or each.dim()}
        if len(shapes) > 1 or any(each.dim() for each in tensors if not is_absent(each)):
            _refuse(self._func, absent)
        return next(filter(_is_sharded, absent), absent[0])

    def _update_lists(self, op: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """The update of the tensors of lists that are not absent. Their processes update the others."""
        lists = [each for each in args if isinstance(each, list | tuple)]
        for row in zip(*lists, strict=True):
            if any(map(is_absent, row)):
                self._first(row)
                if not is_absent(row[0]) or _is_sharded(row[0]):
                    _refuse(self._func, row)
        there = [not is_absent(each) for each in lists[0]]
        kept = [
            [x for x, is_here in zip(each, there, strict=True) if is_here]
            if any(each is x for x in lists)
            else each
            for each in args
        ]
        return op(*kept, **kwargs) if any(there) else None


def is_absent(tensor: object) -> bool:
    """Whether this process does not have the values of a tensor."""
    return isinstance(tensor, _Absent)


def is_unread(tensor: object) -> bool:
    """Whether the values of a tensor are still in a file."""
    return isinstance(tensor, _Absent) and tensor.absence.is_unread


def _is_sharded(tensor: object) -> bool:
    return isinstance(tensor, _Absent) and tensor.absence.is_sharded


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
    return value.detach().as_strided((), ()) if is_absent(value) else value


def _like(made: Tensor, absent: Tensor) -> Tensor:
    """The same tensor as one that is absent where another one is."""
    made.__class__ = AbsentBuffer
    cast(_Absent, made).absence = cast(_Absent, absent).absence
    return made


def _set_data(tensor: Tensor, values: Tensor) -> None:
    """``tensor.data = values``."""
    if not is_absent(tensor):
        _refuse("writing to .data", [values])
    if is_absent(values):
        with plain_tensors():
            tensor.data = _one_element(values).expand(values.shape)
    elif _is_sharded(tensor) and isinstance(tensor, nn.Parameter):
        hold(tensor, values)
    else:
        _refuse("writing to .data", [tensor])


def _tensors(args: object, kwargs: object = None) -> list[Tensor]:
    return [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]


def _refuse(func: Callable[..., Any] | str, args: Sequence[Any], kwargs: Any = None) -> NoReturn:
    absent = [each for each in _tensors(args, kwargs) if is_absent(each)]
    refuse_unread(*absent)
    absence = cast(_Absent, absent[0]).absence
    name = func if isinstance(func, str) else getattr(func, "__qualname__", str(func)).split(".")[-1]
    if name == "__get__":
        read = getattr(func, "__self__")  # noqa: B009
        name = f"reading .{getattr(read, '__name__', None) or read.fget.__name__}"
    raise InputError(
        f"{name} cannot use {absence.name}: it is {absence.place}, and this process has none of its values. "
        "Call pipe(...), pipe.eval_step(...) or pipe.step(...), not the model. For the values, every rank "
        "calls one of these: pipe.state_dict(), which is the whole model's on rank 0; "
        "pipe.gather_into(model), after which rank 0 has the whole model until the next step, as for "
        "model.generate(...); pipe.save_checkpoint(...), "
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


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

_READ_MEMORY = {Tensor.data_ptr, Tensor.storage, Tensor.tolist, torch.autograd.grad}
"""What reads values without an operator, and returns plain numbers."""

_METADATA = (
    *(bool, int, str, tuple, list, type(None), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, RemovableHandle),
)
"""The types of what does not depend on values. Memory, arrays and capsules are none of these."""

_ELEMENTWISE = {
    *("alias", "detach", "detach_", "lift_fresh", "_to_copy", "copy_", "fill", "fill_", "zero_", "rsub"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
}
"""Operators that torch does not call pointwise, although they work element by element."""
