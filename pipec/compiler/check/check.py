"""Compares a few rows in microbatches with the user's model in eager torch, before a step is run."""

import contextlib
import functools
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from pipec.capture.autocast import autocast
from pipec.capture.model_call import ModelCall
from pipec.capture.traced_step import TracedStep, model_names, named_tensors
from pipec.compiler.batch_equivalence import (
    batch_warnings,
    changed_buffer_warning,
    require_concatenable_outputs,
    require_independent_rows,
    require_rows_for_norms,
    several_rounds_warning,
    single_row_warning,
)
from pipec.compiler.candidate import Candidate
from pipec.compiler.check.compare import TOLERANCES, Agreement, Comparison, tolerance_of
from pipec.compiler.check.draws import FixedDraws
from pipec.compiler.check.split_run import SplitRun, first_difference
from pipec.compiler.check.unsplit_run import StepValues, UnsplitRun
from pipec.compiler.compiler import CompileRequest, CompileSettings
from pipec.compiler.staged_graph import StagedGraph
from pipec.errors import BranchError, CaptureError, InputError, PipecError, UnequalStepError
from pipec.graph import BatchFindings, ResultRole, TrainingGraph, UpdatedBuffer, is_random
from pipec.ir import Mode
from pipec.ir.batch_split import require_equal_rows, variable_values

log = logging.getLogger("pipec")


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


def check_microbatches(
    request: CompileRequest,
    candidate: Candidate,
    staged: StagedGraph,
    sizes: Sequence[int],
    rest: Sequence[int],
) -> str:
    """Refuse microbatches that do not make up the batch; warn of exceptions, and of what is not known.

    A graph that is new is compared with the model itself on rows of the ``rest`` of the microbatches. Returns
    the result of that for the plan.
    """
    graph, count, compiler = staged.graph, len(sizes), request.compiler
    if graph.first_collective:
        require_equal_rows(sizes)
    require_rows_for_norms(graph.findings, sizes)
    compiler.warn(several_rounds_warning(graph, candidate.policy.replicas, count))
    compiler.warn(single_row_warning(graph, request.batch))
    compiler.warn(changed_buffer_warning(graph, compiler.model, count, candidate.policy.replicas))
    if count > 1:
        require_concatenable_outputs(graph)
        require_independent_rows(request.findings(graph), count, candidate.recorded_options)
    is_known = any(each.captured is staged.captured for each in request.known.graphs)
    if is_known and compiler.settings.checks:
        return ""
    result = CheckResult(reason='check is "off"')
    if compiler.settings.checks:
        result = check_graph(request, staged, rest)
    if len(rest) > 1 and not is_known:
        _refuse_unchecked_rows(result, request.example or request.call, graph.findings)
    for warning in batch_warnings(graph.findings, result.agreement is not None) if count > 1 else ():
        compiler.warn(warning)
    return str(result) if compiler.settings.checks else ""


def check_graph(request: CompileRequest, staged: StagedGraph, sizes: Sequence[int]) -> CheckResult:
    """Compare a graph with the model itself on a few rows of the call.

    Raises:
        UnequalStepError: microbatches do not compute what the model computes of their rows.
        CaptureError: the graph computes something else than the model.
    """
    with request.compiler.stopwatch.timed("check"):
        result = check_call(request, staged.graph, sizes)
    _refuse_difference(result)
    log.debug("%s", result)
    return result


def check_call(request: CompileRequest, graph: TrainingGraph, sizes: Sequence[int]) -> CheckResult:
    """Compare what microbatches of the first rows compute with what the model computes of them at once.

    ``graph`` is that of a microbatch, after all passes, and ``sizes`` are the rows of each microbatch of a
    step. The model, its buffers and all generators are left as they were.
    """
    check = _Check(request, graph, tuple(size for size in sizes if size), _given_for(request, graph, sizes))
    if reason := check.obstacle():
        return CheckResult(reason=reason)
    result = CheckResult(reason="there are no rows")
    for few in check.attempts():
        result = check.compare_on(few)
        if result.agreement is not None:
            break
    return result


