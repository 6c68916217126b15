"""The interpreter: runs the program of one rank, step after step.

Everything that can be decided before a step is decided once, when ``pipec.runtime.step.linker`` links the
program. A step then fills the frames of its microbatches and runs the linked actions, one after the other.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pipec.ir import Mode, Payload, Plan, Program, Value
from pipec.runtime.memory.block_cache import clear_block_cache
from pipec.runtime.memory.meter import MemoryMeter
from pipec.runtime.messages.cuda import current_device
from pipec.runtime.messages.transport import Transport
from pipec.runtime.stages.bound_stage import BoundStage, StageCode
from pipec.runtime.stages.cuda_graphs import graph_slots
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.compute import Action
from pipec.runtime.step.error_report import failure_message, reporting_failures
from pipec.runtime.step.linker import link
from pipec.runtime.step.non_finite import NonFinite
from pipec.runtime.step.optimizer_updates import OptimizerUpdates, StageUpdate
from pipec.runtime.step.rank_state import RankState, UpdateState
from pipec.runtime.step.step_results import StepResults, empty_result, has_rows, merge_replicas, result_values
from pipec.runtime.step.timestamps import Moment, Timestamps, clock_of


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
        self._program, self._device = program, device
        bind = functools.partial(bind_stages, plan, program.rank, stages, parameters, buffers, device)
        self._stages = bind(plan.num_microbatches, owns_tensors)
        for (index, microbatch), slot in graph_slots(program).items():
            self._stages[index].slots[microbatch] = slot
        self._own = {stage: plan.microbatches_on(stage, program.rank) for stage in self._stages}
        self._result_links = [link for link in plan.links if link.payload is Payload.RESULT]
        made = [
            (value, self._own[link.source])
            for link in self._result_links
            if link.source in self._stages
            for value in link.values
        ]
        self._results = StepResults(made, plan.num_microbatches, plan.summed_outputs)
        self._update_state = UpdateState(updates)
        loss = loss_of(plan)
        self._rank = RankState(
            *(
                program.rank,
                plan,
                self._stages,
                self._results,
                {},
                [],
                {},
                transport,
                loss,
                self._update_state,
            )
        )
        self._clock = clock_of(device)
        self._linked = link(program, self._rank)
        self._closing = [transport.finish, self._end_step]
        self._actions = [*(each.action for each in self._linked), *self._closing]

    @property
    def inputs(self) -> set[str]:
        """The inputs of the model that this rank reads."""
        return set[str]().union(*(stage.inputs for stage in self._stages.values()))

    def run(
        self,
        microbatches: Sequence[Mapping[str, Tensor]],
        batch_slice: BatchSlice,
        seed: int = 0,
        timestamps: Timestamps | None = None,
        update: bool = True,
        meter: MemoryMeter | None = None,
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
            update: A program that updates does so. If not, the gradients are kept for the next update.
            meter: Measures the memory of the step.

        Raises:
            ExecutionError: an instruction failed here or, if every rank is in this process, anywhere.
            TransportError: another rank failed, hung or is gone.
        """
        self.position = -1
        self._update_state.begin_step(update)
        try:
            with (
                reporting_failures(self._rank.transport, self._describe),
                current_device(self._device),
                torch.no_grad(),
                torch.autocast(self._device.type, enabled=False),
                meter or contextlib.nullcontext(),
            ):
                self._results.loss_weights, self._results.is_local = (
                    batch_slice.custom_loss_weights,
                    batch_slice.is_local,
                )
                self._begin_step(microbatches, batch_slice, seed)
                actions = self._actions if all(batch_slice.sizes) else self._actions_on(batch_slice.sizes)
                if meter is not None:
                    self._execute_and_measure(actions, meter)
                elif timestamps is not None:
                    self._execute_and_stamp(actions, timestamps)
                else:
                    self._execute(actions)
                return self._merged_results(batch_slice)
        finally:
            self._forget_step()

    def _begin_step(
        self, microbatches: Sequence[Mapping[str, Tensor]], batch_slice: BatchSlice, seed: int
    ) -> None:
        self._rank.sizes[:] = [*batch_slice.sizes, batch_slice.num_rows]
        self._rank.use(batch_slice.values)
        shares, scale = batch_slice.loss_weights, self._update_state.loss_scale
        for stage in self._stages.values():
            stage.begin_step(scale)
            for microbatch in self._own[stage.index]:
                if not batch_slice.sizes[microbatch]:
                    continue
                inputs, sizes = microbatches[microbatch], self._rank.sizes_with(batch_slice.sizes[microbatch])
                frame = stage.fill_frame(microbatch, (seed, batch_slice.first + microbatch), sizes)
                frame.update(
                    {name: inputs[name].to(self._device, non_blocking=True) for name in stage.inputs}
                )
                if self._rank.loss:
                    weight = shares[microbatch]
                    frame["grad_loss"] = loss_gradient(weight * scale, self._rank.loss.dtype, self._device)

    def _end_step(self) -> None:
        """Write the buffers that the step has changed, unless nothing is to come of it."""
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

    def _actions_on(self, sizes: Sequence[int]) -> list[Action]:
        """The actions of a step in which some microbatches have no rows, and so are not computed."""
        return [*(each.for_sizes(sizes) for each in self._linked), *self._closing]

    def _execute(self, actions: Sequence[Action]) -> None:
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
                if position < len(self._linked):
                    marks += (begun, clock.now())
            timestamps += clock.times(marks)

    def _execute_and_measure(self, actions: Sequence[Action], meter: MemoryMeter) -> None:
        meter.begin(self._held())
        num_instructions = len(self._program.instructions)
        for position, action in enumerate(actions):
            self.position = position
            action()
            if position < num_instructions:
                meter.note(sum(map(self._host_bytes, self._stages.values())))

    def _host_bytes(self, stage: BoundStage) -> int:
        """The bytes of a stage in host memory."""
        own = self._update_of(stage.index)
        return stage.host_bytes + (own.optimizer.host_bytes if own else 0)

    def _update_of(self, stage: int) -> StageUpdate | None:
        """What the rank updates of a stage, or what the replica does with which it shares the parameters."""
        updates, owners = self._update_state.updates, (self._rank.number, self._rank.plan.placement[stage][0])
        found = (updates.on(each, stage) for each in owners) if updates else iter(())
        return next(filter(None, found), None)

    def _held(self) -> dict[str, list[Tensor]]:
        """The memory of the rank at the start of a step, by kind.

        Replicas of one process share parameters and state; each is counted with what it would have.
        """
        parts: list[Mapping[str, Sequence[Tensor]]] = [stage.held() for stage in self._stages.values()]
        parts += [own.held() for stage in self._stages if (own := self._update_of(stage))]
        found: dict[str, list[Tensor]] = defaultdict(list)
        for part in (*parts, {"received": self._rank.transport.held()}):
            for kind, tensors in part.items():
                found[kind] += tensors
        return found

    def _merged_results(self, batch_slice: BatchSlice) -> dict[str, Tensor]:
        """The results of the batch, merged from those of all replicas.

        If replicas pass their own parts of the batch, a result with rows has this replica's rows.
        """
        plan, merged = self._rank.plan, dict[str, Tensor]()
        for made in self._result_links:
            ranks = plan.placement[made.source]
            for value in made.values:
                if batch_slice.is_local and has_rows(value):
                    own = self._part(value, ranks[batch_slice.replica], made.source, batch_slice)
                    merged[value.name] = (
                        empty_result(value, batch_slice.values, self._device) if own is None else own
                    )
                else:
                    parts = [self._part(value, rank, made.source, batch_slice) for rank in ranks]
                    merged[value.name] = merge_replicas(
                        value, parts, batch_slice.sizes, batch_slice.values, value.name in plan.summed_outputs
                    )
        return merged

    def _part(self, value: Value, rank: int, stage: int, batch_slice: BatchSlice) -> Tensor | None:
        """A rank's part of a result; None if its microbatches have no rows."""
        if not any(batch_slice.sizes[each] for each in self._rank.plan.microbatches_on(stage, rank)):
            return None
        if rank == self._rank.number:
            return self._results.merged(value.name, batch_slice.sizes, batch_slice.values)
        return self._rank.received[value.name, rank]

    def _forget_step(self) -> None:
        for stage in self._stages.values():
            stage.forget_step()
        self._results.forget_step()
        self._rank.received.clear()
        clear_block_cache()

    def _describe(self, problem: str) -> str:
        """The place, the problem, and the instructions before it."""
        rank = f"rank {self._program.rank}"
        if self.position < 0:
            return f"{rank}, preparing the step: {problem}"
        if self.position >= len(self._linked):
            return f"{rank}, finishing the step: {problem}"
        instruction = self._program.instructions[self.position]
        return failure_message(self._program, self.position, instruction, problem)


def bind_stages(
    plan: Plan,
    rank: int,
    stages: Mapping[int, StageCode],
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    device: torch.device,
    num_frames: int,
    owns_tensors: Callable[[int], bool],
) -> dict[int, BoundStage]:
    """The state of each stage of a rank, for so many microbatches at a time."""
    return {
        stage.index: BoundStage(
            stage,
            stages[stage.index],
            parameters,
            buffers,
            device,
            num_frames,
            plan.sync_spec.reduced_parameters(stage.index),
            owns_tensors(stage.index),
            plan.sync_spec.defers_gradients,
        )
        for stage in plan.stages
        if rank in plan.placement[stage.index]
    }


def loss_of(plan: Plan) -> Value | None:
    """The name of the result that training differentiates."""
    if plan.mode is not Mode.TRAIN:
        return None
    return next((value for value in result_values(plan) if value.name == "loss"), None)


@functools.lru_cache(maxsize=64)
def loss_gradient(weight: float, dtype: str, device: torch.device) -> Tensor:
    """The initial gradient of a microbatch's backward: its weight times the loss scale."""
    return torch.full((), weight, dtype=getattr(torch, dtype), device=device)
