"""Linking: every instruction of a program becomes an action, a call without arguments.

The linker walks the program once, and looks up each op in a table. For each stage and microbatch it keeps
track of the named values that are present. It refuses a compute that asks for a name nothing provides. The
last reader of a value drops it.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from torch import Tensor

from pipec.errors import VerifyError
from pipec.ir import SCHEDULED_PHASES, Instruction, Link, ModelCollective, Op, Payload, Phase
from pipec.runtime.stages.bound_stage import Frame, parameter_names
from pipec.runtime.stages.model_collectives import RunningCollective
from pipec.runtime.step.compute import Action, FetchArguments, bind_function
from pipec.runtime.step.linked_instruction import LinkedInstruction, in_sequence
from pipec.runtime.step.rank_state import RankState
from pipec.runtime.step.step_results import ResultCollector
from pipec.runtime.step.sync_linker import StartAndEnd, SyncLinker

ValueReader = Callable[[], Sequence[Any]]
OutputWriter = Callable[[Sequence[Tensor]], None]

_ALWAYS = frozenset({"w", "gradient_sums", "precomputed", "buffers", "constants", "b", "rng", "device"})
_WITHOUT_GRADIENTS = (Op.FORWARD, Op.RECOMPUTE)
_SAVING = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD_INPUT)
"""The phases whose last function saves something, too."""


class Linker:
    """Makes the actions of a program's instructions, one after the other.

    Raises:
        VerifyError: a stage lacks a function, or a function asks for a value that is not there.
    """

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        variables = {variable.name for variable in rank.plan.variables}
        self._always = _ALWAYS | variables | ({"grad_loss"} if rank.loss else set())
        self._inputs = {"batch_fraction", "first_row", *(entry.value.name for entry in rank.plan.inputs)}
        self._inputs |= {name for stage in rank.plan.stages for name in stage.batch_counts}
        self._present: dict[tuple[int, int], set[str]] = defaultdict(set)
        self._dropped_by: dict[tuple[int, int], dict[str, list[str]]] = defaultdict(dict)
        self._tied_weights: dict[int, set[str]] = defaultdict(set)
        self._ends: dict[object, Action] = {}
        self._received: dict[tuple[int, int], Sequence[Tensor]] = {}
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
        op = instruction.op
        action = self._wait(instruction) if op.traits.awaits else self._calls[op](instruction)
        return LinkedInstruction(instruction, action, self._microbatches(instruction))

    def _started(self, make: Callable[[Instruction], StartAndEnd], instruction: Instruction) -> Action:
        """The action that starts something; another one waits for its end."""
        start, self._ends[_key(instruction)] = make(instruction)
        return start

    def _wait(self, instruction: Instruction) -> Action:
        """Wait for what an instruction before has started. Its values are present then."""
        key = instruction.stage, instruction.microbatch
        if instruction.link:
            self._note_arrived(instruction.link, instruction.microbatch)
        elif instruction.op is Op.WAIT_PREFETCH:
            self._present[key].add("saved")
        elif instruction.model_collective >= 0:
            self._present[key].add(self._collective(instruction).value.name)
        return self._ends[_key(instruction)]

    def _note_arrived(self, link: Link, microbatch: int) -> None:
        """Note that the values of a link are present where they are read."""
        if link.payload is Payload.WEIGHT:
            self._tied_weights[link.target] |= {*link.names}
        elif link.payload.readers:
            self._present[link.target, microbatch].update(link.names)

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
        source = self._value_reader(link, instruction.microbatch, self._is_other_pipeline(instruction.peer))
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
        link, microbatch = _link_of(instruction), instruction.microbatch
        source = self._value_reader(link, microbatch)
        write_output = self._output_writer(link, microbatch, -1)
        self._note_arrived(link, microbatch)
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
        """Free a frame, and tell the last reader of each value in it to drop it. Others may take it then."""
        key = instruction.stage, instruction.microbatch
        self._present.pop(key, None)
        for name, names in self._dropped_by.pop(key, {}).items():
            names.append(name)
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

    def _value_reader(self, link: Link, microbatch: int, to_other_pipeline: bool = False) -> ValueReader:
        """The function that fetches a link's value from where it was stored."""
        names = link.names
        match link.payload:
            case Payload.ACTIVATION | Payload.GRADIENT | Payload.MICROBATCH_RESULT:
                return self._argument_fetcher(
                    link.source, microbatch, names, f"the link to stage {link.target}"
                )
            case Payload.RESULT:
                results, rank = self._rank.step_results, self._rank
                to_other = to_other_pipeline and not self._is_of_tail(link)
                fetch = results.sent_to_other_pipeline if to_other else results.merged
                return lambda: [fetch(name, rank.sizes[:-1], rank.values) for name in names]
        stage = self._rank.stages[link.source]
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
        actions = [self._call(instruction, names, segment) for segment in segments]
        if instruction.op not in _WITHOUT_GRADIENTS:  # those of the last function have an instruction
            accumulate = self._rank.stages[instruction.stage].gradients.accumulate
            actions = [each for call in actions for each in (call, accumulate)][:-1]
        if instruction.version >= 0:
            select = self._rank.stages[instruction.stage].select_version
            actions = [functools.partial(select, instruction.microbatch), *actions]
        return actions[0] if len(actions) == 1 else in_sequence(actions)

    def _call(self, instruction: Instruction, names: Sequence[str], segment: int) -> Action:
        """The action that calls one of the functions that a phase consists of."""
        stage, microbatch = self._rank.stages[instruction.stage], instruction.microbatch
        name, phase, is_last = names[segment], Phase(instruction.op), segment == len(names) - 1
        function = getattr(stage.code, name, None)
        if function is None:
            raise VerifyError(
                f"the program runs {name} of stage {stage.index}, whose code has no such function; generate "
                "the stage code for this schedule"
            )
        parameters = parameter_names(function)
        if not {"w", "precomputed"}.isdisjoint(parameters):
            self._check_tied_weights(stage.index, name)
        fetch_arguments = self._argument_fetcher(stage.index, microbatch, parameters, name)
        self._note_made(stage.index, microbatch, phase, is_last)
        results = self._collector(stage.index, phase)
        return bind_function(name, phase, is_last, stage, microbatch, fetch_arguments, results)

    def _collector(self, stage: int, phase: Phase) -> ResultCollector:
        """Who takes the results of a phase: the tail its inputs, and the step what forwards return."""
        tail = self._rank.tails.get(stage)
        return tail.collecting(self._rank.results) if tail and phase is Phase.FORWARD else self._rank.results

    def _tail(self, instruction: Instruction) -> Action:
        """Run the tail of a stage; its gradients are present in the frames then."""
        stage, tail = self._rank.stages[instruction.stage], self._rank.tails[instruction.stage]
        self._check_tied_weights(stage.index, "tail")
        stage.inputs |= tail.inputs & self._inputs
        for microbatch in self._rank.plan.microbatches_on(stage.index, self._rank.number):
            self._present[stage.index, microbatch] |= tail.gradients
        return functools.partial(tail.run, self._rank.step_results)

    def _precompute(self, instruction: Instruction) -> Action:
        stage = self._rank.stages[instruction.stage]
        self._check_tied_weights(stage.index, "precompute")
        return functools.partial(stage.precompute, instruction.microbatch)

    def _note_made(self, stage: int, microbatch: int, phase: Phase, is_last: bool) -> None:
        """Note that what a function of ``phase`` leaves in the frame is present from now on."""
        links = [link for link in self._rank.plan.links if is_last and phase in link.payload.producers]
        sent, received = (
            {name for x in links if x.payload.per_microbatch and getattr(x, end) == stage for name in x.names}
            for end in ("source", "target")
        )
        self._present[stage, microbatch] |= sent - received  # what it has received, it hands on
        if phase in _SAVING or not is_last:
            self._present[stage, microbatch].add("saved")

    def _collective(self, instruction: Instruction) -> ModelCollective:
        return self._rank.plan.stages[instruction.stage].model_collectives[instruction.model_collective]

    def _model_collective(self, instruction: Instruction) -> Action:
        """Start a model collective of a microbatch."""
        stage, collective = self._rank.stages[instruction.stage], self._collective(instruction)
        group = self._rank.transport.group(self._rank.plan.placement[stage.index])
        running = RunningCollective(collective, stage.frames[instruction.microbatch], group)
        self._ends[_key(instruction)] = running.finish
        return running.start

    def _argument_fetcher(
        self, stage: int, microbatch: int, names: Sequence[str], reader: str
    ) -> FetchArguments:
        """The function that fetches values from a frame, and drops those that nobody reads later."""
        first, dropped = list[Action](), list[str]()
        for name in names:
            if name == "precomputed":
                first.append(functools.partial(self._rank.stages[stage].select_precomputed, microbatch))
                dropped.append(name)  # before the weights go, where they are gathered for use
            elif name in self._always:
                first += self._buffers(stage, microbatch, reader) if name == "buffers" else []
            elif name in self._present[stage, microbatch]:
                self._dropped_by[stage, microbatch][name] = dropped
            elif name in self._inputs:
                self._rank.stages[stage].inputs.add(name)
            else:
                raise self._unknown(stage, microbatch, name, reader)
        return _fetching(self._rank.stages[stage].frames[microbatch], names, first, dropped)

    def _check_tied_weights(self, stage: int, reader: str) -> None:
        """Raise VerifyError unless all borrowed weights of a stage are present."""
        if missing := self._rank.stages[stage].borrowed - self._tied_weights[stage]:
            raise VerifyError(
                f"stage {stage}, {reader}: the parameters {', '.join(sorted(missing))} are borrowed, but "
                "no weight link has brought them; add one to the plan, from the stage that owns them"
            )

    def _buffers(self, stage: int, microbatch: int, reader: str) -> list[Action]:
        """What puts the buffers of a microbatch's forward into its frame."""
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
    frame: Frame, names: Sequence[str], first: Sequence[Action], dropped: Sequence[str]
) -> FetchArguments:
    fetch = itemgetter(*names) if len(names) > 1 else lambda frame: [frame[name] for name in names]

    def fetch_arguments() -> Sequence[Any]:
        for action in first:
            action()
        values: Sequence[Any] = fetch(frame)
        for name in dropped:
            del frame[name]
        return values

    return fetch_arguments


def _key(instruction: Instruction) -> object:
    """What an instruction that starts something and its wait have in common."""
    op = instruction.op.traits.awaits or instruction.op
    return (op, *(getattr(instruction, name) for name in _SHARED_FIELDS))


_SHARED_FIELDS = ("stage", "microbatch", "link", "peer", "bucket", "model_collective")


def _link_of(instruction: Instruction) -> Link:
    assert instruction.link is not None
    return instruction.link
