"""Dry runs for steps of new sizes: each rank runs its computes alone, before all ranks run the step.

A GPU loads a kernel when it is used first, and may do so only when nothing else runs on it. What runs there
may be a message that waits for its sender; and that one may wait for the same, for a message of this rank.
So every kernel has been used before the first message is posted. (CUDA C++ Programming Guide, Lazy Loading:
Concurrent Execution.)

Functions that torch compiles are compiled then, on all ranks at the same time, while no rank waits for a
message.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import le

import torch
from torch import Tensor

from pipec.errors import PipecError
from pipec.ir import Instruction, Op, Payload, Plan, Program, Sizes, StepPart
from pipec.ir.periodic_program import unroll
from pipec.runtime.messages.collective_group import CollectiveGroup, CollectiveWait
from pipec.runtime.messages.transport import Receiver, Send
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.interpreter import Interpreter
from pipec.runtime.step.linker import nothing
from pipec.runtime.step.step_results import result_values, zeros_of

log = logging.getLogger("pipec")

_OF_THE_END = (
    *(Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD, Op.AVERAGE_BUFFERS, Op.WAIT_AVERAGE_BUFFERS),
    *(Op.GRAD_NORM, Op.STAGE_NORM, Op.CHECK, Op.STASH, Op.UPDATE, Op.HOST_UPDATE, Op.PAUSE),
)
"""Instructions with lasting effects, which a dry run leaves out."""


class DryRuns:
    """Dry runs of one rank: one for each power of two that sizes come to, or for ``every_size``.

    Sizes between two powers of two use the same kernels as a rule. A kernel that is loaded later does not
    make neighbours wait for each other (``NcclConnections``). Functions are compiled for each size.

    A dry run is of the whole step where some size is larger than before, so that memory grows while no rank
    waits. Else it is of one microbatch of each number of rows.

    A dry run leaves gradients, buffers and random states as they were. Received values are zeros. A dry run
    that fails on them is abandoned, since the step itself may succeed. The first dry run also makes an
    update.
    """

    def __init__(self, interpreter: Interpreter, every_size: bool = False) -> None:
        self._interpreter, self._every_size = interpreter, every_size
        program, plan = interpreter.program, interpreter.plan
        if plan.sync_spec.stream is not None:
            program, plan = _as_step(program, plan)
        kept = [each for each in program.instructions if each.op not in _OF_THE_END]
        self._program, self._plan = replace(program, instructions=kept), plan
        self._own_microbatches = [
            plan.microbatches_on(stage, program.rank)
            for stage, ranks in enumerate(plan.placement)
            if program.rank in ranks
        ]
        self._whole: list[tuple[float, ...]] = []
        self._sizes = [each.name for each in plan.variables if each.dim is not None]
        self._updates = interpreter.updates if plan.sync_spec.updates else None
        self._known = set[object]()

    def needs_dry_run(self, batch_slice: BatchSlice) -> bool:
        """Whether these sizes had no dry run yet; the answer is the same on all ranks."""
        return self._sizes_of(batch_slice) not in self._known

    def dry_run(
        self, microbatches: Sequence[Mapping[str, Tensor]], batch_slice: BatchSlice, seed: int
    ) -> None:
        """Make a dry run, after which these sizes need none."""
        self._run(microbatches, batch_slice, seed)
        self._known.add(self._sizes_of(batch_slice))

    def _sizes_of(self, batch_slice: BatchSlice) -> object:
        """The sizes up to which kernels are alike."""
        sizes = self._all_sizes(batch_slice)
        return sizes if self._every_size else tuple(int(size).bit_length() for size in sizes)

    def _all_sizes(self, batch_slice: BatchSlice) -> tuple[float, ...]:
        """The sizes that decide which kernels run; numbers do not."""
        values = (own.get(name, 0) for own in batch_slice.values for name in self._sizes)
        return (*batch_slice.sizes, *values)

    def _run(self, microbatches: Sequence[Mapping[str, Tensor]], batch_slice: BatchSlice, seed: int) -> None:
        rank, device = self._program.rank, self._interpreter.device
        if len(microbatches) < self._plan.num_microbatches:
            microbatches, batch_slice = _repeated(microbatches, batch_slice, self._plan.num_microbatches)
        batch_slice = self._shortened(batch_slice)
        microbatches = self._with_output_gradients(microbatches, batch_slice)
        alone = replace(
            self._interpreter,
            program=self._program,
            plan=self._plan,
            parameters={name: _with_own_gradient(x) for name, x in self._interpreter.parameters.items()},
            transport=_StubTransport(rank, device),
            owned=(),
        )
        try:
            alone.run(microbatches, batch_slice, seed, part=StepPart.ACCUMULATE)
        except PipecError as error:
            log.debug("a dry run ended early: %s", error)
        updates, self._updates = self._updates, None
        if updates is not None:
            try:
                updates.dry_run(rank, device)
            except Exception as error:  # of an optimizer that cannot have such little tensors
                log.debug("a dry run of an update ended early: %s", error)

    def _with_output_gradients(
        self, microbatches: Sequence[Mapping[str, Tensor]], batch_slice: BatchSlice
    ) -> Sequence[Mapping[str, Tensor]]:
        """The inputs with zeros for the gradients of outputs, which a script would give."""
        values, device = {x.name: x for x in result_values(self._plan)}, self._interpreter.device
        return [
            {
                **inputs,
                **{
                    each.gradient: zeros_of(values[each.name], names, device)
                    for each in self._plan.trained_outputs
                },
            }
            for inputs, names in zip(microbatches, batch_slice.names, strict=True)
        ]

    def _shortened(self, batch_slice: BatchSlice) -> BatchSlice:
        """The slice with rows for one microbatch of each size, if none of its sizes is larger than before."""
        sizes = self._all_sizes(batch_slice)
        if not any(all(map(le, sizes, before)) for before in self._whole):
            self._whole.append(sizes)
            return batch_slice
        rows, names = batch_slice.sizes, batch_slice.names
        firsts = {
            next(k for k in own if names[k] == names[each]) for own in self._own_microbatches for each in own
        }
        return replace(batch_slice, sizes=[size if k in firsts else 0 for k, size in enumerate(rows)])


def _as_step(program: Program, plan: Plan) -> tuple[Program, Plan]:
    """A periodic program as one step, with one microbatch for each replica of a stage."""
    count = max(plan.num_microbatches, *map(len, plan.placement))
    written = [
        replace(each, version=-1)
        for each in unroll(program, count).instructions
        if each.link is None or each.link.payload is not Payload.MICROBATCH_RESULT
    ]
    return Program(program.rank, written), replace(plan, num_microbatches=count)


def _repeated(
    microbatches: Sequence[Mapping[str, Tensor]], batch_slice: BatchSlice, count: int
) -> tuple[Sequence[Mapping[str, Tensor]], BatchSlice]:
    """``count`` microbatches, by repeating the given ones."""
    places = [number % len(microbatches) for number in range(count)]
    sizes, weights = [batch_slice.sizes[k] for k in places], [batch_slice.loss_weights[k] for k in places]
    values = [batch_slice.values[k] for k in places] if batch_slice.values else ()
    repeated = replace(batch_slice, sizes=sizes, custom_loss_weights=weights, values=values)
    return [microbatches[k] for k in places], repeated


def _with_own_gradient(tensor: Tensor) -> Tensor:
    """A tensor with the same values in the same memory, and a gradient of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class _StubTransport:
    """The transport of a dry run: sent values are dropped, and received values are zeros."""

    rank: int
    device: torch.device

    def sender(self, instruction: Instruction, tag: int) -> Send:
        return lambda tensors, sizes: None

    def receiver(self, instruction: Instruction, tag: int) -> Receiver:
        return _Zeros(instruction, self.device)

    def group(self, ranks: Sequence[int]) -> CollectiveGroup:
        return _StubGroup(list(ranks).index(self.rank), len(ranks))

    def finish(self) -> None:
        """Nothing was sent."""

    def check(self) -> None:
        """Nothing is cut off."""

    def fail(self, error: BaseException) -> None:
        """No other rank is told."""


class _Zeros:
    def __init__(self, instruction: Instruction, device: torch.device) -> None:
        assert instruction.link is not None
        self._values, self._device = instruction.link.values, device
        self._sizes: Sizes = {}

    def post(self, sizes: Sizes) -> None:
        self._sizes = sizes

    def wait(self) -> Sequence[Tensor]:
        return [zeros_of(value, self._sizes, self._device) for value in self._values]


@dataclass
class _StubGroup:
    """A group without its other members."""

    index: int
    size: int

    def all_reduce(self, tensor: Tensor) -> CollectiveWait:
        return nothing

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> CollectiveWait:
        output.copy_(tensor.view(self.size, -1)[self.index].view(output.shape))
        return nothing

    def all_gather(self, output: Tensor, tensor: Tensor) -> CollectiveWait:
        """Repeat the own part. An output of which it is a view is memory that lasts, and keeps its values."""
        if output.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            output.view(self.size, -1).copy_(tensor.view(1, -1))
        return nothing
