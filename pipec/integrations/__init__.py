"""Training loops of other libraries, each in a module of its own: `import pipec` imports none of them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import pipec
from pipec.errors import InputError
from pipec.pipeline.pipeline_module import PipelineModule


def refuse_optimizer(options: Mapping[str, Any]) -> None:
    """Raise InputError for options by which programs would make the updates that a loop makes."""
    if "optimizer" in options:
        raise InputError(
            "optimizer=... makes updates in the programs, and the loop's own optimizer would make them "
            "again; leave it out"
        )


def module_of(model: nn.Module, options: Mapping[str, Any]) -> PipelineModule:
    """``as_module`` of a pipeline: of ``model`` with these options, unless it is a pipeline already."""
    if isinstance(model, PipelineModule):
        return model
    pipe = model if isinstance(model, pipec.Pipeline) else pipec.compile(model, **options)
    if pipe.num_replicas > 1:
        raise InputError(
            'batch="local" leaves it to the loop which rows each rank reads, but here every rank reads all '
            "rows of a batch, and pipec divides them among replicas; leave it out"
        )
    return pipe.as_module()


def clip_grad_norm(
    models: Iterable[nn.Module], parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``, over all stages if one of the models trains these parameters.

    Every rank calls it then, also one whose stages train nothing.
    """
    given = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    trained = {id(each) for each in given if each.requires_grad}
    for model in models:
        is_trained = trained == {id(each) for each in model.parameters() if each.requires_grad}
        if is_trained and isinstance(model, PipelineModule):
            return model.clip_grad_norm_(max_norm, norm_type)
    return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)
