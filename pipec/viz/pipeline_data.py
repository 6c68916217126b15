"""What a page knows of the pipeline behind its steps: stages, links, code, programs and the model's graph."""

from pipec.ir import OpKind, Payload, Plan, Program
from pipec.ir.columns import OPS, InstructionColumns
from pipec.ir.text_format import instruction_lines, value_bytes
from pipec.viz.drawn_steps import DrawnPipeline
from pipec.viz.model_outline import outline

MOST_INSTRUCTIONS = 200_000
"""Of pipelines with more, a page shows no programs: nobody reads them, and they would be most of its size."""


def pipeline_data(pipeline: DrawnPipeline) -> dict[str, object]:
    """The pipeline as plain data."""
    plan, programs = pipeline.plan, pipeline.programs
    shown = programs if sum(len(each.instructions) for each in programs) <= MOST_INSTRUCTIONS else ()
    operators = outline(pipeline.sources, [stage.parameters for stage in plan.stages])
    return {
        "stages": [
            {
                "ranks": plan.placement[stage.index],
                "modules": [*dict.fromkeys([*stage.modules[:1], *stage.modules[-1:]])],
            }
            for stage in plan.stages
        ],
        "links": _links(plan),
        "tied": _tied(plan),
        "notes": sorted(pipeline.notes.items()),
        "sources": pipeline.sources,
        "programs": [
            {"rank": each.rank, "lines": instruction_lines(each), **_numbers(each)} for each in shown
        ],
        "operators": [
            [
                *(each.stage, each.line, each.module, each.module_type, each.source, each.call),
                *(each.result, each.shape, each.inputs, each.weights),
            ]
            for each in operators
        ],
        "alternatives": [
            {
                "schedule": each.schedule,
                "microbatches": each.num_microbatches,
                "stages": each.num_stages,
                "seconds": each.seconds,
                "peak": each.peak_bytes,
                "rejected": each.rejection_reason,
            }
            for each in plan.alternatives
        ],
    }


def _numbers(program: Program) -> dict[str, list[int]]:
    """The line of each compute and update of a program, in order."""
    ops = InstructionColumns.of(program.instructions, ()).ops
    blocking = [
        k for k, op in enumerate(ops.tolist()) if OPS[op].traits.kind in (OpKind.COMPUTE, OpKind.STEP_COMPUTE)
    ]
    return {"blocking": blocking}


def _links(plan: Plan) -> list[dict[str, object]]:
    """The values that stages hand to others, forwards and back, in bytes for one microbatch."""
    return [
        {
            "source": link.source,
            "target": link.target,
            "payload": link.payload.replace("_", " "),
            "values": {value.name: value_bytes(value, plan.sizes) for value in link.values},
        }
        for link in plan.links
        if not link.payload.is_result
    ]


def _tied(plan: Plan) -> list[dict[str, object]]:
    """Weights that several stages use: the stage that owns each, and those that borrow it."""
    found: dict[str, dict[str, object]] = {}
    for link in plan.links:
        for value in link.values if link.payload is Payload.WEIGHT else ():
            tied = found.setdefault(
                value.name, {"name": value.name, "owner": link.source, "bytes": value_bytes(value, {})}
            )
            tied["borrowers"] = [*tied.get("borrowers", []), link.target]  # type: ignore[misc]
    return [*found.values()]
