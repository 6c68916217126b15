"""Values that several stages of a rank read: the first stage receives them, and moves them to the others."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pipec.ir import Link, Payload, Phase
from pipec.ir.columns import PHASE_CODE, ComputeColumns

_READING = (
    ([Phase.FORWARD], 1),
    ([Phase.BACKWARD, Phase.BACKWARD_INPUT], -1),
)
"""The phases that read messages, and the direction in which a microbatch runs through the stages in each."""


def runs_stages_in_order(orders: Iterable[ComputeColumns]) -> bool:
    """Whether ranks run a microbatch's forwards in the order of its stages, and the backwards in reverse.

    Then the first stage that reads a value can move it on. Stages that form a chain cannot run otherwise.
    """
    several = (computes for computes in orders if np.diff(computes.stages).any())
    return all(_is_in_order(computes, phases, way) for computes in several for phases, way in _READING)


def _is_in_order(computes: ComputeColumns, phases: Sequence[Phase], way: int) -> bool:
    own = np.flatnonzero(np.isin(computes.phases, [PHASE_CODE[phase] for phase in phases]))
    order = own[np.lexsort((computes.stages[own] * way, computes.microbatches[own]))]
    same = np.diff(computes.microbatches[order]) == 0
    return bool((np.diff(order)[same] > 0).all())


def holding_stages(links: Sequence[Link]) -> Mapping[int, Sequence[int]]:
    """By the number of a link, the stages that keep its values, if its target moves them on."""
    handed: dict[tuple[Payload, int, str], list[int]] = {}
    for link in links:
        for value in link.values if link.payload.feeds_compute else ():
            handed.setdefault((link.payload, link.source, value.name), []).append(link.target)
    found = {}
    for number, link in enumerate(links):
        stages = {(link.target, value.name) for value in link.values if link.payload.feeds_compute}
        pending = list(stages)
        while pending:
            stage, name = pending.pop()
            reached = {(target, name) for target in handed.get((link.payload, stage, name), ())} - stages
            stages |= reached
            pending += reached
        if len({stage for stage, _ in stages}) > 1:
            found[number] = sorted({stage for stage, _ in stages})
    return found
