"""Captures an nn.Module as a TrainingGraph: forward, loss and backward, each node with its operator.

Dynamo's full-graph capture comes first: it keeps torch-level operators, variable names, source lines and
custom backwards, and records what the code read. What it cannot trace because of the model is traced with
``make_fx`` while it runs. Each is asked for a symbolic batch first, and then for a fixed one; the log says
why the first attempts failed.
"""

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.backends import mha

from pipec import ops
from pipec.capture.analyse_copy import analyse_differentiated, analyse_outputs
from pipec.capture.attributes import readable_values
from pipec.capture.batch import analyse_batch, batch_symbol_of
from pipec.capture.branch_decisions import BranchDecider, describe_branches, refuse_branches
from pipec.capture.captured_collectives import resolve_model_collectives, use_local_statistics
from pipec.capture.diagnosis import capture_error, error_summary
from pipec.capture.foreign_code import NonTorchGenerators, refuse_foreign_model, refuse_shared_constants
from pipec.capture.graph_symbols import SpecializedVariableError, number_values
from pipec.capture.microbatch_checks import require_full_scatter
from pipec.capture.model_call import ModelCall, refuse_input_gradients
from pipec.capture.normalize import TracedCall, training_graph
from pipec.capture.operators import number_operators
from pipec.capture.own_operators import use_own_operators
from pipec.capture.repeated_blocks import (
    IrregularBlocksError,
    RepeatedBlocks,
    find_repeated_blocks,
    instantiate_blocks,
    without_middle,
)
from pipec.capture.traced_step import (
    CaptureRequest,
    TracedStep,
    model_names,
    named_tensors,
    refuse_returned_cache,
)
from pipec.capture.variable_history import symbolic_candidates
from pipec.errors import CaptureError, InputError, NoLossError, PipecError, UnsupportedTorchError
from pipec.graph import NO_FINDINGS, BatchFindings, Gradient, ReadValues, TrainingGraph
from pipec.ir import Variable
from pipec.ir.batch_split import variable_values
from pipec.primitives import ctc_loss, recurrent_network
from pipec.torch_compat.compared_values import has_gradient_hook
from pipec.torch_compat.differentiation import (
    CapturedGraph,
    JointGraph,
    SymbolicDims,
    argument_tensors,
    differentiate,
    replaced_graph,
    returns_loss_first,
)
from pipec.torch_compat.dynamo_front_end import (
    capture_with_dynamo,
    draws_with_numpy,
    ignored_cudnn_flags,
    raise_if_unsupported,
)
from pipec.torch_compat.guards import Guards
from pipec.torch_compat.make_fx_front_end import capture_with_make_fx
from pipec.torch_compat.module_state import (
    DryRun,
    dry_run,
    has_partial_backward_hook,
    quiet_loggers,
    quiet_logging,
    replace_with_fake_tensors,
    restore_module,
    without_gradients,
)
from pipec.torch_compat.operator_patches import (
    cached_size_arithmetic,
    inlined_reentrant_checkpoints,
    skip_distribution_validation,
    traced_otherwise,
)
from pipec.torch_compat.symbolic_numbers import forget_tensors

log = logging.getLogger("pipec")

_warned: WeakSet[nn.Module] = WeakSet()
"""The models of which it was said that changes of what their code reads may go unnoticed."""

_unusual_losses: WeakSet[nn.Module] = WeakSet()
"""The models whose losses dry runs have found, which is done before any front end is asked again."""

FrontEnd = Callable[[nn.Module, tuple[Any, ...], SymbolicDims], CapturedGraph]

FRONT_ENDS: Mapping[str, FrontEnd] = {
    "Dynamo": capture_with_dynamo,
    "make_fx": capture_with_make_fx,
}


