"""The gradients of one stage, summed over microbatches and steps as autograd's ``AccumulateGrad`` does.

A sparse gradient, as ``nn.Embedding(sparse=True)`` has, stays sparse. One that comes as some rows of a dense
one is added to those alone.
"""

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipec.runtime.memory.storage import fills_storage, is_exclusive
from pipec.runtime.sparse_gradients import RowSparseGradient

# Adds lists of tensors in one call; the public API has no such function.
_add_all = torch._foreach_add_


class GradientStorage(Protocol):
    """Memory in which the totals of some parameters are to lie."""

    def place(self, index: int) -> Tensor:
        """That of the parameter ``index``, whatever its values are."""

    def held(self) -> Sequence[Tensor]:
        """The memory that is there already."""

    def forget_step(self) -> None:
        """Let go of what ``place`` has returned."""


class GradientAccumulator:
    """Adds gradients to ``parameter.grad``, or to a total of the step for parameters in ``separate``.

    ``parameters`` is the very list that the stage passes as ``w``. ``separate`` are the indices of parameters
    that another stage owns, or whose gradients are summed over replicas before they are added to ``.grad``.
    What it ``holds`` is added to ``.grad`` by ``release`` alone, and that is everything if it is True.
    Gradients are multiplied by a factor of the step as they are added, which is exact for a power of two.
    """

    def __init__(self, parameters: Sequence[Tensor], separate: Collection[int], holds: bool = False) -> None:
        self._parameters = parameters
        self._apart = frozenset(range(len(parameters)) if holds else separate)
        self._holds = holds
        self._factor = 1.0
        self._totals: list[Tensor | None] = []
        self._waiting: list[Tensor | RowSparseGradient | None] = []
        self._homes: dict[int, GradientStorage] = {}

    def accumulate_in(self, home: GradientStorage, indices: Iterable[int]) -> None:
        """Let the totals of these parameters lie in ``home``, from their first gradient on."""
        self._homes |= dict.fromkeys(indices, home)

    def held(self) -> list[Tensor]:
        """The sums that are there already, and the memory that others are to lie in."""
        kept = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return kept + [memory for home in set(self._homes.values()) for memory in home.held()]

    def begin_step(self, factor: float = 1.0) -> None:
        """Start from the ``.grad`` that previous steps left; totals of the step start empty."""
        self._factor, self._waiting = factor, []
        self._totals = [
            None if index in self._apart else parameter.grad
            for index, parameter in enumerate(self._parameters)
        ]

    def clear_updated(self) -> None:
        """Release what an update has used. In a stream, totals of ``separate`` are of later mini-batches."""
        self._totals = [
            total if index in self._apart else parameter.grad
            for index, (total, parameter) in enumerate(zip(self._totals, self._parameters, strict=True))
        ]

    def forget_step(self) -> None:
        """Hold no gradient any longer, so that setting ``.grad`` to None frees it."""
        self._totals, self._waiting = [], []
        for home in set(self._homes.values()):
            home.forget_step()

    def add(self, gradients: list[Tensor | RowSparseGradient | None]) -> None:
        """Add one microbatch's gradients, aligned with ``parameters``; None stands for no gradient.

        A parameter's first gradient is taken out of the list, so that its memory can become the total.
        """
        self._add(gradients, self._factor)

    def add_deferred(self, gradients: list[Tensor | RowSparseGradient | None]) -> None:
        """Add these when ``flush_deferred`` is called, before anybody looks at sums."""
        self.flush_deferred()
        self._waiting = gradients

    def flush_deferred(self) -> None:
        """Add what waits for that."""
        gradients, self._waiting = self._waiting, []
        if gradients:
            self._add(gradients, self._factor)

    def _add(self, gradients: list[Tensor | RowSparseGradient | None], factor: float) -> None:
        totals, terms = [], []
        for index, total in enumerate(self._totals):
            gradient = gradients[index]
            if gradient is None:
                continue
            if isinstance(gradient, RowSparseGradient):
                gradient.add_to(self[index], factor)
                continue
            if gradient.is_complex():
                gradients[index] = gradient = gradient.resolve_conj()  # no sum takes the marked memory
            if total is None:
                del gradient
                self._set_first(index, gradients, factor)
            elif gradient.is_sparse or total.is_sparse:
                self._set(index, _added(total, gradient if factor == 1 else gradient * factor))
            else:
                totals.append(total)
                terms.append(gradient)
        if totals:
            _add_all(totals, terms, alpha=factor)

    def __getitem__(self, index: int) -> Tensor:
        """The sum for a parameter, for its next gradient to be made in; zeros before the first."""
        total = self._totals[index]
        if total is None:
            zeros = functools.partial(torch.zeros_like, self._parameters[index], requires_grad=False)
            total = self._homes[index].place(index).zero_() if index in self._homes else zeros()
            self._set(index, total)
        return total

    def add_tied(self, index: int, gradient: Tensor) -> None:
        """Add what another stage has summed for a parameter that it borrowed from this one."""
        gradients: list[Tensor | RowSparseGradient | None] = [None] * len(self._totals)
        gradients[index] = gradient
        self._add(gradients, 1.0)

    def pop(self, index: int) -> Tensor | None:
        """Hand over the total of a parameter in ``separate``; None if it got no gradient."""
        total, self._totals[index] = self._totals[index], None
        return total

    def add_reduced(self, index: int, total: Tensor) -> None:
        """Add a sum over replicas to ``.grad``, or hold it."""
        if self._holds:
            self._totals[index] = total
        else:
            self._add_to_grad(index, total)

    @property
    def unreleased(self) -> dict[int, Tensor]:
        """The totals of the step that are not in ``.grad``, by index."""
        return {index: total for index, total in enumerate(self._totals) if total is not None}

    def release(self) -> None:
        """Add everything that waits to ``.grad``."""
        for index in self.unreleased if self._holds else ():
            total, self._totals[index] = self._totals[index], None
            assert total is not None
            self._add_to_grad(index, total)

    def _add_to_grad(self, index: int, total: Tensor) -> None:
        parameter = self._parameters[index]
        if parameter.grad is None:
            parameter.grad = total
        elif total.is_sparse or parameter.grad.is_sparse:
            parameter.grad = _added(parameter.grad, total)
        else:
            parameter.grad.add_(total)

    def _set_first(
        self, index: int, gradients: list[Tensor | RowSparseGradient | None], factor: float
    ) -> None:
        parameter, gradient = self._parameters[index], gradients[index]
        assert isinstance(gradient, Tensor)
        total = gradient.detach()
        gradients[index] = gradient = None
        if total.is_sparse:
            total = total.clone()  # its indices may be the memory of the batch
        elif index in self._homes:
            total = self._homes[index].place(index).copy_(total)
        elif not (total.stride() == parameter.stride() and fills_storage(total) and is_exclusive(total)):
            total = torch.empty_like(parameter, requires_grad=False).copy_(total)
        self._set(index, total.mul_(factor) if factor != 1 else total)

    def _set(self, index: int, total: Tensor) -> None:
        self._totals[index] = total
        if index not in self._apart:
            self._parameters[index].grad = total


def _added(total: Tensor, gradient: Tensor) -> Tensor:
    """The sum of two gradients, of which one is sparse. It is dense if the other one is."""
    return total.add_(gradient) if total.is_sparse <= gradient.is_sparse else gradient + total
