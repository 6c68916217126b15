"""The gradients of one stage, summed over microbatches and steps as autograd's ``AccumulateGrad`` does.

A sparse gradient, as of ``nn.Embedding(sparse=True)``, stays sparse. A row-sparse gradient is added to its
rows of a dense sum.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from pipec.runtime.memory.storage import fills_storage, is_exclusive
from pipec.runtime.sparse_gradients import RowSparseGradient
from pipec.runtime.stages.flat_bucket import FlatBucket

# Adds lists of tensors in one call; the public API has no such function.
_add_all = torch._foreach_add_


class GradientAccumulator:
    """Adds gradients to ``parameter.grad``, or to a total of the step for parameters in ``separate``.

    ``parameters`` is the same list object that the stage passes as ``w``. ``separate`` are the indices of
    parameters that another stage owns, or whose gradients are reduced over replicas before they are added to
    ``.grad``. If it ``defers``, all gradients stay in totals until ``release`` adds them to ``.grad``.
    Gradients are multiplied by a factor of the step as they are added, which is exact for a power of two.
    ``on_host`` are the parameters of which the list has copies.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        separate: Collection[int],
        defers: bool = False,
        on_host: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        self._parameters, self._on_host = parameters, on_host
        self._separate = frozenset(range(len(parameters)) if defers else separate)
        self._defers = defers
        self._factor = 1.0
        self._totals: list[Tensor | None] = []
        self.kept: list[Tensor | RowSparseGradient | None] = []
        """Gradients of a microbatch for ``accumulate``, aligned with ``parameters``; None for no gradient.

        The first gradient of a parameter is removed from the list when it is added, so that its memory can
        become the sum.
        """
        self._homes: dict[int, tuple[FlatBucket, str]] = {}

    def accumulate_in(self, home: FlatBucket, names: Mapping[int, str]) -> None:
        """Put the totals of these parameters into the memory of ``home``, from the first gradient on."""
        self._homes |= {index: (home, name) for index, name in names.items()}

    def begin_step(self, factor: float = 1.0) -> None:
        """Start from the ``.grad`` that previous steps left; totals of the step start empty."""
        self._factor, self.kept = factor, []
        self._totals = [
            None if index in self._separate else parameter.grad
            for index, parameter in enumerate(self._parameters)
        ]

    def clear_updated(self) -> None:
        """Drop the gradients that an update used. In a stream, separate totals are of later mini-batches."""
        self._totals = [
            total if index in self._separate else parameter.grad
            for index, (total, parameter) in enumerate(zip(self._totals, self._parameters, strict=True))
        ]

    def forget_step(self) -> None:
        """Drop references to gradients, so that setting ``.grad`` to None frees them."""
        self._totals, self.kept = [], []
        for home, _ in self._homes.values():
            home.forget_step()

    def _home_of(self, index: int) -> Tensor:
        home, name = self._homes[index]
        return home.place(name)

    def accumulate(self) -> None:
        """Add the gradients that were ``kept``."""
        gradients, self.kept = self.kept, []
        if gradients:
            self._add(gradients, self._factor)

    def _add(self, gradients: list[Tensor | RowSparseGradient | None], factor: float) -> None:
        totals, terms = [], []
        for index, total in enumerate(self._totals):
            gradient = gradients[index]
            if gradient is None:
                continue
            if isinstance(gradient, RowSparseGradient):
                gradient.add_to(self._sum(index), factor)
                continue
            if gradient.is_complex():
                gradients[index] = gradient = gradient.resolve_conj()  # sums need plain memory
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

    def _sum(self, index: int) -> Tensor:
        """The sum for a parameter, to which rows of its gradient are added; zeros before the first."""
        total = self._totals[index]
        if total is None:
            zeros = functools.partial(torch.zeros_like, self._parameters[index], requires_grad=False)
            total = self._home_of(index).zero_() if index in self._homes else zeros()
            self._set(index, total)
        return total

    def add_tied(self, index: int, gradient: Tensor) -> None:
        """Add the gradient that another stage summed for a parameter it borrows from this one."""
        gradients: list[Tensor | RowSparseGradient | None] = [None] * len(self._totals)
        gradients[index] = gradient
        self._add(gradients, 1.0)

    def pop(self, index: int) -> Tensor | None:
        """Remove and return the total of a separate parameter; None if it has no gradient."""
        total, self._totals[index] = self._totals[index], None
        return total

    def add_reduced(self, index: int, total: Tensor) -> None:
        """Add a sum over replicas to ``.grad``, or to the totals if deferred."""
        if self._defers:
            self._totals[index] = total
        else:
            add_to_grad(self._owner(index), total)

    @property
    def unreleased(self) -> dict[int, Tensor]:
        """The totals of the step that are not yet in ``.grad``, by index."""
        return {index: total for index, total in enumerate(self._totals) if total is not None}

    def release(self) -> None:
        """Add all deferred totals to ``.grad``."""
        for index in self.unreleased if self._defers else ():
            total, self._totals[index] = self._totals[index], None
            assert total is not None
            add_to_grad(self._owner(index), total)

    def _owner(self, index: int) -> Tensor:
        """The parameter of the model."""
        return self._on_host.get(index, self._parameters[index])

    def _set_first(
        self, index: int, gradients: list[Tensor | RowSparseGradient | None], factor: float
    ) -> None:
        parameter, gradient = self._owner(index), gradients[index]
        assert isinstance(gradient, Tensor)
        total = gradient.detach()
        gradients[index] = gradient = None
        if total.is_sparse:
            total = total.clone()  # its indices may be the memory of the batch
        elif index in self._homes:
            total = self._home_of(index).copy_(total)
        elif not (total.stride() == parameter.stride() and fills_storage(total) and is_exclusive(total)):
            total = torch.empty_like(parameter, device=total.device, requires_grad=False).copy_(total)
        self._set(index, total.mul_(factor) if factor != 1 else total)

    def _set(self, index: int, total: Tensor) -> None:
        self._totals[index] = total
        if index not in self._separate:
            self._parameters[index].grad = total


def add_to_grad(parameter: Tensor, total: Tensor) -> None:
    """Add a gradient to ``parameter.grad``, or let it be that."""
    if parameter.grad is None:
        parameter.grad = total
    elif total.is_sparse or parameter.grad.is_sparse:
        parameter.grad = _added(parameter.grad, total)
    else:
        parameter.grad.add_(total)


def _added(total: Tensor, gradient: Tensor) -> Tensor:
    """The sum of two gradients, at least one of which is sparse; dense if the other one is."""
    return total.add_(gradient) if total.is_sparse <= gradient.is_sparse else gradient + total
