"""Equal replicas: the programs of two of each kind prove those of all.

Replica k of a step with R replicas runs the microbatches k, k + R, k + 2R and so on. If R does not divide the
number of microbatches, the first replicas run one more than the others; so there are at most two kinds of
replicas. ``representative_replicas`` checks that all replicas of a kind run the same computes in the same
order, and returns the schedule of at most two *representatives* of each kind. A proof for its programs holds
for the programs of all replicas:

* Map each replica to a representative of its kind. Each instruction is then mapped to an equal one, except
  for the numbers of its microbatch and of ranks.
* A compute, a free and a message between stages concern the ranks of one replica alone. So their rules hold
  in each replica, because they hold in its representative.
* The ranks of a stage start its collectives in the same order: each of them has the list of a representative
  rank, and these lists are compared, within a kind and between the kinds.
* If ranks waited for each other in a cycle, so would their representatives, because each wait is mapped to a
  wait. A rank that waits until another replica of its own kind reaches a collective is mapped to a rank that
  waits until it reaches the collective itself, which it has.
* Each replica that makes results sends them to all other ranks, or to those of its stage. A rank receives
  the results of a replica of its own kind as from the other representative. Nothing is computed from results,
  and a rank posts all these receives before it sends results itself, so no cycle goes through them.

Costs belong to stages and links, whichever replica runs them, so replicas of a kind also take the same time.
So the times and the memory of a step are those of one replica of each kind, whose programs ``in_step``
returns. tests/programs/test_representative_replicas.py compares all this with steps of all replicas.
Representatives serve planning only: programs that run, or are written to a file, are those of all ranks, and
are verified one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pipec.ir import Op, Placement, Plan, Program, Schedule
from pipec.ir.columns import OP_CODE, ComputeColumns, InstructionColumns, Ints

MAX_RANKS_WITHOUT_REPRESENTATIVES = 64
"""On more ranks than these, only representatives of equal replicas are lowered, verified and simulated."""


@dataclass(frozen=True)
class RepresentativeReplicas:
    """The ``schedule`` of the representatives, which are these ``replicas`` of the step.

    ``ranks[position][replica]`` are the ranks of the step, and ``own_ranks`` those of ``schedule``: ranks at
    one position of their replicas have the same stages. The first replicas of a kind are in ``firsts``.
    """

    schedule: Schedule
    replicas: Sequence[int]
    firsts: Sequence[int]
    ranks: Placement
    own_ranks: Placement

    def plan(self, plan: Plan) -> Plan:
        """The plan of the representatives."""
        schedule = self.schedule
        return replace(plan, placement=schedule.placement, num_microbatches=schedule.num_microbatches)

    def in_step(self, programs: Sequence[Program]) -> tuple[Program, ...]:
        """The programs of the first replica of each kind, as they are in the step, by rank.

        ``programs`` are those of ``schedule``.
        """
        found = [
            self._in_step(programs[own[place]], self.ranks[position][replica], place)
            for position, own in enumerate(self.own_ranks)
            for place, replica in enumerate(self.replicas)
            if replica in self.firsts
        ]
        return tuple(sorted(found, key=lambda program: program.rank))

    def _in_step(self, program: Program, rank: int, place: int) -> Program:
        """The program with the microbatches and peers of the step, and with the results of all replicas."""
        columns, num_replicas = program.instructions, len(self.ranks[0])
        assert isinstance(columns, InstructionColumns)
        matrix = columns.matrix
        rounds, places = np.divmod(matrix[2], len(self.replicas))
        matrix[2] = np.where(matrix[2] < 0, -1, rounds * num_replicas + np.array(self.replicas)[places])
        is_result = np.array([*(link.payload.is_result for link in columns.links), False])
        in_replica = np.full(self.schedule.num_ranks + 1, -1, np.int32)
        represented = dict[int, Sequence[int]]()
        for ranks, own in zip(self.ranks, self.own_ranks, strict=True):
            in_replica[list(own)] = ranks[self.replicas[place]]
            bounds = pairwise([*self.replicas, num_replicas])
            represented |= {peer: ranks[slice(*each)] for peer, each in zip(own, bounds, strict=True)}
        peers: list[Sequence[int]] = [[peer] for peer in in_replica[matrix[4]].tolist()]
        for number in np.flatnonzero(is_result[matrix[3]]).tolist():
            peers[number] = represented[int(matrix[4, number])]
        matrix = matrix.repeat([len(each) for each in peers], axis=1)
        matrix[4] = np.concatenate([np.empty(0, np.int32), *peers])
        sends = np.flatnonzero(is_result[matrix[3]] & (matrix[0] == OP_CODE[Op.SEND]))
        matrix[:, sends] = matrix[:, sends[np.lexsort((matrix[4, sends], matrix[3, sends]))]]
        return Program(rank, InstructionColumns(matrix, columns.links))


def representative_programs(
    schedule: Schedule, plan: Plan, make: Callable[[Schedule, Plan], tuple[Program, ...]]
) -> tuple[Program, ...]:
    """The programs of the ranks that represent all of a step: of many equal replicas, one of each kind.

    ``make`` lowers and verifies a schedule with its plan.
    """
    found = representative_replicas(schedule)
    return found.in_step(make(found.schedule, found.plan(plan))) if found else make(schedule, plan)


def representative_replicas(
    schedule: Schedule, most_ranks: int | None = None
) -> RepresentativeReplicas | None:
    """The schedule of representatives; None for up to ``most_ranks`` ranks, or if no replicas are equal."""
    limit = MAX_RANKS_WITHOUT_REPRESENTATIVES if most_ranks is None else most_ranks
    if schedule.num_ranks <= limit or schedule.stream is not None:
        return None
    ranks = _positions(schedule)
    if ranks is None:
        return None
    longer = schedule.num_microbatches % len(ranks[0])
    kinds = [kind for kind in (range(longer), range(longer, len(ranks[0]))) if kind]
    replicas = [replica for kind in kinds for replica in kind[:2]]
    if len(replicas) == len(ranks[0]) or not all(_do_the_same(schedule, ranks, kind) for kind in kinds):
        return None
    return _of_representatives(schedule, ranks, replicas, [kind[0] for kind in kinds])


def _positions(schedule: Schedule) -> Placement | None:
    """By position in a replica and by replica, the ranks; None if these are not equal pipelines."""
    if len({len(ranks) for ranks in schedule.placement}) != 1:
        return None
    positions = tuple(sorted({*schedule.placement}))
    numbers = [rank for ranks in positions for rank in ranks]
    in_order = not np.diff(np.argsort(np.array(positions), axis=0), axis=1).any()
    return positions if in_order and sorted(numbers) == list(range(schedule.num_ranks)) else None


def _do_the_same(schedule: Schedule, ranks: Placement, kind: range) -> bool:
    """Whether each of these replicas runs the same computes as the first, on microbatches of its own."""
    replicas = len(ranks[0])
    for position in ranks:
        first = _own_computes(schedule, position, kind[0], replicas)
        if not all(np.array_equal(_own_computes(schedule, position, each, replicas), first) for each in kind):
            return False
    return True


def _own_computes(schedule: Schedule, position: Sequence[int], replica: int, replicas: int) -> Ints:
    """The computes of a rank, with 0, 1, 2, ... for the microbatches of its replica."""
    matrix = ComputeColumns.of(schedule.orders[position[replica]]).matrix
    matrix[2] -= replica
    own = matrix[2] % replicas == 0
    matrix[2] = np.where(own, matrix[2] // replicas, -1 - matrix[2])
    return matrix


def _of_representatives(
    schedule: Schedule, ranks: Placement, replicas: Sequence[int], firsts: Sequence[int]
) -> RepresentativeReplicas:
    left = sorted(position[replica] for position in ranks for replica in replicas)
    number = {rank: own for own, rank in enumerate(left)}
    own_ranks = tuple(tuple(number[position[replica]] for replica in replicas) for position in ranks)
    positions = dict(zip(ranks, own_ranks, strict=True))
    orders: dict[int, ComputeColumns] = {}
    for position, own in positions.items():
        for place, replica in enumerate(replicas):
            matrix = _own_computes(schedule, position, replica, len(position))
            matrix[2] = matrix[2] * len(replicas) + place
            orders[own[place]] = ComputeColumns(matrix)
    counts = [len(range(replica, schedule.num_microbatches, len(ranks[0]))) for replica in replicas]
    placement = tuple(positions[of_stage] for of_stage in schedule.placement)
    in_order = tuple(orders[rank] for rank in range(len(left)))
    return RepresentativeReplicas(
        Schedule(schedule.name, sum(counts), placement, in_order), replicas, firsts, ranks, own_ranks
    )