def capture(request: CaptureRequest) -> TrainingGraph:
    """Trace a call of a model into one graph. The model is left as it was.

    Raises:
        CaptureError: no front end can capture the model; it names the model's source line.
        InputError: the model fails on these arguments, or its loss is not one number.
        SpecializedVariableError: the variables cannot be symbolic, all of them.
        UnsupportedTorchError: torch is not as pipec knows it.
    """
    model, call, is_training = request.model, request.call, request.mode.trains
    refuse_returned_cache(request)
    refuse_foreign_model(model)
    _refuse_other_splits(call)
    _refuse_cumulative_norms(model)
    if is_training:
        refuse_input_gradients(call)
        _refuse_gradient_hooks(model)
    step = TracedStep(
        *(model, request.loss_fn, request.mode, call),
        *(request.variables, request.outputs, request.loss_path),
    )
    with _tracing(request, step):
        tracer = _Tracer(request, step)
        generators = NonTorchGenerators(step)
        if model in _unusual_losses:
            tracer.dry_run()
        graph, failures = _first_success(tracer, request)
        captured = tracer.captured
        assert captured is not None
        generators.refuse_non_torch_draws(tracer.dry_run, suspected=draws_with_numpy(captured.module))
        read = step.batched, step.loss_path
    refuse_shared_constants(model, graph)
    step.batched, step.loss_path = read  # which guards of the capture look at
    if captured.dynamo_output is None:
        _warn_of_missing_guards(model, captured, failures)
    if is_training:
        _check_trained(graph)
    if graph.batch is None and not call.is_whole:
        log.warning(
            "microbatches of %d rows are compiled on their own, and so is every other size: %s",
            graph.batch_size,
            error_summary(failures[0]),
        )
    found = replace(graph, reads=tracer.reads(), repeated=call.repeated)
    forget_tensors(captured.module.meta["fake_mode"].shape_env)
    return found


def capture_with_variables(
    request: CaptureRequest, variables: Sequence[Variable], report: Callable[..., None] = log.debug
) -> TrainingGraph:
    """The graph with variables as symbols: all that can be, or sizes alone, or numbers alone, or none.

    ``report`` logs which are compiled for one value, and why. Raises as ``capture``.
    """
    attempts = symbolic_candidates(variables, request.call)
    while attempts:
        attempt = attempts.pop(0)
        try:
            return capture(replace(request, variables=attempt))
        except SpecializedVariableError as error:
            fixed = [variable for variable in attempt if variable.name == error.name] or attempt
            names = ", ".join(dict.fromkeys(variable.path for variable in fixed))
            report("each value of %s is compiled on its own: %s", names, error)
            if error.name:
                left = [tuple(x for x in each if x.name != error.name) for each in (attempt, *attempts)]
                attempts = [each for each in dict.fromkeys(left) if each]
    return capture(request)


@contextmanager
def _tracing(request: CaptureRequest, step: TracedStep) -> Iterator[None]:
    """Let torch trace a step inside a ``with``, and leave the model as it was."""
    with ExitStack() as stack:
        stack.enter_context(quiet_logging())
        stack.enter_context(restore_module(step))
        stack.enter_context(without_gradients(step))
        stack.enter_context(cached_size_arithmetic())
        stack.enter_context(skip_distribution_validation())
        stack.enter_context(traced_otherwise(recurrent_network, ctc_loss))
        stack.enter_context(inlined_reentrant_checkpoints())
        stack.enter_context(ignored_cudnn_flags())
        stack.enter_context(_without_fused_attention(step))
        use_local_statistics(step)
        stack.enter_context(ops.tracing_with_replicas(request.num_replicas or 1))
        stack.enter_context(torch.set_grad_enabled(request.mode.trains))
        yield


@contextmanager
def _without_fused_attention(step: TracedStep) -> Iterator[None]:
    """Let attention modules of torch make the calls of training in evaluation too.

    Their one fused call would read weights of several stages.
    """
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(before and not any(isinstance(each, _ATTENTION) for each in step.modules()))
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)


_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


def _warn_of_missing_guards(model: nn.Module, captured: CapturedGraph, failures: Sequence[Exception]) -> None:
    """Say once of a model that changes of what its code reads may go unnoticed."""
    if model not in _warned:
        _warned.add(model)
        log.warning(
            "%sDynamo cannot trace the model (%s), so what its code reads is taken to stay as it is, unless "
            "modules have it as attributes, or their methods and the loss function enclose it or name it",
            "forward and backward were traced together: " * captured.has_backward,
            error_summary(failures[0]) if failures else "it was not asked",
        )


