"""Steps of every kind, and what is left of their programs when one instruction is wrong."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from example_schedules import result_link, shared_links, skip_links, v_gpipe, value
from symbolic_steps import Step, make_step

from pipec.errors import VerifyError
from pipec.ir import (
    Instruction,
    Link,
    Mode,
    NonFiniteAction,
    Op,
    Payload,
    Program,
    Schedule,
    ShardingLevel,
)
from pipec.schedules import forward_only, make_schedule
from pipec.schedules.asynchronous import ASYNCHRONOUS_SCHEDULES
from pipec.schedules.replicated import replicate_schedule, round_robin


def _replicated(name: str, ranks: int, microbatches: int, replicas: int = 2) -> Schedule:
    return replicate_schedule(functools.partial(make_schedule, name, ranks), microbatches, replicas)


def _stream(name: str, *replicas: int, batches: int = 4, **options: object) -> Step:
    how = ASYNCHRONOUS_SCHEDULES[name]
    schedule = how.for_batches(replicas, how.min_microbatches(replicas), batches)
    loss = Link(len(replicas) - 1, -1, Payload.MICROBATCH_RESULT, (value("loss"),))
    return make_step(schedule, links=[loss], updates=True, **options)


@functools.cache
def golden_steps() -> Mapping[str, Step]:
    """Small steps, which together have every op and every option of a sync spec."""
    skip, data_parallel = skip_links(0, 2), _replicated("gpipe", 1, 4)
    skipped, outside = {"on_nan": NonFiniteAction.SKIP}, {"mode": Mode.OUTPUTS}
    on_host = {"weights_on_host": True, "updates": True}
    return {
        "1f1b": make_step(make_schedule("1f1b", 3, 3), links=[*skip, result_link(2)], recompute=[1]),
        "tied": make_step(make_schedule("1f1b", 3, 3), tied=(0, 2), updates=True),
        "zb-h1": make_step(make_schedule("zb-h1", 3, 3), recompute=[1]),
        "v-gpipe": make_step(v_gpipe(2, 2), tied=(0, 3), updates=True),
        "interleaved": make_step(make_schedule("interleaved-1f1b", 2, 2), links=[result_link(3)]),
        "looped": make_step(make_schedule("looped-bfs", 2, 3)),
        "forwards": make_step(forward_only(v_gpipe(2, 2)), links=[result_link(3)]),
        "handed on": make_step(forward_only(make_schedule("looped-bfs", 2, 3)), links=shared_links(0, 1, 3)),
        "replicas": make_step(data_parallel, buffer_sync_stages=(0,), updates=True, clips=True),
        "tied replicas": make_step(round_robin(3, [1, 2]), tied=(0, 1), updates=True, clips=True),
        "lent by replicas": make_step(round_robin(4, [2, 1]), tied=(0, 1), updates=True),
        "in segments": make_step(data_parallel, updates=True, num_segments=3),
        "skipping": make_step(data_parallel, updates=True, **skipped),
        "own rows": make_step(data_parallel, count_stages=(0,), updates=True),
        "shared optimizer": make_step(data_parallel, updates=True, shard=ShardingLevel.OPTIMIZER),
        "shared gradients": make_step(data_parallel, updates=True, shard=ShardingLevel.GRADIENTS),
        "shared parameters": make_step(
            _replicated("1f1b", 2, 4), updates=True, shard=ShardingLevel.PARAMETERS, precomputes=True
        ),
        "offloaded": make_step(make_schedule("gpipe", 2, 4), offload=[0, 1]),
        "weights on host": make_step(
            make_schedule("looped-bfs-v3", 1, 2), tied=(0, 2), clips=True, num_segments=2, **on_host
        ),
        "loaded in turns": make_step(make_schedule("interleaved-1f1b", 2, 2), precomputes=True, **on_host),
        "loaded outside": make_step(
            make_schedule("looped-bfs", 2, 2), links=[result_link(3)], tied=(0, 3), **on_host, **outside
        ),
        "shards on host": make_step(
            _replicated("looped-bfs-v2", 1, 4), shard=ShardingLevel.PARAMETERS, clips=True, **on_host
        ),
        "precomputed": make_step(make_schedule("1f1b", 2, 3), precomputes=True),
        "tail": make_step(_replicated("gpipe", 2, 4), tail=True, updates=True),
        "loss outside": make_step(
            make_schedule("1f1b", 3, 3),
            links=[*skip, result_link(1), result_link(2)],
            recompute=[1],
            **outside,
        ),
        "sharded loss outside": make_step(
            _replicated("1f1b", 2, 4),
            links=[result_link(1)],
            buffer_sync_stages=(1,),
            offload=[0],
            updates=True,
            shard=ShardingLevel.PARAMETERS,
            precomputes=True,
            **outside,
        ),
        "loss of replicas outside": make_step(
            _replicated("1f1b", 2, 4), links=[result_link(1, 1)], **outside
        ),
        "tied loss outside": make_step(
            make_schedule("zb-v", 2, 2), links=[result_link(3)], tied=(0, 3), updates=True, **outside
        ),
        "model collectives": make_step(_replicated("gpipe", 2, 4), collectives=True),
        "stream": _stream("pipedream", 1, 1, 1, clips=True, **skipped),
        "stream of replicas": _stream("pipedream", 2, 1, batches=6, num_segments=2),
        "vertical sync": _stream("pipedream-vertical-sync", 1, 1, 1),
        "two versions": _stream("pipedream-2bw", 1, 1),
    }


@dataclass(frozen=True)
class Edit:
    """What is done to an instruction of a rank, and to equal ones of others if ``everywhere``.

    ``kind`` is ``drop``, ``double``, ``swap`` with the next one, ``move`` by ``amount``, ``link`` for
    another link, or the name of a field, to which ``amount`` is added.
    """

    rank: int
    number: int
    kind: str
    amount: int = 0
    everywhere: bool = False

    def applied_to(self, programs: Sequence[Program], links: Sequence[Link]) -> list[Program]:
        """The programs with this fault."""
        wrong, edited = programs[self.rank].instructions[self.number], [*programs]
        for rank, program in enumerate(programs):
            own = [*program.instructions]
            if rank == self.rank:
                self._edit(own, self.number, links)
            elif self.everywhere and wrong in own:
                self._edit(own, own.index(wrong), links)
            edited[rank] = replace(program, instructions=tuple(own))
        return edited

    def _edit(self, own: list[Instruction], number: int, links: Sequence[Link]) -> None:
        each = own[number]
        match self.kind:
            case "drop":
                own.pop(number)
            case "double":
                own.insert(number, each)
            case "swap":
                own[number : number + 2] = reversed(own[number : number + 2])
            case "move":
                own.insert(max(0, number + self.amount), own.pop(number))
            case "link":
                own[number] = replace(each, link=links[self.amount])
            case "op":
                own[number] = replace(each, op=[*Op][self.amount])
            case field:
                own[number] = replace(each, **{field: getattr(each, field) + self.amount})


NUMBERS = ("stage", "microbatch", "peer", "slot", "bucket", "segment", "model_collective", "version")


def edits(programs: Sequence[Program], links: Sequence[Link]) -> Iterator[Edit]:
    """Every edit of every instruction: all fields, and places up to five instructions away."""
    for rank, program in enumerate(programs):
        for number, each in enumerate(program.instructions):
            shared = sum(each in other.instructions for other in programs) > 1
            for everywhere in (False, True) if shared else (False,):
                for kind in ("drop", "double", "swap"):
                    yield Edit(rank, number, kind, everywhere=everywhere)
                for amount in (-5, -3, -2, 2, 3, 5):
                    yield Edit(rank, number, "move", amount, everywhere)
            for name in NUMBERS:
                yield from (Edit(rank, number, name, amount) for amount in (-1, 1))
            if each.link is not None:
                yield from (Edit(rank, number, "link", k) for k, x in enumerate(links) if x != each.link)
            yield from (Edit(rank, number, "op", k) for k, op in enumerate(Op) if _is_like(op, each.op))


def verdict(step: Step, programs: Sequence[Program]) -> str:
    """What the verifier says; empty if it accepts the programs."""
    try:
        step.verify(programs)
    except VerifyError as error:
        return str(error)
    return ""


def _is_like(op: Op, other: Op) -> bool:
    """Whether two ops have the same fields."""
    return op is not other and replace(op.traits, effects="") == replace(other.traits, effects="")
