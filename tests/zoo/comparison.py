"""One model, trained for two steps by a pipeline of four stages and by eager torch, and what was found."""

import copy
import functools
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from batch_comparison import logged_batch_warnings, wide
from torch import Tensor, nn
from unsplit_reference import Plain, StepResult, unsplit_step

import pipec
from pipec.compiler.staged_graph import StagedGraph
from pipec.errors import CaptureError, InputError, PlanError
from pipec.hardware.topology import Device, Level
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.assignments.operator_blocks import operator_seconds
from zoo.model_case import Case, Inputs
from zoo.refusal_causes import cause_of

STAGES, MICROBATCHES = 4, 4
BATCHES = (8, 12)
"""Rows of the mini-batch in each step. Compilation is for the first; the second has another size."""

ROUNDING = 3e-4
"""How far off a gradient may be, relative to its largest number: sums over a batch have another order."""

NEGLIGIBLE = 1e-2
"""What counts as zero, relative to the largest number of any gradient: all in it is rounding."""

FREE_MESSAGES = pipec.Topology((Device(1e12),) * STAGES, (Level(STAGES, 1e30),))

RIGHT, ROUNDED, REFUSED = "right", "right to rounding", "refused"
WRONG, CRASH, UNUSABLE = "wrong", "crash", "unusable"
"""Outcomes. A model is unusable if eager torch cannot train it."""


@dataclass(frozen=True)
class Result:
    """What came of a case.

    ``warned`` is what pipec says of the batch, besides its norms. Gradients with ``same_bits`` have those of
    eager torch over the same microbatches. ``balance`` is the time of the slowest stage over the mean, and
    ``possible`` that of the most even stages that consist of whole operators.
    """

    name: str
    outcome: str
    message: str = ""
    cause: str = ""
    warned: str = ""
    same_bits: bool = False
    balance: float = 0.0
    possible: float = 0.0
    compile_seconds: float = 0.0

    @property
    def trained(self) -> bool:
        return self.outcome in (RIGHT, ROUNDED)


def compare_case(case: Case) -> Result:
    """Train the model both ways; in evaluation mode if it draws random numbers in spite of no dropout.

    What is wrong in single precision and right in double was rounding.
    """
    result = _tried(case)
    if result.outcome == WRONG:
        torch.set_default_dtype(torch.float64)
        try:
            if _tried(case).trained:
                return replace(result, outcome=RIGHT if result.same_bits else ROUNDED, message="")
        finally:
            torch.set_default_dtype(torch.float32)
    return result


def _tried(case: Case) -> Result:
    torch.manual_seed(0)
    try:
        model = case.make().train()
        batches = [case.batch(rows) for rows in BATCHES]
        if _draws(case, model, batches[0]):
            model.eval()
        in_turn = [*_eager(case, copy.deepcopy(model), batches, MICROBATCHES)]
        norms = any(name.endswith("num_batches_tracked") for name, _ in model.named_buffers())
        whole = in_turn if case.by_microbatch or norms else [*_eager(case, copy.deepcopy(model), batches, 1)]
    except Exception as error:
        return Result(case.name, UNUSABLE, _described(error))
    try:
        return _compared(case, model, batches, in_turn, whole)
    except (CaptureError, InputError, PlanError) as error:
        return Result(case.name, REFUSED, str(error), cause_of(str(error)))
    except Exception as error:
        return Result(case.name, CRASH, _described(error))


def _compared(
    case: Case,
    model: nn.Module,
    batches: Sequence[Inputs],
    in_turn: Sequence[StepResult],
    whole: Sequence[StepResult],
) -> Result:
    options = {"microbatch_weight": "rows"} if case.by_microbatch else {}
    options |= {"loss_fn": case.loss_fn, "microbatches": MICROBATCHES, "batched": case.batched}
    with logged_batch_warnings() as told:
        pipe = pipec.compile(model, STAGES, **options)
        begun = time.perf_counter()
        pipe.prepare(**batches[0])
        seconds = time.perf_counter() - begun
        found = [_left(model, pipe.step(**inputs)) for inputs in batches]
    warned = [text for text in told if "take their statistics of each microbatch" not in text]
    wrong = [*_differences(found, whole)]
    staged = pipe._executions.compiler.cache.staged_graphs[0]
    if wrong and staged.captured.findings.unproven:  # pipec has said that it does not know how losses add up
        wrong = [*_differences(found, in_turn)]
    same_bits = all(
        torch.equal(gradient, other.gradients[fqn])
        for mine, other in zip(found, in_turn, strict=True)
        for fqn, gradient in mine.gradients.items()
        if fqn in other.gradients
    )
    return Result(
        case.name,
        WRONG if wrong else RIGHT if same_bits else ROUNDED,
        "; ".join(wrong[:5]),
        warned="; ".join(warned),
        same_bits=same_bits,
        balance=_balance([sum(stage.cost.seconds.values()) for stage in pipe.plan.stages]),
        possible=_possible(staged, pipe.plan.microbatch_size),
        compile_seconds=seconds,
    )


