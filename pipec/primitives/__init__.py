"""Operators that pipec defines and stages call."""

from pipec.primitives.cross_entropy import cross_entropy_gradient, rows_per_block
from pipec.primitives.recurrent import (
    CUDNN_RNN,
    CUDNN_RNN_BACKWARD,
    ONEDNN_LSTM,
    RECURRENCE,
    RECURRENCE_BACKWARD,
)
from pipec.primitives.require import require
from pipec.primitives.row_independence import check_row_independence

__all__ = [
    "CUDNN_RNN",
    "CUDNN_RNN_BACKWARD",
    "ONEDNN_LSTM",
    "RECURRENCE",
    "RECURRENCE_BACKWARD",
    "check_row_independence",
    "cross_entropy_gradient",
    "require",
    "rows_per_block",
]