def _first_success(tracer: "_Tracer", request: CaptureRequest) -> tuple[TrainingGraph, list[Exception]]:
    """The graph of the first attempt that succeeds, and the errors of those before it.

    An attempt is the name of a front end, and whether the batch is symbolic. What pipec itself refuses, it
    would refuse of every front end, so that such an error ends the attempts. If the first attempt fails, a
    dry run does what only the first call of some models does, such as to install hooks under a lock; if it
    changes anything, that attempt is made again.
    """
    if request.variables:
        try:
            return tracer.trace_variables(), []
        except SpecializedVariableError as error:
            if error.__cause__ is None:
                raise
            first = tracer.dry_run()
            if isinstance(first.error, NoLossError):
                raise first.error from error
            if not first.changed:
                raise
        return tracer.trace_variables(), []
    errors: list[Exception] = []
    waiting = [*itertools.product(FRONT_ENDS, (False,) if request.call.is_whole else (True, False))]
    dry_run = None
    while waiting:
        name, symbolic = waiting.pop(0)
        try:
            return tracer.trace(FRONT_ENDS[name], symbolic), errors
        except PipecError:
            raise
        except Exception as error:
            raise_if_unsupported(error)
            log.debug(
                "%s%s failed: %s", name, " with a symbolic batch" if symbolic else "", error_summary(error)
            )
            errors.append(error)
        if dry_run is None:
            dry_run = tracer.dry_run()
            if isinstance(dry_run.error, PipecError):
                raise dry_run.error
            if dry_run.changed:
                waiting.insert(0, (name, symbolic))
                errors.clear()
    assert dry_run is not None
    is_part = request.call.batch_size < request.whole_batch.batch_size
    refused_branch = next(reversed(tracer.branches.refused), "")
    raise capture_error(errors, dry_run, refused_branch, is_part) from errors[0]


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _refuse_cumulative_norms(model: nn.Module) -> None:
    """Refuse batch norms whose statistics are means over all batches, whose number is in a tensor."""
    for path, module in model.named_modules():
        is_norm = isinstance(module, _BATCH_NORMS)
        if is_norm and module.training and module.track_running_stats and module.momentum is None:
            raise CaptureError(
                f"{path or 'the model'} is a {type(module).__name__}(momentum=None): its statistics are the "
                "mean over all batches so far, whose number is in a tensor. Pass a momentum such as 0.1, or "
                "call eval() on it"
            )


