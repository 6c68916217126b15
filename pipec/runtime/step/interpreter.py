"""The interpreter: runs the program of one rank, a step or a stream.

Everything that can be decided before is decided once, when ``pipec.runtime.step.linker`` links the program.
A step fills the frames of all its microbatches, and runs the linked actions one after the other. A stream
repeats a period of them (``pipec.ir.periodic_program``): a microbatch takes a frame when it is first named,
and the frames are taken in turn. Where the program pauses, the stream waits for the script.
"""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from pipec.errors import ExecutionError, PipecError, TransportError
from pipec.ir import Instruction, Op, Program, StepPart, program_part, rank_of, replica_counts
from pipec.ir.periodic_program import unrolled_instructions
from pipec.ir.step_parts import instructions_of_part
from pipec.ir.text_format import instruction_lines
from pipec.runtime.messages.cuda import current_device
from pipec.runtime.step.batch_slice import NO_ROWS, BatchSlice
from pipec.runtime.step.linker import Action, Linker, microbatches_of, nothing
from pipec.runtime.step.rank_state import (
    GroupHyperparameters,
    Inputs,
    OutputGradients,
    RankState,
    SuspendedStep,
)
from pipec.runtime.step.stream_results import StreamBatch
from pipec.runtime.step.timestamps import Moment, Timestamps, clock_of

BatchSource = Callable[[int], StreamBatch | None]
"""Returns the mini-batch of a number, or None from the end of the stream on."""

Emit = Callable[[int, Mapping[str, Tensor]], None]

_NUM_LINES = 5
"""How many instructions an error shows, the failed one last."""


