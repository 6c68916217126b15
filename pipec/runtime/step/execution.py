"""An artifact linked on the ranks of this process, ready to run."""

import contextlib
import functools
import itertools
import json
import math
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from pipec.artifact.artifact import Artifact, load_stage_module
from pipec.errors import InputError, PipecError
from pipec.ir import SCHEDULED_PHASES, Plan, StepPart, program_part, rank_of, result_ranks, stages_on
from pipec.ir.periodic_program import max_batches_ahead
from pipec.runtime.messages.cuda import pinned_copy
from pipec.runtime.stages.kernels import compile_functions
from pipec.runtime.step.batch_slice import NO_ROWS, BatchSlice
from pipec.runtime.step.dry_run import DryRuns
from pipec.runtime.step.interpreter import BatchSource, Interpreter
from pipec.runtime.step.non_finite import NonFinite, stage_of_loss
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.rank_state import OutputGradients, SuspendedStep
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.step.step_results import gradient_parts, result_values
from pipec.runtime.step.stream_results import StreamBatch
from pipec.runtime.step.stream_run import StreamRun, restore_common_version
from pipec.runtime.step.timestamps import RecordedStep, Timestamps

CallLeaves = Sequence[Sequence[object]]
"""The flattened arguments of a batch, in a list of one; or of each given microbatch."""

Results = Mapping[str, Tensor]
"""The results of a step by name."""