def _refuse_difference(result: CheckResult) -> None:
    """Raise if a check found that the graph does not compute what the model does.

    Raises:
        UnequalStepError: microbatches do not make up the batch.
        CaptureError: the graph differs even where the batch is not split.
    """
    if not result.has_difference:
        return
    rows = " and ".join(map(str, result.sizes))
    if result.is_of_capture:
        raise CaptureError(
            f"the captured graph does not compute what the model computes of the first {rows} rows: "
            f'{result.difference}. This is a fault of pipec; with check="off" the step would run as it is'
        )
    raise UnequalStepError(
        f"microbatches of {rows} rows do not make what the model computes of these rows at once:\n  "
        f"{result.difference}\n"
        "Remedies: compute the batch as one, with microbatches=1; compute each row by itself, and reduce "
        'with sums and means over rows; name the dimension of the batch, as in batched={"x": 1}, or the '
        'arguments that every microbatch needs whole, as in batched={"table": None}'
    )


def _refuse_unchecked_rows(result: CheckResult, call: ModelCall, findings: BatchFindings) -> None:
    """Ask for the rows of tensors that may be whole, where neither a proof nor a check has told.

    Raises:
        InputError: it names all of them.
    """
    is_proved = findings.is_proved
    if call.ambiguous_leaves and result.agreement is None and not is_proved:
        names = dict.fromkeys(call.ambiguous_leaves.values())
        split, whole = (", ".join(f"{name!r}: {word}" for name in names) for word in (0, None))
        raise InputError(
            f"{', '.join(call.ambiguous_leaves)} have as many rows as the batch, and may be other rows. No "
            f"run could tell: {result.reason}. Pass batched={{{split}}} to pipec.compile for what is split, "
            f"and batched={{{whole}}} for what every microbatch needs whole"
        )


