"""Pictures of steps, simulated or recorded, drawn from their timelines.

``draw_steps`` is what commands and scripts call; it chooses between ``html``, ``svg``, ``chrome`` and
``terminal``, which draw. ``page_data`` and ``packed_data`` make the data of a page, which
the scripts in ``page/`` show. ``labels`` and ``bottleneck`` are what these share.
"""

from pipec.viz.chrome import chrome_trace
from pipec.viz.drawn_steps import DrawnPipeline, DrawnStep, steps_text
from pipec.viz.html import page_html
from pipec.viz.svg import timeline_svg
from pipec.viz.terminal import timeline_text
from pipec.viz.write_files import check_drawing, draw_steps, steps_title
