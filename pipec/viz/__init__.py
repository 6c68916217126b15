"""Pictures of steps, simulated or recorded, drawn from their timelines alone.

``drawn_steps`` is what commands and scripts call; ``write_files`` chooses between ``html``, ``chrome``,
``svg`` and ``terminal``, which draw. ``labels``, ``bottleneck`` and ``drawing_checks`` are what these share.
"""

from pipec.viz.chrome import chrome_trace
from pipec.viz.drawn_steps import DrawnStep, draw_steps, steps_text
from pipec.viz.html import timeline_html
from pipec.viz.svg import timeline_svg
from pipec.viz.terminal import timeline_text
from pipec.viz.write_files import check_drawing, write_timelines
