"""Judges a step of a pipeline against eager torch on the whole mini-batch, in double precision.

It knows nothing of how pipec decides what a microbatch may be told of its batch. It sees results, errors
and warnings.
"""

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

import torch
from torch import Tensor, nn

import pipec
from pipec.errors import ExecutionError, PipecError, PipecWarning
from pipec.torch_compat import pytree

TOLERANCE = 1e-9
"""How far off a number may be, relative to the largest of its tensor, for sums are made in another order."""

OTHER_WARNINGS = re.compile(
    r"compiled on their own|compiled on its own|traced together|cannot be read"
    r"|a step has one microbatch"
)
"""What pipec also says, and what casts no doubt on the results."""


class ComparisonStatus(StrEnum):
    RIGHT = "right"
    WARNED = "warned, right"
    WARNED_WRONG = "warned, wrong"
    REFUSED = "refused"
    RAW = "raw"
    SILENT = "silent"


class Expect(Enum):
    """What a case may come to."""

    RIGHT = frozenset({ComparisonStatus.RIGHT})
    """No row depends on another: right, and not a word."""

    NEVER_WRONG = frozenset({ComparisonStatus.RIGHT, ComparisonStatus.WARNED, ComparisonStatus.REFUSED})
    """Rows depend on each other, or nobody can prove that they do not: right, or refused."""

    REFUSED = frozenset({ComparisonStatus.REFUSED})
    """Only a refusal is right."""

    TOLD = frozenset(ComparisonStatus) - {ComparisonStatus.RAW, ComparisonStatus.SILENT}
    """A declared exception, or a loss that is no sum: right, refused, or other numbers after a warning."""


@dataclass(frozen=True)
class BatchCase:
    """A model, a loss and mini-batches.

    Args:
        make: The model.
        inputs: The positional arguments of the model for so many rows.
        target: What the loss function takes besides the model's output, for so many rows.
        loss_fn: As of ``pipec.compile``; None compares what ``pipe(...)`` returns instead of a step.
        rows: Of the mini-batches of steps in turn.
        options: Further arguments of ``pipec.compile``.
        random: The case draws random numbers, so that results are not compared.
        quick: One of those that are tried whenever the tests run.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    target: Callable[[int], Any] | None = None
    loss_fn: Callable[..., Any] | None = None
    rows: tuple[int, ...] = (8,)
    microbatches: int | None = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    random: bool = False
    quick: bool = False
    expect: Expect = Expect.NEVER_WRONG
    name: str = ""


@dataclass(frozen=True)
class ComparisonResult:
    """``is_proved`` is set if rules alone have shown that microbatches make up the batch, without a tail."""

    verdict: ComparisonStatus
    message: str = ""
    is_proved: bool = False

    def allowed(self, case: BatchCase) -> bool:
        return self.verdict in case.expect.value


class BrokenCase(Exception):
    """Eager torch cannot run the case: the case is wrong."""


def compare_with_eager(case: BatchCase) -> ComparisonResult:
    """Compile the case, run its mini-batches in turn, and compare each with eager torch."""
    try:
        expected = [_eager(case, _made(case), rows) for rows in case.rows]
    except Exception as error:
        raise BrokenCase(f"{case.name}: {error!r}") from error
    with logged_batch_warnings() as told:
        try:
            model, options = _made(case), {"microbatches": case.microbatches, **case.options}
            pipe = pipec.compile(model, 2, loss_fn=case.loss_fn, **options)
            differences = [*_differences(case, model, pipe, expected)]
        except PipecError as error:
            return ComparisonResult(
                ComparisonStatus.RAW if _is_raw(error) else ComparisonStatus.REFUSED, _brief(error)
            )
        except Exception as error:
            return ComparisonResult(ComparisonStatus.RAW, _brief(error))
    message = "; ".join([*differences[:2], *told])
    findings = [each.graph.findings for each in pipe._executions.compiler.cache.staged_graphs]
    is_proved = all(each.is_proved and not each.tail for each in findings)
    if told:
        verdict = ComparisonStatus.WARNED_WRONG if differences else ComparisonStatus.WARNED
    else:
        wrong = differences or (case.random and case.expect is not Expect.RIGHT)
        verdict = ComparisonStatus.SILENT if wrong else ComparisonStatus.RIGHT
    return ComparisonResult(verdict, message, is_proved)


def _differences(
    case: BatchCase, model: nn.Module, pipe: pipec.Pipeline, expected: list[dict[str, Tensor]]
) -> Iterator[str]:
    for rows, wanted in zip(case.rows, expected, strict=True):
        args, target = _batch(case, rows)
        if case.loss_fn is None:
            found = _leaves(pipe(*args))
        else:
            found = _left(model, pipe.step(*args, target=target))
        if not case.random:
            yield from _compared(found, wanted)


def _made(case: BatchCase) -> nn.Module:
    torch.manual_seed(0)
    return case.make().double()


def _is_raw(error: PipecError) -> bool:
    """Whether an instruction failed, and not by a check of pipec's own."""
    return isinstance(error, ExecutionError) and not isinstance(error.__cause__, PipecError)


def _eager(case: BatchCase, model: nn.Module, rows: int) -> dict[str, Tensor]:
    args, target = _batch(case, rows)
    if case.loss_fn is None:
        with torch.no_grad():
            return _leaves(model(*args))
    loss = case.loss_fn(model(*args), target)
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    return _left(model, loss)


def _batch(case: BatchCase, rows: int) -> tuple[tuple[Any, ...], Any]:
    torch.manual_seed(rows)
    made = case.inputs(rows), case.target(rows) if case.target else None
    return pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, made)


def _left(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The loss and the gradients; one that is missing is zero."""
    gradients = {
        f"gradient of {name}": torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone()
        for name, p in model.named_parameters()
    }
    model.zero_grad()
    return {"loss": loss.detach(), **gradients}


def _leaves(output: Any) -> dict[str, Tensor]:
    return {f"output {place}": torch.as_tensor(x) for place, x in enumerate(pytree.tree_leaves(output))}


def _compared(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Iterator[str]:
    if found.keys() != wanted.keys():
        yield f"{len(found)} results, expected {len(wanted)}"
    for name in found.keys() & wanted.keys():
        mine, theirs = found[name], wanted[name]
        if mine.shape != theirs.shape:
            yield f"{name} has the shape {tuple(mine.shape)}, expected {tuple(theirs.shape)}"
        elif not is_close(mine, theirs):
            yield f"{name} is off by {float((wide(mine) - wide(theirs)).abs().max()):.1e}"


def wide(x: Tensor) -> Tensor:
    """A tensor in double precision."""
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def is_close(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether numbers differ by no more than this part of the largest finite one, or of 0.001."""
    finite = wide(wanted).abs().nan_to_num(0.0, 0.0, 0.0)
    scale = max(1e-3, float(finite.max()) if finite.numel() else 0.0)
    return torch.allclose(wide(found), wide(wanted), rtol=0, atol=tolerance * scale, equal_nan=True)


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


@contextmanager
def logged_batch_warnings() -> Iterator[list[str]]:
    """What pipec says of the batch meanwhile, by its loggers or by ``warnings``."""
    told, log, handler = list[str](), logging.getLogger("pipec"), logging.Handler(logging.WARNING)

    def note(message: str) -> None:
        if not OTHER_WARNINGS.search(message):
            told.append(message)

    handler.emit = lambda record: note(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield told
            for each in caught:
                if each.category is PipecWarning or re.search(r"\bmicrobatch", str(each.message)):
                    note(str(each.message))
    finally:
        log.removeHandler(handler)