def _refuse_gradient_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients that a pipeline would not call."""
    for path, module in model.named_modules():
        if has_partial_backward_hook(module):
            raise CaptureError(
                f"{path or type(module).__name__} has a hook of register_backward_hook, which a pipeline "
                "would not call; register it on a tensor inside forward(), with Tensor.register_hook"
            )
    for fqn, parameter in model.named_parameters():
        if has_gradient_hook(parameter):
            raise CaptureError(
                f"{fqn} has a hook on its gradient, which a pipeline would not call; remove it, "
                "and change the gradient between step() and the optimizer's step"
            )


def _check_trained(graph: TrainingGraph) -> None:
    """Refuse a step that would train nothing. Eager torch would refuse its ``loss.backward()``."""
    if not any(isinstance(result, Gradient) for result in graph.results):
        raise NoLossError(
            "no parameter would get a gradient: none that the loss depends on has requires_grad set. "
            "Set it on those to train, or use eval_step() for the loss alone"
        )


class _Tracer:
    """Traces the call of a request with any front end, the batch symbolic or fixed."""

    def __init__(self, request: CaptureRequest, step: TracedStep) -> None:
        self._request, self._call, self._step = request, request.call, step
        self._fqns, self._constants = model_names(step, request.canonical)
        self._device = request.device if any(True for _ in step.model.parameters()) else None
        originals = replace_with_fake_tensors(step, request.device)
        self.branches = BranchDecider(request.call, request.whole_batch, originals)
        self.captured: CapturedGraph | None = None

    def dry_run(self) -> DryRun:
        """Run the step in eager mode on fake tensors."""
        self._step.is_dry_run = True
        found = dry_run(self._step, self._call.sample(self._call.batch_size, self._device).tree)
        self._step.is_dry_run = False
        if self._step.loss_path not in (self._request.loss_path, (), ("loss",)):
            _unusual_losses.add(self._step.model)
        return found

    def trace_variables(self) -> TrainingGraph:
        """Trace with the variables of the request symbolic, as the batch is.

        Raises:
            NoLossError: the model returns no loss, whatever the variables are.
            SpecializedVariableError: that cannot be done.
        """
        try:
            graph = self.trace(capture_with_dynamo, symbolic=True)
        except (NoLossError, SpecializedVariableError, UnsupportedTorchError):
            raise
        except Exception as error:
            raise_if_unsupported(error)
            raise SpecializedVariableError(error_summary(error)) from error
        if not graph.is_valid_for(self._call.batch_size, graph.planned_sizes):
            raise SpecializedVariableError("what holds of it does not hold of this call")
        return graph

    def trace(self, front_end: FrontEnd, symbolic: bool) -> TrainingGraph:
        """The training graph of what a front end captures."""
        sample = self._sample() if symbolic else self._call.sample(self._call.batch_size, self._device)
        self._step.batched = tuple(sample.batched)
        with self.branches.deciding(sample, symbolic):
            captured = front_end(self._step, sample.tree, self._symbolic(sample) if symbolic else [])
        if captured.dynamo_output is not None and self._request.has_loss and not returns_loss_first(captured):
            raise TypeError("the model returns an object that torch makes before it returns the loss")
        self.captured = captured
        use_own_operators(captured.module)
        operators = number_operators(captured.module)
        describe_branches(captured.module)
        require_full_scatter(captured.module.graph, sample)
        _warn_of_changed_state(self._step.model, captured.changed_state)
        first_collective = self._resolve_collectives(captured)
        batched = [path for path, split in zip(sample.paths, sample.batched, strict=True) if split]
        if sample.is_whole or (symbolic and batch_symbol_of(captured.module.graph, batched) is None):
            findings = NO_FINDINGS  # nothing is split; or the graph is for these rows alone, and refused
        else:
            with self._request.timed("analyse the batch"):
                findings = self._analyse(captured, batched, first_collective)

        def read(joint: JointGraph) -> TrainingGraph:
            return training_graph(
                TracedCall(
                    joint,
                    self._request,
                    operators,
                    sample,
                    symbolic and not sample.is_whole,
                    number_values(captured.module.graph, self._request.variables),
                    self._fqns,
                    self._constants,
                    findings,
                    first_collective,
                )
            )

        with self._request.timed("differentiate"):
            return self._differentiate(captured, self._repeated_blocks(captured), read)

    def _resolve_collectives(self, captured: CapturedGraph) -> str:
        """The first collective of the model itself, if it has one."""
        first = resolve_model_collectives(captured.module, self._step, self._request.num_replicas)
        if first and captured.has_backward:
            raise CaptureError(
                f"{first} is a collective, which a model that differentiates by itself cannot have"
            )
        return first

    def _repeated_blocks(self, captured: CapturedGraph) -> list[RepeatedBlocks]:
        """The runs of equal blocks in a graph of Dynamo's that is about to be differentiated."""
        if captured.dynamo_output is None:
            return []
        names = {id(tensor): self._fqns[name] for name, tensor in named_tensors(self._step).items()}
        given = argument_tensors(captured)
        named = {node: names[id(value)] for node, value in given.items() if id(value) in names}
        return find_repeated_blocks(captured.module.graph, named)

    def _differentiate(
        self,
        captured: CapturedGraph,
        runs: Sequence[RepeatedBlocks],
        read: Callable[[JointGraph], TrainingGraph],
    ) -> TrainingGraph:
        """What ``read`` makes of the joint graph, in which the middle blocks of runs are copies."""
        training = self._request.mode.trains
        if runs:
            with replaced_graph(captured, without_middle(captured.module.graph, runs)):
                joint = differentiate(captured, training)
            try:
                return instantiate_blocks(read(joint), runs)
            except IrregularBlocksError as error:
                log.info("equal blocks are differentiated one by one: %s", error)
        return read(differentiate(captured, training))

    def _sample(self) -> ModelCall:
        """A call to be traced with symbols, and numbers that are to be symbols in tensors.

        No symbol has one element, nor has the batch the size of another one by chance.
        """
        sizes = {*variable_values(self._request.variables, self._call.leaves).values()}
        rows = next(rows for rows in itertools.count(max(self._call.batch_size, 2)) if rows not in sizes)
        positions = itertools.count()

        def as_symbol(leaf: Any) -> Any:
            is_number = next(positions) in self._step.numbers
            return torch.tensor(leaf, dtype=_TYPES[type(leaf)]) if is_number else leaf

        return self._call.sample(rows, self._device).map(as_symbol)

    def _symbolic(self, sample: ModelCall) -> list[tuple[Tensor, int]]:
        """The dimensions of the sample that are to be symbols."""
        split = [(leaf, 0) for leaf, split in zip(sample.leaves, sample.batched, strict=True) if split]
        variables = self._request.variables
        return split + [(sample.leaves[x.position], x.dim) for x in variables if x.dim is not None]

    def _analyse(
        self,
        captured: CapturedGraph,
        batched: Sequence[str],
        first_collective: str,
    ) -> BatchFindings:
        """Analyse the graph, and rewrite it so that the losses of microbatches add up.

        Where the user says how they add up, only the other results are looked at.
        """
        request = self._request
        if not (request.adds_up or first_collective):
            refuse_branches(captured.module, "where microbatch_weight=... says how losses add up")
        size, num_replicas = self._call.batch_size, request.num_replicas or 1
        if captured.has_backward:
            return analyse_differentiated(captured, batched, size, request.has_loss, num_replicas)
        if request.adds_up:
            rows = request.whole_batch.batch_size if request.may_have_tail else 0
            return analyse_batch(captured.module, batched, size, request.has_loss, num_replicas, rows)
        return analyse_outputs(captured.module, batched, size, num_replicas)

    def reads(self) -> ReadValues:
        """The values that the code of the model and of the loss function read for the last graph."""
        noted = self.captured.dynamo_output if self.captured else None
        with quiet_loggers():  # guards may compare the filters of warnings
            guards = Guards(noted, self._step) if noted else None
        constants = [fqn.removeprefix("constant.") for fqn in self._constants]
        return ReadValues.of(self._step, guards, constants, readable_values)


