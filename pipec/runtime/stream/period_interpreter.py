"""The interpreter of periodic programs: repeats the period of one rank for as long as mini-batches come.

A round is linked once for each of the frames that its microbatches take in turn. A stream then fills a frame
when a microbatch is first named, and calls the actions, one after the other.

A rank pauses before it has all results of a mini-batch that the script has not requested yet, and before an
update whose last mini-batch is such a one. ``pipec.programs.rules.result_rules`` proves that the script gets
what comes before.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipec.ir import Instruction, Op, Payload, Plan, Program, rank_of, replica_counts
from pipec.ir.periodic_program import (
    microbatch_window,
    unrolled_instructions,
    updates_per_period,
    yields_result,
)
from pipec.runtime.messages.cuda import current_device
from pipec.runtime.messages.transport import Transport
from pipec.runtime.stages.bound_stage import StageCode
from pipec.runtime.stages.weight_versions import WeightVersions
from pipec.runtime.step.error_report import failure_message, reporting_failures
from pipec.runtime.step.interpreter import bind_stages, loss_gradient, loss_of
from pipec.runtime.step.linked_instruction import LinkedInstruction
from pipec.runtime.step.linker import Linker
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.rank_state import RankState, UpdateState
from pipec.runtime.step.stream_results import StreamBatch, StreamResults

BatchSource = Callable[[int], StreamBatch | None]
"""Returns the mini-batch of a number, or None from the end of the stream on."""

GroupHyperparameters = Sequence[Mapping[str, Any]]
"""The hyperparameters of an update, for each group of the optimizer."""

Emit = Callable[[int, Mapping[str, Tensor]], None]


class PeriodInterpreter:
    """Executes the rounds of ``program`` on ``device``; its arguments are those of ``Interpreter``."""

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
        self._program, self._plan, self._device = program, plan, device
        self._window = _num_frames(program, plan)
        own = {**parameters, **(updates.copies(program.rank) if updates else {})}
        self._stages = bind_stages(
            plan, program.rank, stages, own, buffers, device, self._window, owns_tensors
        )
        for index, stage in self._stages.items():
            stage.versions = WeightVersions(stage.weights, _most_behind(program, index))
            stage.is_versioned = True
        self._stream_results, self._update_state = StreamResults(plan), UpdateState(updates)
        self._learns = [yields_result(each, plan.links) for each in program.instructions]
        makers = {link.source for link in plan.links if link.payload is Payload.MICROBATCH_RESULT}
        self._num_to_learn = plan.num_microbatches * len(makers)
        self._rank = RankState(
            program.rank,
            plan,
            self._stages,
            self._stream_results,
            {},
            [0] * (self._window + 1),
            {},
            transport,
            loss_of(plan),
            self._update_state,
        )
        self._linked_instructions = self._linked()
        self._updates_per_period = updates_per_period(program)

    @property
    def inputs(self) -> set[str]:
        """The inputs of the model that this rank reads."""
        return set[str]().union(*(stage.inputs for stage in self._stages.values()))

    def begin(self, source: BatchSource, emit: Emit, seed: int) -> None:
        """Begin a stream. Random operators draw from streams that depend on ``seed``."""
        self._source, self._seed = source, seed
        self._stream_results.begin(emit)
        self._num_admitted, self._end = 0, math.inf
        self._batch: StreamBatch | None = None
        self._groups: dict[float, GroupHyperparameters] = {}
        self._asked, self._num_known = -1.0, 0
        self._learned: Counter[int] = Counter()
        self._instruction: tuple[int, Instruction] | None = None
        for stage in self._stages.values():
            stage.begin_step()
            stage.versions.begin()
        self._running = self._run()

    def advance(self, batch: float, groups: GroupHyperparameters) -> None:
        """Run until the results of a mini-batch are known, or the programs end.

        ``groups`` are the hyperparameters of the updates whose last mini-batch it is.

        Raises:
            ExecutionError, TransportError: as ``Interpreter.run``.
        """
        self._asked, self._groups[batch] = batch, groups
        with self._running_alone():
            next(self._running, None)
            self._stream_results.wait_received(batch)

    @property
    def first_nan(self) -> float:
        """The first microbatch whose loss is NaN; its mini-batch and all later ones are not updated."""
        return self._stream_results.first_nan

    @property
    def held(self) -> dict[int, set[int]]:
        """The weight versions that each stage holds, by the number of mini-batches before them."""
        held = {}
        for index, stage in self._stages.items():
            per_version = self._batches_per_version(index)
            held[index] = {version * per_version for version in stage.versions.held}
        return held

    def _batches_per_version(self, stage: int) -> int:
        """The mini-batches of an update, which are several where a stage has replicas."""
        stream = self._plan.sync_spec.stream
        assert stream is not None, "periodic programs have mini-batches"
        return (
            stream.microbatches_per_update(stage, replica_counts(self._plan.placement))
            // self._plan.num_microbatches
        )

    def restore(self, batch: int | None) -> None:
        """Restore the weights and buffers of all stages after a mini-batch; None leaves each its latest."""
        for index, stage in self._stages.items():
            latest = stage.versions.number
            stage.restore(latest if batch is None else batch // self._batches_per_version(index))

    def finish(self, groups: GroupHyperparameters) -> None:
        """Run everything that is left of a stream whose source has ended. Raises as ``advance``."""
        self.advance(math.inf, groups)
        with self._running_alone():
            self._rank.transport.finish()
            for stage in self._stages.values():
                stage.restore_buffers(self._stream_results.num_finite)
                stage.end_step()

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

    def forget(self) -> None:
        """Drop every value of the stream."""
        self._running, self._batch = iter(()), None
        for stage in self._stages.values():
            stage.forget_step()
            stage.versions.begin()
        self._stream_results.forget()

    def _run(self) -> Iterator[None]:
        """Run period after period, and pause where more would be known than the script has requested."""
        instructions, period = self._program.instructions, self._program.period
        offsets = [each.microbatch for each in instructions]
        number = -(max(offsets) // period)
        while number * period + min(offsets) < self._end:
            for place, offset in enumerate(offsets):
                microbatch = offset + number * period
                if microbatch < 0 or not self._admits(microbatch):
                    continue
                while self._asked < self._asked_for(place, microbatch):
                    yield
                self._instruction = place, replace(instructions[place], microbatch=microbatch)
                self._stream_results.microbatch = microbatch
                if instructions[place].op is Op.UPDATE:
                    self._update_state.groups = self._groups_of(self._asked_for(place, microbatch))
                frame = microbatch % self._window
                self._linked_instructions[place][frame].for_sizes(self._rank.sizes)()
                if self._learns[place]:
                    self._note_learned(microbatch)
            number += 1

    def _asked_for(self, place: int, microbatch: int) -> int:
        """The mini-batch that the script must have asked for before an instruction runs; -1 for none."""
        stream, per_batch = self._plan.sync_spec.stream, self._plan.num_microbatches
        assert stream is not None, "periodic programs have mini-batches"
        if self._learns[place] and microbatch // per_batch == self._num_known:
            return self._num_known if self._learned[self._num_known] == self._num_to_learn - 1 else -1
        each = self._program.instructions[place]
        if each.op is Op.UPDATE:
            behind = microbatch + stream.microbatches_per_update(
                each.stage, replica_counts(self._plan.placement)
            )
            return int(min(behind, self._end)) // per_batch - 1
        return -1

    def _note_learned(self, microbatch: int) -> None:
        self._learned[microbatch // self._plan.num_microbatches] += 1
        while self._learned[self._num_known] == self._num_to_learn:
            del self._learned[self._num_known]
            self._num_known += 1

    def _groups_of(self, batch: int) -> GroupHyperparameters:
        """The hyperparameters of when the script asked for a mini-batch, or the last ones if it has not."""
        for number in [each for each in self._groups if each < batch]:
            del self._groups[number]
        return self._groups[batch if batch in self._groups else math.inf]

    def _admits(self, microbatch: int) -> bool:
        """Whether a microbatch exists. When it is first asked for, its frames are filled."""
        while self._num_admitted <= microbatch < self._end:
            number, place = divmod(self._num_admitted, self._plan.num_microbatches)
            if place == 0:
                self._batch = self._source(number)
            if self._batch is None:
                self._end = self._num_admitted
            else:
                if place == 0:
                    self._stream_results.expect(number, self._batch)
                self._fill(self._num_admitted, self._batch, place)
                self._num_admitted += 1
        return microbatch < self._end

    def _fill(self, microbatch: int, batch: StreamBatch, place: int) -> None:
        number, size, inputs = microbatch % self._window, batch.sizes[place], batch.microbatches[place]
        self._rank.sizes[number] = size
        self._rank.use(batch.values)
        if not size:
            return
        placement = self._plan.placement
        for stage in self._stages.values():
            if rank_of(placement, stage.index, microbatch) != self._rank.number:
                continue
            frame = stage.fill_frame(number, (self._seed, microbatch), self._rank.sizes_with(size))
            frame["version"] = self._version(stage.index, microbatch)
            frame["batch"] = microbatch // self._plan.num_microbatches
            frame.update({name: inputs[name].to(self._device, non_blocking=True) for name in stage.inputs})
            if self._rank.loss:
                share = batch.loss_weights[place]
                frame["grad_loss"] = loss_gradient(share, self._rank.loss.dtype, self._device)

    def _version(self, stage: int, microbatch: int) -> int:
        """The version that the program says for a microbatch."""
        period = self._program.period
        forward = next(
            each
            for each in self._program.instructions
            if each.op is Op.FORWARD and each.stage == stage and (microbatch - each.microbatch) % period == 0
        )
        number = (microbatch - forward.microbatch) // period
        return max(forward.version + number * self._updates_per_period[stage], 0)

    def _linked(self) -> list[dict[int, LinkedInstruction]]:
        """Each instruction of a period, linked, by the frame of its microbatch."""
        linker = Linker(self._rank)
        table: list[dict[int, LinkedInstruction]] = [{} for _ in self._program.instructions]
        for _, place, each in unrolled_instructions(self._program, 2 * self._window):
            frame = each.microbatch % self._window
            table[place][frame] = linker.link(replace(each, microbatch=frame))
        return table

    def _describe(self, problem: str) -> str:
        if self._instruction is None:
            return f"rank {self._program.rank}, beginning the stream: {problem}"
        return failure_message(self._program, *self._instruction, problem)


def _num_frames(program: Program, plan: Plan) -> int:
    """A number of frames that microbatches can take in turn, and after which a round names the first again.

    The results of two mini-batches may be on their way at once.
    """
    most = max(microbatch_window(program), 2 * plan.num_microbatches)
    return -(-most // program.period) * program.period


def _most_behind(program: Program, stage: int) -> int:
    """How many versions before the one that an update makes may still be read after it."""
    written = [
        each
        for _, _, each in unrolled_instructions(program, 4 * (microbatch_window(program) + program.period))
    ]
    read = [each.version if each.op.phase and each.stage == stage else math.inf for each in written]
    behind, oldest = 0.0, math.inf
    for each, version in zip(reversed(written), reversed(read), strict=True):
        oldest = min(oldest, version)
        if each.op is Op.UPDATE and each.stage == stage:
            behind = max(behind, each.version - oldest)
    return int(behind)
