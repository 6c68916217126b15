"""Follows what every tensor is to the batch, while operators run on tensors without memory.

Each operator that torch dispatches is looked up in ``rules``. Tensors that share memory share what is known:
a write through a view changes what its base is.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipec.capture.batch.call import (
    OperatorCall,
    Rule,
    is_pointwise,
    plain_name_of,
    rows_among,
    tensors_in,
    truncates,
    unknown_among,
)
from pipec.capture.batch.movement import as_view_of
from pipec.capture.batch.pointwise import KEEPING
from pipec.capture.batch.rules import KEEP_POWERS, READ_NO_VALUES, READ_SIZES, UNIFORM, rule_of
from pipec.capture.batch.sorting import by_place, of_sorted
from pipec.capture.batch.values import Rows, Sorted, Sum, Value, Whole, power_of
from pipec.graph import Assumed
from pipec.torch_compat import OpOverload, TorchDispatchMode, decompositions, pytree

_META = torch.device("meta")

_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True)
class Known:
    """What a tensor is to the batch.

    ``given``: it follows from the arguments of ``step`` alone. ``uniform``: all its elements are one number,
    so that its rows may be in any order.
    """

    value: Value
    given: bool = False
    uniform: bool = False


@dataclass(eq=False)
class Tracker(TorchDispatchMode):
    """Knows the tensors that were made while it was active.

    ``rows`` stands for the rows of a microbatch; ``symbolic``: no other number is a multiple of it.
    """

    rows: int
    symbolic: bool
    degrees: dict[float, int] = field(default_factory=dict)
    assumed: list[Assumed] = field(default_factory=list)
    """The operators without a rule whose results were taken to have rows, for their sizes say so."""
    of_round: set[int] = field(default_factory=set)
    """The sizes of dimensions that have the rows of all replicas."""
    in_turns: set[int] = field(default_factory=set)
    """Tensors by ``id`` that have them in another order than the batch, and what is made of them."""
    ambiguous: list[int | float] = field(default_factory=list)
    """Numbers that rows are scaled by, and that may be the number of rows, if that is no symbol."""
    trained_norms: int = 0
    drawn: bool = False
    """Random numbers were drawn that belong to no row. Whoever reads it sets it back."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, Known] = {}
        self._kept: list[Any] = []
        self._sharing: dict[int, list[Tensor]] = {}
        self._twins: dict[int, Tensor] = {}
        self._depth = 0

    def known(self, tensor: Tensor) -> Known:
        """What is known of a tensor; one that nobody told of is a constant."""
        return self._known.get(id(tensor), Known(Whole(), given=True))

    def value_of(self, tensor: Tensor) -> Value:
        return self.known(tensor).value

    def tell(self, tensor: Tensor, known: Known) -> Tensor:
        """Note what a tensor is."""
        if id(tensor) not in self._known:
            self._kept.append(tensor)
            self._sharing.setdefault(_memory(tensor), []).append(tensor)
        self._known[id(tensor)] = known
        return tensor

    def overwrite(self, tensor: Tensor, value: Value) -> None:
        """Note that a call has written to a tensor, and so to all that shares its memory."""
        for other in self._sharing.get(_memory(tensor), []):
            self.tell(other, Known(value))

    def shows_memory_of_others(self, tensor: Tensor) -> bool:
        """Whether other tensors have the same memory."""
        return any(other is not tensor for other in self._sharing.get(_memory(tensor), []))

    def twin(self, tensor: Tensor) -> Tensor:
        """A tensor without memory in place of one that has some."""
        if tensor.device == _META:
            return tensor
        if id(tensor) not in self._twins:
            self._kept.append(tensor)
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
            self._twins[id(tensor)] = self.tell(made, self.known(tensor))
        return self._twins[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(args), dict(kwargs or {})
        if any(tensor.device != _META for tensor in tensors_in((args, kwargs))):
            args, kwargs = pytree.tree_map_only(Tensor, self.twin, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _META}
        result = self._run(func, args, kwargs)
        if not isinstance(func, OpOverload):
            return result
        value_of = self._in_one_order(tensors_in((args, kwargs)))
        call = OperatorCall(
            func,
            args,
            kwargs,
            result,
            value_of,
            self.rows,
            self.symbolic,
            self.degrees,
            lambda tensor: self.known(tensor).given,
        )
        is_drawn = _RANDOM in func.tags
        given = all(self.known(tensor).given for tensor in call.tensors) and not is_drawn
        if func._schema.is_mutable and call.tensors and "batch_norm" not in func._schema.name:
            self._write(call, given)
            return result
        results = tensors_in(result)
        if any(id(tensor) in self.in_turns for tensor in call.tensors):
            self.in_turns.update(map(id, results))
        keeps = (is_pointwise(func) or call.name in KEEPING) and not is_drawn
        of_uniform = keeps and all(self.known(x).uniform for x in call.tensors)
        uniform = call.name in UNIFORM or (of_uniform and bool(call.tensors))
        values = call.mixed(_OUT_OF_ORDER) if self._needs_order(call) else self._values(call)
        each = values if isinstance(values, tuple) else (values,) * len(results)
        for tensor, value in zip(results, each, strict=False):
            if not any(tensor is argument for argument in call.tensors):
                known = Known(self._checked(call, tensor, value), given, uniform)
                self.drawn |= is_drawn and isinstance(known.value, Whole)
                self.tell(tensor, known)
        return result

    def _in_one_order(self, tensors: Sequence[Tensor]) -> Callable[[Tensor], Value]:
        """What tensors are, where rows that are uniform follow the order of those that are not."""
        rows = [(self.known(x), v) for x in tensors if isinstance(v := self.value_of(x), Rows)]
        orders = {v.outer * v.inner: v for known, v in rows if not known.uniform}
        sizes = {v.inner // v.divisor for v in map(self.value_of, tensors) if isinstance(v, Sorted)}
        orders |= {size: Rows(0, 1, size) for size in sizes}
        if not orders or not any(known.uniform for known, _ in rows):
            return self.value_of

        def value_of(tensor: Tensor) -> Value:
            known, value = self.known(tensor), self.value_of(tensor)
            if not known.uniform or not isinstance(value, Rows):
                return value
            order = orders.get(value.outer * value.inner, value)
            return replace(value, outer=order.outer, inner=order.inner)

        return value_of

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        made = _STAND_INS.get(plain_name_of(func)) if isinstance(func, OpOverload) else None
        found = made(args) if made else None
        return func(*args, **kwargs) if found is None else found

    def _values(self, call: OperatorCall) -> Value | tuple[Value, ...]:
        """What the results of a call are."""
        name = call.name
        if unknown := None if name in READ_NO_VALUES else unknown_among(call.values):
            return unknown
        grows = self.symbolic and any(call.degree(number) for number in call.numbers)
        is_whole = bool(call.values) and all(isinstance(v, Whole) and not v.degree for v in call.values)
        if is_whole and not grows and name not in _KEEP_FILLS | READ_NO_VALUES:
            return Whole()
        if name in ("mul", "div") and not self.symbolic:
            self.ambiguous += [number for number in call.numbers if call.degree(number) is None]
        if grows and name not in READ_SIZES:
            return call.mixed("computes with the number of rows, which is another one in a microbatch")
        if "batch_norm" in name and "no_" not in name:
            self._note_norm(call)
        rule = rule_of(name, is_pointwise(call.op))
        if name not in READ_NO_VALUES and any(isinstance(value, Sorted) for value in call.values):
            return self._of_sorted(call, rule)
        if rule is not None:
            is_power = any(power_of(value) for value in call.values if not isinstance(value, Sum))
            if is_power and name not in KEEP_POWERS and not is_pointwise(call.op):
                return call.mixed("computes with the number of rows, which is another one in a microbatch")
            return rule(call)
        if not call.values:
            return Whole()
        if (made := self._decomposed(call)) is not None:
            return made
        return self._assume(call)

    def _of_sorted(self, call: OperatorCall, rule: Rule | None) -> Value | tuple[Value, ...]:
        found = of_sorted(call)
        if found is not None:
            return found
        return by_place(call, rule) if rule else self._decomposed(call) or call.unproven()

    def _needs_order(self, call: OperatorCall) -> bool:
        """Whether a call tells rows of all replicas apart by their place, where that is not the batch's."""
        if (
            not self.in_turns
            or not call.tensors
            or id(call.first) not in self.in_turns
            or call.name not in _TELLING_PLACES
        ):
            return False
        dim = call.arguments.get("dim")
        if isinstance(dim, int) and call.first.ndim:
            return call.first.shape[dim] in self.of_round
        return any(size in self.of_round for size in call.first.shape)

    def _note_norm(self, call: OperatorCall) -> None:
        value = call.value_of(call.first)
        training = call.arguments.get("training", True)
        if training and isinstance(value, Rows) and value.dim != 1:
            self.trained_norms += 1

    def _decomposed(self, call: OperatorCall) -> tuple[Value, ...] | None:
        """What torch's decomposition of an operator makes of its arguments."""
        decompose = _trilinear if call.name == "_trilinear" else decompositions().get(call.op)
        if decompose is None or self._depth > 3:
            return None
        self._depth += 1
        try:
            with self:
                made = decompose(*call.args, **call.kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
            return None
        finally:
            self._depth -= 1
        return tuple(map(self.value_of, tensors_in(made)))

    def _assume(self, call: OperatorCall) -> Value:
        """Rows along the one dimension that is as long as the batch, to be checked when the step runs."""
        found = call.unproven()
        rows = rows_among(call.values)
        results = tensors_in(call.result)
        dims = [dim for dim, size in enumerate(call.shape) if size == self.rows] if results else []
        plain = all(isinstance(v, Rows | Whole) and not v.degree for v in call.values)
        if self.symbolic and len(dims) == 1 and rows and plain and len(results) == 1:
            along = [v.dim if isinstance(v := self._row_value(x), Rows) else None for x in call.args]
            if any(isinstance(x, list | tuple) and tensors_in(x) for x in call.args) or call.kwargs:
                return found
            self.assumed.append(Assumed(str(call.op), tuple(along), dims[0], ""))
            return Rows(dims[0])
        return found

    def _row_value(self, argument: Any) -> Value | None:
        return self.value_of(argument) if isinstance(argument, Tensor) else None

    def _checked(self, call: OperatorCall, tensor: Tensor, value: Value) -> Value:
        """The value, unless the tensor has dimensions that grow with the batch and are none of its rows."""
        if not self.symbolic or not isinstance(value, Rows | Sum | Whole):
            return value
        tagged = {dim for dim, size in enumerate(tensor.shape) if call.is_tagged(size)}
        if isinstance(value, Rows) and (call.is_tagged(value.outer) or call.is_tagged(value.inner)):
            return call.mixed("makes something for every pair of rows")
        own = {value.dim} if isinstance(value, Rows) else set()
        if tagged == own:
            if own and tensor.shape[value.dim] != self.rows * value.outer * value.inner:  # type: ignore[union-attr]
                return call.unproven()
            return value
        if own <= tagged and all(tensor.shape[dim] in self.of_round for dim in tagged - own):
            return value
        return call.mixed("makes something for every pair of rows") if own else call.unproven()

    def _write(self, call: OperatorCall, given: bool) -> None:
        """Note what a call has written into an argument, and into all that shares its memory."""
        schema = call.op._schema.arguments
        written = [
            call.arguments[a.name] for a in schema if a.alias_info is not None and a.alias_info.is_write
        ]
        if call.name in ("set", "resize", "set_source_Tensor_storage_offset"):
            values: Value | tuple[Value, ...] = call.unproven()
        elif call.name in _OVERWRITING:
            values = self._overwritten(call)
        else:
            values = self._values(call)
        each = values if isinstance(values, tuple) else (values,) * len(written)
        for tensor, value in zip(tensors_in(written), each, strict=False):
            before = self.value_of(tensor)
            value = self._checked(call, tensor, value)
            given_here = given and self.known(tensor).given
            for other in self._sharing.get(_memory(tensor), []):
                if other is tensor or _is_same(other, tensor):
                    self.tell(other, Known(value, given_here, call.name in UNIFORM))
                else:
                    found = self._beside(call, other, tensor, before, value)
                    self.tell(other, Known(found, given_here and self.known(other).given))
            self.tell(tensor, Known(value, given_here, call.name in UNIFORM))
            self.drawn |= _RANDOM in call.op.tags and isinstance(value, Whole)

    def _overwritten(self, call: OperatorCall) -> Value:
        """``copy_`` and ``fill_``: what was there is gone."""
        target = call.first
        if call.name == "copy" and len(call.tensors) > 1:
            source = call.tensors[1]
            value = self.value_of(source)
            counts = isinstance(value, Sum) or getattr(value, "numbers", False) or power_of(value)
            if truncates(source, target) and counts:
                return unknown_among([value]) or call.unproven()
            if isinstance(value, Rows):
                return value.at(value.dim + target.ndim - source.ndim)
            return self._kept_rows(call, value)
        if call.name == "fill" and len(call.tensors) > 1:
            return self._kept_rows(call, self.value_of(call.tensors[1]))
        number = 0.0 if call.name == "zero" else next(iter(call.numbers), None)
        degree = call.degree(number)
        return self._kept_rows(call, call.unproven() if degree is None else Whole(degree, number))

    def _kept_rows(self, call: OperatorCall, value: Value) -> Value:
        """What is whole, written to each row, is rows. An unknown value may have any number of elements."""
        old = self.value_of(call.first)
        if not isinstance(value, Whole):
            return value
        if isinstance(old, Rows):
            return Rows(old.dim, old.outer, old.inner, value.degree)
        tagged = any(map(call.is_tagged, call.first.shape))
        return unknown_among([old]) or (call.unproven() if tagged else value)

    def _beside(self, call: OperatorCall, other: Tensor, view: Tensor, before: Value, value: Value) -> Value:
        """What a tensor is of whose memory a part was written, that ``view`` shows."""
        old = self.value_of(other)
        if unknown := unknown_among([old, value]) or unknown_among([before]):
            return unknown
        if isinstance(old, Whole) and isinstance(value, Whole) and old.degree == value.degree:
            return Whole(old.degree, old.fill if old.fill == value.fill else None)
        if isinstance(old, Sum) and old == value:
            return old
        if isinstance(value, Rows) and not value.numbers:
            dim = as_view_of(other, view, value, self.rows)
            if dim is not None and getattr(old, "degree", None) == value.degree:
                mapped = Rows(dim, value.outer, value.inner, value.degree)
                if isinstance(old, Whole) or old == mapped:
                    return mapped
        if isinstance(old, Rows) and isinstance(before, Rows) and before == value:
            return old
        return call.unproven("writes into a part of what has another meaning")


_OUT_OF_ORDER = "tells rows of replicas apart by their place, which is another one than in the batch"

_TELLING_PLACES = {
    *("diagonal", "gather", "index", "index_select", "roll", "select", "slice", "split", "split_with_sizes"),
    *("tril", "triu", "unbind", "unfold"),
}

_OVERWRITING = {"copy", "fill", "zero"}
_KEEP_FILLS = {
    "view",
    "expand",
    "clone",
    "_to_copy",
    "unsqueeze",
    "slice",
    "select",
    "transpose",
    "permute",
    "detach",
}


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )


CHOSEN = 5040 * 199
"""How many rows values choose, in the analysis: small numbers divide them, and that of the rows does not."""


def _nonzero(args: Sequence[Any]) -> Tensor:
    return torch.empty(CHOSEN, max(args[0].ndim, 1), dtype=torch.int64, device=_META)


def _masked_select(args: Sequence[Any]) -> Tensor:
    return torch.empty(CHOSEN, dtype=args[0].dtype, device=_META)


def _index(args: Sequence[Any]) -> Tensor | None:
    """``x[mask]``, whose size torch cannot tell without values."""
    x, given = args[0], list(args[1])
    masks = [
        (place, i) for place, i in enumerate(given) if i is not None and i.dtype in (torch.bool, torch.uint8)
    ]
    if not masks:
        return None
    place, mask = masks[0]
    shape = (*x.shape[:place], CHOSEN, *x.shape[place + mask.ndim :])
    return torch.empty(shape, dtype=x.dtype, device=_META)


def _ctc(args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    scores = args[0]
    losses = torch.empty(scores.shape[1:2], dtype=scores.dtype, device=_META)
    return losses, losses.clone()


def _bincount(args: Sequence[Any]) -> Tensor:
    return torch.empty((args[2] if len(args) > 2 else 0) or CHOSEN, dtype=torch.int64, device=_META)


def _trilinear(one: Tensor, two: Tensor, three: Tensor, *dims: Sequence[int], unroll_dim: int = 1) -> Tensor:
    """What ``nn.Bilinear`` calls, as its formula says."""
    *expanded, summed = dims[:4]
    for each, tensor in enumerate(factors := [one, two, three]):
        for dim in expanded[each]:
            tensor = tensor.unsqueeze(dim)
        factors[each] = tensor
    return (factors[0] * factors[1] * factors[2]).sum(list(summed))


_STAND_INS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "nonzero": _nonzero,
    "masked_select": _masked_select,
    "index": _index,
    "_ctc_loss": _ctc,
    "bincount": _bincount,
    "pipec::share": lambda args: torch.empty((), dtype=torch.float64, device=_META),
}
"""Results of operators that torch cannot run without values."""


@contextlib.contextmanager
def following(tracker: Tracker) -> Iterator[Tracker]:
    """Let operators run under the tracker, without gradients."""
    with torch.no_grad(), tracker:
        yield tracker
