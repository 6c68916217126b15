"""Pictures of a simulated step, drawn from the timeline alone."""

from pipec.viz.svg import timeline_svg
from pipec.viz.text import timeline_text

__all__ = ["timeline_svg", "timeline_text"]
