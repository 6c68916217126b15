"""What the linked actions of one rank work on: its stages, and the values of the step that runs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipec.ir import Mode, Plan, Program, Sizes, StepPart
from pipec.ir.periodic_program import num_frames, num_versions_behind, version_read
from pipec.runtime.memory.block_cache import clear_block_cache
from pipec.runtime.messages.cuda import on_device
from pipec.runtime.messages.transport import Transport
from pipec.runtime.random_seeds import OperatorGenerators
from pipec.runtime.stages.bound_stage import (
    BATCH,
    VERSION,
    BoundStage,
    Frame,
    StageCode,
    SuspendedStage,
)
from pipec.runtime.stages.host_bucket import HostLink
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.non_finite import NonFinite
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.step_results import StepResults, result_values
from pipec.runtime.step.stream_results import StreamResults
from pipec.runtime.step.tail import StageTail

Inputs = Mapping[str, Tensor]
"""The model's inputs of a microbatch, by name."""

OutputGradients = Mapping[str, Mapping[int, Tensor]]
"""The gradients of outputs by name, of the part that each microbatch has made of them."""

GroupHyperparameters = Sequence[Mapping[str, Any]]
"""The hyperparameters of an update, for each group of the optimizer."""


@dataclass(frozen=True)
class SuspendedStep:
    """What a rank needs for the backwards of a step whose forwards have run, by stage."""

    batch_slice: BatchSlice
    stages: Mapping[int, SuspendedStage]


