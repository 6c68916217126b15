"""Linking: every instruction of a program becomes an action, a call without arguments.

The linker walks the program once. For each stage and microbatch it keeps track of the named values that are
present or on their way. It refuses a compute that asks for a name nothing provides. The first reader of a
value that is still on its way waits for it, and the last reader of a value drops it.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch import Tensor

from pipec.errors import VerifyError
from pipec.ir import Instruction, Kind, Link, Op, Payload, Phase, Plan, Program, Value
from pipec.runtime.compute import Action, Take, bind_phase
from pipec.runtime.results import Results
from pipec.runtime.stage import BoundStage, Frame, parameter_names
from pipec.runtime.transport import Transport

Source = Callable[[], Sequence[Any]]
Sink = Callable[[Sequence[Tensor]], None]

_ALWAYS = frozenset({"w", "buffers", "constants", "b", "rng", "device"})
_SAVING = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD_INPUT)


@dataclass(frozen=True)
class Rank:
    """What the actions of one rank work on.

    ``sizes`` is set anew for each step: the number of samples in each microbatch, then that in the batch. A
    link that moves once per step has microbatch -1, and so finds the size of the batch at ``sizes[-1]``.
    ``received`` has the results that other ranks made; ``loss`` is the result that training differentiates.
    ``arrival[0]`` is the time, by ``time.perf_counter_ns``, when an action last had all that it waited for.
    """

    plan: Plan
    stages: Mapping[int, BoundStage]
    results: Results
    received: dict[str, Tensor]
    sizes: list[int]
    transport: Transport
    loss: Value | None
    arrival: list[int]


def link(program: Program, rank: Rank) -> list[tuple[Instruction, Action]]:
    """The actions of a step in order, each with its instruction.

    After the program's own come those that take in what is awaited only when the program is over: weight
    gradients, and other ranks' results.

    Raises:
        VerifyError: a stage lacks a function, or a function asks for a value that is not there.
    """
    linker = _Linker(rank)
    actions = [(instruction, linker.link(instruction)) for instruction in program.instructions]
    linker.mark_last_readers()
    return actions + linker.closing


@dataclass(eq=False)
class _Delivery:
    """Brings received values to their readers. ``action`` is None once a reader has been found to run it."""

    action: Action | None = None

    def awaited(self) -> list[Action]:
        """What the next reader must run first."""
        action, self.action = self.action, None
        return [action] if action else []


class _Linker:
    def __init__(self, rank: Rank) -> None:
        self.closing: list[tuple[Instruction, Action]] = []
        self._rank = rank
        self._always = _ALWAYS | {"grad_loss"} if rank.loss else _ALWAYS
        self._inputs = {"share", *(entry.value.name for entry in rank.plan.inputs)}
        self._inputs |= {name for stage in rank.plan.stages for name in stage.of_batch}
        self._present: dict[tuple[int, int], dict[str, _Delivery]] = defaultdict(dict)
        self._dropped_by: dict[tuple[int, int, str], list[str]] = {}
        self._lent: dict[int, dict[str, _Delivery]] = defaultdict(dict)

    def link(self, instruction: Instruction) -> Action:
        match instruction.op:
            case Op.RECV:
                return self._receive(instruction)
            case Op.SEND:
                return self._send(instruction)
            case Op.MOVE:
                return self._move(instruction)
            case Op.FREE:
                return self._free(instruction)
        assert instruction.op.traits.kind is Kind.COMPUTE, f"the linker makes no call for {instruction.op}"
        return self._compute(instruction)

    def mark_last_readers(self) -> None:
        """Tell each action which names to drop, which is known once the whole program is linked."""
        for (_, _, name), names in self._dropped_by.items():
            names.append(name)

    def _receive(self, instruction: Instruction) -> Action:
        link, microbatch, sizes = _link_of(instruction), instruction.microbatch, self._rank.sizes
        receiver = self._rank.transport.receiver(instruction, self._tag(link))
        sink, wait, post = self._sink(link, microbatch), receiver.wait, receiver.post

        def deliver() -> None:
            sink(wait())

        if link.payload.readers:
            self._announce(link, microbatch, _Delivery(deliver))
        else:
            self.closing.append((instruction, deliver))
        return lambda: post(sizes[microbatch])

    def _send(self, instruction: Instruction) -> Action:
        link = _link_of(instruction)
        send = self._rank.transport.sender(instruction, self._tag(link))
        source = self._source(link, instruction.microbatch)
        return lambda: send(source())

    def _move(self, instruction: Instruction) -> Action:
        link, microbatch = _link_of(instruction), instruction.microbatch
        source, sink = self._source(link, microbatch), self._sink(link, microbatch)
        if link.payload.readers:
            self._announce(link, microbatch, _Delivery())
        return lambda: sink(source())

    def _free(self, instruction: Instruction) -> Action:
        self._present.pop((instruction.stage, instruction.microbatch), None)
        return self._rank.stages[instruction.stage].frames[instruction.microbatch].clear

    def _tag(self, link: Link) -> int:
        return self._rank.plan.links.index(link)

    def _announce(self, link: Link, microbatch: int, delivery: _Delivery) -> None:
        for value in link.values:
            if link.payload is Payload.WEIGHT:
                self._lent[link.target][value.name] = delivery
            else:
                self._present[link.target, microbatch][value.name] = delivery

    def _source(self, link: Link, microbatch: int) -> Source:
        """The function that fetches what a link carries from where it was left."""
        names = [value.name for value in link.values]
        match link.payload:
            case Payload.ACTIVATION | Payload.GRADIENT:
                return self._take(link.source, microbatch, names, f"the link to stage {link.target}")
            case Payload.RESULT:
                results, sizes = self._rank.results, self._rank.sizes
                return lambda: [results.merged(name, sizes[:-1]) for name in names]
        stage = self._rank.stages[link.source]
        indices = [stage.code.PARAMETERS.index(name) for name in names]
        if link.payload is Payload.WEIGHT:
            return lambda: [stage.weights[index] for index in indices]
        return lambda: [stage.gradients.take(index) for index in indices]

    def _sink(self, link: Link, microbatch: int) -> Sink:
        """The function that puts what a link carries to where its reader looks for it."""
        names = [value.name for value in link.values]
        if link.payload is Payload.RESULT:
            received = self._rank.received
            return lambda tensors: received.update(zip(names, tensors, strict=True))
        stage = self._rank.stages[link.target]
        if link.payload.per_microbatch:
            frame = stage.frames[microbatch]
            return lambda tensors: frame.update(zip(names, tensors, strict=True))
        indices = [stage.code.PARAMETERS.index(name) for name in names]
        keep = stage.weights.__setitem__ if link.payload is Payload.WEIGHT else stage.gradients.add_one

        def sink(tensors: Sequence[Tensor]) -> None:
            for index, tensor in zip(indices, tensors, strict=True):
                keep(index, tensor)

        return sink

    def _compute(self, instruction: Instruction) -> Action:
        stage, microbatch = self._rank.stages[instruction.stage], instruction.microbatch
        phase = Phase(instruction.op)
        function = getattr(stage.code, phase, None)
        if function is None:
            raise VerifyError(
                f"the program runs {phase} of stage {stage.index}, whose code has no such function; generate "
                "the stage code for this schedule"
            )
        take = self._take(stage.index, microbatch, parameter_names(function), phase)
        self._note_made(stage.index, microbatch, phase)
        return bind_phase(phase, stage, microbatch, take, self._rank.results)

    def _note_made(self, stage: int, microbatch: int, phase: Phase) -> None:
        """Note that what ``phase`` leaves in the frame is present from now on."""
        present = self._present[stage, microbatch]
        for link in self._rank.plan.links:
            if link.source == stage and link.payload.per_microbatch and phase in link.payload.producers:
                present.update({value.name: _Delivery() for value in link.values})
        if phase in _SAVING:
            present["saved"] = _Delivery()

    def _take(self, stage: int, microbatch: int, names: Sequence[str], reader: str) -> Take:
        """The function that fetches values from a frame.

        It first waits for those still on their way, and afterwards drops those that nobody reads later.
        """
        waits: list[Action] = []
        dropped: list[str] = []
        for name in names:
            if name in self._always:
                waits += self._prepare(stage, microbatch, name, reader)
            elif delivery := self._present[stage, microbatch].get(name):
                waits += delivery.awaited()
                self._dropped_by[stage, microbatch, name] = dropped
            elif name in self._inputs:
                self._rank.stages[stage].inputs.add(name)
            else:
                raise self._unknown(stage, microbatch, name, reader)
        if waits:
            waits.append(self._note_arrival)
        return _taking(self._rank.stages[stage].frames[microbatch], names, waits, dropped)

    def _note_arrival(self) -> None:
        self._rank.arrival[0] = time.perf_counter_ns()

    def _prepare(self, stage: int, microbatch: int, name: str, reader: str) -> list[Action]:
        """What must run before a value that every frame has is up to date."""
        bound = self._rank.stages[stage]
        if name == "w":
            if unlent := bound.borrowed - self._lent[stage].keys():
                raise VerifyError(
                    f"stage {stage}, {reader}: the parameters {', '.join(sorted(unlent))} are borrowed, but "
                    "no weight link has brought them; add one to the plan, from the stage that owns them"
                )
            return [call for delivery in self._lent[stage].values() for call in delivery.awaited()]
        if name == "buffers" and reader == Phase.FORWARD and bound.code.UPDATED_BUFFERS:
            return [functools.partial(bound.show_buffers, microbatch)]
        return []

    def _unknown(self, stage: int, microbatch: int, name: str, reader: str) -> VerifyError:
        present = sorted({*self._present[stage, microbatch], *self._inputs, *self._always})
        return VerifyError(
            f"stage {stage}, {reader}, microbatch {microbatch}: nothing provides {name!r}; "
            f"at this point of the program there are {', '.join(present)}"
        )


def _taking(frame: Frame, names: Sequence[str], waits: Sequence[Action], dropped: Sequence[str]) -> Take:
    fetch = itemgetter(*names) if len(names) > 1 else lambda frame: [frame[name] for name in names]

    def take() -> Sequence[Any]:
        for wait in waits:
            wait()
        values: Sequence[Any] = fetch(frame)
        for name in dropped:
            del frame[name]
        return values

    return take


def _link_of(instruction: Instruction) -> Link:
    assert instruction.link is not None
    return instruction.link
