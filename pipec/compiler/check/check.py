"""Compares a few rows in microbatches with the user's model in eager torch, before a step is run."""

import contextlib
import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from pipec.capture.autocast import autocast
from pipec.capture.model_call import ModelCall
from pipec.capture.traced_step import TracedStep, model_names, named_tensors
from pipec.compiler.check.compare import (
    TOLERANCES,
    Agreement,
    Differences,
    Tolerance,
    agreement,
    differences,
    tolerance_of,
)
from pipec.compiler.check.draws import FixedDraws
from pipec.compiler.check.locate import first_difference
from pipec.compiler.check.split_run import SplitRun
from pipec.compiler.check.unsplit_run import StepValues, UnsplitRun
from pipec.errors import BranchError, PipecError
from pipec.graph import ResultRole, TrainingGraph, UpdatedBuffer, is_random
from pipec.ir import Mode, Precision, Sizes
from pipec.torch_compat.module_state import without_autocast

log = logging.getLogger("pipec")


@dataclass(frozen=True, eq=False)
class CheckRequest:
    """A compiled graph, and the call that it was compiled for.

    Attributes:
        graph: Of a microbatch, after all passes.
        step: The user's model with its loss.
        call: The whole batch.
        sizes: The rows of each microbatch of a step.
        values: The other sizes of the call, and its numbers, by name.
        canonical: Maps every name of a tied tensor to the one that the graph uses.
        device: Where both run.
        unknown: Names of tensors whose values this process does not have. The check draws some: microbatches
            must make up the batch for any weights.
        microbatch_weight: How the losses of microbatches count, if the user says so: each microbatch is then
            a batch of its own, and the check adds up what the model makes of each.
    """

    graph: TrainingGraph
    step: TracedStep
    call: ModelCall
    sizes: Sequence[int]
    values: Sizes
    canonical: Mapping[str, str]
    device: torch.device
    precision: Precision | None = None
    unknown: Collection[str] = ()
    microbatch_weight: str = ""


@dataclass(frozen=True)
class CheckResult:
    """What a check found: ``agreement`` on so many rows of ``sizes``, or the ``reason`` why there was none.

    ``cause`` names the operator where a difference begins, if it was found. ``is_of_capture`` is set if the
    graph differs from the model even where the batch is not split.
    """

    sizes: tuple[int, ...] = ()
    agreement: Agreement | None = None
    reason: str = ""
    cause: str = ""
    is_of_capture: bool = False

    @property
    def has_difference(self) -> bool:
        return self.agreement is not None and not self.agreement.is_equal

    @property
    def difference(self) -> str:
        """What differs, in words."""
        assert self.agreement is not None
        off = max(self.agreement.results, self.agreement.gradients)
        return f"{self.agreement.worst} is off by {off:.2g} times its size" + (
            f", which begins at {self.cause}" if self.cause else ""
        )

    def __str__(self) -> str:
        if self.agreement is None:
            return f"not checked: {self.reason}"
        rows = " + ".join(map(str, self.sizes))
        return (
            f"checked against the model itself on {rows} rows: results agree to "
            f"{self.agreement.results:.1e}, gradients to {self.agreement.gradients:.1e}"
        )


def check_call(request: CheckRequest) -> CheckResult:
    """Compare what microbatches of the first rows compute with what the model computes of them at once.

    The model, its buffers and all generators are left as they were.
    """
    if reason := _why_not(request):
        return CheckResult(reason=reason)
    result = CheckResult(reason="there are no rows")
    for sizes in _attempts(request):
        result = _compare_on(request, sizes)
        if result.agreement is not None:
            break
    return result


