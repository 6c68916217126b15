"""What a page knows of the pipeline behind its steps: stages, code, programs and alternatives."""

from pipec.ir import OpKind, Program
from pipec.ir.columns import OPS, InstructionColumns
from pipec.ir.text_format import instruction_lines
from pipec.viz.drawn_steps import DrawnPipeline

MOST_INSTRUCTIONS = 200_000
"""Of pipelines with more, a page shows no programs: nobody reads them, and they would be most of its size."""


def pipeline_data(pipeline: DrawnPipeline) -> dict[str, object]:
    """The pipeline as plain data."""
    plan, programs = pipeline.plan, pipeline.programs
    shown = programs if sum(len(each.instructions) for each in programs) <= MOST_INSTRUCTIONS else ()
    return {
        "stages": [
            {
                "ranks": plan.placement[stage.index],
                "modules": [*dict.fromkeys([*stage.modules[:1], *stage.modules[-1:]])],
            }
            for stage in plan.stages
        ],
        "notes": sorted(pipeline.notes.items()),
        "sources": pipeline.sources,
        "programs": [
            {"rank": each.rank, "lines": instruction_lines(each), **_numbers(each)} for each in shown
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
