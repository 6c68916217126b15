"""The ranks of this process, and an artifact linked on them, ready to run."""

import functools
import json
import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from pipec.artifact.artifact import Artifact, load_stage_module
from pipec.errors import ExecutionError, InputError, PipecError, TransportError
from pipec.ir import Phase, Plan, RankMemory, stages_on
from pipec.runtime.memory.allocator import retain_freed_memory
from pipec.runtime.memory.meter import make_memory_meter
from pipec.runtime.messages.agreement import Agreement
from pipec.runtime.messages.collective_group import CollectiveGroup
from pipec.runtime.messages.cuda import CudaGraphRecorder, pinned_copy
from pipec.runtime.messages.distributed_transport import DistributedTransport
from pipec.runtime.messages.transport import InProcessTransport, Transport
from pipec.runtime.processes.launch import SINGLE_PROCESS, Devices, World, resolve_devices, world
from pipec.runtime.stages.cuda_graphs import GraphRecorder, StageGraphs, require_gpus, require_recordable
from pipec.runtime.stages.kernels import load_kernels
from pipec.runtime.step.batch_counts import (
    BatchCountsFunction,
    batch_counts,
    batch_fraction,
    local_batch_counts,
)
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.dry_run import DryRuns
from pipec.runtime.step.interpreter import Interpreter
from pipec.runtime.step.non_finite import NonFinite
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.timestamps import RecordedStep, Timestamps

T = TypeVar("T")


class _ReadsInputs(Protocol):
    @property
    def inputs(self) -> Set[str]: ...


InterpreterT = TypeVar("InterpreterT", bound=_ReadsInputs)


class Ranks:
    """The ranks that run in this process, their devices, and the transport to the other ranks.

    ``kernels`` says how they load the code of their stages. Ranks of a process that is ``alone``, whatever
    others were started with it, all run in it.

    Raises:
        InputError: ``devices`` contradicts the number of processes that were started.
    """

    def __init__(
        self, devices: Devices, timeout: float, kernels: str = "source", alone: bool = False
    ) -> None:
        self.world = SINGLE_PROCESS if alone else world()
        self.devices = resolve_devices(devices, self.world)
        self.count = devices if isinstance(devices, int) else len(devices)
        self._timeout, self.kernels = timeout, kernels
        if kernels == "cudagraphs":
            require_gpus(self.devices.values())
        if self.has_gpu_messages:  # before the first CUDA call, which would take memory of GPU 0
            torch.cuda.set_device(self.devices[self.world.rank])
        if any(device.type == "cpu" for device in self.devices.values()):
            retain_freed_memory()

    @functools.cached_property
    def in_process(self) -> InProcessTransport:
        return InProcessTransport([self.devices[rank] for rank in range(self.count)])

    @functools.cached_property
    def distributed(self) -> DistributedTransport:
        return DistributedTransport(self.devices[self.world.rank], self._timeout)

    @functools.cached_property
    def agreement(self) -> Agreement:
        """Where processes compare what they were given. All of them make theirs in the same order."""
        return Agreement(self.distributed, self._timeout)

    @property
    def has_gpu_messages(self) -> bool:
        """Whether GPUs wait for messages, and not their hosts."""
        return self.world.is_distributed and self.devices[self.world.rank].type == "cuda"

    def call_on_rank_0(self, request: str, make: Callable[[], T]) -> T:
        """Call ``make`` in one process; every process returns its result, or raises its error."""
        return self.distributed.call_on_rank_0(request, make) if self.world.is_distributed else make()

    def gathered(self, steps: Sequence[RecordedStep]) -> list[RecordedStep]:
        """The recorded steps with the timestamps of all ranks, on every rank."""
        if not self.world.is_distributed:
            return list(steps)
        parts = [
            json.loads(part)
            for part in self.distributed.all_gather_text(json.dumps([s.timestamps for s in steps]))
        ]
        return [
            RecordedStep(
                step.programs, {int(rank): timestamps for part in own for rank, timestamps in part.items()}
            )
            for step, *own in zip(steps, *parts, strict=True)
        ]

    def peak_memory(self, measured: Sequence[RankMemory]) -> list[RankMemory]:
        """The peak memory of each rank, on every rank."""
        found = list(measured)
        if self.world.is_distributed:
            texts = self.distributed.all_gather_text(json.dumps([each.as_json() for each in measured]))
            found = [RankMemory.from_json(each) for text in texts for each in json.loads(text)]
        most = {each.rank: each for each in sorted(found, key=lambda each: each.peak_bytes)}
        return [most[rank] for rank in range(self.count)]

    def barrier(self) -> None:
        """Wait for the other processes, however long they take while all of them live."""
        self.all_gather_text_no_timeout("", "waiting for what other ranks do before their first step")

    def all_gather_text_no_timeout(self, text: str, activity: str) -> list[str]:
        """The text of each process, in every process, however long they take while all of them live."""
        return (
            self.distributed.all_gather_text_no_timeout(text, activity)
            if self.world.is_distributed
            else [text]
        )

    def exchange_final_status(self, text: str) -> list[str | None]:
        """The text of each other process that lives when the pipeline cannot go on; None if it tells none."""
        return (
            list(self.distributed.exchange_final_status(text).values()) if self.world.is_distributed else []
        )

    def in_background(self) -> "BackgroundRanks":
        """These processes, for a thread beside the one that steps."""
        if not self.world.is_distributed:
            return BackgroundRanks(self.world, self.all_gather_text_no_timeout, lambda: None)
        transport = self.distributed
        return BackgroundRanks(
            self.world,
            lambda text, _: transport.all_gather_text_in_background(text),
            transport.check_processes,
        )

    def transport(self, rank: int) -> Transport:
        return self.distributed if self.world.is_distributed else self.in_process.endpoint(rank)


