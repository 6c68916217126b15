"""A module that trains across stages and is compiled at its first step: what ``pipec.compile`` returns."""

import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pipec.artifact.directory import write
from pipec.capture.call import Call
from pipec.capture.other_axes import second_dimension
from pipec.capture.splitting import Batched, known_from
from pipec.compiler.captures import Turn
from pipec.compiler.compiler import Compiler
from pipec.compiler.groups import Compiled, Groups
from pipec.errors import CaptureError, InputError, MixedRowsError, TargetRowsError
from pipec.graph import ReadConstants
from pipec.ir import Mode, RankMemory
from pipec.ir.arguments import check_arguments
from pipec.ir.batch import require_equal_rows, sizes_of_replicas, variable_values
from pipec.pipeline.kept import Kept
from pipec.pipeline.methods import METHODS
from pipec.pipeline.shown import ShownModel
from pipec.pipeline.turns import Asked
from pipec.plan.local_batch import check_local_batch
from pipec.plan.step_memory import StepMemory
from pipec.runtime.calls import one_at_a_time
from pipec.runtime.holder import Emptied, ModelTensors, forget
from pipec.runtime.randomness import take
from pipec.runtime.step.execution import Ranks
from pipec.runtime.step.outcomes import StreamBatch
from pipec.runtime.step.results import join
from pipec.runtime.step.span import Span
from pipec.runtime.step.updates import Updates
from pipec.runtime.step.weights import MicrobatchWeight, loss_shares
from pipec.runtime.stream.batches import Given
from pipec.runtime.stream.flow import CompiledStream
from pipec.runtime.stream.stream_execution import StreamExecution
from pipec.runtime.streams import Begun, nothing
from pipec.torch_compat import Place, pytree

logger = logging.getLogger("pipec")