def _draws(case: Case, model: nn.Module, inputs: Inputs) -> bool:
    """Whether torch's generator is another after a call: pipelines draw other numbers than eager torch."""
    before = torch.get_rng_state()
    model, inputs = copy.deepcopy((model, inputs))
    with torch.random.fork_rng(devices=[]):
        Plain(model, loss_fn=case.loss_fn).loss(**inputs)
        return not torch.equal(before, torch.get_rng_state())


def _eager(case: Case, model: nn.Module, batches: Sequence[Inputs], num_parts: int) -> Iterator[StepResult]:
    """What each step leaves, the batch taken in so many parts, one after the other."""
    loss, shared = Plain(model, loss_fn=case.loss_fn).loss, case.batched or {}
    for inputs, rows in zip(batches, BATCHES, strict=True):
        split = {
            name: value
            for name, value in inputs.items()
            if isinstance(value, Tensor) and value.shape[:1] == (rows,) and shared.get(name, 0) == 0
        }
        rest = {name: value for name, value in inputs.items() if name not in split}
        sizes = [rows // num_parts] * num_parts
        yield _left(model, unsplit_step(functools.partial(loss, **rest), split, sizes, model))


def _left(model: nn.Module, loss: Tensor) -> StepResult:
    """What a step leaves."""
    result = StepResult.of(loss.detach(), model)
    model.zero_grad()
    return result


def _differences(steps: Sequence[StepResult], expected_steps: Sequence[StepResult]) -> Iterator[str]:
    """What the steps leave that is off by more than rounding, or missing."""
    for found, expected in zip(steps, expected_steps, strict=True):
        largest = max((_largest(gradient) for gradient in expected.gradients.values()), default=0.0)
        errors = {"the loss": _error(found.loss, expected.loss, 0.0)}
        for kind, floor in (("gradients", NEGLIGIBLE * largest), ("buffers", 1e-6)):
            mine, theirs = getattr(found, kind), getattr(expected, kind)
            for fqn in mine.keys() | theirs.keys():
                both = fqn in mine and fqn in theirs
                errors[f"{kind} of {fqn}"] = _error(mine[fqn], theirs[fqn], floor) if both else float("inf")
        yield from (f"{what} is off by {off:.1e}" for what, off in errors.items() if not off <= ROUNDING)


def _error(found: Tensor, expected: Tensor, floor: float) -> float:
    """The largest difference, relative to the largest number, or to ``floor`` if that is more."""
    if torch.equal(found, expected):
        return 0.0
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not (torch.isfinite(found).all() and torch.isfinite(expected).all()):
        return 0.0 if torch.allclose(found, expected, equal_nan=True) else float("inf")
    found, expected = wide(found), wide(expected)
    return float((found - expected).abs().max() / max(_largest(expected), floor))


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _balance(seconds: Collection[float]) -> float:
    """How long the slowest stage takes, over the mean."""
    return max(seconds) / (sum(seconds) / STAGES)


def _possible(staged: StagedGraph, size: int) -> float:
    """The balance of the best cut between the operators as they were when stages were cut."""
    evenly = StagedGraph(staged.captured, AssignStages(CutStages(FREE_MESSAGES, size)), staged.options)
    assert evenly.prepared is not None
    stages, seconds = Counter[int](), operator_seconds(evenly.prepared, size)
    for stage, time_of_operator in zip(evenly.graph.assignment.stages, seconds, strict=True):
        stages[stage] += time_of_operator
    return _balance(stages.values())


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
