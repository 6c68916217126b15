"""Would programs finish if every send waited until its receive is posted? Worked out without running them."""

import heapq
from collections.abc import Mapping, Sequence

Site = tuple[int, int]
"""A rank and the number of an instruction in its program."""


def stalls(lengths: Sequence[int], awaited: Mapping[Site, Sequence[Site]]) -> dict[int, tuple[Site, Site]]:
    """For each rank that cannot finish: the instruction it is at, and that of another rank it waits for.

    ``lengths`` are the numbers of instructions of the programs. An instruction passes when its rank is
    there and every instruction in ``awaited`` for it has been passed. The result does not depend on the
    order in which ranks run. Time: n log n in the instructions and what they await.
    """
    position = [0] * len(lengths)
    sleepers: list[list[tuple[int, int]]] = [[] for _ in lengths]
    stalled: dict[int, tuple[Site, Site]] = {}
    runnable = list(range(len(lengths)))
    while runnable:
        rank = runnable.pop()
        stalled.pop(rank, None)
        while rank not in stalled and position[rank] < lengths[rank]:
            site = (rank, position[rank])
            ahead = next((other for other in awaited.get(site, ()) if position[other[0]] <= other[1]), None)
            if ahead:
                stalled[rank] = (site, ahead)
                heapq.heappush(sleepers[ahead[0]], (ahead[1], rank))
            else:
                position[rank] += 1
        while sleepers[rank] and sleepers[rank][0][0] < position[rank]:
            runnable.append(heapq.heappop(sleepers[rank])[1])
    return stalled


def circle(stalled: Mapping[int, tuple[Site, Site]]) -> list[tuple[Site, Site]]:
    """Some of ``stalls`` that wait for each other in a ring, each followed by the one it waits for."""
    rank = min(stalled)
    visited: list[int] = []
    while rank not in visited:
        visited.append(rank)
        rank = stalled[rank][1][0]
    return [stalled[rank] for rank in visited[visited.index(rank) :]]
