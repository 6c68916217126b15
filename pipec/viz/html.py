"""Steps as one self-contained page to explore: where the time goes, who waits for whom, and what would help.

The page is ``page/page.html``, into which its style, its scripts and its data are put. Waits and the critical
path are worked out here. The scripts only draw, add up, and look up what is under the pointer.
"""

import math
import re
from collections.abc import Sequence
from html import escape
from importlib import resources

from pipec.ir import OpKind, Program
from pipec.ir.columns import OPS, InstructionColumns
from pipec.ir.text_format import instruction_lines
from pipec.viz.drawn_steps import DrawnPipeline, DrawnStep
from pipec.viz.packed_data import pack
from pipec.viz.page_data import steps_data, vocabulary

SCRIPTS = (
    "columns",
    "timeline",
    "labels",
    "sums",
    "drawing",
    "interaction",
    "summary",
    "search",
    "code",
    "runs",
    "start",
)
"""The scripts in ``page/``, in the order in which the page runs them."""


MOST_INSTRUCTIONS = 200_000
"""Of pipelines with more, a page shows no programs: nobody reads them, and they would be most of its size."""


def page_html(steps: Sequence[DrawnStep], title: str = "", pipeline: DrawnPipeline | None = None) -> str:
    """The page, as text: the steps on one axis of time, and what is known of their pipeline. Deterministic.

    All steps have one unit of time.
    """
    data = {
        "unit": steps[0].timeline.unit,
        **vocabulary(),
        "timelines": steps_data(steps),
        "pipeline": pipeline and _pipeline_data(pipeline),
        "limits": [x if x < math.inf else None for x in pipeline.memory_limits] if pipeline else [],
    }
    shown = "".join(filter(str.isprintable, title)) or "timeline"
    scripts = "\n".join(page_file(f"{name}.js") for name in SCRIPTS)
    parts = {"title": escape(shown), "data": pack(data), "style": page_file("style.css"), "scripts": scripts}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page_file("page.html"))


def page_file(name: str) -> str:
    """The text of a file of the page."""
    return resources.files("pipec.viz").joinpath("page", name).read_text(encoding="utf-8")


def _pipeline_data(pipeline: DrawnPipeline) -> dict[str, object]:
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