@dataclass(frozen=True)
class BackgroundRanks:
    """Communication of background threads, one of each process, separate from that of steps.

    ``all_gather_text_no_timeout`` takes a text and the activity of this process; it returns the texts of all
    processes. ``check`` raises TransportError if the process of another rank has ended.
    """

    world: World
    all_gather_text_no_timeout: Callable[[str, str], list[str]]
    check: Callable[[], None]


class LinkedArtifact(Generic[InterpreterT]):
    """An artifact linked on the ranks of this process, an ``interpret`` of the program of each.

    ``parameters`` and ``buffers`` hold the tensors of those ranks' stages by FQN, on their devices.

    Raises:
        TransportError: the ranks do not all hold the same artifact. Every rank raises it.
    """

    def __init__(
        self,
        interpret: Callable[..., InterpreterT],
        artifact: Artifact,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        ranks: Ranks,
        updates: OptimizerUpdates | None = None,
    ) -> None:
        self.artifact = artifact
        self._ranks, self._updates = ranks, updates
        plan, is_distributed = artifact.plan, ranks.world.is_distributed
        if ranks.kernels == "cudagraphs":
            require_recordable(plan, artifact.sources, ranks.devices)
        _require_one_device(plan, ranks.devices)
        if is_distributed:
            ranks.distributed.connect(artifact.programs, _groups(plan), artifact.canonical_text())
        self._interpreters: list[InterpreterT] = []
        self._of_batch: list[BatchCountsFunction] = []
        self._read_by_gpus: set[str] = set()
        self._dry_runs: list[DryRuns] = []
        for rank, device in ranks.devices.items():
            recorder = CudaGraphRecorder(device) if ranks.kernels == "cudagraphs" else None
            modules = {k: self._load(k, recorder) for k in stages_on(plan.placement, rank)}
            held = {**buffers, **{name: value.to(device) for name, value in artifact.constants.items()}}
            owns = functools.partial(_owns_tensors, plan, rank, is_distributed)
            program, transport = artifact.programs[rank], ranks.transport(rank)
            self._interpreters.append(
                interpret(program, plan, modules, parameters, held, transport, device, owns, updates)
            )
            if ranks.has_gpu_messages or ranks.kernels != "source":
                self._dry_runs.append(DryRuns(program, plan, modules, parameters, held, device, updates))
            if device.type == "cuda":
                self._read_by_gpus |= self._interpreters[-1].inputs
            self._of_batch += [
                BatchCountsFunction(plan.stages[k], module, held, device) for k, module in modules.items()
            ]
        readers: list[_ReadsInputs] = [*self._interpreters, *self._of_batch]
        self._read_here = set[str]().union(*(reader.inputs for reader in readers))

    def _load(self, number: int, recorder: GraphRecorder | None) -> types.ModuleType:
        stage = self.artifact.plan.stages[number]
        names = [name for phase in Phase for name in stage.functions(phase)]
        code = load_kernels(
            load_stage_module(number, self.artifact.sources[number]), names, self._ranks.kernels
        )
        if recorder is not None:
            vars(code)["graphs"] = StageGraphs(stage, code, recorder)
        return code

    def dry_run(
        self, microbatches: Sequence[Mapping[str, Tensor]], batch_slice: BatchSlice, seed: int
    ) -> None:
        """Run a dry run of each rank of this process that needs one, one after another.

        All processes wait for each other here: from then on, a message may wait for another rank.
        """
        needs_dry_run = any(each.needs_dry_run(batch_slice) for each in self._dry_runs)
        try:
            for each in self._dry_runs:
                each.dry_run(microbatches, batch_slice, seed)
        except PipecError as error:
            if self._ranks.world.is_distributed:
                self._ranks.distributed.fail(error)
            raise
        if needs_dry_run:
            self._ranks.barrier()

    def _microbatches(self, leaves: Sequence[object], batch_slice: BatchSlice) -> list[dict[str, Tensor]]:
        """The inputs of the stages for each microbatch, by name."""
        microbatches = self._split(leaves, batch_slice)
        whole = self._batch_counts(leaves, microbatches, batch_slice)
        for microbatch, size, first in zip(
            microbatches, batch_slice.sizes, batch_slice.first_rows, strict=True
        ):
            numbers = {
                "batch_fraction": batch_fraction(size, batch_slice.batch),
                "first_row": torch.tensor(first),
            }
            microbatch |= numbers | whole
        return microbatches

    def _batch_counts(
        self, leaves: Sequence[object], microbatches: Sequence[Mapping[str, Tensor]], batch_slice: BatchSlice
    ) -> dict[str, Tensor]:
        """The batch counts of the stages. Replicas with local batches sum theirs."""
        plan = self.artifact.plan
        if not batch_slice.is_local:
            return batch_counts(self._of_batch, plan, leaves, microbatches, batch_slice)
        transport = self._ranks.distributed

        def group_of(stage: int) -> CollectiveGroup:
            return transport.group(plan.placement[stage])

        try:
            return local_batch_counts(self._of_batch, plan, leaves, microbatches, batch_slice, group_of)
        except TransportError as error:
            transport.fail(error)
            raise
        except Exception as error:  # of rows that the other replicas do not have
            what = f"{type(error).__name__}: {error}"
            failure = ExecutionError(f"rank {self._ranks.world.rank}, preparing the step: {what}")
            transport.fail(failure)
            raise failure from error

    def _split(self, leaves: Sequence[object], batch_slice: BatchSlice) -> list[dict[str, Tensor]]:
        """The inputs of each microbatch whose rows this process has; nothing for others."""
        microbatches: list[dict[str, Tensor]] = [{} for _ in batch_slice.sizes]
        own, sizes = (
            [microbatches[each] for each in batch_slice.own_microbatches],
            [batch_slice.sizes[each] for each in batch_slice.own_microbatches],
        )
        for given in self.artifact.plan.inputs:
            if given.value.name not in self._read_here:
                continue
            tensor = leaves[given.position]
            assert isinstance(tensor, Tensor)
            if given.value.name in self._read_by_gpus and tensor.device.type == "cpu":
                tensor = pinned_copy(tensor)
            if given.batched:
                parts = tensor[batch_slice.start : batch_slice.start + sum(sizes)].split(sizes)
            else:
                parts = (tensor,) * len(own)
            for microbatch, part in zip(own, parts, strict=True):
                microbatch[given.value.name] = part
        return microbatches


