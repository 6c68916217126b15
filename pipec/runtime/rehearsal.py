"""Steps of new sizes are rehearsed: each rank goes through its computes alone, before all make them together.

A GPU loads a kernel when it is used first, and may do so only when nothing else runs on it. What runs there
may be a message that waits for its sender; and that one may wait for the same, for a message of this rank.
So every kernel has been used before the first message is posted. (CUDA C++ Programming Guide, Lazy Loading:
Concurrent Execution.)

Functions that torch compiles are compiled then, on all ranks at the same time, while no rank waits for a
message.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipec.errors import PipecError
from pipec.ir import Instruction, Op, Plan, Program, Sizes
from pipec.ir.text import evaluate_dim
from pipec.runtime.group import Group, Wait
from pipec.runtime.interpreter import Interpreter
from pipec.runtime.meter import Meter
from pipec.runtime.recording import Stamps
from pipec.runtime.span import Span
from pipec.runtime.stage import StageCode
from pipec.runtime.transport import Receiver, Send, Transport
from pipec.runtime.updates import Updates

log = logging.getLogger("pipec")

_OF_THE_END = (Op.REDUCE_GRAD, Op.AVERAGE_BUFFERS, Op.NORM, Op.UPDATE)
"""What would leave something behind."""


def _nothing(*_: Any) -> None:
    """There is nobody to wait for."""


class RehearsedInterpreter(Interpreter):
    """An ``Interpreter`` that rehearses the first step of any sizes of microbatches. It takes the same.

    A rehearsal leaves gradients, buffers and random states as they were. In place of what other ranks send
    there are zeros. One that fails on those is given up; the step itself may do better. ``meet`` is
    called behind it.
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
        updates: Updates | None = None,
        *,
        meet: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__(program, plan, stages, parameters, buffers, transport, device, owns_tensors, updates)
        kept = [each for each in program.instructions if each.op not in _OF_THE_END]
        self._alone = functools.partial(
            Interpreter,
            replace(program, instructions=kept),
            plan,
            stages,
            buffers=buffers,
            transport=_Alone(program.rank, device),
            device=device,
            owns_tensors=lambda stage: False,
            updates=updates,
        )
        self._parameters = parameters
        self._meet = meet
        self._rehearsed: set[tuple[int, ...]] = set()

    def run(
        self,
        microbatches: Sequence[Mapping[str, Tensor]],
        span: Span,
        seed: int = 0,
        stamps: Stamps | None = None,
        update: bool = True,
        meter: Meter | None = None,
    ) -> dict[str, Tensor]:
        if tuple(span.sizes) not in self._rehearsed:
            self._rehearsed.add(tuple(span.sizes))
            self._rehearse(microbatches, span, seed)
            self._meet()
        return super().run(microbatches, span, seed, stamps, update, meter)

    def _rehearse(self, microbatches: Sequence[Mapping[str, Tensor]], span: Span, seed: int) -> None:
        leaves = {name: _another(tensor) for name, tensor in self._parameters.items()}
        try:
            self._alone(parameters=leaves).run(microbatches, span, seed, update=False)
        except PipecError as error:
            log.info("a rehearsal ended early: %s", error)


def _another(tensor: Tensor) -> Tensor:
    """A tensor with the same values in the same memory, and a gradient of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class _Alone:
    """The transport of a rank that rehearses: what it sends is dropped, and what it receives is zeros."""

    rank: int
    device: torch.device

    def sender(self, instruction: Instruction, tag: int) -> Send:
        return lambda tensors, sizes: None

    def receiver(self, instruction: Instruction, tag: int) -> Receiver:
        return _Zeros(instruction, self.device)

    def group(self, ranks: Sequence[int], num_hosts: int = 1) -> Group:
        return _GroupOfOne(list(ranks).index(self.rank), len(ranks))

    def held(self) -> Sequence[Tensor]:
        """Nothing: what is received is made when it is waited for."""
        return ()

    def finish(self) -> None:
        """Nothing was sent."""

    def check(self) -> None:
        """Nothing is cut off."""

    def fail(self, error: BaseException) -> None:
        """Nobody asks."""


class _Zeros:
    def __init__(self, instruction: Instruction, device: torch.device) -> None:
        assert instruction.link is not None
        self._values, self._device = instruction.link.values, device
        self._sizes: Sizes = {}

    def post(self, sizes: Sizes) -> None:
        self._sizes = sizes

    def wait(self) -> Sequence[Tensor]:
        return [
            torch.zeros(
                [evaluate_dim(dim, self._sizes) for dim in value.shape],
                dtype=getattr(torch, value.dtype),
                device=self._device,
            )
            for value in self._values
        ]


@dataclass
class _GroupOfOne:
    """A group whose other members stay away."""

    index: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Wait:
        return _nothing

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Wait:
        output.copy_(tensor.view(self.size, -1)[self.index].view(output.shape))
        return _nothing

    def all_gather(self, output: Tensor, tensor: Tensor) -> Wait:
        """Repeat the own part. An output of which it is a view is memory that lasts, and keeps its values."""
        if output.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            output.view(self.size, -1).copy_(tensor.view(1, -1))
        return _nothing
