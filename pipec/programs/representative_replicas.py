"""Equal replicas: the programs of two of each kind represent those of all.

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
* Each replica that makes results sends them to all other ranks. A rank receives the results of a replica of
  its own kind as from the other representative. Nothing is computed from results, and a rank posts all these
  receives before it sends results itself, so no cycle goes through them.

Costs belong to stages and links, whichever replica runs them, so replicas of a kind also take the same time.
tests/programs/test_alike.py compares all this with steps of all replicas. Representatives serve planning
only: programs that run, or are written to a file, are those of all ranks, and are verified one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy as np

from pipec.ir import Op, Placement, Plan, Program, RankMemory, RepresentativeRanks, Schedule
from pipec.ir.columns import OP_CODE, ComputeColumns, InstructionColumns, Ints

MAX_RANKS_WITHOUT_REPRESENTATIVES = 64
"""On more ranks than these, only representatives of equal replicas are lowered, verified and simulated."""


@dataclass(frozen=True)
class RepresentativeReplicas:
    """The ``schedule`` of the representatives, which are the replicas ``kept`` of the step.

    ``ranks[position][replica]`` are the ranks of the step, and ``few_ranks`` those of ``schedule``: ranks at
    one position of their replicas have the same stages. The first replicas of a kind are in ``firsts``.
    """

    schedule: Schedule
    kept: Sequence[int]
    firsts: Sequence[int]
    ranks: Placement
    few_ranks: Placement

    @property
    def num_replicas(self) -> int:
        return len(self.ranks[0])

    @property
    def num_ranks(self) -> int:
        return len(self.ranks) * self.num_replicas

    @cached_property
    def representatives(self) -> RepresentativeRanks:
        """The first replica of a kind represents itself, and the second all others."""
        pairs = sorted(
            (few[place], ranks[replica], len(self._represented_replicas(place)))
            for ranks, few in zip(self.ranks, self.few_ranks, strict=True)
            for place, replica in enumerate(self.kept)
        )
        return RepresentativeRanks(
            [rank for _, rank, _ in pairs], [count for *_, count in pairs], self.num_replicas
        )

    def representative(self, rank: int) -> int:
        """The rank of ``schedule`` that represents a rank of the step."""
        return self._stand_ins[rank]

    @cached_property
    def _stand_ins(self) -> dict[int, int]:
        return {
            ranks[replica]: rank
            for ranks, few in zip(self.ranks, self.few_ranks, strict=True)
            for place, rank in enumerate(few)
            for replica in self._represented_replicas(place)
        }

    def microbatches(self, few: Ints) -> Ints:
        """The numbers that microbatches of ``schedule`` have in the step; -1 stays."""
        rounds, places = np.divmod(few, len(self.kept))
        return np.where(few < 0, few, rounds * self.num_replicas + np.array(self.kept)[places]).astype(
            np.int32
        )

    def plan(self, plan: Plan) -> Plan:
        """The plan of the representatives."""
        few = self.schedule
        return replace(plan, placement=few.placement, num_microbatches=few.num_microbatches)

    def as_in_full_step(self, programs: Sequence[Program]) -> list[Program]:
        """For each of these ``programs`` the one that the first replica of its kind runs in the step."""
        by_rank: dict[int, Program] = {}
        for position, few in enumerate(self.few_ranks):
            for place, rank in enumerate(few):
                first = max(each for each in self.firsts if each <= self.kept[place])
                own = self.kept.index(first)
                by_rank[rank] = self._renumbered(programs[few[own]], position, own)
        return [by_rank[rank] for rank in range(len(programs))]

    def expand(self, memory: Sequence[RankMemory]) -> list[RankMemory]:
        """The memory of each rank of the step, given the memory of the representatives."""
        return [replace(memory[self.representative(rank)], rank=rank) for rank in range(self.num_ranks)]

    def _represented_replicas(self, place: int) -> range:
        """The replicas of a representative."""
        replica = self.kept[place]
        if replica in self.firsts:
            return range(replica, replica + 1)
        return range(
            replica, min((each for each in self.firsts if each > replica), default=self.num_replicas)
        )

    def _renumbered(self, program: Program, position: int, place: int) -> Program:
        """The program with the microbatches and peers of the step, and with the results of all replicas."""
        columns = program.instructions
        assert isinstance(columns, InstructionColumns)
        matrix, replica = columns.matrix, self.kept[place]
        matrix[2] = self.microbatches(matrix[2])
        is_result = np.array([*(link.payload.is_result for link in columns.links), False])
        peers = [[peer] for peer in self._peers(matrix[4], replica).tolist()]
        for number in np.flatnonzero(is_result[matrix[3]]).tolist():
            peers[number] = self._represented_ranks(int(matrix[4, number]))
        matrix = matrix.repeat([len(each) for each in peers], axis=1)
        matrix[4] = np.concatenate([np.empty(0, np.int32), *peers])
        sends = np.flatnonzero(is_result[matrix[3]] & (matrix[0] == OP_CODE[Op.SEND]))
        matrix[:, sends] = matrix[:, sends[np.lexsort((matrix[4, sends], matrix[3, sends]))]]
        return Program(self.ranks[position][replica], InstructionColumns(matrix, columns.links))

    def _peers(self, few: Ints, replica: int) -> Ints:
        """The ranks of one replica that these ranks represent; -1 stays."""
        own = np.full(self.schedule.num_ranks + 1, -1, np.int32)
        for ranks, kept in zip(self.ranks, self.few_ranks, strict=True):
            own[list(kept)] = ranks[replica]
        return own[few]

    def _represented_ranks(self, few: int) -> list[int]:
        """The ranks that a rank of ``schedule`` represents."""
        position = next(k for k, ranks in enumerate(self.few_ranks) if few in ranks)
        return [
            self.ranks[position][k] for k in self._represented_replicas(self.few_ranks[position].index(few))
        ]


def representative_replicas(
    schedule: Schedule, most_ranks: int = MAX_RANKS_WITHOUT_REPRESENTATIVES
) -> RepresentativeReplicas | None:
    """The schedule of representatives; None for up to ``most_ranks`` ranks, or if no replicas are equal."""
    if schedule.num_ranks <= most_ranks or schedule.stream is not None:
        return None
    ranks = _positions(schedule)
    if ranks is None:
        return None
    longer = schedule.num_microbatches % len(ranks[0])
    kinds = [kind for kind in (range(longer), range(longer, len(ranks[0]))) if kind]
    kept = [replica for kind in kinds for replica in kind[:2]]
    if len(kept) == len(ranks[0]) or not all(_do_the_same(schedule, ranks, kind) for kind in kinds):
        return None
    return _of_representatives(schedule, ranks, kept, [kind[0] for kind in kinds])


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
    schedule: Schedule, ranks: Placement, kept: Sequence[int], firsts: Sequence[int]
) -> RepresentativeReplicas:
    left = sorted(position[replica] for position in ranks for replica in kept)
    number = {rank: few for few, rank in enumerate(left)}
    few_ranks = tuple(tuple(number[position[replica]] for replica in kept) for position in ranks)
    positions = dict(zip(ranks, few_ranks, strict=True))
    orders: dict[int, ComputeColumns] = {}
    for position, few in positions.items():
        for place, replica in enumerate(kept):
            matrix = _own_computes(schedule, position, replica, len(position))
            matrix[2] = matrix[2] * len(kept) + place
            orders[few[place]] = ComputeColumns(matrix)
    counts = [len(range(replica, schedule.num_microbatches, len(ranks[0]))) for replica in kept]
    placement = tuple(positions[of_stage] for of_stage in schedule.placement)
    in_order = tuple(orders[rank] for rank in range(len(left)))
    return RepresentativeReplicas(
        Schedule(schedule.name, sum(counts), placement, in_order), kept, firsts, ranks, few_ranks
    )


class ReplicatedPrograms(Sequence[Program]):
    """The programs of all ranks, of which only ``representative_programs`` of ``few`` replicas are lowered.

    ``make`` lowers and verifies all of them, when the first one is accessed.
    """

    def __init__(
        self,
        few: RepresentativeReplicas,
        representative_programs: Sequence[Program],
        make: Callable[[], tuple[Program, ...]],
    ) -> None:
        self.representative_replicas = few
        self.representative_programs = representative_programs
        self._make = make

    @cached_property
    def _all(self) -> tuple[Program, ...]:
        return self._make()

    def __len__(self) -> int:
        return self.representative_replicas.num_ranks

    @overload
    def __getitem__(self, index: int) -> Program: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Program]: ...
    def __getitem__(self, index: int | slice) -> Program | Sequence[Program]:
        return self._all[index]


def representative_programs(programs: Sequence[Program]) -> Sequence[Program]:
    """The programs that represent all of these, as they are lowered, verified and simulated."""
    return programs.representative_programs if isinstance(programs, ReplicatedPrograms) else programs


def as_in_full_step(programs: Sequence[Program]) -> Sequence[Program]:
    """The programs that represent all of these, as the ranks of the step execute them."""
    return (
        programs.representative_replicas.as_in_full_step(programs.representative_programs)
        if isinstance(programs, ReplicatedPrograms)
        else programs
    )
