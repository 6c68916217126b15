"""One model, trained for two steps by a pipeline of four stages and by eager torch, and what was found."""

import copy
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any

import torch
from batch_comparison import logged_batch_warnings
from torch import Tensor, nn

import pipec
from pipec.compiler import pass_list
from pipec.compiler.staged_graph import NO_RECOMPUTE, StagedGraph
from pipec.errors import CaptureError, InputError, PlanError
from pipec.graph import copy_graph
from pipec.ir import Plan
from pipec.passes import run_passes
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.operator_blocks import find_colocations, operator_blocks, operator_seconds
from zoo.model_case import Case, Inputs
from zoo.refusal_causes import cause_of

STAGES, MICROBATCHES = 4, 4
BATCHES = (8, 12)
"""Rows of the mini-batch in each step. Compilation is for the first; the second has another size."""

ROUNDING = 3e-4
"""How far off a gradient may be, relative to its largest number: sums over a batch have another order."""

NEGLIGIBLE = 1e-2
"""What counts as zero, relative to the largest number of any gradient: all in it is rounding."""

RIGHT, ROUNDED, REFUSED = "right", "right to rounding", "refused"
WRONG, CRASH, UNUSABLE = "wrong", "crash", "unusable"
"""Outcomes. A model is unusable if eager torch cannot train it."""


@dataclass(frozen=True)
class Result:
    """What came of a case.

    ``warned`` is what pipec says of the batch, besides its norms. ``error`` is the largest relative one,
    ``same_bits`` the share of gradients that have the bits of eager torch over the same microbatches,
    ``balance`` the time of the slowest stage over the mean, and ``possible`` that of the most even stages
    that consist of whole operators.
    """

    name: str
    outcome: str
    message: str = ""
    cause: str = ""
    warned: str = ""
    error: float = 0.0
    same_bits: float = 0.0
    balance: float = 0.0
    possible: float = 0.0
    compile_seconds: float = 0.0

    @property
    def trained(self) -> bool:
        return self.outcome in (RIGHT, ROUNDED)


@dataclass(frozen=True)
class Left:
    """What a step leaves: its loss, and by FQN gradients and buffers."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def by(cls, model: nn.Module, loss: Tensor) -> "Left":
        gradients = {
            fqn: p.grad.to_dense().clone() for fqn, p in model.named_parameters() if p.grad is not None
        }
        model.zero_grad()
        return cls(loss.detach().clone(), gradients, {fqn: b.clone() for fqn, b in model.named_buffers()})


def compare_case(case: Case) -> Result:
    """Train the model both ways; in evaluation mode if it draws random numbers in spite of no dropout.

    What is wrong in single precision and right in double was rounding.
    """
    result = _tried(case)
    if result.outcome == WRONG:
        torch.set_default_dtype(torch.float64)
        try:
            if _tried(case).trained:
                return replace(result, outcome=RIGHT if result.same_bits == 1 else ROUNDED, message="")
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
        in_turn = list(_eager(case, copy.deepcopy(model), batches, MICROBATCHES))
        mixes = case.by_microbatch or bool(_batch_counters(model))
        whole = in_turn if mixes else list(_eager(case, copy.deepcopy(model), batches, 1))
    except Exception as error:
        return Result(case.name, UNUSABLE, _described(error))
    try:
        return _compared(case, model, batches, in_turn, whole)
    except (CaptureError, InputError, PlanError) as error:
        return Result(case.name, REFUSED, str(error), cause_of(str(error)))
    except Exception as error:
        return Result(case.name, CRASH, _described(error))


def _compared(
    case: Case, model: nn.Module, batches: Sequence[Inputs], in_turn: Sequence[Left], whole: Sequence[Left]
) -> Result:
    options = {"microbatch_weight": "rows"} if case.by_microbatch else {}
    with logged_batch_warnings() as told:
        pipe = pipec.compile(
            model, STAGES, loss_fn=case.loss_fn, microbatches=MICROBATCHES, batched=case.batched, **options
        )
        begun = time.perf_counter()
        pipe.prepare(**batches[0])
        seconds = time.perf_counter() - begun
        found = [Left.by(model, pipe.step(**inputs)) for inputs in batches]
    warned = [text for text in told if "take their statistics of each microbatch" not in text]
    wrong = [*_differences(found, whole)]
    if _staged(pipe).captured.findings.unproven:  # pipec has said that it does not know how losses add up
        wrong = min(wrong, [*_differences(found, in_turn)], key=lambda each: max(error for _, error in each))
    plan = pipe.plan
    same = [
        torch.equal(gradient, other.gradients[fqn])
        for mine, other in zip(found, in_turn, strict=True)
        for fqn, gradient in mine.gradients.items()
        if fqn in other.gradients
    ]
    largest = max((error for _, error in wrong), default=0.0)
    beyond = [f"{what} is off by {error:.1e}" for what, error in wrong if not error <= ROUNDING]
    outcome = WRONG if beyond else RIGHT if all(same) else ROUNDED
    return Result(
        case.name,
        outcome,
        "; ".join(beyond[:5]),
        warned="; ".join(warned),
        error=largest,
        same_bits=sum(same) / len(same),
        balance=_balance(plan),
        possible=_possible(pipe),
        compile_seconds=seconds,
    )


def _draws(case: Case, model: nn.Module, inputs: Inputs) -> bool:
    """Whether torch's generator is another after a call: pipelines draw other numbers than eager torch."""
    before = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        _loss(case, *copy.deepcopy((model, inputs)))
        return not torch.equal(before, torch.get_rng_state())


