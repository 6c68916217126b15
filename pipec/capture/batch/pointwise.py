"""Rules for elementwise operators, which torch tags, on rows and on sums over rows."""

from dataclasses import replace

from pipec.capture.batch.dependence import MEAN, Dependence, PerRow, SelectedRows, SumOverRows, Whole
from pipec.capture.batch.operator_call import (
    NeedsMeanError,
    OperatorCall,
    per_row_among,
    tensors_in,
    truncates,
)

ADDING = {"add", "sub", "rsub"}
KEEPING = {
    *("clone", "_to_copy", "alias", "detach", "lift_fresh", "lift_fresh_copy", "copy"),
    *("_conj", "conj_physical", "_conj_physical"),
}
"""Operators that return the elements of their first argument, in another type perhaps."""


def pointwise(call: OperatorCall) -> Dependence:
    """Each element of the result depends on the elements of the arguments at the same position."""
    if call.has_row_numbers and call.name == "ne" and call.numbers and max(call.numbers) < 0:
        return replace(per_row_among(call.values)[0], is_row_number=False)  # no row has such a number
    if call.has_row_numbers and not _keeps(call):
        return call.with_row_numbers()
    if any(isinstance(value, SelectedRows) for value in call.values):
        return _of_picked(call)
    if any(isinstance(value, SumOverRows) for value in call.values):
        return _of_sums(call)
    degree = _degree(call)
    if degree is None:
        return call.mixed("computes with the number of rows, which is another one in a microbatch")
    rows = aligned_rows(call)
    if rows is None:
        return call.mixed("combines each row with other rows")
    if rows:
        return replace(rows[0], degree=degree) if _fits(call, rows[0]) else call.unproven()
    fills = [value.fill for value in call.values if isinstance(value, Whole)]
    return Whole(degree, fills[0] if _keeps(call) else None)


def _keeps(call: OperatorCall) -> bool:
    """Whether the result equals the first argument, up to rounding."""
    return call.name in KEEPING and not truncates(call.first, tensors_in(call.result)[0])


def aligned_rows(call: OperatorCall) -> list[PerRow] | None:
    """The rows of the arguments along a dimension of the result; None if that is not one for all."""
    ndim = len(call.shape)
    aligned = [
        value.at(value.dim + ndim - tensor.ndim)
        for tensor, value in zip(call.tensors, call.values, strict=True)
        if isinstance(value, PerRow)
    ]
    return aligned if len({(x.dim, x.outer, x.inner) for x in aligned}) <= 1 else None


def _fits(call: OperatorCall, rows: PerRow) -> bool:
    """Whether the arguments without rows broadcast over all rows alike."""
    from_end = len(call.shape) - rows.dim
    for tensor, value in zip(call.tensors, call.values, strict=True):
        is_plain = isinstance(value, Whole) and value.fill is None
        if is_plain and tensor.ndim >= from_end and tensor.shape[-from_end] != 1:
            return False
    return True


def _degree(call: OperatorCall) -> int | None:
    """The degree of the result in the number of rows; None if it has none."""
    degrees = []
    for value in call.values:
        assert isinstance(value, Whole | PerRow)
        is_zero = isinstance(value, Whole) and value.fill == 0 and call.name in ADDING
        degrees += [] if is_zero else [value.degree]
    for number in call.numbers:
        degree = call.degree(number) or 0
        degrees += [] if number == 0 and call.name in ADDING else [degree]
    if call.name == "mul":
        return sum(degrees)
    if call.name == "div" and call.arguments.get("rounding_mode") is None:
        return degrees[0] - sum(degrees[1:])
    if _keeps(call) or call.name in {"neg", "abs", "relu"}:
        return degrees[0]
    if call.name in ADDING | {"where"}:
        numbers = set(degrees)
        return numbers.pop() if len(numbers) == 1 else (0 if not numbers else None)
    return 0 if not any(degrees) else None


def _of_sums(call: OperatorCall) -> Dependence:
    sums = [value for value in call.values if isinstance(value, SumOverRows)]
    if per_row_among(call.values):
        return call.mixed("combines rows with what is computed of all rows of a microbatch")
    numbers = [call.degree(number) for number in call.numbers]
    if None in numbers and call.name in ("mul", "div"):
        return call.unproven(
            "computes with a number that may be that of the rows, in a graph for so many alone"
        )
    wholes = [value for value in call.values if isinstance(value, Whole) and value.fill != 0]
    if _keeps(call) or call.name == "neg":
        return sums[0]
    if call.name in ADDING:
        has_number = any(call.numbers[: 1 if len(call.tensors) < 2 else 0])
        degrees = {value.degree for value in sums} | ({MEAN.degree} if wholes or has_number else set())
        if any(value.degree for value in wholes) or any(numbers):
            return call.mixed("adds what grows with the number of rows")
        if len(degrees) == 1:
            return sums[0]
        if degrees == {0, MEAN.degree}:
            pairs = zip(call.tensors, call.values, strict=True)
            raise NeedsMeanError([tensor for tensor, value in pairs if value == SumOverRows()])
    others = sum(value.degree for value in call.values if isinstance(value, Whole))
    if call.name == "mul" and len(sums) == 1:
        return SumOverRows(sums[0].degree + others + sum(degree or 0 for degree in numbers))
    divides = call.name == "div" and call.arguments.get("rounding_mode") is None
    if divides and len(sums) == 1 and isinstance(call.values[0], SumOverRows):
        return SumOverRows(sums[0].degree - others - sum(degree or 0 for degree in numbers))
    return call.mixed("computes, of a sum over the rows of a microbatch, what is no multiple of it")


def _of_picked(call: OperatorCall) -> Dependence:
    if SelectedRows(are_indices=True) in call.values and not _keeps(call):
        return call.with_row_numbers()
    if all(value == SelectedRows() or isinstance(value, Whole) for value in call.values):
        return SelectedRows() if _degree_is_zero(call) else call.unproven()
    if len(call.values) == 1 and _keeps(call):
        return call.values[0]
    return call.unproven("computes with rows that values choose, and with others")


def _degree_is_zero(call: OperatorCall) -> bool:
    wholes = [value for value in call.values if isinstance(value, Whole)]
    return not any(value.degree for value in wholes) and not any(map(call.degree, call.numbers))