class Execution(LinkedArtifact[Interpreter]):
    """An artifact of steps, ready to run them."""

    def __init__(
        self,
        artifact: Artifact,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        ranks: Ranks,
        updates: OptimizerUpdates | None = None,
    ) -> None:
        super().__init__(Interpreter, artifact, parameters, buffers, ranks, updates)
        self.non_finite: NonFinite | None = None
        """Why nothing came of the last step, if its plan looks for that."""

    def run(
        self,
        leaves: Sequence[object],
        batch_slice: BatchSlice,
        seed: int,
        recorded: list[RecordedStep] | None = None,
        update: bool = True,
        measured: list[RankMemory] | None = None,
    ) -> dict[str, Tensor]:
        """Run one step; returns its results by name.

        A step that fails drops all gradients since the last update, if the program makes updates: nobody
        could tell apart what it has added to them.

        Args:
            leaves: The flattened arguments of the step, for the whole batch, or for this replica's part.
            batch_slice: Which microbatches of the batch to run.
            seed: Seeds the random operators. Each step has another.
            recorded: If the step succeeds, its times on the ranks of this process are appended.
            update: Whether a program that updates does so.
            measured: If the step succeeds, what the ranks of this process held is appended.
        """
        if self._updates is not None:
            self._updates.follow_script()
        microbatches = self._microbatches(leaves, batch_slice)
        timestamps: dict[int, Timestamps] = (
            {} if recorded is None else {rank: [] for rank in self._ranks.devices}
        )
        devices = self._ranks.devices
        meters = {
            rank: make_memory_meter(device, list(devices.values()).count(device) > 1)
            for rank, device in (devices.items() if measured is not None else ())
        }
        jobs = [
            functools.partial(
                interpreter.run,
                microbatches,
                batch_slice,
                seed,
                timestamps.get(rank),
                update,
                meters.get(rank),
            )
            for rank, interpreter in zip(self._ranks.devices, self._interpreters, strict=True)
        ]
        try:
            self.dry_run(microbatches, batch_slice, seed)
            results = jobs[0]() if self._ranks.world.is_distributed else self._ranks.in_process.run(jobs)[0]
        except BaseException as error:
            if self._updates is not None:
                self._updates.drop_gradients()
                if isinstance(error, PipecError) and (note := self._half_made()):
                    error.add_note(note)
            raise
        if self._updates is not None:
            self._updates.mark_gradients()
        self.non_finite = self._interpreters[0].non_finite
        if measured is not None:
            measured += [meter.memory(rank) for rank, meter in meters.items()]
        if recorded is not None:
            recorded.append(RecordedStep(self.artifact.programs, timestamps))
        return results

    def _half_made(self) -> str | None:
        """A note on updates that had begun when the step failed. All living ranks call this."""
        begun = {stage for each in self._interpreters for stage in each.begun_updates}
        for stages in self._ranks.exchange_final_status(json.dumps(sorted(begun))):
            begun.update(json.loads(stages or "[]"))
        if not begun:
            return None
        listed = ", ".join(f"stage {number}" for number in sorted(begun))
        return (
            f"the step failed when updates had begun, of {listed}: the parameters of the stages do not fit "
            "together. Load a checkpoint to train on"
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


def _owns_tensors(plan: Plan, rank: int, is_distributed: bool, stage: int) -> bool:
    """Whether a rank has tensors of a stage of its own. In one process the first replica's are for all."""
    return is_distributed or rank == plan.placement[stage][0]


def _groups(plan: Plan) -> list[tuple[int, ...]]:
    """The groups of ranks that have collectives."""
    groups = [ranks for ranks in dict.fromkeys(plan.placement) if len(ranks) > 1]
    return [*groups, tuple(range(plan.num_ranks))] if plan.sync_spec.has_grad_norm else groups