class Pipeline(ShownModel):
    """A model cut into stages. Make one with :func:`pipec.compile`.

    It holds the model's own parameters and buffers, under the model's own names. In one process these are all
    of them. Under ``torchrun``, once it is compiled, they are those of this rank's stages; the model's other
    tensors are emptied where they are, so that their memory is given back and an optimizer passes them over.
    ``full_state_dict`` and ``gather_into`` bring the whole together again.

    It makes one call at a time. A call on a second thread raises InputError meanwhile, and changes nothing.
    """

    def __init__(
        self,
        compiler: Compiler,
        tensors: ModelTensors,
        ranks: Ranks,
        batch: str = "same",
        updates: Updates | None = None,
        batched: Batched | None = None,
        microbatch_weight: MicrobatchWeight | None = None,
    ) -> None:
        super().__init__(compiler, tensors, ranks, batch, updates, batched)
        self._weight = microbatch_weight
        self._kept = Kept()
        self._measured: list[RankMemory] | None = None
        self._axes_are_known = False
        self._served: set[tuple[int, frozenset[int], tuple[float, ...]]] = set()

    @one_at_a_time
    def step(self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any) -> Any:
        """Run forward and backward of one mini-batch. Gradients are added to ``.grad``.

        If the pipeline was compiled with an optimizer, the step ends with its update, which clears them.

        The arguments are those of the model for the whole mini-batch, and ``target`` goes to the loss
        function. Every rank passes the same, unless ``compile`` was told otherwise: with ``batch="local"``
        the arguments are this replica's part, which may have other numbers of rows. Tensors with the rows of
        the batch are split into microbatches, others are passed whole; see ``batched`` of ``compile``.
        A step that draws, as for dropout, takes one number of torch's default generator, rank 0's for all.

        Returns:
            The loss of the batch, on every rank; with ``outputs``, a tuple of that and the model's output.
            What ``loss_fn`` returned besides the loss is in ``logs`` then. Of results with a value for each
            row, a rank gets those of the rows that it passed.

        Raises:
            CaptureError, InputError, PlanError: the step cannot be run, or the ranks passed different
                arguments. Nothing was changed, and every rank raises it.
            NonFiniteError: the loss or a gradient is not finite, and ``on_nan`` is "raise"; on every rank.
            ExecutionError, TransportError: a rank failed.
            KeyboardInterrupt, SystemExit: some rank was sent a signal; see ``before_stop``.
        """
        turn = self._agreed_on_axes(Asked("step", Mode.TRAIN, outputs), args, kwargs, target)
        self._last_reading = None
        return self._train(turn)

    def _train(self, turn: Turn, begun: Begun = nothing) -> Any:
        loss = self._loss(turn, begun)
        self._count_step(self._execution(self._artifact).not_finite)
        return loss

    @one_at_a_time
    def join(self, after_update: Callable[[], object] | None = None) -> int:
        """Take part in what replicas do that have more batches than this one, until all ranks have joined.

        With ``batch="local"`` a rank calls this when its data end, and all ranks do in the end. Until then
        it is without rows in the steps of the others, and makes the same updates. So it needs an optimizer
        in the programs, unless the others only evaluate.

        Args:
            after_update: called after each update, as the loop of the others calls ``scheduler.step``.

        Returns:
            How many steps were made without this rank's rows.
        """
        check_arguments(METHODS, locals())
        if self._batch != "local":
            raise InputError(
                f"join is for replicas with data of their own, but the pipeline has batch={self._batch!r}; "
                'pass batch="local" to pipec.compile'
            )
        count, accumulates = 0, self._accumulates
        try:
            while self._ranks.world.distributed and (told := self._joined()):
                asked, turn = told
                if asked.method == "step":
                    self._train(turn)
                    count += 1
                    if after_update is not None and not self._accumulates:
                        after_update()
                elif asked.method == "prepare":
                    self._compiled(turn)
                else:
                    self._run(turn)
        finally:
            self._accumulates = accumulates
        return count

    @one_at_a_time
    def eval_step(self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any) -> Any:
        """What ``step`` would return, without gradients.

        Dropout and the like run in the mode that ``train()`` or ``eval()`` set last.
        """
        return self._loss(self._agreed_on_axes(Asked("eval_step", Mode.LOSS, outputs), args, kwargs, target))

    @one_at_a_time
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the batch, without gradients, on every rank that passed these rows."""
        turn = self._agreed_on_axes(Asked("forward", Mode.FORWARD), args, kwargs)
        compiled = self._compiled(turn)[0][0]
        results = self._run(turn)
        return _output(compiled, results, compiled.artifact.plan.outputs)

    @property
    def _takes_target(self) -> bool:
        return self._compiler.loss_fn is not None

    @property
    def _overlaps_steps(self) -> bool:
        return self._compiler.autotuner.policy.may_be_asynchronous

    def _compiled_for(self, given: Given) -> CompiledStream | None:
        turn = self._agreed_batch(given)
        groups = self._compiled(turn)
        execution = self._execution(groups[0][0].artifact)
        if not isinstance(execution, StreamExecution):
            return None
        if len(groups) > 1:
            raise InputError(
                "the microbatches of a mini-batch are compiled apart, because the model makes a constant of "
                "their rows, so that they make no stream; pass batches that divide evenly"
            )
        if groups[0][0].artifact.draws:
            take(turn.drawn)

        kind, variables = turn.signature.kind, turn.signature.kind.variables

        def split(given: Given) -> StreamBatch | None:
            call = self._checked(Mode.TRAIN, given.args, dict(given.kwargs), given.target)
            if call.batch_size != turn.call.batch_size or call.signature(variables) != kind.called:
                return None
            if variable_values(variables, call.leaves) != variable_values(variables, turn.call.leaves):
                return None
            (span,) = self._spans(replace(turn, call=call), [groups[0][1]])
            return execution.batch(call.leaves, span)

        return CompiledStream(execution, turn.seed, split, functools.partial(self._is_right, turn.signature))

    def _stream_step(self, given: Given, begun: Begun) -> Tensor:
        loss: Tensor = self._train(self._agreed_batch(given), begun)
        return loss

    def _loss(self, turn: Turn, begun: Begun = nothing) -> Any:
        """The loss of a step, and if it was asked for, the model's output. The logs are kept."""
        compiled = self._compiled(turn)[0][0]
        results, plan = self._run(turn, begun), compiled.artifact.plan
        self.logs = {name: results[kept] for name, kept in zip(plan.logs, plan.outputs[1:], strict=False)}
        loss = results["loss"]
        if not turn.signature.kind.outputs:
            return loss
        return loss, _output(compiled, results, plan.outputs[1 + len(plan.logs) :])

    @one_at_a_time
    def prepare(self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any) -> "Pipeline":
        """Compile what ``step`` with these arguments would run, and run nothing. Returns the pipeline."""
        self._compiled(self._agreed_on_axes(Asked("prepare", Mode.TRAIN, outputs), args, kwargs, target))
        return self

    @one_at_a_time
    def measure_memory(self, *args: Any, target: Any = None, **kwargs: Any) -> StepMemory:
        """Run ``step`` with these arguments, and return what each rank held. Every rank calls this.

        On a GPU that one rank has for itself this is what torch's allocator says; else it is what the tensors
        took that operators made. The step takes longer than others, and does all that they do.

        Raises:
            InputError: the programs have no end; and what ``step`` raises.
        """
        measured: list[RankMemory] = []
        self._measured = measured
        try:
            self.step(*args, target=target, **kwargs)
        finally:
            self._measured = None
        return StepMemory(self._ranks.most_of_each(measured), self.programs)

    @one_at_a_time
    def train(self, mode: bool = True) -> "Pipeline":
        """Set every module of the model to training or evaluation mode, as ``nn.Module.train`` does."""
        check_arguments(METHODS, locals())
        self._compiler.model.train(mode)
        return super().train(mode)

    @one_at_a_time
    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipeline":
        """A pipeline of a copy of the model, on the same stages. It compiles its calls itself.

        It has an optimizer of its own, with a copy of the state. Every rank makes the copy then.
        """
        with self._gathered():
            model = copy.deepcopy(self._compiler.model, memo)
        tensors = ModelTensors.of(model)
        emptied = Emptied({fqn: x for fqn, x in self._emptied.layouts.items() if not self._is_here(fqn)})
        with emptied.shaped(tensors.unique()):
            updates = self._updates.of(tensors.unique_parameters()) if self._updates else None
        compiler, ranks = self._compiler.of(model), self._ranks
        made = Pipeline(compiler, tensors, ranks, self._batch, updates, self._batched, self._weight)
        memo[id(self)] = made
        made._unfilled.marked = {
            fqn: (tensor, tensor._version)
            for fqn, tensor in tensors.unique().items()
            if fqn in self._unfilled.marked
        }
        made._holders, made._emptied = dict(self._holders), emptied
        made._changing = set(self._changing)
        made._split_before = dict(self._split_before)
        made._variables = copy.deepcopy(self._variables)
        forget(made, [fqn for fqn, first in self._canonical.items() if first in emptied.layouts])
        return made

    @one_at_a_time
    def save(self, directory: str | Path, tensors: bool = False) -> None:
        """Write plan, code and programs to a directory that ``pipec.load`` and ``pipec run`` read.

        With ``tensors``, the parameters and buffers are written too, as safetensors. Under ``torchrun``
        rank 0 writes; every rank then calls this, because rank 0 gathers the tensors of all.
        """
        check_arguments(METHODS, locals())
        held = self._whole("save", set(self._tensors.unique()), all_ranks=False) if tensors else None
        if self._ranks.world.rank == 0:
            write(self._artifact, Path(directory), held)

    @property
    def compile_seconds(self) -> dict[str, float]:
        """How long each step of compilation took, summed over all compilations."""
        return dict(self._compiler.watch.seconds)

    def _compiled(self, turn: Turn) -> Groups:
        """What runs each group of consecutive microbatches, and their sizes.

        There are two groups if one graph cannot serve both sizes of a batch that does not divide evenly.
        """
        rows = self._rows_to_compile(turn)
        found = self._kept.find(turn.signature, rows, turn.call)
        groups = found or self._compile(turn, rows)
        if turn.signature.kind.mode is Mode.TRAIN:
            self._trained = groups[0][0].artifact
        if found is None or self._unsettled:
            self._keep_own_tensors(groups[0][0].artifact.plan)
            self._unsettled = False
        return groups if len(turn.rows) == 1 else self._of_local_batch(turn, groups)

    def _agreed_on_axes(
        self, asked: Asked, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None
    ) -> Turn:
        """The call that all ranks make, by the dimension that is the batch.

        That is dimension 0, unless rows along it are proved to depend on one another, the user says nothing
        of it, and along dimension 1 they are proved not to.
        """
        other = None
        if not self._axes_are_known and self._batched is None and self._batch == "same":
            other = second_dimension(Call(args, kwargs, target))
        if other is None:
            turn = self._agreed(asked, args, kwargs, target)
            self._axes_are_known = True
            return turn
        try:
            turn = self._agreed_and_compiled(asked, args, kwargs, target)
        except InputError as error:
            if not isinstance(error, MixedRowsError | TargetRowsError):
                raise
            why, self._batched = error, other
        else:
            self._axes_are_known = True
            return turn
        self._calls.clear()
        try:
            turn = self._agreed_and_compiled(asked, args, kwargs, target)
        except (InputError, CaptureError):
            self._batched = None
            self._calls.clear()
            if isinstance(why, TargetRowsError):
                raise why from None
            turn = self._agreed(asked, args, kwargs, target)
        else:
            listed = ", ".join(f"{name!r}: {word!r}" for name, word in other.items())
            logger.warning(
                "the batch is dimension 1, along which no row depends on others: split with batched={%s}. "
                "Dimension 0 is not: %s",
                listed,
                str(why).splitlines()[-2 if isinstance(why, MixedRowsError) else 0].strip(),
            )
        self._axes_are_known = True
        return turn

    def _agreed_and_compiled(
        self, asked: Asked, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> Turn:
        """The call that all ranks make, if its microbatches are proved to make what the batch does."""
        turn = self._agreed(asked, args, kwargs, target)
        self._compiler.tries_axes = True
        try:
            self._compiled(turn)
        finally:
            self._compiler.tries_axes = False
        return turn

    def _rows_to_compile(self, turn: Turn) -> int:
        """The rows of the batch; if replicas have their own, as if all had as many as one has at most."""
        if len(turn.rows) == 1:
            return turn.rows[0]
        return max(len(turn.rows) * max(turn.rows), self._compiler.microbatches or 0)

    def _of_local_batch(self, turn: Turn, groups: Groups) -> Groups:
        """What runs the microbatches of all replicas, each of which splits its own rows."""
        compiled, _ = groups[0]
        plan = compiled.artifact.plan
        check_local_batch(plan, self.num_replicas)
        sizes = sizes_of_replicas(turn.rows, plan.num_microbatches)
        if plan.joins:
            require_equal_rows(sizes)
        kinds = frozenset(sizes) - {0}
        values = variable_values(turn.signature.kind.variables, turn.call.leaves)
        served = compiled.number, kinds, tuple(values.values())
        if served not in self._served:
            request = f"microbatches of {sorted(kinds)} rows"
            require = functools.partial(self._compiler.require_served, turn.signature, sorted(kinds), values)
            self._ranks.once(request, require)
            self._served.add(served)
        return [(compiled, sizes)]

    def _compile(self, turn: Turn, rows: int) -> Groups:
        """Compile in one process, for all, and let go of what was used longest ago."""
        kind, version, call = turn.signature.kind, turn.signature.version, turn.call
        change = self._variables.change(call, kind.mode)

        def compiled() -> tuple[Groups, dict[Place, Any]]:
            whole = call if len(turn.rows) == 1 else call.sample(rows, None)
            with self._emptied.shaped(self._tensors.unique()):
                groups = self._compiler.compile(turn.signature, whole, change)
                return groups, self._compiler.read(turn.signature)

        values = variable_values(kind.variables, call.leaves)
        request = repr((*kind.of_any_state, kind.state.facts, self._trains, version, rows, values))
        groups, read = self._ranks.once(request, compiled)
        self._read[kind.mode] = ReadConstants(read)
        self._split_before |= known_from(call)
        self._variables.note(call, kind.mode)
        self._calls.clear()
        self._kept.add(turn.signature, rows, groups)
        kept = {made.number: made.artifact for made in self._kept.compiled}
        self._compiler.retain(kept)
        self._executions = {made: x for made, x in self._executions.items() if made in kept.values()}
        self._served = {served for served in self._served if served[0] in kept}
        return groups

    def _run(self, turn: Turn, begun: Begun = nothing) -> Mapping[str, Tensor]:
        groups = self._compiled(turn)
        if any(compiled.artifact.draws for compiled, _ in groups):
            take(turn.drawn)
        begun()
        if turn.signature.kind.mode is Mode.TRAIN:
            return self._run_groups(turn, groups)
        with self._gathered():
            return self._run_groups(turn, groups)

    def _run_groups(self, turn: Turn, groups: Groups) -> Mapping[str, Tensor]:
        executions = [self._execution(compiled.artifact) for compiled, _ in groups]
        if len(groups) > 1 and groups[0][0].artifact.plan.ending.may_drop:
            raise InputError(
                "the microbatches of the batch are compiled apart, because the model makes a constant of "
                "their rows, so that there is no moment before anything comes of any gradient; pass batches "
                "that divide evenly, or compile without on_nan=... and in another precision than 'fp16-mixed'"
            )
        spans = self._spans(turn, [sizes for _, sizes in groups])
        recorded = self._recorded if turn.signature.kind.mode is Mode.TRAIN else None
        parts = []
        for execution, span in zip(executions, spans, strict=True):
            update = span is spans[-1] and not self._accumulates
            leaves, measured = turn.call.leaves, self._measured
            parts.append(execution.run(leaves, span, turn.seed, recorded, update, measured))
        axes = groups[0][0].axes
        results = parts[0] if len(parts) == 1 else join(groups[0][0].artifact.plan, parts, spans)
        return {name: axes[name].restore(x) if name in axes else x for name, x in results.items()}

    def _spans(self, turn: Turn, groups: Sequence[list[int]]) -> list[Span]:
        """What each group of microbatches is of the batch."""
        call, every, batch = turn.call, [size for sizes in groups for size in sizes], sum(turn.rows)
        shares = None
        if turn.signature.kind.mode is not Mode.FORWARD:
            shares = loss_shares(self._weight, call.leaves, call.with_leaves, call.axes, every)
        values = variable_values(turn.signature.kind.variables, call.leaves)
        spans, start, first = list[Span](), 0, 0
        for sizes in groups:
            own = None if shares is None else shares[first : first + len(sizes)]
            spans.append(Span(sizes, batch, start, first, own, self.replica, self.num_replicas, values))
            start, first = start + sum(sizes), first + len(sizes)
        return spans


def _output(compiled: Compiled, results: Mapping[str, Tensor], names: Sequence[str]) -> Any:
    assert compiled.output_spec is not None
    return pytree.tree_unflatten([results.get(name) for name in names], compiled.output_spec)
