"""Compiled code called directly, without what ``torch.compile`` does around each call.

``torch.compile`` looks in each call at every value that a function takes, by guards and in Python. So the
first call of a kind goes through it, and what it passes to the code of the graph, and makes of the results,
is noted. Later calls do the same by themselves::

    backward(w, saved, grad, b)    ->    code(w[0], w[3], saved[1], grad), and saved is emptied
    returns                              ({"grad_x": made[0]}, (made[2], None, made[1]))

Identity tells which tensor was passed and which returned. So one that is passed twice is no case for this,
nor are numbers that are returned or among those saved, nor code that changes what it is given.

Calls of a kind have the same numbers, and torch is in the same state (``call_key``). Dtypes and devices
are compared in each of them, and the code looks at sizes and strides (``compile_graph``). A call that
differs goes through ``torch.compile`` with all of its guards.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from pipec.runtime.stages.inductor import compile_graph

Function = Callable[..., Any]
Take = Callable[[Sequence[Any]], Any]

_look = attrgetter("dtype", "device")


def call_key(args: Sequence[Any]) -> Hashable:
    """What is alike in calls that may run the same code; None if a call cannot be direct, as with floats."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return None
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return None
    kind: list[Hashable] = [torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()]
    kind.append(torch.get_num_threads())
    for arg in args:
        if isinstance(arg, list | tuple):
            kind.append(len(arg))
        elif type(arg) is int or isinstance(arg, torch.device):
            kind.append(arg)
        elif not isinstance(arg, Tensor):
            return None
    return tuple(kind)


@dataclass(frozen=True)
class DirectCall:
    """A function as a call of the code of its graph.

    ``take`` picks the tensors that the code is given out of all that is passed, and ``tensor_options`` are
    their dtypes and devices. ``join`` puts them and the ``numbers`` of this kind of call, such as sizes, in
    order. The arguments at ``emptied`` are lists that the function empties. ``build`` makes what it returns
    out of all that was passed, all that the code returned, and None.
    """

    code: Function
    take: Take
    tensor_options: Sequence[tuple[torch.dtype, torch.device]]
    numbers: Sequence[int]
    join: Take
    emptied: Sequence[int]
    build: Take

    def __call__(self, args: Sequence[Any]) -> tuple[bool, Any]:
        """Whether this call is like the noted one, and what the function returns then."""
        passed = _spread(args)
        tensors = self.take(passed)
        if [*map(_look, tensors)] != self.tensor_options:
            return False, None
        try:
            made = self.code(*self.join([*tensors, *self.numbers]))
        except AssertionError:  # of other sizes or strides, before anything is changed
            return False, None
        for position in self.emptied:
            args[position].clear()
        return True, self.build([*passed, *made, None])


class CallRecorder:
    """A backend of ``torch.compile`` that notes calls of the code it has compiled."""

    def __init__(self) -> None:
        self._calls: list[tuple[Function, Sequence[Any], Sequence[Any]]] | None = None

    def compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Function:
        """The code for a graph."""
        code = compile_graph(graph, inputs)

        def call(*given: Any) -> Any:
            made = code(*given)
            if self._calls is not None:
                self._calls.append((code, given, made))
            return made

        return call

    def record(self, args: Sequence[Any], call: Callable[[], Any]) -> tuple[DirectCall | None, Any]:
        """Make a ``call`` of a compiled function with ``args``.

        Returns how to make it directly, or None if that cannot be, and what the function returned.
        """
        passed, lengths = _spread(args), _lengths(args)
        versions, calls = _versions(passed), list[tuple[Function, Sequence[Any], Sequence[Any]]]()
        self._calls = calls
        try:
            returned = call()
        finally:
            self._calls = None
        emptied = [place for place, length in enumerate(_lengths(args)) if length < lengths[place]]
        is_told = len(calls) == 1 and not any(args[place] for place in emptied)
        is_told &= len(passed) == sum(isinstance(x, Tensor) for x in passed) + _num_numbers(args)
        if not is_told or versions is None or versions != _versions(passed):
            return None, returned
        return _direct(passed, emptied, *calls[0], returned), returned


def _direct(
    passed: Sequence[Any],
    emptied: Sequence[int],
    code: Function,
    given: Sequence[Any],
    made: Sequence[Any],
    returned: Any,
) -> DirectCall | None:
    """A call of ``code`` as a direct one, if identity tells what it was given and what is returned."""
    tensors = [value for value in given if isinstance(value, Tensor)]
    numbers = [value for value in given if not isinstance(value, Tensor)]
    if not all(map(_is_plain, tensors)) or not all(type(number) is int for number in numbers):
        return None
    count = Counter(map(id, passed))
    places = {
        id(value): place
        for place, value in enumerate(passed)
        if isinstance(value, Tensor) and count[id(value)] == 1
    }
    try:
        take = _taking([places[id(tensor)] for tensor in tensors])
        places |= {id(x): place for place, x in enumerate(made, len(passed)) if isinstance(x, Tensor)}
        places[id(None)] = len(passed) + len(made)
        build = _building(returned, places)
    except KeyError:
        return None
    next_tensor, next_number = itertools.count(), itertools.count(len(tensors))
    join = _taking([next(next_tensor if isinstance(value, Tensor) else next_number) for value in given])
    return DirectCall(code, take, [*map(_look, tensors)], numbers, join, emptied, build)


def _building(returned: Any, places: Mapping[int, int]) -> Take:
    """What makes the like of ``returned`` out of all values, each at its place by identity.

    Raises:
        KeyError: a value has no place, or is a tuple with names.
    """
    match returned:
        case dict():
            names, values = tuple(returned), _building(tuple(returned.values()), places)
            return lambda known: dict(zip(names, values(known), strict=True))
        case list():
            items = _building(tuple(returned), places)
            return lambda known: [*items(known)]
        case tuple() if type(returned) is not tuple:
            raise KeyError(type(returned))
        case tuple() if not any(isinstance(each, dict | list | tuple) for each in returned):
            return _taking([places[id(each)] for each in returned])
        case tuple():
            parts = [_building(each, places) for each in returned]
            return lambda known: tuple([part(known) for part in parts])
    return itemgetter(places[id(returned)])


def _taking(places: Sequence[int]) -> Take:
    """What makes a tuple of the values at some places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda known: tuple([known[place] for place in places])


def _spread(args: Sequence[Any]) -> list[Any]:
    """All values that are passed, with those of lists and tuples in their place."""
    values = list[Any]()
    for arg in args:
        if isinstance(arg, list | tuple):
            values += arg
        else:
            values.append(arg)
    return values


def _is_plain(tensor: Tensor) -> bool:
    """Whether dtype, device, sizes and strides say all that code may have been told of a tensor."""
    return tensor.layout is torch.strided and not tensor.is_complex() and not tensor.is_neg()


def _num_numbers(args: Sequence[Any]) -> int:
    """How many arguments are no tensors by themselves. Those are in the kind of the call."""
    return sum(not isinstance(arg, Tensor | list | tuple) for arg in args)


def _lengths(args: Sequence[Any]) -> list[int]:
    return [len(arg) if isinstance(arg, list) else 0 for arg in args]


def _versions(values: Sequence[Any]) -> list[int] | None:
    """How often each tensor was changed; None where torch does not count that."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return None if any(each.is_inference() for each in tensors) else [each._version for each in tensors]
