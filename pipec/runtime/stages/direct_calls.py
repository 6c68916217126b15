"""Calls the code that ``torch.compile`` generated directly, without its guards.

``torch.compile`` checks every argument of each call, by guards and in Python. So only the first call with a
key goes through it: the arguments that it passes to the generated code, and how it assembles the results, are
recorded. Later calls do the same directly::

    backward(w, saved, grad, b)    ->    code(w[0], w[3], saved[1], grad), and saved is emptied
    returns                              ({"grad_x": outputs[0]}, (outputs[2], None, outputs[1]))

Tensors are matched by identity. So calls that pass a tensor twice, return or save numbers, or modify their
arguments are never direct.

Calls with equal keys have equal numbers and the same torch state (``call_key``). Dtypes and devices are
compared in each call, and the code checks sizes and strides (``compile_graph``). A call that differs goes
through ``torch.compile`` with all of its guards.
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

_tensor_options = attrgetter("dtype", "device")


def call_key(args: Sequence[Any]) -> Hashable:
    """The key of a call; calls with equal keys may run the same code. None if a call cannot be direct."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return None
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return None
    key: list[Hashable] = [torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()]
    key.append(torch.get_num_threads())
    for arg in args:
        if isinstance(arg, list | tuple):
            key.append(len(arg))
        elif type(arg) is int or isinstance(arg, torch.device):
            key.append(arg)
        elif not isinstance(arg, Tensor):  # such as a float
            return None
    return tuple(key)


@dataclass(frozen=True)
class DirectCall:
    """A function as a direct call of its generated code.

    ``take`` picks the tensor arguments of the code from all passed values, and ``tensor_options`` are their
    dtypes and devices. ``order`` puts them and the ``numbers`` of this key, such as sizes, in order. The
    function empties its list arguments at ``emptied``. ``build`` assembles the result from all passed values,
    all outputs of the code, and None.
    """

    code: Function
    take: Take
    tensor_options: Sequence[tuple[torch.dtype, torch.device]]
    numbers: Sequence[int]
    order: Take
    emptied: Sequence[int]
    build: Take

    def __call__(self, args: Sequence[Any]) -> tuple[bool, Any]:
        """Whether this call matches the recorded one, and the function's result if so."""
        passed = _flattened(args)
        tensors = self.take(passed)
        if [*map(_tensor_options, tensors)] != self.tensor_options:
            return False, None
        try:
            outputs = self.code(*self.order([*tensors, *self.numbers]))
        except AssertionError:  # sizes or strides differ; nothing was changed yet
            return False, None
        for position in self.emptied:
            args[position].clear()
        return True, self.build([*passed, *outputs, None])


class CallRecorder:
    """A backend of ``torch.compile`` that records calls of the generated code."""

    def __init__(self) -> None:
        self._calls: list[tuple[Function, Sequence[Any], Sequence[Any]]] | None = None

    def compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Function:
        """The code for a graph."""
        code = compile_graph(graph, inputs)

        def call(*arguments: Any) -> Any:
            outputs = code(*arguments)
            if self._calls is not None:
                self._calls.append((code, arguments, outputs))
            return outputs

        return call

    def record(self, args: Sequence[Any], call: Callable[[], Any]) -> tuple[DirectCall | None, Any]:
        """Run a ``call`` of a compiled function with ``args``.

        Returns the direct call, or None if there is none, and the function's result.
        """
        passed, lengths = _flattened(args), _lengths(args)
        versions, calls = _versions(passed), list[tuple[Function, Sequence[Any], Sequence[Any]]]()
        self._calls = calls
        try:
            returned = call()
        finally:
            self._calls = None
        emptied = [place for place, length in enumerate(_lengths(args)) if length < lengths[place]]
        is_direct = len(calls) == 1 and not any(args[place] for place in emptied)
        is_direct &= len(passed) == sum(isinstance(x, Tensor) for x in passed) + _num_numbers(args)
        if not is_direct or versions is None or versions != _versions(passed):
            return None, returned
        return _direct(passed, emptied, *calls[0], returned), returned


def _direct(
    passed: Sequence[Any],
    emptied: Sequence[int],
    code: Function,
    arguments: Sequence[Any],
    outputs: Sequence[Any],
    returned: Any,
) -> DirectCall | None:
    """The direct call of ``code``, if all its arguments and results can be matched by identity."""
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    numbers = [value for value in arguments if not isinstance(value, Tensor)]
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
        places |= {id(x): place for place, x in enumerate(outputs, len(passed)) if isinstance(x, Tensor)}
        places[id(None)] = len(passed) + len(outputs)
        build = _building(returned, places)
    except KeyError:
        return None
    next_tensor, next_number = itertools.count(), itertools.count(len(tensors))
    order = _taking([next(next_tensor if isinstance(value, Tensor) else next_number) for value in arguments])
    return DirectCall(code, take, [*map(_tensor_options, tensors)], numbers, order, emptied, build)


def _building(returned: Any, places: Mapping[int, int]) -> Take:
    """A function that assembles the structure of ``returned`` from all values, by their places.

    Raises:
        KeyError: a value has no place, or is a named tuple.
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
    """A function that returns a tuple of the values at ``places``."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda known: tuple([known[place] for place in places])


def _flattened(args: Sequence[Any]) -> list[Any]:
    """All passed values; lists and tuples are replaced by their items."""
    values = list[Any]()
    for arg in args:
        if isinstance(arg, list | tuple):
            values += arg
        else:
            values.append(arg)
    return values


def _is_plain(tensor: Tensor) -> bool:
    """Whether generated code can depend on dtype, device, sizes and strides of a tensor alone."""
    return tensor.layout is torch.strided and not tensor.is_complex() and not tensor.is_neg()


def _num_numbers(args: Sequence[Any]) -> int:
    """The number of arguments that are neither tensors nor sequences; the call's key contains them."""
    return sum(not isinstance(arg, Tensor | list | tuple) for arg in args)


def _lengths(args: Sequence[Any]) -> list[int]:
    return [len(arg) if isinstance(arg, list) else 0 for arg in args]


def _versions(values: Sequence[Any]) -> list[int] | None:
    """The version counter of each tensor; None if torch does not count one."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return None if any(each.is_inference() for each in tensors) else [each._version for each in tensors]
