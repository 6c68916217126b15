"""Cuts between modules, and what a cut inside of one divides.

A cut is between modules if no module that computes something in its own forward is on two stages. A module
that only calls others, one after the other, may be: its children are whole. The operators of the model's own
forward belong to the module before them, and the first ones to the first module.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipec.graph.training_graph import Operator


@dataclass(frozen=True)
class ModulePart:
    """The modules that are wholly on a stage, the outermost alone, in the order of their first operators.

    ``divided`` is empty if the cut before the stage is between modules. Otherwise it names the module and the
    source line at which the stage begins.
    """

    modules: tuple[str, ...]
    divided: str = ""


def undivided_modules(operators: Sequence[Operator]) -> list[str]:
    """For each operator the module that no cut between modules divides, by its name; "" without modules."""
    computing = {each.module for each in operators} - {""}
    outermost = [next((name for name in each.callers if name in computing), "") for each in operators]
    first = next(filter(None, outermost), "")
    return [*accumulate(outermost, lambda before, own: own or before, initial=first)][1:]


def undivided_ranges(operators: Sequence[Operator]) -> list[tuple[int, int]]:
    """The first and the last operator of each module that no cut between modules divides."""
    ranges: dict[str, tuple[int, int]] = {}
    for number, module in enumerate(undivided_modules(operators)):
        first, _ = ranges.get(module, (number, number))
        ranges[module] = first, number
    return [*ranges.values()]


def module_parts(operators: Sequence[Operator], stages: Sequence[int], num_stages: int) -> list[ModulePart]:
    """What each stage has of the model's modules. ``stages`` has the stage of each operator."""
    undivided, modules = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for each, name, stage in zip(operators, undivided_modules(operators), stages, strict=True):
        undivided[name].add(stage)
        for caller in each.callers:
            modules[caller].add(stage)
    whole: list[dict[str, None]] = [{} for _ in range(num_stages)]
    sources = [""] * num_stages
    for each, stage in zip(operators, stages, strict=True):
        outermost = next((name for name in each.callers if len(modules[name]) == 1), None)
        if outermost is not None:
            whole[stage][outermost] = None
        sources[stage] = sources[stage] or each.source
    divided = [
        next((name or "the model" for name, on in undivided.items() if min(on) < stage <= max(on)), "")
        for stage in range(num_stages)
    ]
    return [
        ModulePart(tuple(names), name and f"{name} ({source})")
        for names, name, source in zip(whole, divided, sources, strict=True)
    ]
