"""Linking: every instruction of a program becomes an action, a call without arguments.

The linker walks the program once. For each stage and microbatch it keeps track of the named values that are
present or on their way. It refuses a compute that asks for a name nothing provides. The first reader of a
value that is still on its way waits for it, and the last reader of a value drops it.

Gradients are sent to the previous stage first, then accumulated: the other rank is waiting::

    backward, add    send    free        ->        backward    send    add, free
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from torch import Tensor

from pipec.errors import VerifyError
from pipec.ir import Instruction, Link, Op, OpKind, Payload, Phase, Program
from pipec.runtime.messages.transport import Receiver
from pipec.runtime.stages.bound_stage import Frame, parameter_names
from pipec.runtime.stages.model_collectives import RunningCollective
from pipec.runtime.step.compute import Action, FetchArguments, bind_function
from pipec.runtime.step.linked_instruction import LinkedInstruction, in_sequence
from pipec.runtime.step.rank_state import PendingValue, RankState
from pipec.runtime.step.step_results import StepResults
from pipec.runtime.step.stream_results import StreamResults
from pipec.runtime.step.sync_linker import SyncLinker

ValueReader = Callable[[], Sequence[Any]]
OutputWriter = Callable[[Sequence[Tensor]], None]

_ALWAYS = frozenset({"w", "gradient_sums", "precomputed", "buffers", "constants", "b", "rng", "device"})
_SAVING = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD_INPUT)
"""The phases whose last function saves something, too."""


def link(program: Program, rank: RankState) -> list[LinkedInstruction]:
    """The actions of a step in order.

    After the program's own come those that take in what is awaited only when the program is over: weight
    gradients, and other ranks' results.

    Raises:
        VerifyError: a stage lacks a function, or a function asks for a value that is not there.
    """
    linker, linked, settle = Linker(rank), list[LinkedInstruction](), list[Action]()
    for instruction, behind in itertools.zip_longest(program.instructions, program.instructions[1:]):
        made = linker.link(instruction, _sends_to_compute(behind))
        if settle and not _sends_to_compute(instruction):
            made = made.after(settle.pop())
        if _makes_gradients(instruction) and _sends_to_compute(behind):
            settle.append(rank.stages[instruction.stage].gradients.flush_deferred)
        linked.append(made)
    linker.finish()
    return linked + [LinkedInstruction(program.instructions[-1], each) for each in settle] + linker.closing


def _sends_to_compute(instruction: Instruction | None) -> bool:
    """Whether an instruction sends what a compute of another rank waits for."""
    if instruction is None or instruction.op is not Op.SEND:
        return False
    return _link_of(instruction).payload.feeds_compute


def _makes_gradients(instruction: Instruction) -> bool:
    phase = instruction.op.phase
    return phase is not None and phase not in (Phase.FORWARD, Phase.RECOMPUTE)


class Linker:
    """Makes the actions of a program's instructions, one after the other."""

    def __init__(self, rank: RankState) -> None:
        self.closing: list[LinkedInstruction] = []
        self._rank = rank
        variables = {variable.name for variable in rank.plan.variables}
        self._always = _ALWAYS | variables | ({"grad_loss"} if rank.loss else set())
        self._inputs = {"batch_fraction", "first_row", *(entry.value.name for entry in rank.plan.inputs)}
        self._inputs |= {name for stage in rank.plan.stages for name in stage.batch_counts}
        self._present: dict[tuple[int, int], dict[str, PendingValue]] = defaultdict(dict)
        self._dropped_by: dict[tuple[int, int], dict[str, list[str]]] = defaultdict(dict)
        self._tied_weights: dict[int, dict[str, PendingValue]] = defaultdict(dict)
        self._leaving: list[Action] = []
        self._sync_linker = SyncLinker(rank)

    def link(self, instruction: Instruction, sends_first: bool = False) -> LinkedInstruction:
        """With ``sends_first``, somebody else lets a compute's stage add its gradients."""
        if instruction.op.traits.kind is OpKind.COMPUTE:
            return self._compute(instruction, sends_first)
        return LinkedInstruction(instruction, self._action(instruction), self._microbatches(instruction))

    def _action(self, instruction: Instruction) -> Action:
        match instruction.op:
            case Op.RECV:
                return self._receive(instruction)
            case Op.SEND:
                return self._send(instruction)
            case Op.MOVE:
                return self._move(instruction)
            case Op.FREE:
                return self._free(instruction)
            case Op.OFFLOAD:
                return self._offload(instruction)
            case Op.PREFETCH:
                return self._prefetch(instruction)
        if instruction.model_collective >= 0:
            return self._start_model_collective(instruction)
        return self._sync_linker.link(instruction)

    def _microbatches(self, instruction: Instruction) -> Sequence[int]:
        """The microbatches of an instruction, or of the values that it moves; none if it has none."""
        link, number = instruction.link, self._rank.number
        if not (instruction.op.traits.per_microbatch or instruction.op.traits.carries_link):
            return ()  # also in a stream, where updates and reductions have the last of their microbatches
        if instruction.microbatch >= 0:
            return (instruction.microbatch,)
        if link is None or link.payload is Payload.WEIGHT:
            return ()
        return self._rank.plan.microbatches_on(
            link.source, instruction.peer if instruction.op is Op.RECV else number
        )

    def finish(self) -> None:
        """Wait at the end of the program for everything that no instruction has waited for."""
        self.closing += [LinkedInstruction(*left) for left in self._sync_linker.unfinished()]

    def _receive(self, instruction: Instruction) -> Action:
        link, microbatch, rank = _link_of(instruction), instruction.microbatch, self._rank
        if link.payload is Payload.MICROBATCH_RESULT:
            apart = replace(instruction, slot=microbatch)  # several are on their way at once
            return self._receive_microbatch_result(
                link, microbatch, self._rank.transport.receiver(apart, self._tag(link))
            )
        receiver = self._rank.transport.receiver(instruction, self._tag(link))
        write_output, wait, post = (
            self._output_writer(link, microbatch, instruction.peer),
            receiver.wait,
            receiver.post,
        )
        made_of = self._microbatches(instruction)

        def deliver() -> None:
            write_output(wait())

        def deliver_if_made() -> None:
            if any(rank.sizes[each] for each in made_of):
                deliver()

        if link.payload.readers:
            self._announce(link, microbatch, PendingValue(deliver))
        elif link.payload is Payload.WEIGHT_GRADIENT:
            self._sync_linker.expect_tied_gradient(instruction, PendingValue(deliver_if_made))
        else:
            self.closing.append(LinkedInstruction(instruction, deliver_if_made))
        num_rows = self._num_rows(instruction)
        return lambda: post(rank.sizes_with(num_rows()))

    def _receive_microbatch_result(self, link: Link, microbatch: int, receiver: Receiver) -> Action:
        """Post the receive of a microbatch's results, which the rank waits for when the script asks."""
        rank, stream_results, names = self._rank, self._rank.results, [value.name for value in link.values]
        assert isinstance(stream_results, StreamResults), "only a stream returns results of microbatches"

        def post() -> None:
            receiver.post(rank.sizes_with(rank.sizes[microbatch]))
            stream_results.expect_received(names, receiver.wait)

        return post

    def _send(self, instruction: Instruction) -> Action:
        link, rank = _link_of(instruction), self._rank
        send = rank.transport.sender(instruction, self._tag(link))
        source = self._value_reader(link, instruction.microbatch, self._is_other_pipeline(instruction.peer))
        num_rows = self._num_rows(instruction)
        return lambda: send(source(), rank.sizes_with(num_rows()))

    def _num_rows(self, instruction: Instruction) -> Callable[[], int]:
        """The number of rows of a message in the current step."""
        sizes, microbatch = self._rank.sizes, instruction.microbatch
        if _link_of(instruction).payload is not Payload.RESULT:
            return lambda: sizes[microbatch]
        results, away = self._rank.results, self._is_other_pipeline(instruction.peer)
        made_of = self._microbatches(instruction)
        assert isinstance(results, StepResults), "only a step returns results at its end"
        return lambda: 0 if away and results.is_local else sum(sizes[each] for each in made_of)

    def _is_other_pipeline(self, peer: int) -> bool:
        """Whether a rank belongs to another one of several whole pipelines."""
        placement = self._rank.plan.placement
        own, other = (
            next(ranks.index(rank) for ranks in placement if rank in ranks)
            for rank in (self._rank.number, peer)
        )
        return own != other

    def _move(self, instruction: Instruction) -> Action:
        link, microbatch = _link_of(instruction), instruction.microbatch
        source, write_output = self._value_reader(link, microbatch), self._output_writer(link, microbatch, -1)
        if link.payload.readers:
            self._announce(link, microbatch, PendingValue())
        return lambda: write_output(source())

    def _free(self, instruction: Instruction) -> Action:
        """Free a frame, and tell the last reader of each value in it to drop it. Others may take it then."""
        key = instruction.stage, instruction.microbatch
        self._present.pop(key, None)
        for name, names in self._dropped_by.pop(key, {}).items():
            names.append(name)
        return self._rank.stages[instruction.stage].frames[instruction.microbatch].clear

    def _offload(self, instruction: Instruction) -> Action:
        """Start to copy saved values to the host, of which the device lets go behind the next compute."""
        stage = self._rank.stages[instruction.stage]
        frame, copies = stage.frames[instruction.microbatch], stage.copies
        self._leaving.append(lambda: copies.release_device_memory(frame.get("saved", ())))
        return lambda: copies.offload(frame["saved"])

    def _prefetch(self, instruction: Instruction) -> Action:
        """Start to copy saved values back, for which their reader waits."""
        microbatch, stage = instruction.microbatch, self._rank.stages[instruction.stage]
        frame, copies = stage.frames[microbatch], stage.copies
        self._present[stage.index, microbatch]["saved"] = PendingValue(
            lambda: copies.wait_prefetch(microbatch)
        )
        return lambda: copies.prefetch(frame["saved"], microbatch)

    def _tag(self, link: Link) -> int:
        return self._rank.plan.links.index(link)

    def _announce(self, link: Link, microbatch: int, pending: PendingValue) -> None:
        for value in link.values:
            if link.payload is Payload.WEIGHT:
                self._tied_weights[link.target][value.name] = pending
            else:
                self._present[link.target, microbatch][value.name] = pending

    def _value_reader(self, link: Link, microbatch: int, away: bool = False) -> ValueReader:
        """The function that fetches a link's value from where it was stored."""
        names = [value.name for value in link.values]
        match link.payload:
            case Payload.ACTIVATION | Payload.GRADIENT | Payload.MICROBATCH_RESULT:
                return self._argument_fetcher(
                    link.source, microbatch, names, f"the link to stage {link.target}"
                )
            case Payload.RESULT:
                results, rank = self._rank.results, self._rank
                assert isinstance(results, StepResults), "only a step returns results at its end"
                fetch = results.sent_to_other_pipeline if away else results.merged
                return lambda: [fetch(name, rank.sizes[:-1], rank.values) for name in names]
        stage = self._rank.stages[link.source]
        indices = [stage.code.PARAMETERS.index(name) for name in names]
        if link.payload is Payload.WEIGHT:
            return lambda: [stage.weights[index] for index in indices]
        return lambda: [stage.gradients.pop(index) for index in indices]

    def _output_writer(self, link: Link, microbatch: int, peer: int) -> OutputWriter:
        """The function that stores a link's value where its reader finds it."""
        names = [value.name for value in link.values]
        if link.payload is Payload.RESULT:
            received = self._rank.received
            return lambda tensors: received.update(
                {(name, peer): tensor for name, tensor in zip(names, tensors, strict=True)}
            )
        stage = self._rank.stages[link.target]
        if link.payload.per_microbatch:
            frame = stage.frames[microbatch]
            return lambda tensors: frame.update(zip(names, tensors, strict=True))
        indices = [stage.code.PARAMETERS.index(name) for name in names]
        keep = stage.weights.__setitem__ if link.payload is Payload.WEIGHT else stage.gradients.add_tied

        def write_output(tensors: Sequence[Tensor]) -> None:
            for index, tensor in zip(indices, tensors, strict=True):
                keep(index, tensor)

        return write_output

    def _compute(self, instruction: Instruction, sends_first: bool) -> LinkedInstruction:
        names = self._rank.plan.stages[instruction.stage].functions(Phase(instruction.op))
        segments = range(len(names)) if instruction.segment < 0 else (instruction.segment,)
        weights: list[Action] = []
        actions = [self._call(instruction, names, segment, weights, sends_first) for segment in segments]
        if instruction.version >= 0:
            show = self._rank.stages[instruction.stage].select_version
            actions = [functools.partial(show, instruction.microbatch), *actions]
        left, self._leaving = self._leaving, []
        return LinkedInstruction(
            instruction,
            in_sequence([*actions, *left]),
            (instruction.microbatch,),
            in_sequence([*weights, *left]),
        )

    def _call(
        self,
        instruction: Instruction,
        names: Sequence[str],
        segment: int,
        weights: list[Action],
        sends_first: bool,
    ) -> Action:
        """The action that calls one of the functions that a phase consists of.

        What it waits for so that the weights are there is added to ``weights``.
        """
        stage, microbatch = self._rank.stages[instruction.stage], instruction.microbatch
        name, phase, is_last = names[segment], Phase(instruction.op), segment == len(names) - 1
        function = getattr(stage.code, name, None)
        if function is None:
            raise VerifyError(
                f"the program runs {name} of stage {stage.index}, whose code has no such function; generate "
                "the stage code for this schedule"
            )
        parameters = parameter_names(function)
        lies_alike = _makes_gradients(instruction)  # gradients lie as the weights do
        reads = lies_alike or not {"w", "precomputed"}.isdisjoint(parameters)
        own = self._weights(stage.index, name) if reads else []
        weights += own
        take = self._argument_fetcher(stage.index, microbatch, parameters, name, own)
        self._note_made(stage.index, microbatch, phase, is_last)
        results = self._rank.results
        return bind_function(name, phase, is_last, stage, microbatch, take, results, sends_first)

    def _note_made(self, stage: int, microbatch: int, phase: Phase, is_last: bool) -> None:
        """Note that what a function of ``phase`` leaves in the frame is present from now on.

        What the stage hands on has been received, or is still on its way.
        """
        present = self._present[stage, microbatch]
        for link in self._rank.plan.links if is_last else ():
            if link.source == stage and link.payload.per_microbatch and phase in link.payload.producers:
                for value in link.values:
                    present.setdefault(value.name, PendingValue())
        if phase in _SAVING or not is_last:
            present["saved"] = PendingValue()

    def _start_model_collective(self, instruction: Instruction) -> Action:
        """Start a model collective; the first reader of its result waits for it."""
        stage, microbatch = self._rank.stages[instruction.stage], instruction.microbatch
        collective = self._rank.plan.stages[stage.index].model_collectives[instruction.model_collective]
        group = self._rank.transport.group(self._rank.plan.placement[stage.index], collective.num_hosts)
        running = RunningCollective(collective, stage.frames[microbatch], group)
        self._present[stage.index, microbatch][collective.value.name] = self._sync_linker.model_collective(
            running.finish
        )
        return running.start

    def _argument_fetcher(
        self, stage: int, microbatch: int, names: Sequence[str], reader: str, first: Sequence[Action] = ()
    ) -> FetchArguments:
        """The function that fetches values from a frame.

        It first waits for those still on their way, and afterwards drops those that nobody reads later.
        """
        waits = [*first]
        dropped: list[str] = []
        for name in names:
            if name == "precomputed":
                waits.append(functools.partial(self._rank.stages[stage].precompute, microbatch))
                dropped.append(name)  # before the weights go, where they are gathered for use
            elif name in self._always:
                waits += self._buffers(stage, microbatch, reader) if name == "buffers" else []
            elif pending := self._present[stage, microbatch].get(name):
                waits += pending.pop_waits()
                self._dropped_by[stage, microbatch][name] = dropped
            elif name in self._inputs:
                self._rank.stages[stage].inputs.add(name)
            else:
                raise self._unknown(stage, microbatch, name, reader)
        if waits:
            waits.append(self._rank.clock.note_arrival)
        return _fetching(self._rank.stages[stage].frames[microbatch], names, waits, dropped)

    def _weights(self, stage: int, reader: str) -> list[Action]:
        """The waits before all weights of a stage are present."""
        if missing := self._rank.stages[stage].borrowed - self._tied_weights[stage].keys():
            raise VerifyError(
                f"stage {stage}, {reader}: the parameters {', '.join(sorted(missing))} are borrowed, but "
                "no weight link has brought them; add one to the plan, from the stage that owns them"
            )
        borrowed = [call for pending in self._tied_weights[stage].values() for call in pending.pop_waits()]
        return [*borrowed, *self._sync_linker.unshard_waits(stage)]

    def _buffers(self, stage: int, microbatch: int, reader: str) -> list[Action]:
        """The waits before a microbatch has the buffers of its forward."""
        bound = self._rank.stages[stage]
        first = self._rank.plan.stages[stage].functions(Phase.FORWARD)[0]
        if reader == first and bound.code.UPDATED_BUFFERS:
            return [functools.partial(bound.select_buffers, microbatch)]
        return []

    def _unknown(self, stage: int, microbatch: int, name: str, reader: str) -> VerifyError:
        present = sorted({*self._present[stage, microbatch], *self._inputs, *self._always})
        return VerifyError(
            f"stage {stage}, {reader}, microbatch {microbatch}: nothing provides {name!r}; "
            f"at this point of the program there are {', '.join(present)}"
        )


def _fetching(
    frame: Frame, names: Sequence[str], waits: Sequence[Action], dropped: Sequence[str]
) -> FetchArguments:
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
