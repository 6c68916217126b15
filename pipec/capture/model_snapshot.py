"""Finds what changed in a model between two calls, with one walk over its modules.

A walk in Python costs some microseconds for each module. So an unchanged model is not walked again: the
contents of the modules of the last walk are read in loops of torch and Python, and compared.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipec.torch_compat import ModuleContents, TensorMetadata, module_contents, tensor_metadata


@dataclass(frozen=True, eq=False)
class ModelSnapshot:
    """The modules and tensors of a model at a moment.

    ``modules`` are in the order of ``modules_of``, and so are what each is and the numbers of its hooks.
    ``tensors`` are its parameters and buffers, module by module; one with two names appears twice.
    """

    modules: list[nn.Module]
    classes: list[type]
    tensors: list[Tensor]
    tensor_metadata: TensorMetadata
    _contents: ModuleContents

    @classmethod
    def of(cls, model: nn.Module) -> "ModelSnapshot":
        modules = modules_of(model)
        parts = module_contents(modules)
        tensors = [tensor for tensor in parts.tensors if tensor is not None]
        return cls(modules, [*map(type, modules)], tensors, tensor_metadata(tensors), parts)

    @property
    def training(self) -> tuple[bool, ...]:
        return self._contents.training

    @property
    def hooks(self) -> Sequence[tuple[int, ...]]:
        return self._contents.hooks

    @property
    def is_current(self) -> bool:
        """Whether a new snapshot would find the same objects, names and classes."""
        parts, before = module_contents(self.modules), self._contents
        return (
            parts.plain == before.plain
            and same_objects(parts.children, before.children)
            and same_objects(parts.tensors, before.tensors)
            and [*map(type, self.modules)] == self.classes
            and tensor_metadata(self.tensors) == self.tensor_metadata
        )


class SnapshotCache:
    """Holds the last snapshot of a model, and takes a new one when the model has changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last: ModelSnapshot | None = None

    def current(self) -> ModelSnapshot:
        """The current snapshot: the same object as last time if nothing has changed."""
        if self._last is None or not self._last.is_current:
            self._last = ModelSnapshot.of(self._model)
        return self._last


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects, by identity."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The model and all modules below it, each once, in less time than ``nn.Module.modules`` takes."""
    found, seen = [model], {id(model)}
    for module in found:
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def tensors_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    """The parameters and buffers of modules; one with two names appears twice."""
    return [
        tensor
        for module in modules
        for registry in (module._parameters, module._buffers)
        for tensor in registry.values()
        if tensor is not None
    ]
