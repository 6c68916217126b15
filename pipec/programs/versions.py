"""Where steps follow each other without a flush: the versions that computes read, and the updates in between.

Every stage updates as soon as the last backward of a mini-batch is over. ``RULES`` prove of a program,
whatever made it, that each microbatch finds the version that ``Stream`` says, forward and backward the same
one; that updates come in the order of mini-batches; and that no stage ever needs more versions than it may
hold.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pipec.ir import GRADIENT_PHASES, Instruction, Op, Payload, Schedule, Stream, Versions, stages_on
from pipec.ir.columns import OP_CODE, PHASES, Ints
from pipec.programs.faults import Fault
from pipec.programs.order_index import OrderIndex
from pipec.programs.step_index import BACKWARDS, COMPUTES, StepIndex

_GRADIENTS = [PHASES.index(phase) for phase in GRADIENT_PHASES]


def read_versions(schedule: Schedule) -> Ints:
    """At [stage, microbatch], the version of the weights that its computes read; -1 without a stream."""
    shape = schedule.num_stages, schedule.num_microbatches
    if schedule.stream is None:
        return np.full(shape, -1, np.int32)
    return _versions(schedule.stream, *shape)


def _versions(stream: Stream, num_stages: int, num_microbatches: int) -> Ints:
    microbatches = range(num_microbatches)
    rows = [[stream.version(each, stage, num_stages) for each in microbatches] for stage in range(num_stages)]
    return np.array(rows, np.int32)


def updates(index: OrderIndex, rank: int) -> Iterator[tuple[int, int, int, int]]:
    """The updates of a rank: the position of the cell behind each, its stage, last microbatch and version."""
    schedule = index.schedule
    if schedule.stream is None:
        return
    size = schedule.stream.microbatches
    for stage in stages_on(schedule.placement, rank):
        ends = index.lasts[_GRADIENTS, stage].max(axis=0)
        for number in range(schedule.num_microbatches // size):
            last = number * size + int(ends[number * size : (number + 1) * size].argmax())
            yield int(ends[last]) + 1, stage, last, number + 1


def misfits(step: StepIndex, rank: int, instruction: Instruction) -> Iterator[str]:
    """What is wrong with the fields of an update of a stream."""
    stage, microbatch = instruction.stage, instruction.microbatch
    if stage not in stages_on(step.placement, rank) or not 0 <= microbatch < step.num_microbatches:
        expected = f"a stage of this rank, and a microbatch below {step.num_microbatches}"
        yield f"update names stage {stage}, microbatch {microbatch}; expected {expected}"
    if instruction.link or not instruction.peer == instruction.slot == instruction.bucket == -1:
        yield "update carries a link, peer, slot or bucket; expected none"


def reads_the_right_version(step: StepIndex) -> Iterator[Fault]:
    """Each compute reads the version that the stream says, and so does its backward. Others read none."""
    stream = step.ending.stream
    for rank, columns in enumerate(step.columns):
        others = ~columns.is_compute & ((columns.ops != OP_CODE[Op.UPDATE]) | (stream is None))
        for number in np.flatnonzero(others & (columns.versions != -1)).tolist()[:1]:
            op, version = columns[number].op, columns.versions[number]
            yield Fault((rank, number), f"{op} names version {version}; expected none")
        computes = np.flatnonzero(columns.is_compute)
        if stream is None:
            expected = np.full(computes.size, -1)
        else:
            table = _versions(stream, len(step.placement), step.num_microbatches)
            expected = table[columns.stages[computes], columns.microbatches[computes]]
        wrong = computes[columns.versions[computes] != expected]
        for number in wrong.tolist()[:1]:
            right = int(expected[computes == number][0])
            found = f"reads version {columns.versions[number]}; expected {right}"
            where = f"stage {columns.stages[number]}, microbatch {columns.microbatches[number]}"
            yield Fault((rank, number), f"{columns[number].op} of {where} {found}")


def updates_in_order(step: StepIndex) -> Iterator[Fault]:
    """A stage makes version after version, each behind the backwards of its mini-batch and of no other."""
    stream = step.ending.stream
    if stream is None:
        return
    count = step.num_microbatches // stream.microbatches
    for rank, stage, numbers in _stage_updates(step):
        columns = step.columns[rank]
        if len(numbers) != count:
            site = step.suspect(numbers, rank, stage, -1)
            yield Fault(site, f"stage {stage} is updated {len(numbers)} times; expected {count}")
            continue
        for made, number in enumerate(numbers, start=1):
            if columns.versions[number] != made:
                message = f"update of stage {stage} makes version {columns.versions[number]}; expected {made}"
                yield Fault((rank, number), message)
        yield from _uses_its_gradients(step, rank, stage, numbers)


def _uses_its_gradients(step: StepIndex, rank: int, stage: int, numbers: Sequence[int]) -> Iterator[Fault]:
    stream = step.ending.stream
    assert stream is not None
    backwards = step.numbers[[OP_CODE[op] for op in BACKWARDS], stage].max(axis=0)
    for microbatch, at in enumerate(backwards.tolist()):
        batch = microbatch // stream.microbatches
        if not (numbers[batch - 1] if batch else -1) < at < numbers[batch]:
            found = f"the gradients of stage {stage}, microbatch {microbatch}, are made at {at}"
            yield Fault((rank, numbers[batch]), f"{found}, but belong into version {batch + 1}")


def reads_what_is_there(step: StepIndex) -> Iterator[Fault]:
    """A version is made before it is read, and a stage never needs more of them than it may hold."""
    stream = step.ending.stream
    if stream is None:
        return
    for rank, stage, numbers in _stage_updates(step):
        columns = step.columns[rank]
        own = np.flatnonzero(np.isin(columns.ops, _COMPUTES) & (columns.stages == stage))
        read = columns.versions[own]
        made = np.searchsorted(numbers, own)
        for place in np.flatnonzero(read > made).tolist()[:1]:
            message = f"reads version {read[place]} of stage {stage}, which is not made yet"
            yield Fault((rank, int(own[place])), message)
        needed = np.minimum.accumulate(read[::-1])[::-1]  # the oldest that is read from here on
        most = stream.most_live(stage, len(step.placement))
        for place in np.flatnonzero(made - needed + 1 > most).tolist()[:1]:
            live = int(made[place] - needed[place] + 1)
            message = f"stage {stage} holds {live} versions of its weights here; expected at most {most}"
            yield Fault((rank, int(own[place])), message)


_COMPUTES = [OP_CODE[op] for op in COMPUTES]


def _stage_updates(step: StepIndex) -> Iterator[tuple[int, int, list[int]]]:
    """The rank of each stage, and the numbers of its updates there."""
    for stage, ranks in enumerate(step.placement):
        for rank in ranks:
            columns = step.columns[rank]
            found = np.flatnonzero((columns.ops == OP_CODE[Op.UPDATE]) & (columns.stages == stage))
            yield rank, stage, found.tolist()


def streams_are_supported(step: StepIndex) -> Iterator[Fault]:
    """What the rules of versions are not made for."""
    stream, ending = step.ending.stream, step.ending
    if stream is None:
        return
    if step.num_microbatches % stream.microbatches:
        whole = f"mini-batches of {stream.microbatches} microbatches"
        yield Fault(None, f"{step.num_microbatches} microbatches are no whole number of {whole}")
    if any(len(ranks) > 1 for ranks in step.placement) or ending.buckets or ending.shard:
        yield Fault(None, "stages have replicas or share state, for which streams have no rules of versions")
    if any(link.payload in (Payload.WEIGHT, Payload.WEIGHT_GRADIENT) for link in step.links):
        yield Fault(None, "stages share tied weights, for which streams have no rule of versions")
    if stream.versions is Versions.DOUBLE and stream.microbatches < len(step.placement):
        most = len(step.placement)
        yield Fault(None, f"a mini-batch has {stream.microbatches} microbatches; two versions need {most}")


RULES: tuple[Callable[[StepIndex], Iterator[Fault]], ...] = (
    streams_are_supported,
    reads_the_right_version,
    updates_in_order,
    reads_what_is_there,
)