@dataclass(frozen=True, eq=False)
class _Check:
    """A graph to compare with the model of ``request``, for microbatches of ``sizes``.

    ``given`` are two of the given microbatches that the graph is for, if they are given.
    """

    request: CompileRequest
    graph: TrainingGraph
    sizes: Sequence[int]
    given: Sequence[ModelCall] = ()

    @property
    def settings(self) -> CompileSettings:
        return self.request.compiler.settings

    @property
    def call(self) -> ModelCall:
        return self.request.example or self.request.call

    @functools.cached_property
    def step(self) -> TracedStep:
        settings, key = self.settings, self.request.key
        model, path = self.request.compiler.model, settings.loss_path
        return TracedStep(model, settings.loss_fn, key.mode, self.call, outputs=key.outputs, loss_path=path)

    @functools.cached_property
    def own_sizes(self) -> tuple[int, ...]:
        """The rows of the microbatches that the graph is for: others may have a graph of their own."""
        if self.given:
            return (1,) * len(self.given)
        return tuple(size for size in self.sizes if self.is_valid_for(size))

    @property
    def has_own_batches(self) -> bool:
        """Whether each microbatch is a batch of its own, and what the model makes of each adds up."""
        return self.request.has_own_batches

    @functools.cached_property
    def comparison(self) -> Comparison:
        names = ["the loss"] if self.graph.mode.has_loss else []
        names += [f"logs[{name!r}]" for name in self.graph.logs if names]
        return Comparison(names, tolerance_of(self.dtypes))

    @functools.cached_property
    def dtypes(self) -> set[torch.dtype]:
        values = (node.meta.get("val") for node in self.graph.module.graph.nodes)
        return {value.dtype for value in values if isinstance(value, Tensor)}

    def is_valid_for(self, rows: int) -> bool:
        return self.graph.is_valid_for(rows, self.request.values)

    def obstacle(self) -> str:
        """Why nothing can be compared; empty if it can."""
        device = self.settings.device
        if self.graph.first_collective:
            return f"{self.graph.first_collective} needs the other replicas"
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in self.call.leaves):
            return "the arguments have no values"
        if len(self.own_sizes) < 2 <= len(self.sizes) and not self.given:
            return "microbatches of other sizes have other graphs"
        tensors = named_tensors(self.step).values()
        # gradients of both runs, and weights that are rounded to see how much rounding matters
        num_bytes = 3 * sum(each.nbytes for each in tensors if each.requires_grad)
        num_bytes += sum(each.nbytes for each in tensors if each.device.type != device.type)
        free = _free_bytes(device)
        if num_bytes > free:
            return f"weights and gradients take {num_bytes:.3g} bytes, and {device} has {free:.3g}"
        return ""

    def attempts(self) -> Iterator[tuple[int, ...]]:
        """The rows of the microbatches to try: few of them, those of two microbatches, and all.

        A model may need more rows than a few. If it makes a constant of their number, or branches on values
        of the whole batch, a part of the rows shows nothing. What is not proved may differ for some values
        alone, so that all rows come first.
        """
        every = self.own_sizes
        attempts = [every]
        if (two := every[:2]) and self.graph.batch is not None and not self.graph.input_branches.branches:
            half = max(2, min(two) // 2)
            few = (half + 1, half)[: len(two)]
            attempts = [two, every] if two != every else attempts
            if sum(few) < sum(two) and all(map(self.is_valid_for, few)):
                attempts = [few, *attempts]
        yield from attempts if self.graph.findings.is_proved else reversed(attempts)

    def compare_on(self, sizes: tuple[int, ...]) -> CheckResult:
        """The agreement on rows of the call, in microbatches of these sizes."""
        rows, draws = sum(sizes), FixedDraws()
        call = replace(self.call, given=tuple(self.given)) if self.given else _some_rows(self.call, sizes)
        try:
            tensors = self._tensors()
        except _CannotDrawError as error:
            return CheckResult(sizes, reason=str(error))
        variables = self.request.key.variables
        values = [variable_values(variables, part.leaves) for part in call.parts]
        split = SplitRun(
            self.graph, tensors.by_fqn, self.settings.device, values, draws, self._weights(sizes)
        )
        try:
            wanted = self._unsplit(tensors, call, sizes, draws)
        except PipecError:
            raise
        except Exception as error:
            return CheckResult(sizes, reason=f"the model fails on {rows} rows: {_brief(error)}")
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
        if self.step.mode is not Mode.FORWARD and not wanted.results[0].isfinite():
            return CheckResult(sizes, reason=f"the loss of {rows} rows is not finite")
        compared = self.comparison
        if (agrees := compared(found, wanted)).is_equal:
            return CheckResult(sizes, agrees)
        rounded = self._unsplit(self._tensors(rounded=True), call, sizes, draws)
        compared = replace(compared, noise=compared.differences(rounded, wanted))
        if (agrees := compared(found, wanted)).is_equal:
            return CheckResult(sizes, agrees)
        if len(sizes) > 1 and not self.has_own_batches and self._changes_own_buffers():
            return CheckResult(sizes, reason="a forward changes buffers, once for each microbatch")
        if len(sizes) == 1:
            return CheckResult(sizes, agrees, is_of_capture=True)
        of_microbatches = self.has_own_batches or self.graph.findings.num_batch_norms
        if of_microbatches or not self.is_valid_for(rows):
            return CheckResult(sizes, agrees)
        if not compared(split.run(call, [rows]), wanted).is_equal:
            return CheckResult(sizes, agrees, is_of_capture=True)
        operator = first_difference(split, call, sizes, compared.tolerance)
        places = operator and (operator.source, operator.module and f"in {operator.module}", operator.name)
        return CheckResult(sizes, agrees, cause=", ".join(filter(None, places or ())))

    def _unsplit(
        self, tensors: "_Tensors", call: ModelCall, sizes: Sequence[int], draws: FixedDraws
    ) -> StepValues:
        """What the model makes of all rows; or the weighted sum of what it makes of its own batches."""
        device, settings = self.settings.device, self.settings
        run = UnsplitRun(self.step, tensors.replaced, tensors.trained)
        calls = [
            x.map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf) for x in call.parts
        ]
        tail = self.graph.tail.nodes if self.graph.tail else ()
        nodes = [*self.graph.nodes, *(node for node in tail if node.op == "call_function")]
        with (
            draws if any(map(is_random, nodes)) else contextlib.nullcontext(),
            autocast(settings.precision, device),
        ):
            if not self.has_own_batches:
                return run.run(calls, sizes, norms=bool(self.graph.findings.num_batch_norms))[0]
            if not self.given:
                starts = [sum(sizes[:k]) for k in range(len(sizes))]
                calls = [
                    calls[0].rows(start, start + size) for start, size in zip(starts, sizes, strict=True)
                ]
            parts = run.run(calls, sizes, norms=False)
        if self.step.mode is Mode.FORWARD:
            whole = dict[int, Tensor]()
            for k in parts[0].results:
                results = [part.results[k] for part in parts]
                if all(x.shape[:1] == (size,) for x, size in zip(results, sizes, strict=True)):
                    whole[k] = torch.cat(results)
            return StepValues(whole)
        loss, gradients = torch.zeros((), device=device), dict[str, Tensor]()
        weights = self._weights(sizes) or [size / sum(sizes) for size in sizes]
        for part, weight in zip(parts, weights, strict=True):
            loss = loss + part.results[0] * weight
            for fqn, gradient in part.gradients.items():
                gradients[fqn] = gradients.get(fqn, 0) + gradient * weight
        return StepValues({0: loss}, gradients)

    def _weights(self, sizes: Sequence[int]) -> list[float] | None:
        """The weight of the loss of each microbatch; None: its fraction of the rows."""
        adds = self.has_own_batches and self.settings.microbatch_weight == "sum" and not self.given
        return [1.0] * len(sizes) if adds else None

    def _tensors(self, rounded: bool = False) -> "_Tensors":
        """The tensors of both runs; with ``rounded``, parameters are rounded to the coarsest dtype."""
        step, device = self.step, self.settings.device
        eps = max((torch.finfo(x).eps for x in self.dtypes if x in TOLERANCES), default=0.0)
        fqns, _ = model_names(step, self.request.compiler.canonical)
        parameters = {id(each) for each in step.parameters()}
        by_fqn, replaced, trained = dict[str, Tensor](), dict[int, Tensor](), dict[str, Tensor]()
        for name, tensor in named_tensors(step).items():
            fqn, is_parameter = fqns[name], id(tensor) in parameters
            is_unknown = fqn in self.request.unknown or tensor.is_meta
            is_own = is_parameter and not is_unknown and tensor.device.type == device.type
            if id(tensor) not in replaced and (rounded or not is_own):
                values = _drawn(fqn, tensor, device) if is_unknown else tensor.detach().clone()
                values = _rounded(values, eps) if rounded and is_parameter else values
                replaced[id(tensor)] = values.to(device).requires_grad_(tensor.requires_grad)
            used = replaced.get(id(tensor), tensor)
            if fqn not in by_fqn:
                by_fqn[fqn] = used.detach() if is_parameter else used.detach().clone()
            if step.mode.trains and is_parameter and tensor.requires_grad:
                trained[fqn] = used
        return _Tensors(by_fqn, replaced, trained)

    def _changes_own_buffers(self) -> bool:
        """Whether a forward changes buffers other than those of torch's own modules, such as batch norms."""
        roles: tuple[ResultRole, ...] = (*self.graph.results, *self.graph.tail_results)
        changed = {role.fqn for role in roles if isinstance(role, UpdatedBuffer)} - self.graph.step_buffers
        owners = (self.step.model.get_submodule(fqn.rpartition(".")[0]) for fqn in changed)
        return any(not type(owner).__module__.startswith("torch.nn.modules.") for owner in owners)


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


