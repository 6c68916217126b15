"""Linking: every instruction of a program becomes an action, a call without arguments.

The linker walks the program once, and looks up each op in a table. What an instruction starts, another one
awaits: the first one's row makes both actions.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pipec.ir import SCHEDULED_PHASES, Instruction, Link, NonFiniteAction, Op, Payload, Phase, Sizes, StepPart
from pipec.runtime.messages.collective_group import CollectiveGroup, CollectiveWait
from pipec.runtime.optimizers import StageOptimizer, sum_of_squares
from pipec.runtime.stages.bound_stage import BoundStage
from pipec.runtime.stages.flat_bucket import FlatBucket, ShardedBucket, reduction_dtype, undivided
from pipec.runtime.stages.host_bucket import HostBucket
from pipec.runtime.stages.replica_reductions import BufferAverage, no_rows, sum_of_rows
from pipec.runtime.step.non_finite import found_in, is_overflow, norm_table, require_finite
from pipec.runtime.step.rank_state import RankState
from pipec.runtime.step.step_results import zeros_of

Action = Callable[[], None]

StartAndEnd = tuple[Action, Action]
"""The action that starts something, and the one that waits for its end."""

_WITHOUT_GRADIENTS = (Op.FORWARD, Op.RECOMPUTE)


def nothing() -> None:
    """The action that does nothing."""


def in_sequence(actions: Sequence[Action]) -> Action:
    """An action that makes these, one after the other."""

    def act() -> None:
        for action in actions:
            action()

    return actions[0] if len(actions) == 1 else act


class Linker:
    """Makes the actions of a program's instructions. ``instructions`` are all of them, as they run."""

    def __init__(self, rank: RankState, instructions: Sequence[Instruction]) -> None:
        self._rank, self._plan, self._stages = rank, rank.plan, rank.stages
        self._ends: dict[object, Action] = {}
        self._buckets: dict[int, FlatBucket] = {}
        self._on_host: dict[int, HostBucket] = {}
        self._received: dict[tuple[int, int], Sequence[Tensor]] = {}
        self._last_messages = {
            (each.link.source, each.microbatch, name): (each.link, each.peer)
            for each in instructions
            if each.link and each.op in (Op.SEND, Op.MOVE)
            for name in each.link.names
        }
        self._calls: Mapping[Op, Callable[[Instruction], Action | StartAndEnd]] = {
            Op.RECV: self._receive,
            Op.SEND: self._send,
            Op.MOVE: self._move,
            **dict.fromkeys(map(Op, SCHEDULED_PHASES), self._compute),
            Op.ACCUMULATE: self._accumulate,
            Op.PRECOMPUTE: lambda x: functools.partial(self._stages[x.stage].precompute, x.microbatch),
            Op.FREE: lambda x: self._stages[x.stage].frames[x.microbatch].clear,
            Op.OFFLOAD: self._offload,
            Op.PREFETCH: self._prefetch,
            Op.SUM_COUNTS: self._sum_counts,
            Op.GATHER_ROWS: self._gather_rows,
            Op.TAIL: lambda x: functools.partial(rank.tails[x.stage].run, rank.step_results),
            Op.REDUCE_GRAD: self._reduce,
            Op.AVERAGE_BUFFERS: self._average,
            Op.GRAD_NORM: self._norm,
            Op.STAGE_NORM: self._stage_norm,
            Op.CHECK: self._check,
            Op.STASH: self._stash,
            Op.UPDATE: self._update,
            Op.HOST_UPDATE: self._update,
            Op.PAUSE: lambda x: nothing,
            Op.UNSHARD: self._unshard,
            Op.LOAD: self._load,
            Op.STORE: self._store,
            Op.RESHARD: self._reshard,
            **dict.fromkeys((Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER), self._model_collective),
        }

    def link(self, instruction: Instruction) -> Action:
        if instruction.op.traits.awaits:
            return self._ends[_key(instruction)]
        made = self._calls[instruction.op](instruction)
        if isinstance(made, tuple):
            made, self._ends[_key(instruction)] = made
        return made

    # messages

    def _receive(self, instruction: Instruction) -> StartAndEnd:
        link, rank = _link_of(instruction), self._rank
        if link.payload is Payload.MICROBATCH_RESULT:  # several are on their way at once
            instruction = replace(instruction, slot=instruction.microbatch)
        receiver = rank.transport.receiver(instruction, self._tag(link))
        wait, post, sizes = receiver.wait, receiver.post, self._sizes(instruction)
        keep = self._writer(link, instruction.microbatch, instruction.peer)
        return lambda: post(sizes()), lambda: keep(wait())

    def _send(self, instruction: Instruction) -> Action:
        link, rank = _link_of(instruction), self._rank
        send, sizes = rank.transport.sender(instruction, self._tag(link)), self._sizes(instruction)
        read = self._reader(instruction)
        return lambda: send(read(), sizes())

    def _move(self, instruction: Instruction) -> Action:
        read = self._reader(instruction)
        keep = self._writer(_link_of(instruction), instruction.microbatch, -1)
        return lambda: keep(read())

    def _sizes(self, instruction: Instruction) -> Callable[[], Sizes]:
        """What the names in the shapes of a message stand for in the current step."""
        link, sizes, results = _link_of(instruction), self._rank.sizes, self._rank.step_results
        if link.payload is not Payload.RESULT:
            return functools.partial(sizes.__getitem__, instruction.microbatch)
        if results.is_of_tail(link.names):
            return functools.partial(sizes.__getitem__, -1)
        to_other = self._is_other_pipeline(instruction.peer)
        made_of = microbatches_of(instruction, self._rank)

        def of_result() -> Sizes:
            rows = 0 if to_other and results.is_local else sum(int(sizes[each]["b"]) for each in made_of)
            return {**sizes[-1], "b": rows}

        return of_result

    def _is_other_pipeline(self, peer: int) -> bool:
        """Whether a rank belongs to another one of several whole pipelines."""
        own, other = (
            next(ranks.index(rank) for ranks in self._plan.placement if rank in ranks)
            for rank in (self._rank.number, peer)
        )
        return own != other

    def _tag(self, link: Link) -> int:
        return self._plan.links.index(link)

    def _reader(self, instruction: Instruction) -> Callable[[], Sequence[Any]]:
        """The function that takes a link's values from where they were stored."""
        link, names = _link_of(instruction), _link_of(instruction).names
        if link.payload is Payload.RESULT:
            results = self._rank.step_results
            to_other = self._is_other_pipeline(instruction.peer) and not results.is_of_tail(names)
            return lambda: [results.sent(name, to_other) for name in names]
        stage = self._stages[link.source]
        if link.payload.per_microbatch:
            frame, message = stage.frames[instruction.microbatch], (link, instruction.peer)
            last = self._last_messages
            is_read_later = [last[stage.index, instruction.microbatch, name] != message for name in names]
            takes = [frame.__getitem__ if later else frame.pop for later in is_read_later]
            return lambda: [take(name) for take, name in zip(takes, names, strict=True)]
        indices = [stage.code.PARAMETERS.index(name) for name in names]
        take = stage.weights.__getitem__ if link.payload is Payload.WEIGHT else stage.gradients.pop
        return lambda: [*map(take, indices)]

    def _writer(self, link: Link, microbatch: int, peer: int) -> Callable[[Sequence[Tensor]], None]:
        """The function that stores a link's values where their reader finds them."""
        names = link.names
        if link.payload is Payload.MICROBATCH_RESULT:
            results = self._rank.results
            return lambda tensors: results.collect(microbatch, dict(zip(names, tensors, strict=True)))
        if link.payload is Payload.RESULT:
            return functools.partial(self._rank.step_results.receive, names, peer)
        if link.payload is Payload.WEIGHT_GRADIENT and peer >= 0:
            return functools.partial(self._received.__setitem__, (self._tag(link), peer))
        stage = self._stages[link.target]
        if link.payload.per_microbatch:
            frame = stage.frames[microbatch]
            return lambda tensors: frame.update(zip(names, tensors, strict=True))
        indices = [stage.code.PARAMETERS.index(name) for name in names]
        keep = stage.weights.__setitem__ if link.payload is Payload.WEIGHT else stage.gradients.add_tied

        def keep_all(tensors: Sequence[Tensor]) -> None:
            for index, tensor in zip(indices, tensors, strict=True):
                keep(index, tensor)

        return keep_all

    # computes

    def _compute(self, instruction: Instruction) -> Action:
        names = self._plan.stages[instruction.stage].functions(Phase(instruction.op))
        segments = range(len(names)) if instruction.segment < 0 else (instruction.segment,)
        stage, microbatch = self._stages[instruction.stage], instruction.microbatch
        actions = [self._call(instruction, names, segment) for segment in segments]
        if instruction.op not in _WITHOUT_GRADIENTS:  # those of the last function have an instruction
            accumulate = stage.gradients.accumulate
            actions = [each for call in actions for each in (call, accumulate)][:-1]
        if instruction.op is Op.FORWARD and segments[0] == 0 and stage.updated_indices:
            actions = [functools.partial(stage.select_buffers, microbatch), *actions]
        if instruction.version >= 0:
            actions = [functools.partial(stage.select_version, microbatch), *actions]
        return in_sequence(actions)

    def _call(self, instruction: Instruction, names: Sequence[str], segment: int) -> Action:
        """The action that calls one of the functions of a phase on a microbatch, and stores its results.

        All but the last function save something for the next one. The stage keeps gradients until they are
        accumulated. They are handed over in a list that replaces the tuple a function returned: nothing but
        the list then holds them, and ``GradientAccumulator`` keeps the memory of such a gradient instead of
        copying it.
        """
        stage, microbatch, name = self._stages[instruction.stage], instruction.microbatch, names[segment]
        frame, function, gradient_sums = stage.frames[microbatch], stage.function(name), stage.gradients
        results, tail = self._rank.results, self._rank.tails.get(stage.index)
        is_last = segment == len(names) - 1

        def forward() -> None:
            sent, saved, updates = function(frame)
            if tail:
                tail.collect(microbatch, sent)
            results.collect(microbatch, sent)
            if updates:
                stage.update_buffers(updates)
            frame.update(sent, saved=saved)

        def recompute() -> None:
            frame["saved"] = function(frame)

        def backward() -> None:
            sent, gradients = function(frame)
            frame.update(sent)
            gradient_sums.kept = [*gradients]

        def backward_input() -> None:
            sent, saved, gradients = function(frame)
            frame.update(sent, saved=saved)
            gradient_sums.kept = [*gradients]

        def backward_weight() -> None:
            gradients = function(frame)
            gradient_sums.kept = [*gradients]

        def part_of_backward_weight() -> None:
            frame["saved"], gradients = function(frame)
            gradient_sums.kept = [*gradients]

        actions = {
            Phase.FORWARD: forward,
            Phase.RECOMPUTE: recompute,
            Phase.BACKWARD: backward if is_last else backward_input,
            Phase.BACKWARD_INPUT: backward_input,
            Phase.BACKWARD_WEIGHT: backward_weight if is_last else part_of_backward_weight,
        }
        return actions[Phase(instruction.op)]

    def _accumulate(self, instruction: Instruction) -> Action:
        """Add the gradients of the compute before, or those that another rank has sent."""
        stage, link = self._stages[instruction.stage], instruction.link
        if link is None:
            return stage.gradients.accumulate
        received, key = self._received, (self._tag(link), instruction.peer)
        indices = [stage.code.PARAMETERS.index(name) for name in link.names]

        def add() -> None:
            if key in received:  # not from a replica whose microbatches have no rows
                for index, gradient in zip(indices, received.pop(key), strict=True):
                    stage.gradients.add_tied(index, gradient)

        return add

    def _offload(self, instruction: Instruction) -> StartAndEnd:
        """Start to copy saved values to the host; the wait for that frees them on the device."""
        stage = self._stages[instruction.stage]
        frame, copies = stage.frames[instruction.microbatch], stage.copies
        return (
            lambda: copies.offload(frame["saved"]),
            lambda: copies.release_device_memory(frame.get("saved", ())),
        )

    def _prefetch(self, instruction: Instruction) -> StartAndEnd:
        """Start to copy saved values back."""
        microbatch, stage = instruction.microbatch, self._stages[instruction.stage]
        frame, copies = stage.frames[microbatch], stage.copies
        return (
            lambda: copies.prefetch(frame["saved"], microbatch),
            lambda: copies.wait_prefetch(microbatch),
        )

    def _model_collective(self, instruction: Instruction) -> StartAndEnd:
        """Start a model collective of a microbatch, whose result replaces the replica's value."""
        stage, group = self._stages[instruction.stage], self._group(instruction)
        collective = self._plan.stages[stage.index].model_collectives[instruction.model_collective]
        frame, name = stage.frames[instruction.microbatch], collective.value.name
        started = dict[str, tuple[Tensor, CollectiveWait]]()

        def start() -> None:
            started[name] = _start(collective.op, frame.pop(name), group)

        def finish() -> None:
            frame[name], wait = started.pop(name)
            wait()

        return start, finish

    # what runs once a step on all rows

    def _sum_counts(self, instruction: Instruction) -> StartAndEnd:
        """Sum the counts of a stage in the order of its replicas: they have the same bits on all."""
        rank, stage, group = self._rank, self._stages[instruction.stage], self._group(instruction)
        sums, own = self._plan.stages[stage.index].batch_count_sums, rank.own[stage.index]
        gathered: list[tuple[str, Tensor, CollectiveWait]] = []

        def start() -> None:
            with_rows = [each for each in own if rank.sizes[each]["b"]]
            parts = [stage.batch_counts(rank.inputs[each], rank.sizes[each]) for each in with_rows]
            gathered.clear()
            for value in sums:
                none = zeros_of(value, {**rank.sizes[-1], "b": 0}, rank.device)
                terms = [part[value.name] for part in parts] or [none]
                term = functools.reduce(Tensor.add, terms)
                every = term.new_empty(group.size, *term.shape)
                wait = group.all_gather(every.view(-1), term.contiguous().view(-1))
                gathered.append((value.name, every, wait))

        def finish() -> None:
            counts = dict[str, Tensor]()
            for name, every, wait in gathered:
                wait()
                counts[name] = functools.reduce(Tensor.add, every.unbind())
            gathered.clear()
            for microbatch in own:
                if rank.sizes[microbatch]["b"]:
                    stage.frames[microbatch].update(counts)
            if stage.index in rank.tails:
                rank.tails[stage.index].frame.update(counts)

        return start, finish

    def _gather_rows(self, instruction: Instruction) -> StartAndEnd:
        tail = self._rank.tails[instruction.stage]
        return functools.partial(tail.start_gather, self._group(instruction)), tail.finish_gather

    # sums over replicas

    def _reduce(self, instruction: Instruction) -> StartAndEnd:
        """Reduce the gradients of a bucket, and add sums that are whole to ``.grad``."""
        rank, stage, group = self._rank, self._stages[instruction.stage], self._group(instruction)
        bucket = self._plan.sync_spec.buckets[instruction.bucket]
        indices = {name: stage.code.PARAMETERS.index(name) for name in bucket.names}
        flat = self._shard(instruction) or self._whole(instruction.bucket, stage, indices)
        sparse = dict[str, Tensor]()

        def start() -> None:
            totals = {name: stage.gradients.pop(index) for name, index in indices.items()}
            if not bucket.sparse:
                flat.start_reduce(totals, group, rank.host_link)
                return
            for name, rows in totals.items():  # synchronously
                own = no_rows(stage.weights[indices[name]]) if rows is None else rows
                sparse[name] = sum_of_rows(own, group)

        def finish() -> None:
            sums = {**sparse, **flat.finish_reduce()}
            sparse.clear()
            for name, total in sums.items() if stage.keeps_gradients else ():
                own = stage.parameter(indices[name])
                stage.gradients.add_reduced(indices[name], total.to(own.device, own.dtype))

        return start, finish

    def _whole(self, number: int, stage: BoundStage, indices: Mapping[str, int]) -> FlatBucket:
        """The flat memory of a bucket that is not sharded."""
        if number not in self._buckets:
            weights = {name: stage.parameter(index) for name, index in indices.items()}
            sync_spec, own = self._plan.sync_spec, next(iter(weights.values())).dtype
            dtype = reduction_dtype(sync_spec.gradient_dtype, own)
            self._buckets[number] = FlatBucket(undivided(weights), weights, stage.device, dtype)
            if dtype is own and not sync_spec.buckets[number].sparse:
                names = {index: name for name, index in indices.items()}
                stage.gradients.accumulate_in(self._buckets[number], names)
        return self._buckets[number]

    def _average(self, instruction: Instruction) -> StartAndEnd:
        rank, stage = self._rank, self._stages[instruction.stage]
        replicas = self._plan.placement[stage.index]
        own = [self._plan.microbatches_on(stage.index, each) for each in replicas]

        def counts() -> Sequence[int]:
            return [sum(rank.sizes[each]["b"] > 0 for each in microbatches) for microbatches in own]

        names, index = self._plan.stages[stage.index].averaged_buffers, replicas.index(rank.number)
        average = BufferAverage(stage, self._group(instruction), names, index, counts)
        return average.start, average.finish

    # updates

    def _norm(self, instruction: Instruction) -> Action:
        """Sum the squares of the norms for every update to come, and tell all ranks what is not finite.

        Each parameter's is summed over the ranks first, and then those of all in the model's order. So the
        bits of the sum do not depend on which ranks have which parameters.
        """
        rank, updates, plan, names = self._rank, self._rank.updates, self._plan, self._parameter_order
        group = rank.transport.group(range(plan.num_ranks))

        def norm() -> None:
            losses = rank.step_results.losses
            rank.table = norm_table(plan, names, self._norm_gradients(), losses, rank.device)
            group.all_reduce(rank.table)()
            if updates is not None and updates.max_norm is not None:
                squares = rank.table[: len(names)].sum().abs()
                updates.grad_norm, rank.factor = squares.sqrt(), updates.factor(squares)

        return norm

    @property
    def _parameter_order(self) -> Sequence[str]:
        """The parameters whose gradients are checked, in the model's order."""
        updates = self._rank.updates
        return [*updates.shapes] if updates else [value.name for value in self._plan.parameters]

    def _norm_gradients(self) -> dict[str, Tensor]:
        """The gradients that this rank counts in the global norm, by name."""
        if self._rank.updates is not None:
            own = filter(None, map(self._own, self._stages))
            return {name: x for update in own for name, x in update.norm_gradients.items()}
        return {
            stage.code.PARAMETERS[index]: total
            for number, stage in self._stages.items()
            if self._rank.number == self._plan.placement[number][0]
            for index, total in stage.gradients.unreleased.items()
        }

    def _check(self, instruction: Instruction) -> Action:
        """Decide whether the step is skipped; in a stream, whether a mini-batch is."""
        rank, number = self._rank, instruction.stage
        if number < 0:
            return self._check_step
        results, versions, update = rank.stream_results, self._stages[number].versions, self._own(number)

        def check_batch() -> None:
            rank.skipped.discard(number)
            if versions.number >= results.num_finite:
                rank.skipped.add(number)
            elif update is not None:
                require_finite(update.norm_gradients)

        return check_batch

    def _check_step(self) -> None:
        """Keep the step or skip it: no update, no gradient in ``.grad``, no buffer."""
        rank, updates, sync_spec = self._rank, self._rank.updates, self._plan.sync_spec
        assert rank.table is not None, "the norm comes first"
        found = found_in(self._plan, self._parameter_order, rank.table)
        accumulates = rank.part in (StepPart.ACCUMULATE, StepPart.BACKWARDS)
        if updates is not None and not accumulates:
            found = updates.skip_reasons.pop(rank.number, None) or found
        rank.non_finite = found
        if updates is None:
            for stage in self._stages.values() if found is None else ():
                stage.gradients.release()
        elif found is None:
            return
        elif accumulates and (sync_spec.on_nan is NonFiniteAction.SKIP or is_overflow(found, sync_spec)):
            updates.skip_reasons[rank.number] = found
        else:
            for update in filter(None, map(self._own, self._stages)):
                update.drop_gradients()

    def _stage_norm(self, instruction: Instruction) -> Action:
        """Compute the factor by which the next update of a stage of a stream is clipped."""
        rank, updates, update = self._rank, self._rank.updates, self._own(instruction.stage)
        assert updates is not None, "a program that updates has an optimizer"

        def norm() -> None:
            if update is not None:
                rank.factor = updates.factor(sum_of_squares(update.norm_gradients.values()))

        return norm

    def _stash(self, instruction: Instruction) -> Action:
        """Keep the weights of a stage that its next update changes."""
        stage, skipped = self._stages[instruction.stage], self._rank.skipped

        def stash() -> None:
            changes = stage.index not in skipped
            stage.versions.stash(
                [i for i, weight in enumerate(stage.weights) if changes and weight.grad is not None]
            )

        return stash

    def _update(self, instruction: Instruction) -> Action:
        """Update a stage. In a stream, this makes its next version; a skipped one equals the last."""
        rank, stage, update = self._rank, self._stages[instruction.stage], self._own(instruction.stage)

        def act() -> None:
            if update is not None:  # which another replica makes
                rank.begun.add(stage.index)
                update.update(update.gradients, rank.factor)
                stage.gradients.clear_updated()

        def make_version() -> None:
            is_skipped = stage.index in rank.skipped
            if update is not None:
                if is_skipped:
                    update.drop_gradients()
                else:
                    stage.versions.begin_update()
                    update.update(update.gradients, rank.factor, rank.groups)
                stage.gradients.clear_updated()
            stage.advance(keeps_buffers=is_skipped)

        return make_version if instruction.version >= 0 else self._unless_skipped(act)

    def _unshard(self, instruction: Instruction) -> StartAndEnd:
        """Gather slices; parameters that are not kept whole are put where the stage's functions find them."""
        stage, shard = self._stages[instruction.stage], self._shard(instruction)
        bucket, sync_spec = self._plan.sync_spec.buckets[instruction.bucket], self._plan.sync_spec
        if shard is None:
            return self._load(instruction) if sync_spec.is_in_host_memory(bucket) else (nothing, nothing)
        start = functools.partial(shard.start_gather, self._group(instruction), self._rank.host_link)

        def finish() -> None:
            gathered = shard.finish_gather()
            if not shard.keeps_parameters:
                stage.set_weights({name: x for name, x in gathered.items() if name in stage.code.PARAMETERS})

        if sync_spec.reshards_after_use(bucket):
            return start, finish
        return self._unless_skipped(start), self._unless_skipped(finish)

    def _load(self, instruction: Instruction) -> StartAndEnd:
        """Copy parameters to the device, where the stage's functions find them."""
        stage, bucket = self._stages[instruction.stage], self._host_bucket(instruction)
        return bucket.start_load, lambda: stage.set_weights(bucket.finish_load())

    def _store(self, instruction: Instruction) -> StartAndEnd:
        """Copy the sums of gradients to the host, and add them to ``.grad`` of the parameters there."""
        stage, bucket = self._stages[instruction.stage], self._host_bucket(instruction)
        names, gradients = self._plan.sync_spec.buckets[instruction.bucket].names, stage.gradients
        indices = {name: stage.code.PARAMETERS.index(name) for name in names}

        def start() -> None:
            bucket.start_store({name: gradients.pop(index) for name, index in indices.items()})

        def finish() -> None:
            for name, total in bucket.finish_store().items():
                gradients.add_reduced(indices[name], total)

        return start, finish

    def _host_bucket(self, instruction: Instruction) -> HostBucket:
        stage, number = self._stages[instruction.stage], instruction.bucket
        if number not in self._on_host:
            names = self._plan.sync_spec.buckets[number].names
            parameters = {name: stage.on_host[stage.code.PARAMETERS.index(name)] for name in names}
            self._on_host[number] = HostBucket(parameters, self._rank.host_link)
        return self._on_host[number]

    def _reshard(self, instruction: Instruction) -> Action:
        stage, shard = self._stages[instruction.stage], self._shard(instruction)
        bucket = self._plan.sync_spec.buckets[instruction.bucket]
        if shard is None:
            if not self._plan.sync_spec.is_in_host_memory(bucket):
                return nothing
            loaded = self._host_bucket(instruction)
            return in_sequence([loaded.drop, functools.partial(stage.clear_weights, bucket.names)])

        def reshard() -> None:
            shard.drop()
            if not shard.keeps_parameters:
                stage.clear_weights(shard.sharding.names)

        return reshard

    def _shard(self, instruction: Instruction) -> ShardedBucket | None:
        """This rank's shard of a bucket; None if its tensors are whole, as in one process."""
        update = self._own(instruction.stage)
        return update.shards.get(instruction.bucket) if update else None

    def _own(self, stage: int) -> StageOptimizer | None:
        """What this rank updates of a stage."""
        return self._rank.updates.on(self._rank.number, stage) if self._rank.updates else None

    def _group(self, instruction: Instruction) -> CollectiveGroup:
        return self._rank.transport.group(self._plan.placement[instruction.stage])

    def _unless_skipped(self, action: Action) -> Action:
        """The action, left out if the check before it has found a value that is not finite."""
        rank = self._rank

        def act() -> None:
            if rank.non_finite is None:
                action()

        return act


