"""The programs of one step, indexed for verification: where everything is computed, moved and read."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipec.ir import Instruction, Link, Op, Payload, Phase, Program
from pipec.rendezvous import Site
from pipec.text import instruction_lines

BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message from where it is made to where it is read. A move is its own send and receive."""

    link: Link
    microbatch: int
    made: Site | None
    send: Site
    receive: Site
    read: Site | None


@dataclass(frozen=True)
class StepIndex:
    """Programs and what they should carry out: stages placed on ranks, links, microbatches and limits.

    ``recompute`` are the stages that replay their forward; ``limits[rank]`` bounds what is in flight.
    """

    programs: Sequence[Program]
    placement: tuple[int, ...]
    links: tuple[Link, ...]
    num_microbatches: int
    recompute: frozenset[int]
    limits: Sequence[int] | None

    def show(self, site: Site) -> str:
        """An instruction on one line."""
        return " ".join(instruction_lines(self.programs[site[0]])[site[1]].split())

    def instructions(self) -> Iterator[tuple[Site, Instruction]]:
        for rank, program in enumerate(self.programs):
            for number, instruction in enumerate(program.instructions):
                yield (rank, number), instruction

    def cells(self) -> Iterator[tuple[int, int]]:
        """Every stage with every microbatch."""
        for stage in range(len(self.placement)):
            for microbatch in range(self.num_microbatches):
                yield stage, microbatch

    @cached_property
    def link_set(self) -> frozenset[Link]:
        return frozenset(self.links)

    @cached_property
    def trains(self) -> bool:
        return any(instruction.op in BACKWARDS for _, instruction in self.instructions())

    @cached_property
    def computes(self) -> Mapping[tuple[Op, int, int], list[Site]]:
        """Where each op runs for each stage and microbatch."""
        sites = defaultdict(list)
        for site, instruction in self.instructions():
            if instruction.op.phase:
                sites[instruction.op, instruction.stage, instruction.microbatch].append(site)
        return sites

    @cached_property
    def transfers(self) -> Mapping[tuple[Op, Link, int, int], list[Site]]:
        """Where each link is sent, received or moved for each microbatch and receiving rank."""
        sites = defaultdict(list)
        for site, instruction in self.instructions():
            if instruction.link:
                target = instruction.peer if instruction.op is Op.SEND else site[0]
                sites[instruction.op, instruction.link, instruction.microbatch, target].append(site)
        return sites

    def receivers(self, link: Link) -> list[int]:
        """The ranks a link goes to."""
        if link.payload is Payload.RESULT:
            return [rank for rank in range(len(self.programs)) if rank != self.placement[link.source]]
        return [self.placement[link.target]]

    def microbatches(self, link: Link) -> Sequence[int]:
        return range(self.num_microbatches) if link.payload.per_microbatch else (-1,)

    def messages(self) -> Iterator[tuple[Link, int, int]]:
        """Everything to deliver: a link, its microbatch or -1, and the receiving rank."""
        for link in self.links:
            for microbatch in self.microbatches(link):
                for target in self.receivers(link):
                    yield link, microbatch, target

    @cached_property
    def deliveries(self) -> Sequence[Delivery]:
        """How every message travels, once it is known that each is delivered exactly once."""
        return [self._delivery(*message) for message in self.messages()]

    def _delivery(self, link: Link, microbatch: int, target: int) -> Delivery:
        ops = self.transfer_ops(link, target)
        sites = [self.transfers[op, link, microbatch, target][0] for op in ops]
        made = self.runs(link.payload.producers, link.source, microbatch)
        read = self.runs(link.payload.readers, link.target, microbatch)
        return Delivery(
            link, microbatch, max(made, default=None), sites[0], sites[-1], min(read, default=None)
        )

    def transfer_ops(self, link: Link, target: int) -> tuple[Op, ...]:
        """What brings a link to a rank: a send and a receive, or a move if it is there already."""
        return (Op.MOVE,) if self.placement[link.source] == target else (Op.SEND, Op.RECV)

    def suspect(self, found: Sequence[Site], rank: int, stage: int, microbatch: int) -> Site | None:
        """Where to look when something was ``found`` too often, or not at all.

        That is the last of what was found, the last compute of the cell, or the last line of the rank.
        """
        computed = [site for op in Op for site in self.computes.get((op, stage, microbatch), ())]
        last = len(self.programs[rank].instructions) - 1
        return max(found, default=None) or max(computed, default=(rank, last) if last >= 0 else None)

    def runs(self, phases: Sequence[Phase], stage: int, microbatch: int) -> list[Site]:
        """Where any of ``phases`` runs for a microbatch, or for all of them if it is -1."""
        microbatches = range(self.num_microbatches) if microbatch == -1 else (microbatch,)
        return [
            site
            for phase in phases
            for mb in microbatches
            for site in self.computes.get((Op(phase), stage, mb), ())
        ]