class Execution:
    """An artifact linked on the ranks of this process, ready to run steps, or the mini-batches of a stream.

    ``parameters`` and ``buffers`` hold the tensors of those ranks' stages by FQN, on their devices.

    Raises:
        TransportError: the ranks do not all hold the same artifact. Every rank raises it.
    """

    def __init__(
        self,
        artifact: Artifact,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        ranks: Ranks,
        updates: OptimizerUpdates | None = None,
    ) -> None:
        self.artifact = artifact
        self.non_finite: NonFinite | None = None
        """Why the last step or mini-batch was skipped, if the plan checks that."""
        self._ranks, self._updates, self._parameters = ranks, updates, parameters
        plan, is_distributed = artifact.plan, ranks.world.is_distributed
        _require_one_device(plan, ranks.devices)
        self._in_process = None if is_distributed else ranks.in_process
        if is_distributed:
            ranks.distributed.connect(artifact.programs, _groups(plan), artifact.canonical_text())
        self._interpreters: list[Interpreter] = []
        self._dry_runs: list[DryRuns] = []
        for rank, device in ranks.devices.items():
            modules = {k: self._load(k) for k in stages_on(plan.placement, rank)}
            constants = {name: value.to(device) for name, value in artifact.constants.items()}
            buffers_here = {**buffers, **constants}
            owned = [k for k in modules if is_distributed or rank == plan.placement[k][0]]
            program, transport = artifact.programs[rank], ranks.transport(rank)
            interpreter = Interpreter(
                program, plan, modules, parameters, buffers_here, transport, device, owned, updates
            )
            self._interpreters.append(interpreter)
            if ranks.has_gpu_messages or ranks.kernels != "source":
                self._dry_runs.append(DryRuns(interpreter, every_size=ranks.kernels != "source"))
        here, summed_later = self._interpreters, plan.sync_spec.count_stages
        stages = [each for own in here for each in own.stages.values() if each.index not in summed_later]
        self._counting = [each for each in stages if each.count_inputs]
        read_here = set[str]().union(*(own.names_read for own in here))
        self._inputs = [leaf for leaf in plan.inputs if leaf.value.name in read_here]
        self._reads_batch_fraction = "batch_fraction" in read_here
        on_gpus = (own.names_read for own in here if own.device.type == "cuda")
        self._read_by_gpus = set[str]().union(*on_gpus)
        self.is_stream = artifact.programs[0].period > 0
        """Whether the programs are periodic: steps overlap."""
        returned = (result_ranks(x, plan.placement) for x in plan.links if x.payload.is_result)
        self.result_ranks = next(returned, range(plan.num_ranks))
        """The ranks that get the results."""
        self._first_reader = next((k for k, x in enumerate(here) if x.number in self.result_ranks), None)

    @property
    def results_are_elsewhere(self) -> bool:
        """Whether no rank of this process gets the results."""
        return self._first_reader is None

    def _load(self, number: int) -> types.ModuleType:
        code = load_stage_module(number, self.artifact.sources[number])
        if self._ranks.kernels == "inductor":
            stage = self.artifact.plan.stages[number]
            compile_functions(code, [name for phase in SCHEDULED_PHASES for name in stage.functions(phase)])
        return code

    def dry_run(
        self, microbatches: Sequence[Mapping[str, Tensor]], batch_slice: BatchSlice, seed: int
    ) -> None:
        """Run a dry run of each rank of this process that needs one, one after another.

        All processes wait for each other here: from then on, a message may wait for another rank.
        """
        needing = [each for each in self._dry_runs if each.needs_dry_run(batch_slice)]
        for each in needing:
            each.dry_run(microbatches, batch_slice, seed)
        if needing:
            self._ranks.barrier()

    def _microbatches(self, leaves: CallLeaves, batch_slice: BatchSlice) -> list[dict[str, Tensor]]:
        """The inputs of the stages for each microbatch whose rows this process has, by name.

        GPUs read copies in pinned memory of what is on the host.
        """
        microbatches: list[dict[str, Tensor]] = [{} for _ in batch_slice.sizes]
        own, whole = [microbatches[each] for each in batch_slice.own_microbatches], dict[str, Tensor]()
        given, sizes, start = batch_slice.own_leaves(leaves), batch_slice.own_sizes, batch_slice.start
        for leaf in self._inputs:
            name, parts = leaf.value.name, [cast(Tensor, each[leaf.position]) for each in given]
            if name in self._read_by_gpus:
                parts = [pinned_copy(tensor) if tensor.is_cpu else tensor for tensor in parts]
            whole[name] = parts[0]
            if leaf.batched:
                parts = [*parts[0][start : start + sum(sizes)].split(sizes)]
            elif not batch_slice.is_given:
                parts *= len(own)
            for microbatch, part in zip(own, parts, strict=not batch_slice.is_given):
                microbatch[name] = part
        for stage in self._counting:
            if self.artifact.plan.dynamic_batch:
                counts = stage.batch_counts(whole, batch_slice.batch_names)
            else:  # such code cannot take the whole batch
                counted = [
                    stage.batch_counts(each, names)
                    for each, names in zip(microbatches, batch_slice.names, strict=True)
                    if names["b"]
                ]
                counts = {x: torch.stack([part[x] for part in counted]).sum(0) for x in counted[0]}
            for microbatch in microbatches:
                microbatch |= counts
        if self._reads_batch_fraction:
            for microbatch, size in zip(microbatches, batch_slice.sizes, strict=True):
                fraction = torch.tensor(size / batch_slice.batch, dtype=torch.float64)
                microbatch["batch_fraction"] = fraction
        return microbatches

    def run(
        self,
        leaves: CallLeaves,
        batch_slice: BatchSlice,
        seed: int,
        recorded: list[RecordedStep] | None = None,
        update: bool = True,
    ) -> Results:
        """Run one step, or a stream of one mini-batch; returns its results by name.

        A step that fails drops all gradients since the last update, if the program makes updates: nobody
        could tell apart what it has added to them.

        Args:
            leaves: The flattened arguments of the step, for the whole batch, or for this replica's part; or
                a list for each given microbatch.
            batch_slice: Which microbatches of the batch to run.
            seed: Seeds the random operators. Each step has another.
            recorded: If the step succeeds, its times on the ranks of this process are appended.
            update: Whether the step ends with the update that the program has, if it has one.
        """
        if self.is_stream:
            require_synchronous(not update, recorded)
            return self._run_batch(leaves, batch_slice, seed)
        if self._updates is not None:
            self._updates.follow_script()
        microbatches = self._microbatches(leaves, batch_slice)
        if self._dry_runs:
            self.dry_run(microbatches, batch_slice, seed)
        updates = self.artifact.plan.sync_spec.updates
        part = StepPart.WHOLE if update or not updates else StepPart.ACCUMULATE
        return self._run_part(part, recorded, microbatches, batch_slice, seed)

    def forward(
        self,
        leaves: CallLeaves,
        batch_slice: BatchSlice,
        seed: int,
        recorded: list[RecordedStep] | None = None,
    ) -> tuple[Results, Sequence[SuspendedStep]]:
        """Run the forwards of a step; returns its results, and for each rank what the backwards need."""
        microbatches = self._microbatches(leaves, batch_slice)
        if self._dry_runs:
            self.dry_run(microbatches, batch_slice, seed)
        results = self._run_part(StepPart.FORWARDS, recorded, microbatches, batch_slice, seed)
        return results, [each.take_suspended() for each in self._interpreters]

    def backward(
        self,
        suspended: Sequence[SuspendedStep],
        output_gradients: Mapping[str, Tensor | None],
        recorded: list[RecordedStep] | None = None,
    ) -> None:
        """Run the backwards of a step, with the gradients of results of the whole batch, by their names."""
        plan, own = self.artifact.plan, suspended[0].batch_slice
        values = {value.name: value for value in result_values(plan)}
        parts = {
            each.gradient: gradient_parts(
                values[each.name],
                output_gradients[each.gradient],
                own,
                each.name in plan.summed_outputs,
                self._interpreters[0].device,
            )
            for each in plan.trained_outputs
            if not self.results_are_elsewhere
        }
        if self._updates is not None:
            self._updates.follow_script()
        resumed = [(each, parts) for each in suspended]
        self._run_part(StepPart.BACKWARDS, recorded, batch_slice=own, resumed=resumed)

    def update(self, recorded: list[RecordedStep] | None = None) -> None:
        """Run the update alone, with the gradients of all steps since the last one; otherwise as ``run``."""
        assert self._updates is not None, "the caller has checked that there are gradients"
        self._updates.follow_script()
        self._run_part(StepPart.UPDATE, recorded)

    def _run_part(
        self,
        part: StepPart,
        recorded: list[RecordedStep] | None,
        microbatches: Sequence[Mapping[str, Tensor]] = (),
        batch_slice: BatchSlice = NO_ROWS,
        seed: int = 0,
        resumed: Sequence[tuple[SuspendedStep, OutputGradients]] | None = None,
    ) -> Results:
        """The results of a part of a step that all ranks of this process run, if one of them gets results."""
        devices = self._ranks.devices
        timestamps: dict[int, Timestamps] = {} if recorded is None else {rank: [] for rank in devices}
        waiting = resumed or itertools.repeat(None, len(devices))
        jobs = [
            functools.partial(each.run, microbatches, batch_slice, seed, timestamps.get(rank), part, own)
            for rank, each, own in zip(devices, self._interpreters, waiting, strict=True)
        ]
        try:
            found = [jobs[0]()] if self._in_process is None else self._in_process.run(jobs)
        except BaseException as error:
            if self._updates is not None and self.artifact.plan.sync_spec.updates:
                self._updates.drop_gradients()
                if isinstance(error, PipecError) and (note := self._partial_update_note()):
                    error.add_note(note)
            raise
        if self._updates is not None:
            self._updates.mark_gradients()
        self.non_finite = self._interpreters[0].non_finite
        if recorded is not None:
            sync_spec = self.artifact.plan.sync_spec
            programs = [program_part(program, sync_spec, part) for program in self.artifact.programs]
            recorded.append(RecordedStep(programs, timestamps, part))
        return found[self._first_reader or 0]

    def _partial_update_note(self) -> str | None:
        """A note on updates that had begun when the step failed. All living ranks call this."""
        begun = {stage for each in self._interpreters for stage in each.begun}
        for stages in self._ranks.exchange_final_status(json.dumps(sorted(begun))):
            begun.update(json.loads(stages or "[]"))
        if not begun:
            return None
        listed = ", ".join(f"stage {number}" for number in sorted(begun))
        return (
            f"the step failed when updates had begun, of {listed}: the parameters of the stages do not fit "
            "together. Load a checkpoint to train on"
        )

    @property
    def num_readers(self) -> int:
        """How many ranks of this process read each mini-batch of a stream."""
        return len(self._interpreters)

    def batch(self, leaves: CallLeaves, batch_slice: BatchSlice) -> StreamBatch:
        """A mini-batch of a stream: split, with its batch counts."""
        return StreamBatch(self._microbatches(leaves, batch_slice), batch_slice)

    def begin(self, source: BatchSource, first: StreamBatch, seed: int) -> StreamRun:
        """Begin to run the mini-batches of a source, which all have the sizes of its first one."""
        self.dry_run(first.microbatches, first.batch_slice, seed)
        if self._updates is not None:
            self._updates.refresh_copies(self._parameters)
        return StreamRun(self._interpreters, self._num_ahead, source, seed, self._in_process)

    @functools.cached_property
    def _num_ahead(self) -> int:
        plan = self.artifact.plan
        return max(max_batches_ahead(x, plan.links, plan.num_microbatches) for x in self.artifact.programs)

    def found(self) -> tuple[int, NonFinite] | None:
        """The first skipped mini-batch of the stream, and why; None if there is none so far."""
        plan = self.artifact.plan
        first = min(each.stream_results.first_nan for each in self._interpreters)
        if math.isinf(first):
            return None
        (number, place), stage = divmod(int(first), plan.num_microbatches), stage_of_loss(plan)
        return number, NonFinite(rank_of(plan.placement, stage, int(first)), stage, place)

    @contextlib.contextmanager
    def drop_gradients_on_failure(self) -> Iterator[None]:
        """Drop all gradients if the ``with`` fails, and say which weights of the stream are left."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, PipecError):
                error.add_note(restore_common_version(self._interpreters, self._ranks))
                for each in self._interpreters:
                    each.forget()
            if self._updates is not None:
                self._updates.drop_gradients()
            raise

    def _run_batch(self, leaves: CallLeaves, batch_slice: BatchSlice, seed: int) -> Results:
        """Run a stream of one mini-batch."""
        batch = self.batch(leaves, batch_slice)
        with self.drop_gradients_on_failure():
            assert self._updates is not None, "a stream updates"
            run = self.begin(lambda number: None if number else batch, batch, seed)
            groups = self._updates.optimizer.hyperparameters()
            results = run.results(groups)
            assert results is not None, "the mini-batch is there"
            run.drain(groups)
        _, self.non_finite = self.found() or (0, None)
        return results


def require_synchronous(
    accumulates: bool = False,
    recorded: list[RecordedStep] | None = None,
) -> None:
    """Raise InputError if a stream is asked to add up gradients over mini-batches, or to record times."""
    if accumulates:
        raise InputError(
            "an asynchronous schedule updates after every mini-batch, so that it accumulates no gradients; "
            "leave out accumulate(), or pass schedule='1f1b'"
        )
    if recorded is not None:
        raise InputError(
            "an asynchronous schedule cannot be recorded or traced, because its programs do not end; use "
            "simulate() and visualize(...), or record schedule='1f1b'"
        )


def _require_one_device(plan: Plan, devices: Mapping[int, torch.device]) -> None:
    """Refuse a buffer that several stages of this process read on several devices: it has one place."""
    on: dict[str, set[str]] = defaultdict(set)
    for stage in plan.stages:
        if device := devices.get(plan.placement[stage.index][0]):
            for fqn in stage.buffers:
                on[fqn].add(str(device))
    for fqn, names in on.items():
        if len(names) > 1:
            raise InputError(
                f"stages on {', '.join(sorted(names))} read buffer {fqn}, which one process has on one "
                "device; run one process per device under torchrun"
            )


def _groups(plan: Plan) -> list[tuple[int, ...]]:
    """The groups of ranks that have collectives."""
    groups = [ranks for ranks in dict.fromkeys(plan.placement) if len(ranks) > 1]
    return [*groups, tuple(range(plan.num_ranks))] if plan.sync_spec.has_grad_norm else groups
