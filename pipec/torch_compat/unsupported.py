"""Tells an error of pipec on a version of torch that it does not know from one that a model causes."""

import traceback
from pathlib import Path

import torch

from pipec.errors import UnsupportedTorchError

_HERE = str(Path(__file__).parent)

_OF_CODE = (AttributeError, ImportError, NameError, TypeError)
"""What Python raises where a name is gone or a function takes other arguments."""


def raise_if_unsupported(error: BaseException) -> None:
    """Raise UnsupportedTorchError if ``error`` arose in the code that uses private parts of torch.

    What that code raises itself is of another class. So no model is captured in a quieter way because a part
    of torch has changed.
    """
    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        if isinstance(cause, UnsupportedTorchError):
            raise cause
        if type(cause) in _OF_CODE and frames and frames[-1].filename.startswith(_HERE):
            place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}"
            raise UnsupportedTorchError(
                f"torch {torch.__version__} is not as pipec knows it: {type(cause).__name__}: {cause}\n"
                f"  at {place}\nInstall a version of torch that docs/stability.md names, or a pipec that "
                "knows this one"
            ) from error
        cause = cause.__cause__ or cause.__context__
