"""Linking: every instruction of a program becomes an action, a call without arguments.

The linker walks the program once, and looks up each op in a table.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pipec.errors import VerifyError
from pipec.ir import SCHEDULED_PHASES, Instruction, Link, Op, Payload, Phase
from pipec.runtime.stages.bound_stage import BoundStage
from pipec.runtime.stages.model_collectives import RunningCollective
from pipec.runtime.step.linked_instruction import Action, LinkedInstruction, in_sequence
from pipec.runtime.step.rank_state import RankState
from pipec.runtime.step.step_results import ResultCollector
from pipec.runtime.step.sync_linker import StartAndEnd, SyncLinker

ValueReader = Callable[[], Sequence[Any]]
OutputWriter = Callable[[Sequence[Tensor]], None]

_WITHOUT_GRADIENTS = (Op.FORWARD, Op.RECOMPUTE)


class Linker:
    """Makes the actions of a program's instructions. ``instructions`` are all of them, as they run.

    Raises:
        VerifyError: a stage lacks a function.
    """

    def __init__(self, rank: RankState, instructions: Sequence[Instruction]) -> None:
        self._rank = rank
        self._ends: dict[object, Action] = {}
        self._received: dict[tuple[int, int], Sequence[Tensor]] = {}
        self._last_messages = {
            (each.link.source, each.microbatch, name): (each.link, each.peer)
            for each in instructions
            if each.link and each.op in (Op.SEND, Op.MOVE)
            for name in each.link.names
        }
        sync = SyncLinker(rank)
        self._calls: Mapping[Op, Callable[[Instruction], Action]] = {
            Op.RECV: self._receive,
            Op.SEND: self._send,
            Op.MOVE: self._move,
            Op.ACCUMULATE: self._accumulate,
            Op.PRECOMPUTE: self._precompute,
            Op.FREE: self._free,
            Op.OFFLOAD: self._offload,
            Op.PREFETCH: self._prefetch,
            **dict.fromkeys((Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER), self._model_collective),
            **dict.fromkeys(map(Op, SCHEDULED_PHASES), self._compute),
            Op.TAIL: self._tail,
            **{op: functools.partial(self._started, make) for op, make in sync.starts.items()},
            **sync.calls,
        }

    def link(self, instruction: Instruction) -> LinkedInstruction:
        awaits = instruction.op.traits.awaits
        action = self._ends[_key(instruction)] if awaits else self._calls[instruction.op](instruction)
        return LinkedInstruction(instruction, action, self._microbatches(instruction))

    def _started(self, make: Callable[[Instruction], StartAndEnd], instruction: Instruction) -> Action:
        """The action that starts something; another one waits for its end."""
        start, self._ends[_key(instruction)] = make(instruction)
        return start

    def _microbatches(self, instruction: Instruction) -> Sequence[int]:
        """The microbatches of an instruction, or of the values that it moves; none if it has none."""
        op, link, number = instruction.op, instruction.link, self._rank.number
        if not (op.traits.per_microbatch or op.traits.carries_link):
            return ()  # also in a stream, where updates and reductions have the last of their microbatches
        if instruction.microbatch >= 0:
            return (instruction.microbatch,)
        if link is None or link.payload is Payload.WEIGHT:
            return ()
        return self._rank.plan.microbatches_on(
            link.source, number if op in (Op.SEND, Op.MOVE) else instruction.peer
        )

    def _receive(self, instruction: Instruction) -> Action:
        link, microbatch, rank = _link_of(instruction), instruction.microbatch, self._rank
        if link.payload is Payload.MICROBATCH_RESULT:  # several are on their way at once
            instruction = replace(instruction, slot=microbatch)
        receiver = self._rank.transport.receiver(instruction, self._tag(link))
        wait, post = receiver.wait, receiver.post
        write_output = self._output_writer(link, microbatch, instruction.peer)
        self._ends[_key(instruction)] = lambda: write_output(wait())
        num_rows = self._num_rows(instruction)
        return lambda: post(rank.sizes_with(num_rows()))

    def _send(self, instruction: Instruction) -> Action:
        link, rank = _link_of(instruction), self._rank
        send = rank.transport.sender(instruction, self._tag(link))
        source = self._value_reader(instruction)
        num_rows = self._num_rows(instruction)
        return lambda: send(source(), rank.sizes_with(num_rows()))

    def _num_rows(self, instruction: Instruction) -> Callable[[], int]:
        """The number of rows of a message in the current step."""
        sizes, microbatch = self._rank.sizes, instruction.microbatch
        if _link_of(instruction).payload is not Payload.RESULT:
            return lambda: sizes[microbatch]
        if self._is_of_tail(_link_of(instruction)):
            return lambda: sizes[-1]
        results, to_other = self._rank.step_results, self._is_other_pipeline(instruction.peer)
        made_of = self._microbatches(instruction)
        return lambda: 0 if to_other and results.is_local else sum(sizes[each] for each in made_of)

    def _is_of_tail(self, link: Link) -> bool:
        """Whether a link carries what a tail makes of the whole batch."""
        tail = self._rank.plan.stages[link.source].tail
        return tail is not None and {*link.names} <= {*tail.results}

    def _is_other_pipeline(self, peer: int) -> bool:
        """Whether a rank belongs to another one of several whole pipelines."""
        placement = self._rank.plan.placement
        own, other = (
            next(ranks.index(rank) for ranks in placement if rank in ranks)
            for rank in (self._rank.number, peer)
        )
        return own != other

    def _move(self, instruction: Instruction) -> Action:
        source = self._value_reader(instruction)
        write_output = self._output_writer(_link_of(instruction), instruction.microbatch, -1)
        return lambda: write_output(source())

    def _accumulate(self, instruction: Instruction) -> Action:
        """Add the gradients of the compute before, or those that another rank has sent."""
        stage, link = self._rank.stages[instruction.stage], instruction.link
        if link is None:
            return stage.gradients.accumulate
        received, key = self._received, (self._tag(link), instruction.peer)
        indices = [stage.code.PARAMETERS.index(name) for name in link.names]

        def add() -> None:
            for index, gradient in zip(indices, received.pop(key), strict=True):
                stage.gradients.add_tied(index, gradient)

        return add

    def _free(self, instruction: Instruction) -> Action:
        return self._rank.stages[instruction.stage].frames[instruction.microbatch].clear

    def _offload(self, instruction: Instruction) -> Action:
        """Start to copy saved values to the host; the wait for that frees them on the device."""
        stage = self._rank.stages[instruction.stage]
        frame, copies = stage.frames[instruction.microbatch], stage.copies
        self._ends[_key(instruction)] = lambda: copies.release_device_memory(frame.get("saved", ()))
        return lambda: copies.offload(frame["saved"])

    def _prefetch(self, instruction: Instruction) -> Action:
        """Start to copy saved values back."""
        microbatch, stage = instruction.microbatch, self._rank.stages[instruction.stage]
        frame, copies = stage.frames[microbatch], stage.copies
        self._ends[_key(instruction)] = lambda: copies.wait_prefetch(microbatch)
        return lambda: copies.prefetch(frame["saved"], microbatch)

    def _tag(self, link: Link) -> int:
        return self._rank.plan.links.index(link)

    def _value_reader(self, instruction: Instruction) -> ValueReader:
        """The function that takes a link's values from where they were stored."""
        link, names = _link_of(instruction), _link_of(instruction).names
        if link.payload is Payload.RESULT:
            results, rank = self._rank.step_results, self._rank
            to_other = self._is_other_pipeline(instruction.peer) and not self._is_of_tail(link)
            fetch = results.sent_to_other_pipeline if to_other else results.merged
            return lambda: [fetch(name, rank.sizes[:-1], rank.values) for name in names]
        stage = self._rank.stages[link.source]
        if link.payload.per_microbatch:
            frame, message = stage.frames[instruction.microbatch], (link, instruction.peer)
            last = self._last_messages
            is_read_later = [last[stage.index, instruction.microbatch, name] != message for name in names]
            takes = [frame.__getitem__ if later else frame.pop for later in is_read_later]
            return lambda: [take(name) for take, name in zip(takes, names, strict=True)]
        indices = [stage.code.PARAMETERS.index(name) for name in names]
        if link.payload is Payload.WEIGHT:
            return lambda: [stage.weights[index] for index in indices]
        return lambda: [stage.gradients.pop(index) for index in indices]

    def _output_writer(self, link: Link, microbatch: int, peer: int) -> OutputWriter:
        """The function that stores a link's value where its reader finds it."""
        names = link.names
        if link.payload is Payload.MICROBATCH_RESULT:
            results = self._rank.results
            return lambda tensors: results.collect(microbatch, dict(zip(names, tensors, strict=True)))
        if link.payload is Payload.RESULT:
            received = self._rank.received
            return lambda tensors: received.update(
                {(name, peer): tensor for name, tensor in zip(names, tensors, strict=True)}
            )
        if link.payload is Payload.WEIGHT_GRADIENT and peer >= 0:
            gradients, key = self._received, (self._tag(link), peer)
            return functools.partial(gradients.__setitem__, key)
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

    def _compute(self, instruction: Instruction) -> Action:
        names = self._rank.plan.stages[instruction.stage].functions(Phase(instruction.op))
        segments = range(len(names)) if instruction.segment < 0 else (instruction.segment,)
        stage, microbatch = self._rank.stages[instruction.stage], instruction.microbatch
        actions = [self._call(instruction, names, segment) for segment in segments]
        if instruction.op not in _WITHOUT_GRADIENTS:  # those of the last function have an instruction
            accumulate = stage.gradients.accumulate
            actions = [each for call in actions for each in (call, accumulate)][:-1]
        if instruction.op is Op.FORWARD and segments[0] == 0 and stage.updated_indices:
            actions = [functools.partial(stage.select_buffers, microbatch), *actions]
        if instruction.version >= 0:
            actions = [functools.partial(stage.select_version, microbatch), *actions]
        return actions[0] if len(actions) == 1 else in_sequence(actions)

    def _call(self, instruction: Instruction, names: Sequence[str], segment: int) -> Action:
        """The action that calls one of the functions that a phase consists of."""
        stage, name, phase = self._rank.stages[instruction.stage], names[segment], Phase(instruction.op)
        if getattr(stage.code, name, None) is None:
            raise VerifyError(
                f"the program runs {name} of stage {stage.index}, whose code has no such function; generate "
                "the stage code for this schedule"
            )
        is_last = segment == len(names) - 1
        return _bound(
            name, phase, is_last, stage, instruction.microbatch, self._collector(stage.index, phase)
        )

    def _collector(self, stage: int, phase: Phase) -> ResultCollector:
        """Who takes the results of a phase: the tail its inputs, and the step what forwards return."""
        tail = self._rank.tails.get(stage)
        return tail.collecting(self._rank.results) if tail and phase is Phase.FORWARD else self._rank.results

    def _tail(self, instruction: Instruction) -> Action:
        """Run the tail of a stage; its gradients are present in the frames then."""
        return functools.partial(self._rank.tails[instruction.stage].run, self._rank.step_results)

    def _precompute(self, instruction: Instruction) -> Action:
        return functools.partial(self._rank.stages[instruction.stage].precompute, instruction.microbatch)

    def _model_collective(self, instruction: Instruction) -> Action:
        """Start a model collective of a microbatch."""
        stage = self._rank.stages[instruction.stage]
        collective = self._rank.plan.stages[stage.index].model_collectives[instruction.model_collective]
        group = self._rank.transport.group(self._rank.plan.placement[stage.index])
        running = RunningCollective(collective, stage.frames[instruction.microbatch], group)
        self._ends[_key(instruction)] = running.finish
        return running.start