@dataclass(eq=False, repr=False)
class RankState:
    """The stages of one rank, and the values of its step.

    ``codes`` has at least the rank's own stages. ``parameters`` and ``buffers`` have at least the tensors of
    those stages by FQN, on ``device``. Gradients are added to ``.grad`` of the parameters. Where replicas in
    one process share tensors, this rank writes those of the ``owned`` stages; None: of all of its stages. A
    program that updates does so with ``updates``.

    ``sizes`` has what the names in shapes stand for in each microbatch of the step, then in the batch: ``b``
    is the number of rows. A link that moves once per step has microbatch -1, and so finds those of the batch
    at ``sizes[-1]``. A stream's microbatches take the frames, of which there are ``num_frames``, in turn.

    ``part`` is the part of the step that runs, ``factor`` what its gradients are clipped by. ``groups`` are
    the hyperparameters of a stream's updates; those of steps are the optimizer's own. ``table`` is what all
    ranks have found with the norm, and ``non_finite`` why the step is skipped. ``skipped`` has the stages of
    a stream whose next update is skipped, and ``begun`` the stages whose update has begun in this step.
    """

    program: Program
    plan: Plan
    codes: Mapping[int, StageCode]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    transport: Transport
    device: torch.device
    owned: Collection[int] | None = None
    updates: OptimizerUpdates | None = None

    def __post_init__(self) -> None:
        program, plan, codes, updates = self.program, self.plan, self.codes, self.updates
        self.number, device = program.rank, self.device
        self.num_frames = num_frames(program, plan.num_microbatches)
        copies = updates.updated_on(program.rank) if updates and program.period else {}
        self.stages = {
            stage.index: BoundStage(
                stage,
                codes[stage.index],
                {**self.parameters, **copies},
                self.buffers,
                device,
                self.num_frames,
                plan.sync_spec,
                self.owned is None or stage.index in self.owned,
                num_versions_behind(program, stage.index) if program.period else None,
                {*plan.sync_spec.host_parameters(stage.index)} - self._sharded(stage.index),
            )
            for stage in plan.stages
            if program.rank in plan.placement[stage.index]
        }
        self.own = {stage: plan.microbatches_on(stage, program.rank) for stage in self.stages}
        summed = {name for index in plan.sync_spec.count_stages for name in plan.stages[index].batch_counts}
        given = {output.gradient for output in plan.trained_outputs}
        self._inputs_of = {index: stage.inputs - summed - given for index, stage in self.stages.items()}
        self._output_gradients_of = {index: stage.inputs & given for index, stage in self.stages.items()}
        self.tails = {
            index: StageTail(plan.stages[index], stage, plan.placement[index], program.rank)
            for index, stage in self.stages.items()
            if plan.stages[index].tail
        }
        self.host_link = HostLink(device, not plan.sync_spec.weights_on_host)
        self.step_results = StepResults(plan, program.rank)
        self.stream_results = StreamResults(plan, program.rank)
        self.results = self.stream_results if program.period else self.step_results
        results = result_values(plan) if plan.mode is Mode.TRAIN else ()
        self._loss_dtypes = [getattr(torch, value.dtype) for value in results if value.name == "loss"]
        self.sizes: list[Sizes] = [{"b": 0}] * (self.num_frames + 1)
        self.inputs: Sequence[Inputs] = ()
        self.groups: GroupHyperparameters = ()
        self.skipped, self.begun = set[int](), set[int]()
        self.begin_part(StepPart.WHOLE)

    def _sharded(self, stage: int) -> set[str]:
        """The parameters of a stage of which this rank has a shard."""
        own = self.updates.on(self.number, stage) if self.updates else None
        return {name for shard in own.shards.values() for name in shard.sharding.names} if own else set()

    @property
    def names_read(self) -> set[str]:
        """The inputs of the model that this rank reads, also those in which it counts."""
        of_counts = (name for stage in self.stages.values() for name in stage.count_inputs)
        return {*of_counts, *(name for names in self._inputs_of.values() for name in names)}

    def begin_part(self, part: StepPart) -> None:
        """Begin a part of a step, or a stream."""
        self.part = part
        self.factor: Tensor | None = None
        self.table: Tensor | None = None
        self.non_finite: NonFinite | None = None
        self.begun.clear()
        self.skipped.clear()

    def begin_step(self, inputs: Sequence[Inputs], batch_slice: BatchSlice, seed: int) -> None:
        """Fill the frames of the step's microbatches and of its tails; an update has none.

        To a tail the batch is one microbatch. Its random numbers are its own.
        """
        if self.part is StepPart.UPDATE:
            for stage in self.stages.values():
                stage.gradients.begin_step()
            return
        self.inputs, scaled = inputs, self.updates.loss_scale if self.updates else None
        scale = scaled.scale if scaled else 1.0
        self.sizes[:], weights = batch_slice.all_names, batch_slice.loss_weights
        self.step_results.batch_slice = batch_slice
        for index, stage in self.stages.items():
            stage.begin_step(scale)
            for number in self.own[index]:
                key = seed, batch_slice.first + number
                self.fill_frame(stage, number, inputs[number], key, weights[number] * scale)
        for index, tail in self.tails.items():
            frame, given = tail.begin_step(batch_slice), inputs[self.own[index][0]]
            self._fill(frame, self._inputs_of[index] & given.keys(), given, scale)
            frame.update(self.sizes[-1], device=self.device)
            frame["batch_fraction"] = torch.ones((), dtype=torch.float64)
            frame["rng"] = OperatorGenerators(self.device, (seed, -1))

    def suspend(self) -> "SuspendedStep":
        """What the backwards need of a step whose forwards have run."""
        results = [value.name for value in result_values(self.plan)]
        stages = {index: stage.suspend(results) for index, stage in self.stages.items()}
        return SuspendedStep(self.step_results.batch_slice, stages)

    def resume(self, suspended: "SuspendedStep", output_gradients: OutputGradients) -> None:
        """Fill the frames for the backwards of a step, with the gradients of its outputs."""
        batch_slice, scaled = suspended.batch_slice, self.updates.loss_scale if self.updates else None
        scale = scaled.scale if scaled else 1.0
        self.sizes[:] = batch_slice.all_names
        self.step_results.batch_slice = batch_slice
        for index, stage in self.stages.items():
            stage.begin_step(scale)
            stage.resume(suspended.stages[index])
            for name in self._output_gradients_of[index]:
                for number in self.own[index]:
                    if self.sizes[number]["b"]:
                        gradient = on_device(output_gradients[name][number], self.device)
                        stage.frames[number][name] = gradient * scale if scale != 1 else gradient

    def fill_frame(
        self, stage: BoundStage, microbatch: int, inputs: Inputs, key: tuple[int, int], loss_weight: float
    ) -> None:
        """Fill the frame of a microbatch on a stage of this rank; without rows it only has a version."""
        number, index = microbatch % self.num_frames, stage.index
        if self.program.period:
            stage.frames[number][VERSION] = version_read(self.program, index, microbatch)
            stage.frames[number][BATCH] = microbatch // self.plan.num_microbatches
        if self.sizes[number]["b"]:
            frame = stage.fill_frame(number, key, self.sizes[number])
            given = self._output_gradients_of[index] & inputs.keys()  # those of a dry run
            self._fill(frame, self._inputs_of[index] | given, inputs, loss_weight)

    def _fill(self, frame: Frame, names: Iterable[str], inputs: Inputs, loss_weight: float) -> None:
        device = self.device
        for name in names:
            frame[name] = inputs[name].to(device, non_blocking=device.type == "cuda")
        for dtype in self._loss_dtypes:
            frame["grad_loss"] = torch.full((), loss_weight, dtype=dtype, device=device)

    def forget_step(self) -> None:
        """Free every value of the step."""
        for stage in self.stages.values():
            stage.forget_step()
        for tail in self.tails.values():
            tail.forget_step()
        self.step_results.forget()
        if self.host_link.is_async:
            self.host_link.finish()
        self.inputs = ()
        clear_block_cache()
