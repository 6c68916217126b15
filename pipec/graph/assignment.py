"""The stage of every operator, and the ranks of every stage."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Assignment:
    """``stages[operator]`` is the stage of each operator, with all it causes, forward and backward.

    ``ranks[k]`` is the rank that acts as the k-th of a schedule; if there are none, rank k does.
    ``replicas[k]`` is how many ranks stage k is cut for, if the assignment decides that. The operators in
    ``split`` are split first: ``stages`` then has the stage of each step of them.
    """

    stages: tuple[int, ...] = field(repr=False)
    num_stages: int
    ranks: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    split: frozenset[int] = frozenset()


UNASSIGNED = Assignment((), 1)
"""Of a graph that is not cut yet."""


def permuted_ranks(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of an assignment: none if each acts as itself."""
    return () if ranks == tuple(range(len(ranks))) else ranks
