"""Operators that pipec defines and stages call."""

from pipec.primitives.cross_entropy import cross_entropy_gradient, rows_per_block
from pipec.primitives.ctc_loss import CTC_LOSS, CTC_LOSS_BACKWARD, ctc_loss
from pipec.primitives.interpolation import INTERPOLATE, INTERPOLATE_BACKWARD, INTERPOLATED_DIMENSIONS
from pipec.primitives.recurrent import (
    RECURRENT_LAYER,
    RECURRENT_LAYER_BACKWARD,
    recurrent_layer,
    recurrent_network,
)
from pipec.primitives.require import require

__all__ = [
    "CTC_LOSS",
    "CTC_LOSS_BACKWARD",
    "INTERPOLATE",
    "INTERPOLATED_DIMENSIONS",
    "INTERPOLATE_BACKWARD",
    "RECURRENT_LAYER",
    "RECURRENT_LAYER_BACKWARD",
    "cross_entropy_gradient",
    "ctc_loss",
    "recurrent_layer",
    "recurrent_network",
    "require",
    "rows_per_block",
]
