"""A pass that divides every phase into segments, and programs that run each part by its own instruction."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

from pipec.artifact.artifact import Artifact
from pipec.compiler import pass_list
from pipec.compiler.staged_graph import StagedGraph
from pipec.graph import TrainingGraph, is_constant, is_forward, stage_of
from pipec.ir import Instruction, Op, Phase, Program, Schedule, SegmentCounts
from pipec.passes import Pass


@dataclass(frozen=True)
class SplitIntoSegments:
    """Divide forwards and backwards of each stage into ``num_segments`` of as many nodes."""

    num_segments: int

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        cells: dict[object, list[object]] = {}
        computed = [node for node in graph.nodes if node.op == "call_function" and not is_constant(node)]
        for node in computed:
            cells.setdefault((stage_of(node), is_forward(node)), []).append(node)
        for node in computed:
            nodes = cells[stage_of(node), is_forward(node)]
            node.meta["segment"] = nodes.index(node) * self.num_segments // len(nodes)
        for node in computed:
            if node.target is operator.getitem:
                node.meta["segment"] = node.all_input_nodes[0].meta["segment"]
        return graph


def staged_with_segments(num_segments: int, *args: object) -> StagedGraph:
    """What ``StagedGraph`` makes of ``args``, with one more pass."""
    passes = pass_list.make_passes

    def with_parts(*options: object) -> list[Pass]:
        return [*passes(*options), SplitIntoSegments(num_segments)]  # type: ignore[arg-type]

    with mock.patch("pipec.compiler.pass_list.make_passes", with_parts):
        return StagedGraph(*args)  # type: ignore[arg-type]


def artifact_with_segments(num_segments: int, schedule: Schedule, rows: int, *args: object) -> Artifact:
    return staged_with_segments(num_segments, *args).evaluate(schedule, rows).artifact()


def apart(artifact: Artifact) -> Artifact:
    """The same artifact, its programs with an instruction for each part."""
    return replace(
        artifact,
        representative_programs=tuple(
            Program(each.rank, tuple(_apart(each, artifact.plan.segments))) for each in artifact.programs
        ),
    )


def _apart(program: Program, segments: SegmentCounts) -> Iterator[Instruction]:
    last = -1
    for each in program.instructions:
        if each.op is Op.ACCUMULATE and each.link is None:
            yield replace(each, segment=last)
            continue
        count = segments.get((each.stage, each.op.phase), 1) if each.op.phase else 1
        numbers = range(count) if count > 1 and each.segment < 0 else (each.segment,)
        makes_gradients = each.op.phase not in (None, Phase.FORWARD, Phase.RECOMPUTE)
        for number in numbers:
            yield replace(each, segment=number)
            if makes_gradients and number != numbers[-1]:
                yield Instruction(Op.ACCUMULATE, each.stage, each.microbatch, segment=number)
        last = numbers[-1] if makes_gradients else last
