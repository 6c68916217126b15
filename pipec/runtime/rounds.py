"""The interpreter of programs without end: runs the rounds of one rank for as long as mini-batches come.

A round is linked once for each of the frames that its microbatches take in turn. A stream then fills a frame
when a microbatch is first named, and calls the actions, one after the other.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipec.ir import Instruction, Op, Plan, Program
from pipec.ir.rounds import rounds, updates_per_round, window_of
from pipec.runtime.compute import Action
from pipec.runtime.cuda import current_device
from pipec.runtime.explain import located, telling
from pipec.runtime.interpreter import bind_stages, loss_gradient, loss_of
from pipec.runtime.linker import Linker
from pipec.runtime.outcomes import Outcomes, StreamBatch
from pipec.runtime.rank import Rank, Updating
from pipec.runtime.recording import clock_of
from pipec.runtime.stage import StageCode
from pipec.runtime.transport import Transport
from pipec.runtime.updates import Updates
from pipec.runtime.versions import WeightVersions

Source = Callable[[int], StreamBatch | None]
"""Returns the mini-batch of a number, or None from the end of the stream on."""

Emit = Callable[[int, Mapping[str, Tensor]], None]


class RoundInterpreter:
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
        updates: Updates | None = None,
    ) -> None:
        self._program, self._plan, self._device = program, plan, device
        self._window = window_of(program)
        self._stages = bind_stages(
            plan, program.rank, stages, parameters, buffers, device, self._window, owns_tensors
        )
        for index, stage in self._stages.items():
            stage.versions = WeightVersions(stage.weights, _most_behind(program, index))
            stage.is_versioned = True
        self._outcomes, self._updating = Outcomes(plan), Updating(updates)
        self._rank = Rank(
            program.rank,
            plan,
            self._stages,
            self._outcomes,
            {},
            [0] * (self._window + 1),
            {},
            transport,
            loss_of(plan),
            clock_of(device),
            self._updating,
        )
        self._actions = self._linked()
        self._per_round = updates_per_round(program)

    @property
    def inputs(self) -> set[str]:
        """The inputs of the model that this rank reads."""
        return set[str]().union(*(stage.inputs for stage in self._stages.values()))

    def begin(self, source: Source, emit: Emit, seed: int) -> None:
        """Start with a stream. Random operators draw from streams that depend on ``seed``."""
        self._source, self._seed = source, seed
        self._outcomes.begin(emit)
        self._num_admitted, self._end = 0, math.inf
        self._batch: StreamBatch | None = None
        self._num_updates = dict.fromkeys(self._stages, 0)
        self._instruction: tuple[int, Instruction] | None = None
        for stage in self._stages.values():
            stage.begin_step()
            stage.versions.begin()
        self._running = self._run()

    def advance(self, batch: float, groups: Sequence[Mapping[str, Any]]) -> None:
        """Run until the updates of a mini-batch are made, or everything is done if there is no such.

        ``groups`` are the hyperparameters of the updates.

        Raises:
            ExecutionError, TransportError: as ``Interpreter.run``.
        """
        self._updating.groups = groups
        with self._running_alone():
            while min(self._num_updates.values()) <= batch and next(self._running, None) is not None:
                """The generator has run up to the next update."""

    @property
    def num_updates(self) -> dict[int, int]:
        """The updates that this run has made so far, by stage."""
        return dict(self._num_updates)

    def finish(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Run everything that is left of a stream whose source has ended. Raises as ``advance``."""
        self.advance(math.inf, groups)
        with self._running_alone():
            self._rank.transport.finish()
            for stage in self._stages.values():
                stage.end_step()

    @contextlib.contextmanager
    def _running_alone(self) -> Iterator[None]:
        """Run instructions inside a ``with``, on their device; what fails is told to the other ranks."""
        with (
            telling(self._rank.transport, self._describe),
            current_device(self._device),
            torch.no_grad(),
            torch.autocast(self._device.type, enabled=False),
        ):
            yield

    def forget(self) -> None:
        """Let go of every value of the stream."""
        self._running, self._batch = iter(()), None
        for stage in self._stages.values():
            stage.forget_step()
            stage.versions.begin()
        self._outcomes.begin(lambda number, results: None)

    def _run(self) -> Iterator[bool]:
        """Run round after round, and pause behind each update."""
        instructions, period = self._program.instructions, self._program.period
        offsets = [each.microbatch for each in instructions]
        makes = [each.op is Op.UPDATE for each in instructions]
        number = -(max(offsets) // period)
        while number * period + min(offsets) < self._end:
            for place, offset in enumerate(offsets):
                microbatch = offset + number * period
                if microbatch < 0 or not self._admits(microbatch):
                    continue
                self._instruction = place, replace(instructions[place], microbatch=microbatch)
                self._actions[place][microbatch % self._window]()
                if makes[place]:
                    self._num_updates[instructions[place].stage] += 1
                    yield True
            number += 1

    def _admits(self, microbatch: int) -> bool:
        """Whether a microbatch exists. When it is first asked for, its frames are filled."""
        while self._num_admitted <= microbatch < self._end:
            number, place = divmod(self._num_admitted, self._plan.num_microbatches)
            if place == 0:
                self._batch = self._source(number)
            if self._batch is None:
                self._end = self._num_admitted
            else:
                self._fill(self._num_admitted, self._batch, place)
                self._num_admitted += 1
        return microbatch < self._end

    def _fill(self, microbatch: int, batch: StreamBatch, place: int) -> None:
        number, size, inputs = microbatch % self._window, batch.sizes[place], batch.microbatches[place]
        self._rank.sizes[number] = size
        self._rank.values.update(batch.values)
        self._outcomes.expect(number, microbatch, batch)
        for stage in self._stages.values():
            frame = stage.fill_frame(number, (self._seed, microbatch), self._rank.sizes_with(size))
            frame["version"] = self._version(stage.index, microbatch)
            frame.update({name: inputs[name].to(self._device, non_blocking=True) for name in stage.inputs})
            if self._rank.loss:
                share = batch.shares[place]
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
        return max(forward.version + number * self._per_round[stage], 0)

    def _linked(self) -> list[dict[int, Action]]:
        """The action of each instruction of a round, by the frame of its microbatch."""
        linker = Linker(self._rank)
        table: list[dict[int, Action]] = [{} for _ in self._program.instructions]
        for _, place, each in rounds(self._program, 2 * math.lcm(self._window, self._program.period)):
            frame = each.microbatch % self._window
            table[place][frame] = linker.link(replace(each, microbatch=frame)).action
        linker.finish()
        assert not linker.closing, "what a stream receives has a reader"
        return table

    def _describe(self, problem: str) -> str:
        if self._instruction is None:
            return f"rank {self._program.rank}, beginning the stream: {problem}"
        return located(self._program, *self._instruction, problem)


def _most_behind(program: Program, stage: int) -> int:
    """How many versions before the one that an update makes may still be read after it."""
    written = [each for _, _, each in rounds(program, 4 * math.lcm(window_of(program), program.period))]
    read = [each.version if each.op.phase and each.stage == stage else math.inf for each in written]
    behind, oldest = 0.0, math.inf
    for each, version in zip(reversed(written), reversed(read), strict=True):
        oldest = min(oldest, version)
        if each.op is Op.UPDATE and each.stage == stage:
            behind = max(behind, each.version - oldest)
    return int(behind)