def _bound(
    name: str, phase: Phase, is_last: bool, stage: BoundStage, microbatch: int, results: ResultCollector
) -> Action:
    """The action that calls a function of ``stage`` on ``microbatch``, and stores its results.

    ``is_last`` tells the last function of ``phase`` from those that save something for the next one. The
    stage keeps gradients until they are accumulated.

    Gradients are handed over in a list that replaces the tuple a function returned. Nothing but the list then
    holds them, and ``GradientAccumulator`` keeps the memory of such a gradient instead of copying it.
    """
    frame, function, keep = stage.frames[microbatch], stage.function(name), stage.gradients.keep

    def forward() -> None:
        sent, saved, updates = function(frame)
        results.collect(microbatch, sent)
        if updates:
            stage.update_buffers(updates)
        frame.update(sent, saved=saved)

    def recompute() -> None:
        frame["saved"] = function(frame)

    def backward() -> None:
        sent, gradients = function(frame)
        frame.update(sent)
        keep([*gradients])

    def backward_input() -> None:
        sent, saved, gradients = function(frame)
        frame.update(sent, saved=saved)
        keep([*gradients])

    def backward_weight() -> None:
        gradients = function(frame)
        keep([*gradients])

    def part_of_backward_weight() -> None:
        frame["saved"], gradients = function(frame)
        keep([*gradients])

    actions = {
        Phase.FORWARD: forward,
        Phase.RECOMPUTE: recompute,
        Phase.BACKWARD: backward if is_last else backward_input,
        Phase.BACKWARD_INPUT: backward_input,
        Phase.BACKWARD_WEIGHT: backward_weight if is_last else part_of_backward_weight,
    }
    return actions[phase]


def _key(instruction: Instruction) -> object:
    """What an instruction that starts something and its wait have in common."""
    op = instruction.op.traits.awaits or instruction.op
    return (op, *(getattr(instruction, name) for name in _SHARED_FIELDS))


_SHARED_FIELDS = ("stage", "microbatch", "link", "peer", "bucket", "model_collective")


def _link_of(instruction: Instruction) -> Link:
    assert instruction.link is not None
    return instruction.link