def _attempts(request: CheckRequest) -> Iterator[tuple[int, ...]]:
    """The rows of the microbatches to try: few of them, those of two microbatches, and all.

    A model may need more rows than a few. If it makes a constant of their number, or branches on values of
    the whole batch, a part of the rows shows nothing. What is not proved may differ for some values alone, so
    that all rows come first. Microbatches of other sizes may have another graph.
    """
    graph, every = request.graph, _own_sizes(request)
    attempts = [every]
    if (two := every[:2]) and graph.batch is not None and not graph.input_branches.branches:
        half = max(2, min(two) // 2)
        few = (half + 1, half)[: len(two)]
        attempts = [two, every] if two != every else attempts
        if sum(few) < sum(two) and all(graph.is_valid_for(size, request.values) for size in few):
            attempts = [few, *attempts]
    yield from attempts if graph.findings.is_proved else reversed(attempts)


def _own_sizes(request: CheckRequest) -> tuple[int, ...]:
    """The rows of the microbatches that the graph is for: others may have a graph of their own."""
    graph, values = request.graph, request.values
    return tuple(size for size in request.sizes if size and graph.is_valid_for(size, values))


def _compare_on(request: CheckRequest, sizes: tuple[int, ...]) -> CheckResult:
    """The agreement on the first rows of the call, in microbatches of these sizes."""
    graph, rows = request.graph, sum(sizes)
    call = _some_rows(request.call, sizes)
    try:
        tensors = _Tensors.of(request)
    except _CannotDrawError as error:
        return CheckResult(sizes, reason=str(error))
    draws, in_turn = FixedDraws(), bool(request.microbatch_weight)
    weights = [1.0] * len(sizes) if request.microbatch_weight == "sum" else None
    split = SplitRun(graph, tensors.by_fqn, request.device, request.values, draws, weights)

    def unsplit(own: _Tensors) -> StepValues:
        with draws if any(map(is_random, _nodes(graph))) else contextlib.nullcontext():
            return _unsplit(request, own, call, sizes, in_turn)

    try:
        wanted = unsplit(tensors)
    except PipecError:
        raise
    except Exception as error:
        return CheckResult(sizes, reason=f"the model fails on {rows} rows: {_brief(error)}")
    with without_autocast():
        try:
            found = split.run(call, sizes)
        except BranchError as error:
            return CheckResult(sizes, reason=f"{rows} rows lead to another branch: {error}")
        except PipecError:
            raise
        except Exception as error:
            if call.ambiguous_leaves:  # such as numbers of rows of a table that was split
                return CheckResult(sizes, Agreement(math.inf, 0.0, f"a call ({_brief(error)})", False))
            log.warning("the first step is not checked, for its graph cannot run alone: %s", _brief(error))
            return CheckResult(sizes, reason=f"its graph cannot run alone: {_brief(error)}")
    if draws.unknown:
        return CheckResult(sizes, reason=f"{draws.unknown[0]} draws random numbers")
    if request.step.mode is not Mode.FORWARD and not wanted.results[0].isfinite():
        return CheckResult(sizes, reason=f"the loss of {rows} rows is not finite")
    compared = _Comparison(_result_names(graph), _dtypes(graph))
    if (agrees := compared(found, wanted)).is_equal:
        return CheckResult(sizes, agrees)
    compared = replace(compared, noise=compared.off(unsplit(_Tensors.of(request, rounded=True)), wanted))
    if (agrees := compared(found, wanted)).is_equal:
        return CheckResult(sizes, agrees)
    if len(sizes) > 1 and not in_turn and _changes_own_buffers(request):
        return CheckResult(sizes, reason="a forward changes buffers, once for each microbatch")
    with without_autocast():
        return _explained(request, split, call, sizes, compared, wanted, agrees)


@dataclass(frozen=True)
class _Comparison:
    """Compares two runs of a step. ``names`` are those of its results, and ``dtypes`` it computes in."""

    names: Sequence[str]
    dtypes: Collection[torch.dtype]
    noise: Differences | None = None

    @property
    def tolerance(self) -> Tolerance:
        return tolerance_of(self.dtypes)

    def off(self, found: StepValues, wanted: StepValues) -> Differences:
        return differences(found, wanted, self.names)

    def __call__(self, found: StepValues, wanted: StepValues) -> Agreement:
        return agreement(self.off(found, wanted), self.tolerance, self.noise)


def _some_rows(call: ModelCall, sizes: Sequence[int]) -> ModelCall:
    """Rows from all over the batch, for microbatches of these sizes; all of them if there are no more.

    The second microbatch ends with a row from the middle of the first: what counts or compares rows then
    shows. (If both began with the same row, or ended with it, neighbours of rows would not show.) Where
    tensors are not contiguous, the rows are the first ones, since a copy would have other strides.
    """
    count = sum(sizes)
    if count == call.batch_size:
        return call.map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
    split = [leaf for leaf, batched in zip(call.leaves, call.batched, strict=True) if batched]
    if not all(leaf.is_contiguous() for leaf in split):
        return call.rows(0, count)
    rows = torch.linspace(0, call.batch_size - 1, count).long()
    if len(sizes) > 1 and sizes[1] > 1:
        rows[sizes[0] + sizes[1] - 1] = rows[(sizes[0] - 1) // 2]
    flags = iter(call.batched)
    return call.map(lambda leaf: leaf[rows.to(leaf.device)] if next(flags) else leaf)


def _explained(
    request: CheckRequest,
    split: SplitRun,
    call: ModelCall,
    sizes: tuple[int, ...],
    compared: _Comparison,
    wanted: StepValues,
    agrees: Agreement,
) -> CheckResult:
    """A difference, with the operator where it begins."""
    graph, rows = request.graph, sum(sizes)
    if len(sizes) == 1:
        return CheckResult(sizes, agrees, is_of_capture=True)
    of_microbatches = request.microbatch_weight or graph.findings.num_batch_norms
    if of_microbatches or not graph.is_valid_for(rows, request.values):
        return CheckResult(sizes, agrees)
    if not compared(split.run(call, [rows]), wanted).is_equal:
        return CheckResult(sizes, agrees, is_of_capture=True)
    operator = first_difference(split, call, sizes, compared.tolerance)
    cause = ""
    if operator is not None:
        places = (operator.source, operator.module and f"in {operator.module}", operator.name)
        cause = ", ".join(filter(None, places))
    return CheckResult(sizes, agrees, cause=cause)


def _unsplit(
    request: CheckRequest, tensors: "_Tensors", call: ModelCall, sizes: Sequence[int], in_turn: bool
) -> StepValues:
    """What the model makes of all rows; or the weighted sum of what it makes of microbatches ``in_turn``."""
    run = UnsplitRun(request.step, tensors.replaced, tensors.trained)
    call = call.map(lambda leaf: leaf.to(request.device) if isinstance(leaf, Tensor) else leaf)
    norms = bool(request.graph.findings.num_batch_norms)
    with autocast(request.precision, request.device):
        if not in_turn:
            return run.run([call], sizes, norms)[0]
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        calls = [call.rows(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        parts = run.run(calls, sizes, norms=False)
    if request.step.mode is Mode.FORWARD:
        every = [[part.results[k] for part in parts] for k in parts[0].results]
        has_rows = [
            all(x.shape[:1] == (n,) for x, n in zip(results, sizes, strict=True)) for results in every
        ]
        places = zip(parts[0].results, every, has_rows, strict=True)
        return StepValues({k: torch.cat(results) for k, results, rows in places if rows})
    adds_up = request.microbatch_weight == "sum"
    loss, gradients = torch.zeros((), device=request.device), dict[str, Tensor]()
    for part, size in zip(parts, sizes, strict=True):
        weight = 1.0 if adds_up else size / sum(sizes)
        loss = loss + part.results[0] * weight
        for fqn, gradient in part.gradients.items():
            gradients[fqn] = gradients.get(fqn, 0) + gradient * weight
    return StepValues({0: loss}, gradients)


class _CannotDrawError(Exception):
    """The values of a tensor are unknown, and cannot be drawn."""


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a check.

    ``by_fqn`` are those of the graph. ``replaced`` has, by the ``id`` of a tensor of the model, what the
    model uses instead: copies of buffers, which a forward may change, and parameters only where the model's
    own cannot be used. ``trained`` are the parameters that the model uses, by FQN.
    """

    by_fqn: Mapping[str, Tensor]
    replaced: Mapping[int, Tensor]
    trained: Mapping[str, Tensor]

    @classmethod
    def of(cls, request: CheckRequest, rounded: bool = False) -> "_Tensors":
        """With ``rounded``, parameters are rounded once more, to the coarsest dtype of the step."""
        eps = max((torch.finfo(x).eps for x in _dtypes(request.graph) if x in TOLERANCES), default=0.0)
        fqns, _ = model_names(request.step, request.canonical)
        parameters = {id(each) for each in request.step.parameters()}
        by_fqn, replaced, trained = dict[str, Tensor](), dict[int, Tensor](), dict[str, Tensor]()
        for name, tensor in named_tensors(request.step).items():
            fqn, is_parameter = fqns[name], id(tensor) in parameters
            is_unknown = fqn in request.unknown or tensor.is_meta
            is_own = is_parameter and not is_unknown and tensor.device.type == request.device.type
            if id(tensor) not in replaced and (rounded or not is_own):
                values = _drawn(fqn, tensor, request.device) if is_unknown else tensor.detach().clone()
                values = _rounded(values, eps) if rounded and is_parameter else values
                replaced[id(tensor)] = values.to(request.device).requires_grad_(tensor.requires_grad)
            used = replaced.get(id(tensor), tensor)
            if fqn not in by_fqn:
                by_fqn[fqn] = used.detach() if is_parameter else used.detach().clone()
            if request.step.mode is Mode.TRAIN and is_parameter and tensor.requires_grad:
                trained[fqn] = used
        return cls(by_fqn, replaced, trained)


def _rounded(values: Tensor, eps: float) -> Tensor:
    """Each element moved by ``eps`` of its size, up or down in turn."""
    if not values.is_floating_point():
        return values
    signs = torch.ones(values.numel(), dtype=values.dtype, device=values.device)
    signs[::2] = -1
    return values * (1 + signs.view(values.shape) * max(eps, torch.finfo(values.dtype).eps))


def _drawn(fqn: str, like: Tensor, device: torch.device) -> Tensor:
    """Values for a tensor that this process does not have: any will do, if none makes others vanish."""
    if not like.is_floating_point():
        raise _CannotDrawError(f"this process does not have the values of {fqn}")
    generator = torch.Generator().manual_seed(len(fqn))
    made = torch.empty(like.shape, dtype=torch.float32)
    if like.ndim > 1:
        made.normal_(std=0.02 if like.numel() > 4096 else 0.2, generator=generator)
    else:
        made.uniform_(0.5, 1.5, generator=generator)
    return made.to(device, like.dtype)


def _why_not(request: CheckRequest) -> str:
    """Why nothing can be compared; empty if it can."""
    graph = request.graph
    if graph.first_collective:
        return f"{graph.first_collective} needs the other replicas"
    if len(_own_sizes(request)) < 2 <= sum(map(bool, request.sizes)):
        return "microbatches of other sizes have other graphs"
    tensors = named_tensors(request.step).values()
    num_bytes = 2 * sum(each.nbytes for each in tensors if each.requires_grad)
    num_bytes += sum(each.nbytes for each in tensors if each.device.type != request.device.type)
    free = _free_bytes(request.device)
    if num_bytes > free:
        return f"weights and gradients take {num_bytes:.3g} bytes, and {request.device} has {free:.3g}"
    return ""


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2


def _nodes(graph: TrainingGraph) -> Iterator[fx.Node]:
    """The nodes of a training graph that call functions, those of the tail among them."""
    yield from graph.nodes
    if graph.tail is not None:
        yield from (node for node in graph.tail.nodes if node.op == "call_function")


def _changes_own_buffers(request: CheckRequest) -> bool:
    """Whether a forward changes buffers other than those of torch's own modules, such as batch norms."""
    roles: tuple[ResultRole, ...] = (*request.graph.results, *request.graph.tail_results)
    changed = {role.fqn for role in roles if isinstance(role, UpdatedBuffer)} - request.graph.step_buffers
    owners = (request.step.model.get_submodule(fqn.rpartition(".")[0]) for fqn in changed)
    return any(not type(owner).__module__.startswith("torch.nn.modules.") for owner in owners)


def _dtypes(graph: TrainingGraph) -> set[torch.dtype]:
    values = (node.meta.get("val") for node in graph.module.graph.nodes)
    return {value.dtype for value in values if isinstance(value, Tensor)}


def _result_names(graph: TrainingGraph) -> list[str]:
    if graph.mode is Mode.FORWARD:
        return []
    return ["the loss", *(f"logs[{name!r}]" for name in graph.logs)]


def _brief(error: Exception) -> str:
    first, _, _ = f"{type(error).__name__}: {error}".partition("\n")
    return first[:200]
