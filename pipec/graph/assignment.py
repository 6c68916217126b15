"""The stage of every operator, and the ranks of every stage."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Assignment:
    """The stages: ``stages[operator]`` runs all nodes that an operator causes, forward and backward.

    ``ranks[k]`` is the rank that acts as rank k of the schedule; if empty, rank k acts as itself.
    ``replicas[k]`` is the number of ranks that stage k is cut for, if the assignment decides that. The
    operators in ``split`` are split first: ``stages`` then has the stage of each of their steps.
    """

    stages: tuple[int, ...] = field(repr=False)
    num_stages: int
    ranks: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    split: frozenset[int] = frozenset()


UNASSIGNED = Assignment((), 1)
"""The assignment of a graph that is not cut yet."""


def permuted_ranks(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ``ranks`` of an assignment: empty if each rank acts as itself."""
    return () if ranks == tuple(range(len(ranks))) else ranks