class _CannotDrawError(Exception):
    """The values of a tensor are unknown, and cannot be drawn."""


def _given_for(request: CompileRequest, graph: TrainingGraph, sizes: Sequence[int]) -> list[ModelCall]:
    """The first two of the last given microbatches, whose rows are ``sizes``, that a graph is for."""
    last = request.call.given[request.batch - sum(sizes) :]
    own = (k for k in range(len(last)) if request.is_valid_for(graph, sizes[k:]))
    return [last[k] for k in islice(own, 2)]


def _some_rows(call: ModelCall, sizes: Sequence[int]) -> ModelCall:
    """Rows from all over the batch, for microbatches of these sizes; all of them if there are no more.

    Rows come first that differ from all before them in an argument of integers, such as a class or a mask.
    The second microbatch repeats a row of the first, at another place: what counts or compares rows then
    shows. (If both began with the same row, or ended with it, neighbours of rows would not show.) Where
    tensors are not contiguous, the rows are the first ones, since a copy would have other strides.
    """
    count = sum(sizes)
    if count == call.batch_size:
        return call.map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
    split = [leaf for leaf, batched in zip(call.leaves, call.batched, strict=True) if batched]
    if not all(leaf.is_contiguous() for leaf in split):
        return call.rows(0, count)
    repetitions = _repetitions(split, call.batch_size)
    order = repetitions.argsort(stable=True)[: max(count, int((repetitions == 0).sum()))]
    rows = order[torch.linspace(0, len(order) - 1, count).long()].sort().values
    if len(sizes) > 1 and sizes[1] > 1:
        repeated, at = (1, 0) if sizes[0] > 2 else (0, 1)
        rows[sizes[0] + at] = rows[repeated]
    flags = iter(call.batched)
    return call.map(lambda leaf: leaf[rows.to(leaf.device)] if next(flags) else leaf)


