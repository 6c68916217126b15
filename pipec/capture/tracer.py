"""nn.Module to TrainingGraph: one graph of forward, loss and backward, every node knowing its operator.

Dynamo's full-graph capture comes first: it keeps torch-level operators, variable names, source lines and
custom backwards. Non-strict ``torch.export`` serves where Dynamo cannot. Where neither can, because the model
differentiates something itself, forward and backward are traced together. Each is asked for a symbolic batch
first, and then for a fixed one; the log says why the first attempts failed.
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx, nn

from pipec import ops, torch_compat
from pipec.capture.attributes import readable_values
from pipec.capture.batch import analyse, symbol_of_rows
from pipec.capture.batch.fixed import Comparison, compare
from pipec.capture.branches import Branches, describe_branches, refuse_branches
from pipec.capture.caches import refuse_cache, without_caches
from pipec.capture.call import Call
from pipec.capture.checks import expect_all_scattered
from pipec.capture.diagnosis import brief, capture_error
from pipec.capture.differentiated import analyse_differentiated, analyse_outputs
from pipec.capture.joins import join_replicas, sync_batch_norms_alone
from pipec.capture.normalize import Traced, training_graph
from pipec.capture.operators import checkpoints, number_operators
from pipec.capture.randomness import Generators
from pipec.capture.recurrent import separate_layers
from pipec.capture.splitting import all_have_rows
from pipec.capture.step import Step, model_names, step_of
from pipec.capture.symbols import FixedVariableError, number_values
from pipec.errors import CaptureError, InputError, PipecError
from pipec.graph import PROVED, Assumptions, Findings, Gradient, TrainingGraph
from pipec.ir import Mode, Variable
from pipec.ir.batch import variable_values
from pipec.torch_compat import Captured

log = logging.getLogger("pipec")

CPU = torch.device("cpu")

_warned: WeakSet[nn.Module] = WeakSet()
"""The models of which it was said that changes of what their code reads may go unnoticed."""

FrontEnd = Callable[[nn.Module, tuple[Any, ...], torch_compat.Symbolic], Captured]

FRONT_ENDS: Mapping[str, FrontEnd] = {
    "Dynamo": torch_compat.capture_with_dynamo,
    "torch.export": torch_compat.capture_with_export,
    "autograd": torch_compat.capture_directly,
}


def capture(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    mode: Mode,
    call: Call,
    canonical: Mapping[str, str] | None = None,
    device: torch.device = CPU,
    symbolic: bool = True,
    adds_up: bool = True,
    outputs: bool = False,
    variables: Sequence[Variable] = (),
    num_replicas: int | None = 1,
    batch: Call | None = None,
) -> TrainingGraph:
    """Trace ``call`` of ``model`` into one graph. The model is left as it was.

    Args:
        call: One microbatch. A symbolic batch is traced with at least two rows, because torch traces a
            dimension of size one as a constant.
        canonical: Maps every name of a tied tensor to the one that the graph uses.
        device: The model is traced as if it were there, wherever its tensors are.
        adds_up: Let the losses of microbatches, averaged by their rows, be that of the batch. Else the graph
            is of the loss as the model has it.
        outputs: Return the model's output besides the loss.
        symbolic: Without it, the graph serves only as many rows as the call has, and takes half the time.
        variables: Other sizes, and numbers, that are to be symbolic as well. Dynamo alone can do that.
        num_replicas: How many replicas the model's own collectives join. None if that differs by stage, or is
            not known; a model with collectives is then refused.
        batch: The mini-batch of the call, if there is more of it. Its values decide the branches that ask for
            those of arguments.

    Raises:
        CaptureError: no front end can capture the model; it names the model's source line.
        InputError: the model fails on these arguments, or its loss is not one number.
        FixedVariableError: the variables cannot be symbolic, all of them.
    """
    refuse_cache(call)
    if mode is Mode.TRAIN:
        _check_gradients(model, call)
    step = step_of(model, loss_fn, mode, call, outputs, variables)
    adds_up = adds_up or mode is Mode.FORWARD
    with ExitStack() as stack:
        stack.enter_context(torch_compat.quiet())
        stack.enter_context(torch_compat.unchanged(step))
        stack.enter_context(without_caches(model))
        stack.enter_context(torch_compat.remembered_arithmetic())
        stack.enter_context(torch_compat.unvalidated_distributions())
        stack.enter_context(torch_compat.whole_interpolations())
        stack.enter_context(torch_compat.whole_recurrent_networks())
        stack.enter_context(torch_compat.bounded_ctc_losses())
        stack.enter_context(sync_batch_norms_alone())
        stack.enter_context(ops.joining(num_replicas or 1))
        stack.enter_context(torch.set_grad_enabled(mode is Mode.TRAIN))
        branches = Branches(call, batch or call, torch_compat.place_fakes(step, device))
        tracer = _Tracer(step, mode, call, canonical or {}, device, adds_up, num_replicas, branches)
        generators = Generators(step)
        if not symbolic and call.unsure:
            tracer.prove_split()
        if variables:
            graph, failures = tracer.trace_variables(variables), list[Exception]()
        else:
            kinds = (True, False) if symbolic else (False,)
            graph, failures = _first_success(tracer, list(itertools.product(FRONT_ENDS, kinds)))
        generators.refuse_draws(tracer.dry_run, suspected=tracer.draws_with_numpy)
        batched = step.batched
    step.batched = batched  # which guards of the capture look at
    if not tracer.is_guarded and model not in _warned:
        _warned.add(model)
        log.warning(
            "%sDynamo cannot trace the model (%s), so what its code reads is taken to stay as it is, unless "
            "modules have it as attributes, or their methods and the loss function enclose it or name it",
            "forward and backward were traced together: " * tracer.is_direct,
            brief(failures[0]) if failures else "it was not asked",
        )
    if mode is Mode.TRAIN:
        _check_trained(graph)
    graph = replace(graph, assumptions=tracer.assumptions())
    if symbolic and graph.batch is None:
        log.warning(
            "microbatches of %d rows are compiled on their own, and so is every other size: %s",
            graph.batch_size,
            brief(failures[0]),
        )
    return graph


def _first_success(
    tracer: "_Tracer", attempts: Sequence[tuple[str, bool]]
) -> tuple[TrainingGraph, list[Exception]]:
    """The graph of the first attempt that succeeds, and the errors of those before it.

    An attempt is the name of a front end, and whether the batch is symbolic. What pipec itself refuses, it
    would refuse of every front end, so that such an error ends the attempts. If the first attempt fails, a
    dry run does what only the first call of some models does, such as to install hooks under a lock; if it
    changes anything, that attempt is made again.
    """
    errors: list[Exception] = []
    waiting, dry_run = list(attempts), None
    while waiting:
        name, symbolic = waiting.pop(0)
        try:
            return tracer.trace(FRONT_ENDS[name], symbolic), errors
        except PipecError:
            raise
        except Exception as error:
            log.info("%s%s failed: %s", name, " with a symbolic batch" if symbolic else "", brief(error))
            errors.append(error)
        if dry_run is None:
            dry_run = tracer.dry_run()
            if dry_run.changed:
                waiting.insert(0, (name, symbolic))
                errors.clear()
    assert dry_run is not None
    raise capture_error(errors, dry_run, tracer.refused_branch) from errors[0]


def _check_gradients(model: nn.Module, call: Call) -> None:
    """Refuse what eager torch would do with gradients and a pipeline would not."""
    for path, leaf in zip(call.paths, call.leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise InputError(
                f"{path} requires a gradient, but pipec computes gradients of parameters alone; "
                f"pass it detached, or make it a parameter of the model"
            )
    for path, module in model.named_modules():
        if torch_compat.has_partial_backward_hook(module):
            raise CaptureError(
                f"{path or type(module).__name__} has a hook of register_backward_hook, which a pipeline "
                "would not call; register it on a tensor inside forward(), with Tensor.register_hook"
            )
    for fqn, parameter in model.named_parameters():
        if torch_compat.has_gradient_hook(parameter):
            raise CaptureError(
                f"{fqn} has a hook on its gradient, which a pipeline would not call; remove it, "
                "and change the gradient between step() and the optimizer's step"
            )


def _check_trained(graph: TrainingGraph) -> None:
    """Refuse a step that would train nothing. Eager torch would refuse its ``loss.backward()``."""
    if not any(isinstance(result, Gradient) for result in graph.results):
        raise InputError(
            "no parameter would get a gradient: none that the loss depends on has requires_grad set. "
            "Set it on those to train, or use eval_step() for the loss alone"
        )


class _Tracer:
    """Traces one call of a step with any front end, the batch symbolic or fixed."""

    def __init__(
        self,
        step: Step,
        mode: Mode,
        call: Call,
        canonical: Mapping[str, str],
        device: torch.device,
        adds_up: bool,
        num_replicas: int | None,
        branches: Branches,
    ) -> None:
        self._step = step
        self._mode = mode
        self._call = call
        self._adds_up = adds_up
        self._num_replicas = num_replicas
        self._fqns, self._constants = model_names(step, canonical)
        self._device = device if any(True for _ in step.model.parameters()) else None
        self._branches = branches
        self._captured: Captured | None = None
        self.draws_with_numpy = self.is_direct = False

    @property
    def refused_branch(self) -> str:
        """Why a branch was not decided; empty if none was asked for in vain."""
        return next(iter(self._branches.refused), "")

    @property
    def is_guarded(self) -> bool:
        """Whether the last graph comes with Dynamo's guards."""
        return self._captured is not None and self._captured.noted is not None

    def dry_run(self) -> torch_compat.DryRun:
        """Call the step in eager mode on fake tensors."""
        return torch_compat.dry_run(self._step, self._call.sample(self._call.batch_size, self._device).tree)

    def trace_variables(self, variables: Sequence[Variable]) -> TrainingGraph:
        """With these variables symbolic, as the batch is.

        Raises:
            FixedVariableError: that cannot be done.
        """
        try:
            graph = self.trace(torch_compat.capture_with_dynamo, True, variables)
        except FixedVariableError:
            raise
        except Exception as error:
            raise FixedVariableError(brief(error)) from error
        if not graph.serves(self._call.batch_size, graph.planned):
            raise FixedVariableError("what holds of it does not hold of this call")
        return graph

    def trace(self, front_end: FrontEnd, symbolic: bool, variables: Sequence[Variable] = ()) -> TrainingGraph:
        size = self._call.batch_size
        proves = symbolic and front_end is torch_compat.capture_with_dynamo
        captured = self.prove_split(variables) if proves else None
        sample = self._sample(variables) if symbolic else self._call.sample(size, self._device)
        if captured is None:
            self._step.batched = tuple(sample.batched)
            with self._branches.decided(sample, symbolic):
                captured = front_end(
                    self._step, sample.tree, _symbolic(sample, variables) if symbolic else []
                )
        self._captured, self.is_direct = captured, captured.differentiated is not None
        self.draws_with_numpy = torch_compat.draws_with_numpy(captured.module)
        separate_layers(captured.module)
        operators = number_operators(captured.module)
        describe_branches(captured.module)
        expect_all_scattered(captured.module.graph, sample)
        _warn_of_changed_state(self._step.model, captured.changed_state)
        _warn_of_checkpoints(list(checkpoints(captured.module)) if self._mode is Mode.TRAIN else [])
        joined = join_replicas(captured.module, self._step, self._num_replicas)
        if joined and self.is_direct:
            raise CaptureError(f"{joined} joins replicas, which a model cannot that differentiates by itself")
        batched = [path for path, split in zip(sample.paths, sample.batched, strict=True) if split]
        if symbolic and symbol_of_rows(captured.module.graph, batched) is None:
            findings = PROVED  # the graph is refused, for it is for this number of rows alone
        else:
            comparison = None if symbolic else self._compare(captured.module, front_end)
            findings = self._analyse(captured, batched, joined, comparison)
        joint = torch_compat.differentiate(captured, training=self._mode is Mode.TRAIN)
        return training_graph(
            Traced(
                joint,
                self._mode,
                operators,
                sample,
                size,
                symbolic,
                variable_values(variables, self._call.leaves),
                variables,
                number_values(captured.module.graph, variables),
                self._fqns,
                self._constants,
                self._step.model.training,
                findings,
                joined,
                self._num_replicas or 1,
            )
        )

    def _sample(self, variables: Sequence[Variable]) -> Call:
        """A call to be traced with symbols, and numbers that are to be symbols in tensors.

        No symbol has one element, nor has the batch the size of another one by chance.
        """
        sizes = {*variable_values(variables, self._call.leaves).values()}
        rows = next(rows for rows in itertools.count(max(self._call.batch_size, 2)) if rows not in sizes)
        positions = itertools.count()

        def as_symbol(leaf: Any) -> Any:
            is_number = next(positions) in self._step.numbers
            return torch.tensor(leaf, dtype=_TYPES[type(leaf)]) if is_number else leaf

        return self._call.sample(rows, self._device).map(as_symbol)

    def prove_split(self, variables: Sequence[Variable] = ()) -> Captured | None:
        """Find out whether the model needs the tensors that may be split to have the batch's rows.

        They are traced with as many rows as the batch, but each with a symbol of its own; where the model
        computes with both, the symbols become one. Returns what was traced; None if that is of no use.

        Raises:
            InputError: a tensor may be split or whole.
        """
        if not self._call.unsure:
            return None
        sample = self._sample(variables)
        named = zip(sample.paths, sample.batched, strict=True)
        self._step.batched = tuple(split and path not in self._call.unsure for path, split in named)
        try:
            symbolic = _symbolic(sample, variables)
            with self._branches.decided(sample, symbolic=True):
                captured = torch_compat.capture_with_dynamo(self._step, sample.tree, symbolic)
        except Exception as error:
            log.info("nothing shows which tensors are split: %s", brief(error))
            return None
        return captured if all_have_rows(captured.module, self._call) else None

    def _compare(self, module: fx.GraphModule, front_end: FrontEnd) -> Comparison | None:
        """Compare what was captured of these rows alone with what is captured of the whole batch."""
        batch = self._branches.batch
        own, all_rows = self._call.batch_size, batch.batch_size
        if own == all_rows:
            return None
        sample = self._call.sample(all_rows, self._device)
        try:
            with replace(self._branches, call=batch, refused=[]).decided(sample, symbolic=False):
                captured = front_end(self._step, sample.tree, [])
        except Exception as error:
            log.info("nothing tells which numbers are the same for the whole batch: %s", brief(error))
            return None
        separate_layers(captured.module)
        describe_branches(captured.module)
        expect_all_scattered(captured.module.graph, sample)
        return compare(module, captured.module, own, all_rows)

    def _analyse(
        self, captured: Captured, batched: Sequence[str], joined: str, comparison: Comparison | None
    ) -> Findings:
        """Make the losses of microbatches add up, as far as that can be proved.

        Where the user says how they add up, only the other results are looked at.
        """
        if not (self._adds_up or joined):
            refuse_branches(captured.module, "where microbatch_weight=... says how losses add up")
        has_loss = self._mode is not Mode.FORWARD
        size, num_replicas = self._call.batch_size, self._num_replicas or 1
        if captured.differentiated is not None:
            return analyse_differentiated(captured, batched, size, has_loss, num_replicas)
        if self._adds_up:
            return analyse(captured.module, batched, size, has_loss, num_replicas, comparison)
        return analyse_outputs(captured.module, batched, size, num_replicas)

    def assumptions(self) -> Assumptions:
        """What the last graph takes for granted of the model and of the loss function."""
        noted = self._captured.noted if self._captured else None
        guards = torch_compat.Guards(noted, self._step) if noted else None
        constants = [fqn.removeprefix("constant.") for fqn in self._constants]
        return Assumptions.of(self._step, guards, constants, readable_values)


def _symbolic(call: Call, variables: Sequence[Variable]) -> list[tuple[Tensor, int]]:
    """The dimensions that are to be symbols."""
    split = [(leaf, 0) for leaf, split in zip(call.leaves, call.batched, strict=True) if split]
    return split + [(call.leaves[x.position], x.dim) for x in variables if x.dim is not None]


_TYPES = {float: torch.float64, int: torch.int64}


def _warn_of_changed_state(model: nn.Module, changed: Sequence[str]) -> None:
    modules = {f"model.{path}" if path else "model" for path, _ in model.named_modules()}
    for path in sorted(modules.intersection(changed)):
        log.warning(
            "forward() of %s (%s) sets attributes of the module; pipelines run what was captured and leave "
            "them alone. State that changes from step to step belongs into a registered buffer.",
            path,
            type(model.get_submodule(path.removeprefix("model").removeprefix("."))).__name__,
        )


def _warn_of_checkpoints(calls: Sequence[str]) -> None:
    """Say that pipec decides what is computed again, and not the model."""
    if calls:
        log.warning(
            "torch.utils.checkpoint at %s is not followed: memory_limit=... and recompute=... decide instead",
            ", ".join(dict.fromkeys(calls)),
        )