class Interpreter(RankState):
    """Executes the program of a rank, which the plan and the code of its stages were made for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.position = -1
        self._passes = self._link()
        self._suspended: SuspendedStep | None = None
        self._parts = {part: self._linked(part) for part in StepPart}
        self._part, self._actions = self._parts[StepPart.WHOLE]

    def _link(self) -> Sequence[Sequence[Action]]:
        """The actions of the program; those of a period once for each frame that microbatches take."""
        program, num_frames = self.program, self.num_frames
        if not program.period:
            linker = Linker(self, program.instructions)
            return [[*map(linker.link, program.instructions)]]
        passes: list[dict[int, Action]] = [{} for _ in range(num_frames // program.period)]
        unrolled = [
            (number % len(passes), place, replace(each, microbatch=each.microbatch % num_frames))
            for number, place, each in unrolled_instructions(program, 2 * num_frames)
        ]
        linker = Linker(self, [each for _, _, each in unrolled])
        for number, place, each in unrolled:
            passes[number][place] = linker.link(each)
        return [[linked[place] for place in range(len(program.instructions))] for linked in passes]

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Run instructions in a ``with`` block, on their device; failures are reported to the other ranks."""
        transport, device = self.transport, self.device
        try:
            with current_device(device), torch.no_grad(), torch.autocast(device.type, enabled=False):
                yield
        except TransportError as error:
            failure = TransportError(self._describe(str(error)))
            transport.fail(failure)
            raise failure from error.__cause__
        except Exception as error:
            explained = self._explained(error)
            transport.fail(explained)
            raise explained from error
        except BaseException as interrupt:  # such as Ctrl-C
            transport.fail(interrupt)
            raise

    def _explained(self, error: Exception) -> PipecError:
        """The error of a failed instruction, which may have read a value that was never received."""
        try:
            self.transport.check()
        except TransportError as interruption:
            return TransportError(self._describe(str(interruption)))
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename.strip('<>')).name}, line {frame.lineno}, in {frame.name}"
        return ExecutionError(self._describe(f"{type(error).__name__}: {error} ({place})"))

    def run(
        self,
        microbatches: Sequence[Inputs] = (),
        batch_slice: BatchSlice = NO_ROWS,
        seed: int = 0,
        timestamps: Timestamps | None = None,
        part: StepPart = StepPart.WHOLE,
        resumed: tuple[SuspendedStep, OutputGradients] | None = None,
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
            part: All of the step, or its microbatches alone: their gradients are kept for the next update. Or
                the update alone, of the gradients of all steps since the last; it has no microbatches. Or
                the forwards alone, or the backwards.
            resumed: What ``take_suspended`` returned after the forwards, and the gradients of the outputs.

        Raises:
            ExecutionError: an instruction failed here or, if every rank is in this process, anywhere.
            TransportError: another rank failed, hung or is gone.
        """
        self.position, (self._part, self._actions) = -1, self._parts[part]
        self.begin_part(part)
        try:
            with self._running():
                if resumed is None:
                    self.begin_step(microbatches, batch_slice, seed)
                else:
                    batch_slice = resumed[0].batch_slice
                    self.resume(*resumed)
                has_rows = all(batch_slice.sizes)
                self._execute(self._actions if has_rows else self._actions_with_rows(), timestamps)
                is_late = part in (StepPart.UPDATE, StepPart.BACKWARDS)
                return {} if is_late else self.step_results.of_batch(self.device)
        finally:
            self.forget_step()

    def _linked(self, part: StepPart) -> tuple[Program, Sequence[Action]]:
        """The instructions of a part of the program, and their actions with those of the end."""
        sync_spec = self.plan.sync_spec
        actions = [self._passes[0][n] for n in instructions_of_part(self.program, sync_spec, part)]
        if part is not StepPart.UPDATE:
            actions.append(self.transport.finish)
            if part is StepPart.FORWARDS:
                actions.append(self._suspend)
            is_forward = part is not StepPart.BACKWARDS
            if is_forward and any(stage.updated_indices for stage in self.stages.values()):
                actions.append(self._end_step)
        return program_part(self.program, sync_spec, part), actions

    def _suspend(self) -> None:
        self._suspended = self.suspend()

    def take_suspended(self) -> SuspendedStep:
        """What the backwards need of the forwards that ran last."""
        suspended, self._suspended = self._suspended, None
        assert suspended is not None, "forwards have run"
        return suspended

    def _actions_with_rows(self) -> Sequence[Action]:
        """The actions of a step in which some microbatches have no rows, and so are not computed."""
        return [
            nothing if each is not None and self._is_idle(each) else action
            for each, action in zip_longest(self._part.instructions, self._actions)
        ]

    def _is_idle(self, instruction: Instruction) -> bool:
        """Whether an instruction is of microbatches that have no rows."""
        own = microbatches_of(instruction, self)
        return len(own) > 0 and not any(self.sizes[each]["b"] for each in own)

    def _end_step(self) -> None:
        """Write the buffers that the step has changed, unless the step is skipped."""
        for stage in self.stages.values() if self.non_finite is None else ():
            stage.end_step()

    def _execute(self, actions: Sequence[Action], timestamps: Timestamps | None) -> None:
        if timestamps is not None:
            self._execute_and_stamp(actions, timestamps)
            return
        for position, action in enumerate(actions):
            self.position = position
            action()

    def _execute_and_stamp(self, actions: Sequence[Action], timestamps: Timestamps) -> None:
        clock, marks = clock_of(self.device), list[Moment]()
        clock.begin()
        for position, action in enumerate(actions):
            self.position = position
            begun = clock.now()
            action()
            if position < len(self._part.instructions):
                marks += (begun, clock.now())
        timestamps += clock.times(marks)

    def begin(self, source: BatchSource, emit: Emit, seed: int) -> None:
        """Begin a stream. Random operators draw from streams that depend on ``seed``.

        ``emit`` is called with the number of each mini-batch and its results by name.
        """
        self._source, self._seed, self.position = source, seed, -1
        self._num_admitted, self._end = 0, math.inf
        self._batch: StreamBatch | None = None
        self._groups: dict[float, GroupHyperparameters] = {}
        self._requested = -1.0
        self.begin_part(StepPart.WHOLE)
        self.stream_results.begin(emit)
        for stage in self.stages.values():
            stage.begin_step()
            stage.versions.begin()
        self._periods = self._run_periods()

    def advance(self, batch: float, groups: GroupHyperparameters) -> None:
        """Run until the results of a mini-batch are known, or the programs end.

        ``groups`` are the hyperparameters of the updates whose last mini-batch it is.

        Raises:
            ExecutionError, TransportError: as ``run``.
        """
        self._requested, self._groups[batch] = batch, groups
        with self._running():
            next(self._periods, None)

    def finish(self, groups: GroupHyperparameters) -> None:
        """Run everything that is left of a stream whose source has ended. Raises as ``advance``."""
        self.advance(math.inf, groups)
        with self._running():
            self.transport.finish()
            for stage in self.stages.values():
                stage.restore_buffers(self.stream_results.num_finite)
                stage.end_step()

    def forget(self) -> None:
        """Drop every value of the stream."""
        self._periods, self._batch = iter(()), None
        self._source = lambda number: None
        for stage in self.stages.values():
            stage.forget_step()
            stage.versions.begin()
        self.stream_results.forget()

    @property
    def held_versions(self) -> dict[int, set[int]]:
        """The weight versions that each stage holds, by the number of mini-batches before them."""
        return {
            index: {version * self._batches_per_update(index) for version in stage.versions.held}
            for index, stage in self.stages.items()
        }

    def restore(self, batch: int | None) -> None:
        """Restore the weights and buffers of all stages after a mini-batch; None leaves each its latest."""
        for index, stage in self.stages.items():
            latest = stage.versions.number
            stage.restore(latest if batch is None else batch // self._batches_per_update(index))

    def _batches_per_update(self, stage: int) -> int:
        return self._microbatches_per_update(stage) // self.plan.num_microbatches

    def _microbatches_per_update(self, stage: int) -> int:
        stream = self.plan.sync_spec.stream
        assert stream is not None, "periodic programs have mini-batches"
        return stream.microbatches_per_update(stage, replica_counts(self.plan.placement))

    def _run_periods(self) -> Iterator[None]:
        """Run period after period; yields where the script has to request the next mini-batch first."""
        instructions, period = self.program.instructions, self.program.period
        offsets, per_batch = [each.microbatch for each in instructions], self.plan.num_microbatches
        needs_rows = [each.op.traits.per_microbatch or each.op.traits.carries_link for each in instructions]
        number = -(max(offsets) // period)
        while number * period + min(offsets) < self._end:
            for position, action in enumerate(self._passes[number % len(self._passes)]):
                microbatch = offsets[position] + number * period
                if microbatch < 0 or not self._admits(microbatch):
                    continue
                self.position, self.stream_results.microbatch = position, microbatch
                instruction = instructions[position]
                if instruction.op is Op.PAUSE:
                    while self._requested < microbatch // per_batch:
                        yield
                elif instruction.op is Op.UPDATE:
                    behind = microbatch + self._microbatches_per_update(instruction.stage)
                    self.groups = self._groups_of(int(min(behind, self._end)) // per_batch - 1)
                if self.sizes[microbatch % self.num_frames]["b"] or not needs_rows[position]:
                    action()
            number += 1

    def _groups_of(self, batch: int) -> GroupHyperparameters:
        """The hyperparameters of when the script requested a mini-batch, or the last ones if it has not."""
        for number in [each for each in self._groups if each < batch]:
            del self._groups[number]
        return self._groups[batch if batch in self._groups else math.inf]

    def _admits(self, microbatch: int) -> bool:
        """Whether a microbatch exists. When it is first named, its frames are filled."""
        while self._num_admitted <= microbatch < self._end:
            number, place = divmod(self._num_admitted, self.plan.num_microbatches)
            if place == 0:
                self._batch = self._source(number)
                if self._batch is None:
                    self._end = self._num_admitted
                    break
                self.stream_results.expect(number, self._batch)
                self.sizes[-1] = self._batch.batch_slice.joined_names(0)
            assert self._batch is not None, "the source has not ended"
            batch_slice, inputs = self._batch.batch_slice, self._batch.microbatches[place]
            admitted, weight = self._num_admitted, batch_slice.loss_weights[place]
            self.sizes[admitted % self.num_frames] = batch_slice.names[place]
            for stage in self.stages.values():
                if rank_of(self.plan.placement, stage.index, admitted) == self.number:
                    self.fill_frame(stage, admitted, inputs, (self._seed, admitted), weight)
            self._num_admitted += 1
        return microbatch < self._end

    def _describe(self, problem: str) -> str:
        """The place, the problem, and the instructions before it, the failed one last."""
        rank, run = f"rank {self.number}", "stream" if self.program.period else "step"
        if self.position < 0:
            return f"{rank}, preparing the {run}: {problem}"
        if self.position >= len(self._part.instructions):
            return f"{rank}, finishing the {run}: {problem}"
        failed = self._part.instructions[self.position]
        microbatch = self.stream_results.microbatch if self.program.period else failed.microbatch
        fields = {"stage": failed.stage, "microbatch": microbatch, "segment": failed.segment}
        words = [f"{word} {number}" for word, number in fields.items() if number != -1]
        lines = instruction_lines(self._part)[: self.position + 1][-_NUM_LINES:]
        heading = f"last instructions of {rank}:"
        return "\n".join(
            [f"{', '.join([rank, *words, failed.op])}: {problem}", heading, *(f"    {x}" for x in lines)]
        )
