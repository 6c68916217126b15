"""Mixed precision: the autocast under which a model is captured, from ``precision=`` or from the script."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from pipec.errors import InputError
from pipec.ir import Mode, Precision

_TYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
_NAMES = {dtype: precision for precision, dtype in _TYPES.items()}


def autocast(precision: Precision | None, device: torch.device) -> AbstractContextManager[object]:
    """The autocast for a capture: that of ``precision``, else the one that the script has entered."""
    return nullcontext() if precision is None else torch.autocast(device.type, _TYPES[precision])


def require_matching_autocast(precision: Precision | None, device: torch.device, where: str) -> None:
    """Refuse an autocast around ``where`` that is not the precision that ``pipec.compile`` was given.

    Raises:
        InputError: it names the option to pass.
    """
    entered = _entered(device)
    if entered is None or _NAMES.get(entered) is precision:
        return
    asked = f"precision={str(precision)!r}" if precision else "no precision"
    wanted = _NAMES.get(entered)
    remedy = f"pass precision={str(wanted)!r}" if wanted else "pass a precision"
    raise InputError(
        f"torch.autocast to {entered} is entered around {where}, but pipec.compile has {asked}; "
        f"{remedy} to pipec.compile, or leave the autocast"
    )


def check_autocast(precision: Precision | None, device: torch.device, mode: Mode) -> None:
    """Refuse a call under an autocast that the pipeline was not compiled for.

    Without an option, an autocast around ``step`` to bfloat16 does what the option does, as an evaluation may
    do with any. To train in float16 the loss is scaled, which only the option does.

    Raises:
        InputError: it names the option to pass.
    """
    entered = _entered(device)
    if precision is not None or (mode.trains and entered not in (None, torch.bfloat16)):
        require_matching_autocast(precision, device, "this call")


def refuse_float16_weights(precision: Precision | None, model: nn.Module) -> None:
    """Refuse to train float16 weights: small gradients vanish once they are unscaled.

    Raises:
        InputError: the model has such weights.
    """
    for fqn, parameter in model.named_parameters() if precision is Precision.FP16 else ():
        if parameter.requires_grad and parameter.dtype is torch.float16:
            raise InputError(
                f"{fqn} is float16, but precision='fp16-mixed' keeps weights in float32 and makes float16 of "
                "them where operators compute; call model.float(), or leave out precision"
            )


def _entered(device: torch.device) -> torch.dtype | None:
    """The dtype of the autocast that the script has entered for this device type."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