def _batch_counters(model: nn.Module) -> list[Tensor]:
    """The numbers of batches of all BatchNorm layers."""
    return [x for name, x in model.named_buffers() if name.endswith("num_batches_tracked")]


def _eager(case: Case, model: nn.Module, batches: Sequence[Inputs], num_segments: int) -> Iterator[Left]:
    """What each step leaves, the batch taken in so many parts, one after the other.

    A step counts as one batch, unless each part is a batch of its own.
    """
    counters = _batch_counters(model)
    for inputs, rows in zip(batches, BATCHES, strict=True):
        total, before = torch.zeros(()), [counter.clone() for counter in counters]
        for part in _split(inputs, rows, num_segments, case.batched or {}):
            for counter, number in [] if case.by_microbatch else zip(counters, before, strict=True):
                counter.copy_(number)
            loss = _loss(case, model, part) / num_segments
            loss.backward()
            total = total + loss.detach()
        yield Left.by(model, total)


def _loss(case: Case, model: nn.Module, inputs: Inputs) -> Tensor:
    target = inputs.pop("target", None)
    output = model(**inputs)
    if case.loss_fn is not None:
        return case.loss_fn(output, target)
    return output if isinstance(output, Tensor) else output["loss"]


def _split(inputs: Inputs, rows: int, num_segments: int, batched: Any) -> Iterator[Inputs]:
    size = rows // num_segments
    for start in range(0, rows, size):
        yield {
            name: value[start : start + size]
            if isinstance(value, Tensor) and value.ndim and len(value) == rows and batched.get(name, 0) == 0
            else value
            for name, value in inputs.items()
        }


def _differences(steps: Sequence[Left], expected_steps: Sequence[Left]) -> Iterator[tuple[str, float]]:
    """The relative error of everything that the steps leave; infinite where something is missing."""
    for found, expected in zip(steps, expected_steps, strict=True):
        yield "the loss", _error(found.loss, expected.loss, 0.0)
        largest = max((_largest(gradient) for gradient in expected.gradients.values()), default=0.0)
        for kind, floor in (("gradients", NEGLIGIBLE * largest), ("buffers", 1e-6)):
            mine, theirs = getattr(found, kind), getattr(expected, kind)
            for fqn in mine.keys() | theirs.keys():
                both = fqn in mine and fqn in theirs
                yield f"{kind} of {fqn}", _error(mine[fqn], theirs[fqn], floor) if both else float("inf")


def _error(found: Tensor, expected: Tensor, floor: float) -> float:
    """The largest difference, relative to the largest number, or to ``floor`` if that is more."""
    if torch.equal(found, expected):
        return 0.0
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not (torch.isfinite(found).all() and torch.isfinite(expected).all()):
        return 0.0 if torch.allclose(found, expected, equal_nan=True) else float("inf")
    wide = torch.complex128 if found.is_complex() else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    return float((found - expected).abs().max() / max(_largest(expected), floor))


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _balance(plan: Plan) -> float:
    seconds = [sum(stage.cost.seconds.values()) for stage in plan.stages]
    return max(seconds) / (sum(seconds) / len(seconds))


def _possible(pipe: pipec.Pipeline) -> float:
    """The balance of the best cut between the operators as they were when stages were cut."""
    staged = _staged(pipe)
    passes = pass_list.make_passes(staged.options, AssignStages(staged.graph.assignment), NO_RECOMPUTE)
    before = takewhile(lambda each: not isinstance(each, AssignStages), passes)
    graph = run_passes(copy_graph(staged.captured), list(before))
    seconds = operator_seconds(graph, pipe.plan.microbatch_size)
    sums = Counter[int]()
    for block, time_of_operator in zip(
        operator_blocks(seconds, find_colocations(graph)), seconds, strict=True
    ):
        sums[block] += time_of_operator
    return most_even([sums[block] for block in sorted(sums)], STAGES) * STAGES / sum(seconds)


def _staged(pipe: pipec.Pipeline) -> StagedGraph:
    return pipe._executions.compiler.cache.staged_graphs[0]


def most_even(seconds: Sequence[float], num_segments: int) -> float:
    """The largest part, where these are divided into parts, in order, so that it is as small as can be."""
    ends = [0.0, *accumulate(seconds)]
    largest = ends
    for _ in range(num_segments - 1):
        largest = [
            min((max(largest[cut], ends[end] - ends[cut]) for cut in range(end)), default=0.0)
            for end in range(len(ends))
        ]
    return largest[-1]


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