def _refuse_other_splits(call: ModelCall) -> None:
    """Raise InputError if a tensor that is passed twice is split in two ways: its parts are two tensors."""
    for position, first in call.repeated:
        if call.axes[position] != call.axes[first]:
            path = call.paths[position]
            raise InputError(
                f"{path} is {call.paths[first]}, but is not split like it, and forward() may ask whether "
                f"they are one tensor; pass {path}.clone()"
            )


_TYPES = {float: torch.float64, int: torch.int64}


def _is_record(model: nn.Module, path: str) -> bool:
    """Whether an object of the model is no container: its attributes may be set to what they were."""
    found: Any = model
    for name in path.split(".")[1:]:
        found = getattr(found, name, None)
    is_of_model = path.startswith("model.") and found is not None
    return is_of_model and not isinstance(found, Collection | Iterator)


def _warn_of_changed_state(model: nn.Module, changed: Sequence[str]) -> None:
    """Name the Python objects that a forward changes, and pipelines leave alone."""
    modules = {f"model.{path}".rstrip("."): type(module).__name__ for path, module in model.named_modules()}
    for path in sorted(changed):
        if path in modules:
            what = f"forward() of {path} ({modules[path]}) sets attributes of the module"
        elif path.endswith(("._buffers", "._parameters")) or _is_record(model, path):
            continue
        else:
            what = f"forward() changes {path.removeprefix('model.')}"
        log.warning(
            "%s; pipelines run what was captured and leave it alone. State that changes from step to step "
            "belongs into a registered buffer.",
            what,
        )
