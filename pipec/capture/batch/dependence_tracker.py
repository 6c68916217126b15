"""Tracks how every tensor depends on the batch, while operators run on meta tensors.

Each operator that torch dispatches is looked up in ``rules``. Tensors that share memory share what is known:
a write through a view changes what is known of its base.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipec.capture.batch.dependence import Dependence, PerRow, SumOverRows, Unproven, Whole, power_of
from pipec.capture.batch.movement import as_view_of
from pipec.capture.batch.operator_call import (
    OperatorCall,
    functional_of,
    is_pointwise,
    mixed_or_unproven,
    plain_name_of,
    tensors_in,
    truncates,
)
from pipec.capture.batch.pointwise import KEEPING
from pipec.capture.batch.rules import (
    CONSTANT_FILLS,
    DRAWN,
    IGNORES_VALUES,
    KEEP_FILLS,
    KEEP_POWERS,
    KEEP_ROW_NUMBERS,
    LOOKS_UP,
    READS_ROW_COUNT,
    rule_of,
)
from pipec.torch_compat import pytree
from pipec.torch_compat.operator_patches import decompositions
from pipec.torch_compat.run_time import OpOverload, TorchDispatchMode, memory_id, schema

_META = torch.device("meta")

_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True)
class TensorFact:
    """How a tensor depends on the batch.

    ``from_arguments``: it follows from the arguments of ``step`` alone. ``uniform``: all its elements are one
    number, or are drawn alike, so that its rows may be in any order.
    """

    value: Dependence
    from_arguments: bool = False
    uniform: bool = False


@dataclass(eq=False)
class DependenceTracker(TorchDispatchMode):
    """Records the dependence of every tensor that is made while it is active.

    ``rows`` stands for the rows of a microbatch; ``symbolic``: no other number is a multiple of it.
    """

    rows: int
    symbolic: bool
    degrees: dict[float, int] = field(default_factory=dict)
    assumes_rows: bool = False
    """The results of an operator without a rule were taken to have rows. Whoever reads it sets it back."""
    gathered_sizes: set[int] = field(default_factory=set)
    """The sizes of dimensions that have the rows of all replicas."""
    num_batch_norms: int = 0
    has_norm_over_rows_alone: bool = False
    drew_random: bool = False
    """Random numbers were drawn that belong to no row. Whoever reads it sets it back."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, TensorFact] = {}
        self._kept: list[Any] = []
        self._sharing: dict[int, list[Tensor]] = {}
        self._twins: dict[int, Tensor] = {}

    def fact(self, tensor: Tensor) -> TensorFact:
        """The facts recorded of a tensor; one that was never recorded is a constant."""
        return self._known.get(id(tensor), TensorFact(Whole(), from_arguments=True))

    def dependence_of(self, tensor: Tensor) -> Dependence:
        return self.fact(tensor).value

    def record(self, tensor: Tensor, known: TensorFact) -> Tensor:
        """Record how a tensor depends on the batch."""
        if id(tensor) not in self._known:
            self._kept.append(tensor)
            self._sharing.setdefault(memory_id(tensor), []).append(tensor)
        self._known[id(tensor)] = known
        return tensor

    def overwrite(self, tensor: Tensor, value: Dependence) -> None:
        """Record a write to a tensor, and so to all tensors that share its memory."""
        for other in self._sharing.get(memory_id(tensor), []):
            self.record(other, TensorFact(value))

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether other tensors have the same memory."""
        return any(other is not tensor for other in self._sharing.get(memory_id(tensor), []))

    def meta_copy(self, tensor: Tensor) -> Tensor:
        """The meta tensor that stands in for a real one."""
        if tensor.device == _META:
            return tensor
        if id(tensor) not in self._twins:
            self._kept.append(tensor)
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
            self._twins[id(tensor)] = self.record(made, self.fact(tensor))
        return self._twins[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(args), dict(kwargs or {})
        if any(tensor.device != _META for tensor in tensors_in((args, kwargs))):
            args, kwargs = pytree.tree_map_only(Tensor, self.meta_copy, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _META}
        if isinstance(func, OpOverload) and rule_of(plain_name_of(func), is_pointwise(func)) is None:
            with self:
                found = func.decompose(*args, **kwargs)  # as autograd does, which decompositions are below
            if found is not NotImplemented:
                return found
        result = self._run(func, args, kwargs)
        if not isinstance(func, OpOverload):
            return result
        dependence_of = self._in_one_order(tensors_in((args, kwargs)))
        call = OperatorCall(
            func,
            args,
            kwargs,
            result,
            dependence_of,
            self.rows,
            self.symbolic,
            self.degrees,
        )
        is_drawn = _RANDOM in func.tags
        given = all(self.fact(tensor).from_arguments for tensor in call.tensors) and not is_drawn
        if schema(func).is_mutable and call.tensors and "batch_norm" not in schema(func).name:
            self._write(call, given)
            self.assumes_rows |= call.is_assumed
            return result
        results = tensors_in(result)
        keeps = (is_pointwise(func) or call.name in KEEPING) and not is_drawn
        of_uniform = keeps and all(self.fact(x).uniform for x in call.tensors)
        uniform = call.name in CONSTANT_FILLS or (of_uniform and bool(call.tensors)) or _draws_alone(call)
        values = self._values(call)
        self.assumes_rows |= call.is_assumed
        each = values if isinstance(values, tuple) else (values,) * len(results)
        for tensor, value in zip(results, each, strict=False):
            if not any(tensor is argument for argument in call.tensors):
                known = TensorFact(self._checked(call, tensor, value), given, uniform)
                self.drew_random |= is_drawn and isinstance(known.value, Whole)
                self.record(tensor, known)
        return result

    def _in_one_order(self, tensors: Sequence[Tensor]) -> Callable[[Tensor], Dependence]:
        """The dependence of tensors, where uniform rows take the order of the other rows."""
        rows = [(self.fact(x), v) for x in tensors if isinstance(v := self.dependence_of(x), PerRow)]
        orders = {v.outer * v.inner: v for known, v in rows if not known.uniform}
        if not orders or not any(known.uniform for known, _ in rows):
            return self.dependence_of

        def dependence_of(tensor: Tensor) -> Dependence:
            known, value = self.fact(tensor), self.dependence_of(tensor)
            if not known.uniform or not isinstance(value, PerRow):
                return value
            order = orders.get(value.outer * value.inner, value)
            return replace(value, outer=order.outer, inner=order.inner)

        return dependence_of

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        made = _STAND_INS.get(plain_name_of(func)) if isinstance(func, OpOverload) else None
        found = made(args) if made else None
        return func(*args, **kwargs) if found is None else found

    def _values(self, call: OperatorCall) -> Dependence | tuple[Dependence, ...]:
        """The dependence of a call's results."""
        name = call.name
        if unknown := None if name in IGNORES_VALUES else mixed_or_unproven(call.values):
            puts_back = name in LOOKS_UP and isinstance(unknown, Unproven) and unknown is call.values[0]
            assumed = call.assumed() if puts_back else unknown
            return assumed if call.is_assumed else unknown
        grows = self.symbolic and any(call.degree(number) for number in call.numbers)
        is_whole = bool(call.values) and all(isinstance(v, Whole) and not v.degree for v in call.values)
        if is_whole and not grows and name not in KEEP_FILLS:
            return Whole()
        rule = rule_of(name, is_pointwise(call.op))
        if rule is None and call.values and (parts := self._decomposed(call)):
            return parts
        if call.has_row_numbers and name not in KEEP_ROW_NUMBERS:
            return call.with_row_numbers()
        if grows and name not in READS_ROW_COUNT:
            return call.mixed("computes with the number of rows, which is another one in a microbatch")
        if "batch_norm" in name and "no_" not in name:
            self._note_norm(call)
        if rule is not None:
            is_power = any(power_of(value) for value in call.values if not isinstance(value, SumOverRows))
            if is_power and name not in KEEP_POWERS and not is_pointwise(call.op):
                return call.mixed("computes with the number of rows, which is another one in a microbatch")
            return rule(call)
        return call.assumed() if call.values else Whole()

    def _note_norm(self, call: OperatorCall) -> None:
        value = call.dependence_of(call.first)
        training = call.arguments.get("training", True)
        if training and isinstance(value, PerRow) and value.dim != 1:
            self.num_batch_norms += 1
            is_plain = value.outer == value.inner == 1 and math.prod(call.first.shape[2:]) == 1
            self.has_norm_over_rows_alone |= is_plain

    def _decomposed(self, call: OperatorCall) -> tuple[Dependence, ...] | None:
        """The dependence of the results by torch's decomposition of the operator; None without one."""
        decompose = _DECOMPOSITIONS.get(call.name) or decompositions().get(functional_of(call.op))
        if decompose is None:
            return None
        try:
            with self:
                made = decompose(*call.args, **call.kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
            return None
        return tuple(map(self.dependence_of, tensors_in(made)))

    def _checked(self, call: OperatorCall, tensor: Tensor, value: Dependence) -> Dependence:
        """The value, unless the tensor has dimensions that grow with the batch and are none of its rows."""
        if not self.symbolic or not isinstance(value, PerRow | SumOverRows | Whole):
            return value
        tagged = {dim for dim, size in enumerate(tensor.shape) if call.is_row_multiple(size)}
        if isinstance(value, PerRow) and (
            call.is_row_multiple(value.outer) or call.is_row_multiple(value.inner)
        ):
            return call.mixed("makes something for every pair of rows")
        own = {value.dim} if isinstance(value, PerRow) else set()
        if tagged == own:
            if own and tensor.shape[value.dim] != self.rows * value.outer * value.inner:  # type: ignore[union-attr]
                return call.unproven()
            return value
        if own <= tagged and all(tensor.shape[dim] in self.gathered_sizes for dim in tagged - own):
            return value
        return call.mixed("makes something for every pair of rows") if own else call.unproven()

    def _write(self, call: OperatorCall, given: bool) -> None:
        """Record what a call has written into its arguments and into tensors that share their memory."""
        written = [
            call.arguments[a.name]
            for a in schema(call.op).arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        if call.name in ("set", "resize", "set_source_Tensor_storage_offset"):
            values: Dependence | tuple[Dependence, ...] = call.unproven()
        elif call.name in _OVERWRITING:
            values = self._overwritten(call)
        else:
            values = self._values(call)
        each = values if isinstance(values, tuple) else (values,) * len(written)
        uniform = call.name in CONSTANT_FILLS or _draws_alone(call)
        uniform |= is_pointwise(call.op) and all(self.fact(tensor).uniform for tensor in call.tensors)
        for tensor, value in zip(tensors_in(written), each, strict=False):
            before = self.dependence_of(tensor)
            value = self._checked(call, tensor, value)
            given_here = given and self.fact(tensor).from_arguments
            for other in self._sharing.get(memory_id(tensor), []):
                if other is tensor or _is_same(other, tensor):
                    self.record(other, TensorFact(value, given_here, uniform))
                else:
                    found = self._beside(call, other, tensor, before, value)
                    self.record(other, TensorFact(found, given_here and self.fact(other).from_arguments))
            self.record(tensor, TensorFact(value, given_here, uniform))
            self.drew_random |= _RANDOM in call.op.tags and isinstance(value, Whole)

    def _overwritten(self, call: OperatorCall) -> Dependence:
        """The value after ``copy_`` or ``fill_``, which overwrite all elements."""
        target = call.first
        if call.name == "copy" and len(call.tensors) > 1:
            source = call.tensors[1]
            value = self.dependence_of(source)
            counts = (
                isinstance(value, SumOverRows) or getattr(value, "is_row_number", False) or power_of(value)
            )
            if truncates(source, target) and counts:
                return mixed_or_unproven([value]) or call.unproven()
            if isinstance(value, PerRow):
                return value.at(value.dim + target.ndim - source.ndim)
            return self._kept_rows(call, value)
        if call.name == "fill" and len(call.tensors) > 1:
            return self._kept_rows(call, self.dependence_of(call.tensors[1]))
        number = 0.0 if call.name == "zero" else next(iter(call.numbers), None)
        degree = call.degree(number)
        return self._kept_rows(call, call.unproven() if degree is None else Whole(degree, number))

    def _kept_rows(self, call: OperatorCall, value: Dependence) -> Dependence:
        """The dependence after writing ``value``: a whole value written to each row has rows."""
        old = self.dependence_of(call.first)
        if not isinstance(value, Whole):
            return value
        if isinstance(old, PerRow):
            return PerRow(old.dim, old.outer, old.inner, value.degree)
        tagged = any(map(call.is_row_multiple, call.first.shape))
        return mixed_or_unproven([old]) or (call.unproven() if tagged else value)

    def _beside(
        self, call: OperatorCall, other: Tensor, view: Tensor, before: Dependence, value: Dependence
    ) -> Dependence:
        """The dependence of ``other``, after a write through ``view`` into a part of its memory."""
        old = self.dependence_of(other)
        if unknown := mixed_or_unproven([old, value]) or mixed_or_unproven([before]):
            return unknown
        if isinstance(old, Whole) and isinstance(value, Whole) and old.degree == value.degree:
            return Whole(old.degree, old.fill if old.fill == value.fill else None)
        if isinstance(old, SumOverRows) and old == value:
            return old
        if isinstance(value, PerRow) and not value.is_row_number:
            dim = as_view_of(other, view, value, self.rows)
            if dim is not None and getattr(old, "degree", None) == value.degree:
                mapped = PerRow(dim, value.outer, value.inner, value.degree)
                if isinstance(old, Whole) or old == mapped:
                    return mapped
        if isinstance(old, PerRow) and isinstance(before, PerRow) and before == value:
            return old
        return call.unproven("writes into a part of what has another meaning")


def _draws_alone(call: OperatorCall) -> bool:
    """Whether a call draws elements that depend on none of its tensors, such as the mask of a dropout."""
    is_like = call.name.endswith("_like") or schema(call.op).is_mutable or not call.tensors
    return call.name in DRAWN and is_like and len(call.tensors) <= 1


_OVERWRITING = {"copy", "fill", "zero"}


def _is_same(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )


NUM_SELECTED = 5040 * 199
"""How many rows values choose, in the analysis: small numbers divide them, and that of the rows does not."""


def _nonzero(args: Sequence[Any]) -> Tensor:
    return torch.empty(NUM_SELECTED, max(args[0].ndim, 1), dtype=torch.int64, device=_META)


def _masked_select(args: Sequence[Any]) -> Tensor:
    return torch.empty(NUM_SELECTED, dtype=args[0].dtype, device=_META)


def _index(args: Sequence[Any]) -> Tensor | None:
    """``x[mask]``, whose size depends on values."""
    x, given = args[0], list(args[1])
    masks = [
        (place, i) for place, i in enumerate(given) if i is not None and i.dtype in (torch.bool, torch.uint8)
    ]
    if not masks:
        return None
    place, mask = masks[0]
    shape = (*x.shape[:place], NUM_SELECTED, *x.shape[place + mask.ndim :])
    return torch.empty(shape, dtype=x.dtype, device=_META)


def _ctc(args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    scores = args[0]
    losses = torch.empty(scores.shape[1:2], dtype=scores.dtype, device=_META)
    return losses, losses.clone()


def _bincount(args: Sequence[Any]) -> Tensor:
    return torch.empty((args[2] if len(args) > 2 else 0) or NUM_SELECTED, dtype=torch.int64, device=_META)


def _trilinear(one: Tensor, two: Tensor, three: Tensor, *dims: Sequence[int], unroll_dim: int = 1) -> Tensor:
    """The decomposition of ``_trilinear``, which ``nn.Bilinear`` calls."""
    *expanded, summed = dims[:4]
    for each, tensor in enumerate(factors := [one, two, three]):
        for dim in expanded[each]:
            tensor = tensor.unsqueeze(dim)
        factors[each] = tensor
    return (factors[0] * factors[1] * factors[2]).sum(list(summed))


def _repeated(x: Tensor, repeats: Sequence[int]) -> Tensor:
    """The decomposition of ``x.repeat(2, 1)``: all rows follow once more after the rows."""
    sizes = [1] * (len(repeats) - x.ndim) + list(x.shape)
    pairs = list(zip(repeats, sizes, strict=True))
    parted = x.reshape([part for size in sizes for part in (1, size)])
    return parted.expand([part for pair in pairs for part in pair]).reshape([n * size for n, size in pairs])


def _written(view: OpOverload) -> Callable[..., Tensor]:
    """The decomposition of ``slice_scatter`` and its kin, which return a copy with a part overwritten."""

    def decomposition(x: Tensor, part: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied = x.clone()
        view(copied, *args, **kwargs).copy_(part)
        return copied

    return decomposition


def _added_product(x: Tensor, first: Tensor, second: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """``alpha * first @ second + beta * x``. Torch 2.15 expands ``x`` before, as if it had rows."""
    made: Tensor = alpha * (first @ second) + beta * x
    return made


_DECOMPOSITIONS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("addmm", "addmv"), _added_product),
    "_trilinear": _trilinear,
    "repeat": _repeated,
    "select_scatter": _written(torch.ops.aten.select.int),
    "slice_scatter": _written(torch.ops.aten.slice.Tensor),
    "diagonal_scatter": _written(torch.ops.aten.diagonal.default),
}

_STAND_INS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "nonzero": _nonzero,
    "masked_select": _masked_select,
    "index": _index,
    "_ctc_loss": _ctc,
    "bincount": _bincount,
    "pipec::batch_fraction": lambda args: torch.empty((), dtype=torch.float64, device=_META),
}
"""Results of operators that torch cannot run without values."""


@contextlib.contextmanager
def tracking(tracker: DependenceTracker) -> Iterator[DependenceTracker]:
    """Let operators run under the tracker, without gradients."""
    with torch.no_grad(), tracker:
        yield tracker