def microbatches_of(instruction: Instruction, rank: RankState) -> Sequence[int]:
    """The microbatches of an instruction, or of the values that it moves; none if it has none.

    Where none of them has rows, the instruction is left out.
    """
    op, link = instruction.op, instruction.link
    if not (op.traits.per_microbatch or op.traits.carries_link or link is not None):
        return ()  # also in a stream, where updates and reductions have the last of their microbatches
    if instruction.microbatch >= 0:
        return (instruction.microbatch,)
    if link is None or link.payload is Payload.WEIGHT:
        return ()
    if link.payload is Payload.RESULT and rank.step_results.is_of_tail(link.names):
        return ()  # a tail has all rows, also on a rank whose microbatches have none
    maker = rank.number if op in (Op.SEND, Op.MOVE) else instruction.peer
    return rank.plan.microbatches_on(link.source, maker)


def _start(op: Op, own: Tensor, group: CollectiveGroup) -> tuple[Tensor, CollectiveWait]:
    """The result of a model collective once it has been waited for."""
    if op is Op.ALL_REDUCE:
        result = own.new_empty(own.shape).copy_(own)
        return result, group.all_reduce(result.view(-1))
    is_gather = op is Op.ALL_GATHER
    rows = own.shape[0] * group.size if is_gather else own.shape[0] // group.size
    result = own.new_empty(rows, *own.shape[1:])
    join = group.all_gather if is_gather else group.reduce_scatter
    return result, join(result.view(-1), own.contiguous().view(-1))


def _key(instruction: Instruction) -> object:
    """What an instruction that starts something and its wait have in common."""
    op = instruction.op.traits.awaits or instruction.op
    return (op, *(getattr(instruction, name) for name in _SHARED_FIELDS))


_SHARED_FIELDS = ("stage", "microbatch", "link", "peer", "bucket", "model_collective")


def _link_of(instruction: Instruction) -> Link:
    assert instruction.link is not None
    return instruction.link