def _repetitions(leaves: Sequence[Tensor], num_rows: int) -> Tensor:
    """By row, how often rows before have the same integers: their sums, added up over ``leaves``."""
    found = torch.zeros(num_rows, dtype=torch.int64)
    for leaf in leaves:
        if not leaf.is_floating_point() and not leaf.is_complex():
            sums = leaf[:, None].flatten(1).sum(1).cpu().long()
            groups, order = sums.sort(stable=True)
            found[order] += torch.arange(num_rows) - torch.searchsorted(groups, groups)
    return found


def _rounded(values: Tensor, eps: float) -> Tensor:
    """Each element moved by ``eps`` of its size, up or down in turn."""
    if not values.is_floating_point():
        return values
    signs = torch.ones(values.numel(), dtype=values.dtype, device=values.device)
    signs[::2] = -1
    return values * (1 + signs.view(values.shape) * max(eps, torch.finfo(values.dtype).eps))


def _drawn(fqn: str, like: Tensor, device: torch.device) -> Tensor:
    """Values for a tensor that this process does not have: any will do, if none makes others vanish.

    Microbatches must make up the batch for any weights.
    """
    if not like.is_floating_point():
        raise _CannotDrawError(f"this process does not have the values of {fqn}")
    generator = torch.Generator().manual_seed(len(fqn))
    made = torch.empty(like.shape, dtype=torch.float32)
    if like.ndim > 1:
        made.normal_(std=0.02 if like.numel() > 4096 else 0.2, generator=generator)
    else:
        made.uniform_(0.5, 1.5, generator=generator)
    return made.to(device, like.dtype)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2


def _brief(error: Exception) -> str:
    first, _, _ = f"{type(error).__name__}: {error}".partition("\n")
    return first[:200]
