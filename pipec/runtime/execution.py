"""The ranks of this process, and an artifact linked on them, ready to run."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipec.artifact.directory import Artifact, stage_module
from pipec.errors import InputError
from pipec.ir import Plan, stages_on
from pipec.runtime.agreement import Agreement
from pipec.runtime.distributed import TorchDistributed
from pipec.runtime.interpreter import Interpreter
from pipec.runtime.launch import Devices, resolve_devices, world
from pipec.runtime.of_batch import OfBatch, share_of, values_of_batch
from pipec.runtime.outcomes import StreamBatch
from pipec.runtime.recording import RecordedStep, Stamps
from pipec.runtime.rounds import RoundInterpreter, Source
from pipec.runtime.span import Span
from pipec.runtime.stream_run import ProcessRun, StreamRun, ThreadsRun
from pipec.runtime.transport import InProcess, Transport
from pipec.runtime.updates import Updates

T = TypeVar("T")


class Ranks:
    """Which ranks run in this process, on which devices, and over which transport they reach the others.

    Raises:
        InputError: ``devices`` contradicts the number of processes that were started.
    """

    def __init__(self, devices: Devices, timeout: float) -> None:
        self.world = world()
        self.devices = resolve_devices(devices, self.world)
        self.count = devices if isinstance(devices, int) else len(devices)
        self._timeout = timeout
        if self.world.distributed and (device := self.devices[self.world.rank]).type == "cuda":
            torch.cuda.set_device(device)  # before the first CUDA call, which would take memory of GPU 0

    @functools.cached_property
    def in_process(self) -> InProcess:
        return InProcess([self.devices[rank] for rank in range(self.count)])

    @functools.cached_property
    def distributed(self) -> TorchDistributed:
        return TorchDistributed(self.devices[self.world.rank], self._timeout)

    @functools.cached_property
    def agreement(self) -> Agreement:
        """Where processes compare what they were given. All of them make theirs in the same order."""
        return Agreement(self.distributed, self._timeout)

    def once(self, request: str, make: Callable[[], T]) -> T:
        """Call ``make`` in one process; every process returns its result, or raises its error."""
        return self.distributed.once(request, make) if self.world.distributed else make()

    def gathered(self, steps: Sequence[RecordedStep]) -> list[RecordedStep]:
        """The steps with the stamps of every rank, on every rank."""
        if not self.world.distributed:
            return list(steps)
        parts = [json.loads(part) for part in self.distributed.gather(json.dumps([s.stamps for s in steps]))]
        return [
            RecordedStep(step.programs, {int(rank): stamps for part in own for rank, stamps in part.items()})
            for step, *own in zip(steps, *parts, strict=True)
        ]

    def transport(self, rank: int) -> Transport:
        return self.distributed if self.world.distributed else self.in_process.endpoint(rank)


class Execution:
    """An artifact of steps, linked on the ranks of this process.

    ``parameters`` and ``buffers`` hold the tensors of those ranks' stages by FQN, on their devices.

    Raises:
        TransportError: the ranks do not all hold the same artifact. Every rank raises it.
    """

    _interpreter: type[Any] = Interpreter

    def __init__(
        self,
        artifact: Artifact,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        ranks: Ranks,
        updates: Updates | None = None,
    ) -> None:
        self.artifact = artifact
        self._ranks, self._updates = ranks, updates
        plan, is_distributed = artifact.plan, ranks.world.distributed
        if is_distributed:
            ranks.distributed.connect(artifact.programs, _groups(plan), artifact.text())
        self._interpreters: list[Any] = []
        self._of_batch: list[OfBatch] = []
        for rank, device in ranks.devices.items():
            modules = {k: stage_module(k, artifact.sources[k]) for k in stages_on(plan.placement, rank)}
            held = {**buffers, **{name: value.to(device) for name, value in artifact.constants.items()}}
            owns = functools.partial(_owns_tensors, plan, rank, is_distributed)
            program, transport = artifact.programs[rank], ranks.transport(rank)
            self._interpreters.append(
                self._interpreter(program, plan, modules, parameters, held, transport, device, owns, updates)
            )
            self._of_batch += [OfBatch(plan.stages[k], module, held, device) for k, module in modules.items()]

    def run(
        self,
        leaves: Sequence[object],
        span: Span,
        seed: int,
        recorded: list[RecordedStep] | None = None,
        update: bool = True,
    ) -> dict[str, Tensor]:
        """Run one step; returns its results by name.

        A step that fails drops all gradients since the last update, if the program makes updates: nobody
        could tell apart what it has added to them.

        Args:
            leaves: The flattened arguments of the step, for the whole batch.
            span: Which microbatches of the batch to run.
            seed: Seeds the random operators. Each step has another.
            recorded: If the step succeeds, its times on the ranks of this process are appended.
            update: Whether a program that updates does so.
        """
        microbatches = self._microbatches(leaves, span)
        stamps: dict[int, Stamps] = {} if recorded is None else {rank: [] for rank in self._ranks.devices}
        jobs = [
            functools.partial(interpreter.run, microbatches, span, seed, stamps.get(rank), update)
            for rank, interpreter in zip(self._ranks.devices, self._interpreters, strict=True)
        ]
        try:
            results = jobs[0]() if self._ranks.world.distributed else self._ranks.in_process.run(jobs)[0]
        except BaseException:
            if self._updates is not None:
                self._updates.drop_gradients()
            raise
        if recorded is not None:
            recorded.append(RecordedStep(self.artifact.programs, stamps))
        return results

    def _microbatches(self, leaves: Sequence[object], span: Span) -> list[dict[str, Tensor]]:
        """What the stages read for each microbatch, by name."""
        microbatches, sizes = self._split(leaves, span), span.sizes
        whole = values_of_batch(self._of_batch, self.artifact.plan, leaves, microbatches, sizes, span.batch)
        for microbatch, size in zip(microbatches, sizes, strict=True):
            microbatch |= {"share": share_of(size, span.batch), **whole}
        return microbatches

    def _split(self, leaves: Sequence[object], span: Span) -> list[dict[str, Tensor]]:
        microbatches: list[dict[str, Tensor]] = [{} for _ in span.sizes]
        for given in self.artifact.plan.inputs:
            tensor = leaves[given.position]
            assert isinstance(tensor, Tensor)
            if given.batched:
                parts = tensor[span.start : span.start + span.num_rows].split(list(span.sizes))
            else:
                parts = (tensor,) * len(span.sizes)
            for microbatch, part in zip(microbatches, parts, strict=True):
                microbatch[given.value.name] = part
        return microbatches


class StreamExecution(Execution):
    """An artifact of programs without end, linked on the ranks of this process."""

    _interpreter = RoundInterpreter

    @property
    def num_readers(self) -> int:
        """How many ranks of this process read each mini-batch."""
        return len(self._interpreters)

    def batch(self, leaves: Sequence[object], span: Span) -> StreamBatch:
        """A mini-batch as a source tells it: split, with what the stages need of the whole of it."""
        return StreamBatch(self._microbatches(leaves, span), span.sizes, span.loss_shares)

    def begin(self, source: Source, seed: int) -> StreamRun:
        """Begin to run the mini-batches of a source."""
        if self._ranks.world.distributed:
            return ProcessRun(self._interpreters, self.artifact.programs, source, seed)
        in_process = self._ranks.in_process
        return ThreadsRun(self._interpreters, self.artifact.programs, source, seed, in_process)

    @contextlib.contextmanager
    def dropping_gradients(self) -> Iterator[None]:
        """Forget all gradients if what is done inside a ``with`` fails."""
        try:
            yield
        except BaseException:
            if self._updates is not None:
                self._updates.drop_gradients()
            raise

    def run(
        self,
        leaves: Sequence[object],
        span: Span,
        seed: int,
        recorded: list[RecordedStep] | None = None,
        update: bool = True,
    ) -> Mapping[str, Tensor]:
        """Run a stream of one mini-batch; returns its results by name."""
        if not update:
            raise InputError(
                "a pipeline without a flush updates after every mini-batch, so that it accumulates no "
                "gradients; leave out accumulate(), or take schedule='1f1b'"
            )
        refuse_recording(recorded)
        batch = self.batch(leaves, span)
        with self.dropping_gradients():
            assert self._updates is not None, "a stream updates"
            run = self.begin(lambda number: None if number else batch, seed)
            results = run.results(self._updates.optimizer.hyperparameters())
            assert results is not None, "the mini-batch is there"
            run.drain()
        return results


def refuse_recording(recorded: list[RecordedStep] | None) -> None:
    """Raise InputError if the times of a stream are to be recorded, which has no end to note them at."""
    if recorded is not None:
        raise InputError(
            "a pipeline without a flush cannot be recorded or traced: its programs have no end. Look at "
            "simulate() and visualize(...), or record schedule='1f1b'"
        )


def _owns_tensors(plan: Plan, rank: int, is_distributed: bool, stage: int) -> bool:
    """Whether a rank has tensors of a stage of its own. In one process the first replica's are for all."""
    return is_distributed or rank == plan.placement[stage][0]


def _groups(plan: Plan) -> list[tuple[int, ...]]:
    """The ranks that meet in collectives."""
    groups = [ranks for ranks in dict.fromkeys(plan.placement) if len(ranks) > 1]
    clips = plan.ending.clips and not plan.ending.stream
    return [*groups, tuple(range(plan.num_ranks))] if clips else groups
