"""Pages and texts inside the output cells of notebooks."""

from collections.abc import Callable
from html import escape

_HEIGHT = 640


def page_in_cell(page: str) -> str:
    """A page as HTML for an output cell: a frame of its own, that shares nothing with the notebook."""
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" title="pipec timeline" '
        f'style="width: 100%; height: {_HEIGHT}px; border: 0"></iframe>'
    )


class DrawnText(str):
    """A picture as text. It prints as it is; a notebook shows the page that ``make_page`` returns."""

    make_page: Callable[[], str] | None = None

    @classmethod
    def of(cls, text: str, make_page: Callable[[], str]) -> "DrawnText":
        drawn = cls(text)
        drawn.make_page = make_page
        return drawn

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str | None:
        return page_in_cell(self.make_page()) if self.make_page else None
