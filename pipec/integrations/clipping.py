"""Clipping where a library calls torch's ``clip_grad_norm_``, also on ranks that have no gradients."""

from collections.abc import Iterable

import torch
from torch import Tensor

from pipec.pipeline import Pipeline


def clip_grad_norm(
    pipes: Iterable[Pipeline], parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``, over all stages if a pipeline trains these parameters.

    Every rank calls it then, also one whose stages train nothing.
    """
    given = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    trained = {id(each) for each in given if each.requires_grad}
    for pipe in pipes:
        if trained == {id(each) for each in pipe.parameters() if each.requires_grad}:
            return pipe.clip_grad_norm_(max_norm, norm_type)
    return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)
