"""A tree of modules that holds tensors of a model under their original names, and none of its code."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a model by FQN. ``canonical`` maps each name of a tied tensor to its first name."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    persistent: frozenset[str]
    canonical: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> "ModelTensors":
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        first: dict[int, str] = {}
        canonical = {fqn: first.setdefault(id(t), fqn) for fqn, t in {**parameters, **buffers}.items()}
        persistent = frozenset(model.state_dict(keep_vars=True)) & buffers.keys()
        return cls(parameters, buffers, frozenset(persistent), canonical)


def hold(module: nn.Module, tensors: ModelTensors, copies: bool) -> None:
    """Register all tensors in ``module``. The names of a tied tensor share one object.

    With ``copies``, the module holds new Parameter and buffer objects over the same memory; dropping or
    moving them leaves the model as it is.
    """
    made: dict[str, Tensor] = {}
    for fqn, tensor in {**tensors.parameters, **tensors.buffers}.items():
        name = tensors.canonical[fqn]
        if name not in made:
            made[name] = _alias(tensor) if copies else tensor
        owner, leaf = _owner(module, fqn)
        if fqn in tensors.parameters:
            owner._parameters[leaf] = made[name]  # type: ignore[assignment]
        else:
            owner._buffers[leaf] = made[name]
            if fqn not in tensors.persistent:
                owner._non_persistent_buffers_set.add(leaf)


def drop(module: nn.Module, fqns: Iterable[str]) -> None:
    """Forget these tensors and release the memory that only they hold."""
    for fqn in fqns:
        owner, leaf = _owner(module, fqn)
        for registered in (owner._parameters, owner._buffers):
            tensor = registered.pop(leaf, None)
            if tensor is not None:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.grad = None


def _alias(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach()


def _owner(module: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor, and the tensor's name there. Modules on the way to it are made.

    They are written into the registry and not set as attributes: a model may have a child called ``step`` or
    ``plan``, and the attributes of that name belong to the pipeline.
    """
    *path, leaf = fqn.split(".")
    for name in path:
        child = module._modules.get(name)
        if child is None:
            child = module._modules[name] = nn.Module()
        module = child
    return module, leaf
