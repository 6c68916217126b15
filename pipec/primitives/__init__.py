"""Operators of pipec's own, which stages call."""

from pipec.primitives.cross_entropy import cross_entropy_gradient, rows_at_a_time
from pipec.primitives.recurrent import ONEDNN_LSTM, RECURRENCE, RECURRENCE_BACKWARD
from pipec.primitives.require import require
from pipec.primitives.rows import check_rows

__all__ = [
    "ONEDNN_LSTM",
    "RECURRENCE",
    "RECURRENCE_BACKWARD",
    "check_rows",
    "cross_entropy_gradient",
    "require",
    "rows_at_a_time",
]
