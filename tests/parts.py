"""A pass that divides every phase into parts, and programs that run each part by its own instruction."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

from pipec.artifact.directory import Artifact
from pipec.compiler import pass_list
from pipec.compiler.staged import StagedGraph
from pipec.graph import TrainingGraph, is_constant, is_forward, stage_of
from pipec.ir import Instruction, Parts, Program, Schedule
from pipec.passes import Pass


@dataclass(frozen=True)
class PutIntoParts:
    """Divide forwards and backwards of each stage into ``num_parts`` of as many nodes."""

    num_parts: int

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        cells: dict[object, list[object]] = {}
        computed = [node for node in graph.nodes if node.op == "call_function" and not is_constant(node)]
        for node in computed:
            cells.setdefault((stage_of(node), is_forward(node)), []).append(node)
        for node in computed:
            nodes = cells[stage_of(node), is_forward(node)]
            node.meta["part"] = nodes.index(node) * self.num_parts // len(nodes)
        for node in computed:
            if node.target is operator.getitem:
                node.meta["part"] = node.all_input_nodes[0].meta["part"]
        return graph


def staged_in_parts(num_parts: int, *args: object) -> StagedGraph:
    """What ``StagedGraph`` makes of ``args``, with one more pass."""
    passes = pass_list.passes

    def with_parts(*options: object) -> list[Pass]:
        return [*passes(*options), PutIntoParts(num_parts)]  # type: ignore[arg-type]

    with mock.patch("pipec.compiler.pass_list.passes", with_parts):
        return StagedGraph(*args)  # type: ignore[arg-type]


def artifact_in_parts(num_parts: int, schedule: Schedule, rows: int, *args: object) -> Artifact:
    return staged_in_parts(num_parts, *args).trial(schedule, rows).artifact()


def apart(artifact: Artifact) -> Artifact:
    """The same artifact, its programs with an instruction for each part."""
    return replace(
        artifact,
        programs=tuple(
            Program(each.rank, tuple(_apart(each, artifact.plan.parts))) for each in artifact.programs
        ),
    )


def _apart(program: Program, parts: Parts) -> Iterator[Instruction]:
    for each in program.instructions:
        count = parts.get((each.stage, each.op.phase), 1) if each.op.phase else 1
        numbers = range(count) if count > 1 and each.part < 0 else (each.part,)
        yield from (replace(each, part=number) for number in numbers)
