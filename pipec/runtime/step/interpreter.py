"""The interpreter: runs the program of one rank, a step or a stream.

Everything that can be decided before is decided once, when ``pipec.runtime.step.linker`` links the program.
A step fills the frames of all its microbatches, and runs the linked actions one after the other. A stream
repeats a period of them (``pipec.ir.periodic_program``): a microbatch takes a frame when it is first named,
and the frames are taken in turn. Where the program pauses, the stream waits for the script.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipec.errors import VerifyError
from pipec.ir import Mode, Op, Payload, Plan, Program, StepPart, Value, program_part, rank_of, replica_counts
from pipec.ir.periodic_program import num_frames, num_versions_behind, unrolled_instructions, version_read
from pipec.ir.step_parts import instructions_of_part
from pipec.runtime.memory.block_cache import clear_block_cache
from pipec.runtime.messages.cuda import current_device, on_device
from pipec.runtime.messages.transport import Transport
from pipec.runtime.random_seeds import OperatorGenerators
from pipec.runtime.stages.bound_stage import BATCH, VERSION, BoundStage, StageCode
from pipec.runtime.stages.weight_versions import WeightVersions
from pipec.runtime.step.batch_counts import BatchCountsFunction, ReplicaCounts, batch_fraction
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.error_report import failure_message, reporting_failures
from pipec.runtime.step.linked_instruction import Action, LinkedInstruction
from pipec.runtime.step.linker import Linker
from pipec.runtime.step.non_finite import NonFinite
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.rank_state import RankState, UpdateState, merged_results
from pipec.runtime.step.step_results import StepResults, result_values
from pipec.runtime.step.stream_results import StreamBatch, StreamResults
from pipec.runtime.step.tail import StageTail
from pipec.runtime.step.timestamps import Moment, Timestamps, clock_of

BatchSource = Callable[[int], StreamBatch | None]
"""Returns the mini-batch of a number, or None from the end of the stream on."""

GroupHyperparameters = Sequence[Mapping[str, Any]]
"""The hyperparameters of an update, for each group of the optimizer."""

Emit = Callable[[int, Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class _LinkedPart:
    """A part of the program: its instructions, the same linked, and all that a step of it calls."""

    program: Program
    linked: Sequence[LinkedInstruction]
    actions: Sequence[Action]
    ends: list[Action]


class Interpreter:
    """Executes ``program`` on ``device``.

    ``stages`` has at least the rank's own stages. ``parameters`` and ``buffers`` have at least the tensors of
    those stages by FQN, on ``device``. Gradients are added to ``.grad`` of the parameters. Where replicas in
    one process share tensors, ``owns_tensors`` tells whether this rank is the one to write those of a stage.
    A program that updates does so with ``updates``.

    Raises:
        VerifyError: program, plan and stage code do not fit together.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        stages: Mapping[int, StageCode],
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        transport: Transport,
        device: torch.device,
        owns_tensors: Callable[[int], bool] = lambda stage: True,
        updates: OptimizerUpdates | None = None,
    ) -> None:
        self.position = -1
        self._program, self._plan, self._device = program, plan, device
        self._window = num_frames(program, plan.num_microbatches)
        copies = updates.copies(program.rank) if updates and program.period else {}
        self._stages = {
            stage.index: BoundStage(
                stage,
                stages[stage.index],
                {**parameters, **copies},
                buffers,
                device,
                self._window,
                plan.sync_spec.reduced_parameters(stage.index),
                owns_tensors(stage.index),
                plan.sync_spec.defers_gradients,
            )
            for stage in plan.stages
            if program.rank in plan.placement[stage.index]
        }
        for index, stage in self._stages.items() if program.period else ():
            stage.versions = WeightVersions(stage.weights, num_versions_behind(program, index))
            stage.is_versioned = True
        self._require_inputs()
        self._own = {stage: plan.microbatches_on(stage, program.rank) for stage in self._stages}
        made = [
            (value, self._own[link.source])
            for link in plan.links
            if link.payload is Payload.RESULT and link.source in self._stages
            for value in link.values
        ]
        self._summed_later = {
            name for stage in plan.sync_spec.count_stages for name in plan.stages[stage].batch_counts
        }
        whole = {name for stage in plan.stages if stage.tail for name in stage.tail.results}
        self._step_results = StepResults(made, plan.num_microbatches, plan.summed_outputs, whole)
        self._stream_results = StreamResults(plan)
        self._update_state = UpdateState(updates)
        self._rank = RankState(
            program.rank,
            plan,
            self._stages,
            {
                stage: ReplicaCounts(
                    BatchCountsFunction(plan.stages[stage], stages[stage], buffers, device), self._own[stage]
                )
                for stage in plan.sync_spec.count_stages
                if stage in self._stages
            },
            {
                index: StageTail(
                    plan.stages[index],
                    stage,
                    self._own[index],
                    len(plan.placement[index]),
                    self._is_first_replica(index),
                )
                for index, stage in self._stages.items()
                if plan.stages[index].tail
            },
            self._stream_results if program.period else self._step_results,
            self._step_results,
            self._stream_results,
            transport,
            loss_of(plan),
            self._update_state,
            [0] * (self._window + 1),
        )
        self._clock = clock_of(device)
        self._passes = self._link()
        self._parts: dict[StepPart, _LinkedPart] = {}
        self._begin_part(StepPart.WHOLE)

    def _require_inputs(self) -> None:
        """Raise VerifyError if a stage reads an input or borrows a parameter that the plan does not bring."""
        known = {"batch_fraction", "first_row", *(entry.value.name for entry in self._plan.inputs)}
        known |= {name for stage in self._plan.stages for name in stage.batch_counts}
        for index, stage in self._stages.items():
            if unknown := sorted(stage.inputs - known):
                raise VerifyError(
                    f"stage {index} reads {', '.join(unknown)} of the batch, but the plan has the inputs "
                    f"{', '.join(sorted(known))}; generate the stage code from this plan"
                )
            weights = (x for x in self._plan.links if x.payload is Payload.WEIGHT and x.target == index)
            if missing := sorted(stage.borrowed.difference(*(link.names for link in weights))):
                raise VerifyError(
                    f"stage {index}: the parameters {', '.join(missing)} are borrowed, but no weight link "
                    "brings them; add one to the plan, from the stage that owns them"
                )

    def _link(self) -> Sequence[Sequence[LinkedInstruction]]:
        """The linked instructions; those of a period once for each of the frames that microbatches take."""
        program = self._program
        if not program.period:
            linker = Linker(self._rank, program.instructions)
            return [[linker.link(each) for each in program.instructions]]
        passes: list[dict[int, LinkedInstruction]] = [{} for _ in range(self._window // program.period)]
        unrolled = [
            (number % len(passes), place, replace(each, microbatch=each.microbatch % self._window))
            for number, place, each in unrolled_instructions(program, 2 * self._window)
        ]
        linker = Linker(self._rank, [each for _, _, each in unrolled])
        for number, place, each in unrolled:
            passes[number][place] = linker.link(each)
        return [[linked[place] for place in range(len(program.instructions))] for linked in passes]

    def _is_first_replica(self, stage: int) -> bool:
        return self._program.rank == self._plan.placement[stage][0]

    @property
    def inputs(self) -> set[str]:
        """The inputs of the model that this rank reads, also those in which it counts."""
        of_stages = (stage.inputs for stage in self._stages.values())
        return set[str]().union(*of_stages, *(counts.inputs for counts in self._rank.counts.values()))

    @contextlib.contextmanager
    def _running_alone(self) -> Iterator[None]:
        """Run instructions in a ``with`` block, on their device; failures are reported to the other ranks."""
        with (
            reporting_failures(self._rank.transport, self._describe),
            current_device(self._device),
            torch.no_grad(),
            torch.autocast(self._device.type, enabled=False),
        ):
            yield

    def _fill(
        self,
        microbatch: int,
        size: int,
        inputs: Mapping[str, Tensor],
        key: tuple[int, int],
        loss_weight: float,
    ) -> None:
        """Fill the frames of a microbatch on this rank's stages; without rows it only has a version."""
        number = microbatch % self._window
        self._rank.sizes[number] = size
        for stage in self._stages.values():
            if rank_of(self._plan.placement, stage.index, microbatch) != self._rank.number:
                continue
            if self._program.period:
                stage.frames[number][VERSION] = version_read(self._program, stage.index, microbatch)
            if not size:
                continue
            frame = stage.fill_frame(number, key, self._rank.sizes_with(size))
            names = stage.inputs - self._summed_later
            frame.update({name: on_device(inputs[name], self._device) for name in names})
            if self._program.period:
                frame[BATCH] = microbatch // self._plan.num_microbatches
            if self._rank.loss:
                frame["grad_loss"] = loss_gradient(loss_weight, self._rank.loss.dtype, self._device)

    def run(
        self,
        microbatches: Sequence[Mapping[str, Tensor]],
        batch_slice: BatchSlice,
        seed: int = 0,
        timestamps: Timestamps | None = None,
        part: StepPart = StepPart.WHOLE,
    ) -> dict[str, Tensor]:
        """Execute one step. Returns the results of the microbatches together by name, on every rank.

        A step that fails leaves in ``.grad`` what was added until then, and the model's buffers as they were.
        If the plan checks for non-finite values, a step that finds one updates nothing and keeps no gradient.

        Args:
            microbatches: The model's inputs by name, for each microbatch that this rank runs.
            batch_slice: What the microbatches are of the batch.
            seed: Random operators draw from streams that depend on the seed, the microbatch's number in the
                batch and the operator alone. Each step has another.
            timestamps: The times of the step are appended.
            part: All of the step, or its microbatches alone: their gradients are kept for the next update.

        Raises:
            ExecutionError: an instruction failed here or, if every rank is in this process, anywhere.
            TransportError: another rank failed, hung or is gone.
        """
        self._begin_part(part)
        try:
            with self._running_alone():
                self._begin_step(microbatches, batch_slice, seed)
                actions = self._part.actions
                if not all(batch_slice.sizes):  # microbatches without rows are not computed
                    actions = [x.for_sizes(batch_slice.sizes) for x in self._part.linked] + self._part.ends
                self._execute(actions, timestamps)
                return merged_results(self._rank, batch_slice, self._device)
        finally:
            self._forget_step()

    def update(self, timestamps: Timestamps | None = None) -> None:
        """Execute the update alone, of the gradients of all steps since the last; otherwise as ``run``."""
        self._begin_part(StepPart.UPDATE)
        try:
            with self._running_alone():
                for stage in self._stages.values():
                    stage.gradients.begin_step()
                self._execute(self._part.actions, timestamps)
        finally:
            self._forget_step()

    def _begin_part(self, part: StepPart) -> None:
        self.position = -1
        self._update_state.begin_step(part)
        if part not in self._parts:
            numbers = instructions_of_part(self._program, self._plan.sync_spec, part)
            program = program_part(self._program, self._plan.sync_spec, part)
            linked = [self._passes[0][number] for number in numbers]
            ends = [] if part is StepPart.UPDATE else [self._rank.transport.finish]
            if ends and any(stage.updated_indices for stage in self._stages.values()):
                ends.append(self._end_step)
            self._parts[part] = _LinkedPart(program, linked, [each.action for each in linked] + ends, ends)
        self._part = self._parts[part]

    def _begin_step(
        self, microbatches: Sequence[Mapping[str, Tensor]], batch_slice: BatchSlice, seed: int
    ) -> None:
        self._step_results.loss_weights = batch_slice.custom_loss_weights
        self._step_results.is_local = batch_slice.is_local
        self._rank.sizes[:] = [*batch_slice.sizes, batch_slice.num_rows]
        self._rank.use(batch_slice.values)
        weights, scale = batch_slice.loss_weights, self._update_state.loss_scale
        for counts in self._rank.counts.values():
            counts.begin_step(microbatches, batch_slice)
        for stage in self._stages.values():
            stage.begin_step(scale)
        for index in self._rank.tails:
            self._fill_tail(index, microbatches, batch_slice, seed, scale)
        for microbatch, size in enumerate(batch_slice.sizes):
            key = seed, batch_slice.first + microbatch
            self._fill(microbatch, size, microbatches[microbatch], key, weights[microbatch] * scale)

    def _fill_tail(
        self,
        stage: int,
        microbatches: Sequence[Mapping[str, Tensor]],
        batch_slice: BatchSlice,
        seed: int,
        scale: float,
    ) -> None:
        """Fill the frame of a tail, to which the batch is one microbatch. Its random numbers are its own."""
        tail, inputs = self._rank.tails[stage], microbatches[self._own[stage][0]]
        tail.begin_step(batch_slice)
        tail.frame.update(self._rank.sizes_with(batch_slice.num_rows))
        names = (self._stages[stage].inputs & inputs.keys()) - self._summed_later
        tail.frame.update({name: on_device(inputs[name], self._device) for name in names})
        tail.frame.update(
            batch_fraction=batch_fraction(1, 1),
            first_row=torch.tensor(0),
            device=self._device,
            rng=OperatorGenerators(self._device, (seed, -1)),
        )
        if self._rank.loss:
            tail.frame["grad_loss"] = loss_gradient(scale, self._rank.loss.dtype, self._device)

    def _end_step(self) -> None:
        """Write the buffers that the step has changed, unless the step is skipped."""
        for stage in self._stages.values() if self.non_finite is None else ():
            stage.end_step()

    @property
    def non_finite(self) -> NonFinite | None:
        """The non-finite value that a step found, the same on every rank; such a step is skipped."""
        return self._update_state.non_finite

    @property
    def begun_updates(self) -> set[int]:
        """The stages whose update has begun in the last step; all are complete unless the step failed."""
        return set(self._update_state.begun)

    def _execute(self, actions: Sequence[Action], timestamps: Timestamps | None) -> None:
        if timestamps is not None:
            self._execute_and_stamp(actions, timestamps)
            return
        for position, action in enumerate(actions):
            self.position = position
            action()

    def _execute_and_stamp(self, actions: Sequence[Action], timestamps: Timestamps) -> None:
        clock, marks = self._clock, list[Moment]()
        with clock.recording():
            for position, action in enumerate(actions):
                self.position = position
                begun = clock.now()
                action()
                if position < len(self._part.linked):
                    marks += (begun, clock.now())
            timestamps += clock.times(marks)

    def _forget_step(self) -> None:
        for stage in self._stages.values():
            stage.forget_step()
        for tail in self._rank.tails.values():
            tail.forget_step()
        self._step_results.forget_step()
        self._rank.received.clear()
        clear_block_cache()

    def begin(self, source: BatchSource, emit: Emit, seed: int) -> None:
        """Begin a stream. Random operators draw from streams that depend on ``seed``.

        ``emit`` is called with the number of each mini-batch and its results by name.
        """
        self._source, self._seed, self.position = source, seed, -1
        self._stream_results.begin(emit)
        self._num_admitted, self._end = 0, math.inf
        self._batch: StreamBatch | None = None
        self._groups: dict[float, GroupHyperparameters] = {}
        self._requested = -1.0
        self._update_state.begin_step()
        for stage in self._stages.values():
            stage.begin_step()
            stage.versions.begin()
        self._running = self._run_periods()

    def advance(self, batch: float, groups: GroupHyperparameters) -> None:
        """Run until the results of a mini-batch are known, or the programs end.

        ``groups`` are the hyperparameters of the updates whose last mini-batch it is.

        Raises:
            ExecutionError, TransportError: as ``run``.
        """
        self._requested, self._groups[batch] = batch, groups
        with self._running_alone():
            next(self._running, None)

    def finish(self, groups: GroupHyperparameters) -> None:
        """Run everything that is left of a stream whose source has ended. Raises as ``advance``."""
        self.advance(math.inf, groups)
        with self._running_alone():
            self._rank.transport.finish()
            for stage in self._stages.values():
                stage.restore_buffers(self._stream_results.num_finite)
                stage.end_step()

    def forget(self) -> None:
        """Drop every value of the stream."""
        self._running, self._batch = iter(()), None
        for stage in self._stages.values():
            stage.forget_step()
            stage.versions.begin()
        self._stream_results.forget()

    @property
    def first_nan(self) -> float:
        """The first microbatch whose loss is NaN; its mini-batch and all later ones are not updated."""
        return self._stream_results.first_nan

    @property
    def held_versions(self) -> dict[int, set[int]]:
        """The weight versions that each stage holds, by the number of mini-batches before them."""
        return {
            index: {version * self._batches_per_update(index) for version in stage.versions.held}
            for index, stage in self._stages.items()
        }

    def restore(self, batch: int | None) -> None:
        """Restore the weights and buffers of all stages after a mini-batch; None leaves each its latest."""
        for index, stage in self._stages.items():
            latest = stage.versions.number
            stage.restore(latest if batch is None else batch // self._batches_per_update(index))

    def _batches_per_update(self, stage: int) -> int:
        return self._microbatches_per_update(stage) // self._plan.num_microbatches

    def _microbatches_per_update(self, stage: int) -> int:
        stream = self._plan.sync_spec.stream
        assert stream is not None, "periodic programs have mini-batches"
        return stream.microbatches_per_update(stage, replica_counts(self._plan.placement))

    def _run_periods(self) -> Iterator[None]:
        """Run period after period; yields where the script has to request the next mini-batch first."""
        instructions, period = self._program.instructions, self._program.period
        offsets, per_batch = [each.microbatch for each in instructions], self._plan.num_microbatches
        number = -(max(offsets) // period)
        while number * period + min(offsets) < self._end:
            for position, linked in enumerate(self._passes[number % len(self._passes)]):
                microbatch = offsets[position] + number * period
                if microbatch < 0 or not self._admits(microbatch):
                    continue
                self.position, self._stream_results.microbatch = position, microbatch
                if linked.instruction.op is Op.PAUSE:
                    while self._requested < microbatch // per_batch:
                        yield
                elif linked.instruction.op is Op.UPDATE:
                    behind = microbatch + self._microbatches_per_update(linked.instruction.stage)
                    self._update_state.groups = self._groups_of(int(min(behind, self._end)) // per_batch - 1)
                linked.for_sizes(self._rank.sizes)()
            number += 1

    def _groups_of(self, batch: int) -> GroupHyperparameters:
        """The hyperparameters of when the script requested a mini-batch, or the last ones if it has not."""
        for number in [each for each in self._groups if each < batch]:
            del self._groups[number]
        return self._groups[batch if batch in self._groups else math.inf]

    def _admits(self, microbatch: int) -> bool:
        """Whether a microbatch exists. When it is first named, its frames are filled."""
        while self._num_admitted <= microbatch < self._end:
            number, place = divmod(self._num_admitted, self._plan.num_microbatches)
            if place == 0:
                self._batch = self._source(number)
            if self._batch is None:
                self._end = self._num_admitted
            else:
                if place == 0:
                    self._stream_results.expect(number, self._batch)
                    self._rank.use(self._batch.batch_slice.values)
                batch_slice, inputs = self._batch.batch_slice, self._batch.microbatches[place]
                size, weight = batch_slice.sizes[place], batch_slice.loss_weights[place]
                self._fill(self._num_admitted, size, inputs, (self._seed, self._num_admitted), weight)
                self._num_admitted += 1
        return microbatch < self._end

    def _describe(self, problem: str) -> str:
        """The place, the problem, and the instructions before it."""
        rank, run = f"rank {self._program.rank}", "stream" if self._program.period else "step"
        if self.position < 0:
            return f"{rank}, preparing the {run}: {problem}"
        if self.position >= len(self._part.linked):
            return f"{rank}, finishing the {run}: {problem}"
        instruction = self._part.program.instructions[self.position]
        if self._program.period:
            instruction = replace(instruction, microbatch=self._stream_results.microbatch)
        return failure_message(self._part.program, self.position, instruction, problem)


def loss_of(plan: Plan) -> Value | None:
    """The name of the result that training differentiates."""
    if plan.mode is not Mode.TRAIN:
        return None
    return next((value for value in result_values(plan) if value.name == "loss"), None)


@functools.lru_cache(maxsize=64)
def loss_gradient(weight: float, dtype: str, device: torch.device) -> Tensor:
    """The initial gradient of a microbatch's backward: its weight times the loss scale."""
    return torch.full((), weight, dtype=getattr(torch, dtype), device=device)
