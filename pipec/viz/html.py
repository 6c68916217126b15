"""Steps as one self-contained page to explore: where the time goes, who waits for whom, and what would help.

The page is ``page/page.html``, into which its style, its scripts and its data are put. Waits and the critical
path are worked out here. The scripts only draw, add up, and look up what is under the pointer.
"""

import math
import re
from collections.abc import Sequence
from html import escape
from importlib import resources

from pipec.viz.drawn_steps import DrawnPipeline, DrawnStep, check_steps
from pipec.viz.packed_data import pack
from pipec.viz.page_data import steps_data, vocabulary
from pipec.viz.pipeline_data import pipeline_data

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


def page_html(steps: Sequence[DrawnStep], title: str = "", pipeline: DrawnPipeline | None = None) -> str:
    """The page, as text: the steps on one axis of time, and what is known of their pipeline. Deterministic.

    Raises:
        InputError: the steps have different units, or the memory of one does not fit it.
    """
    check_steps(steps)
    data = {
        "unit": steps[0].timeline.unit,
        **vocabulary(),
        "timelines": steps_data(steps),
        "pipeline": pipeline and pipeline_data(pipeline),
        "limits": [_finite(limit) for limit in pipeline.memory_limits] if pipeline else [],
    }
    shown = "".join(filter(str.isprintable, title)) or "timeline"
    scripts = "\n".join(_file(f"{name}.js") for name in SCRIPTS)
    parts = {"title": escape(shown), "data": pack(data), "style": _file("style.css"), "scripts": scripts}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file("page.html"))


def _finite(limit: float) -> float | None:
    return limit if limit < math.inf else None


def _file(name: str) -> str:
    return resources.files("pipec.viz").joinpath("page", name).read_text(encoding="utf-8")
