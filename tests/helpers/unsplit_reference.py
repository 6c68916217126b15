"""The oracle: what autograd computes when it runs the unsplit model over the same microbatches in turn."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from pipec.runtime.absent_tensors import is_absent

Inputs = Mapping[str, Any]


def microbatches(inputs: Inputs, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The keyword arguments of each microbatch: every tensor is split along its rows."""
    start = 0
    for size in sizes:
        yield {
            name: value[start : start + size] if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        start += size


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


STEP_BUFFERS = ("num_batches_tracked", ".weight.0._u", ".weight.0._v")
"""The ends of the names of buffers that every microbatch changes alike."""


def step_buffers(model: nn.Module) -> dict[Tensor, Tensor]:
    """Each of these buffers with a copy of its value."""
    return {x: x.clone() for fqn, x in model.named_buffers() if fqn.endswith(STEP_BUFFERS)}


def unsplit_step(
    model: Callable[..., Any], inputs: Inputs, sizes: Sequence[int], owner: nn.Module | None = None
) -> Tensor:
    """The loss of the mini-batch; gradients are added to ``.grad``. Each microbatch counts by its rows.

    If ``model`` is a function, ``owner`` has the tensors that it uses.

    Statistics of norms change with each microbatch; numbers of batches, and vectors of spectral norms, once.
    """
    total: Tensor | float = 0.0
    owner = model if isinstance(model, nn.Module) else owner
    before = step_buffers(owner) if owner is not None else {}
    for rows, size in zip(microbatches(inputs, sizes), sizes, strict=True):
        for buffer, value in before.items():
            buffer.copy_(value)
        loss, share = loss_of(model(**rows)), size / sum(sizes)
        loss.backward(gradient=loss.new_tensor(share))
        total = total + loss.detach() * share
    assert isinstance(total, Tensor)
    return total


class Plain:
    """The unsplit model behind the methods of a pipeline, for scripts that are written once for both.

    ``optimizer`` makes one of ``(name, parameter)`` pairs, or several, as that of ``pipec.compile``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[..., Any] | None = None,
        clip_grad_norm: float | None = None,
        loss_fn: Callable[..., Any] | None = None,
    ) -> None:
        self.model, self._clip, self._loss_fn, self._adds = model, clip_grad_norm, loss_fn, False
        made = [] if optimizer is None else optimizer([*model.named_parameters()])
        self.optimizers = made if isinstance(made, list) else [made]
        self.logs: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __deepcopy__(self, memo: Any) -> "Plain":
        copied = Plain(self.model, None, self._clip, self._loss_fn)
        copied.model, copied.optimizers = copy.deepcopy((self.model, self.optimizers), memo)
        return copied

    @property
    def optimizer(self) -> optim.Optimizer:
        return self.optimizers[0]

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def as_module(self) -> nn.Module:
        return self.model

    def loss(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        found = self.model(*args, **kwargs)
        if self._loss_fn is not None:
            found = self._loss_fn(found, target)
        found, self.logs = found if isinstance(found, tuple) else (found, {})
        return found["loss"] if isinstance(found, dict) else found

    def add(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward, without an update."""
        loss = self.loss(*args, **kwargs)
        loss.backward()
        return loss.detach()

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = self.add(*args, **kwargs)
        if self.optimizers and not self._adds:
            self.update()
        return loss

    def update(self) -> None:
        if self._clip is not None:
            self.clip_grad_norm_(self._clip)
        for each in self.optimizers:
            each.step()
            each.zero_grad()

    def stream(self, batches: Iterable[tuple[Any, ...]]) -> Iterator[Tensor]:
        return (self.step(*batch) for batch in batches)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        self._adds = True
        yield
        self._adds = False

    @torch.no_grad()
    def eval_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.loss(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def full_state_dict(self, all_ranks: bool) -> dict[str, Tensor]:
        return dict(self.model.state_dict())


@dataclass(frozen=True)
class StepResult:
    """What a step leaves: its loss, and by FQN the gradients there are, the parameters and the buffers."""

    loss: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, loss: Tensor, model: nn.Module) -> "StepResult":
        named = {fqn: x for fqn, x in model.named_parameters() if not is_absent(x)}
        return cls(
            loss,
            {fqn: parameter.grad.clone() for fqn, parameter in named.items() if parameter.grad is not None},
            {fqn: parameter.detach().clone() for fqn, parameter in named.items()},
            {fqn: buffer.clone() for fqn, buffer in model.named_buffers() if not is_absent(buffer)},
        )


TIED_ERROR = 1e-6
"""How far off the gradient of a parameter may be that several stages use: its sum has another order."""


def assert_equal(found: StepResult, expected: StepResult, tied: frozenset[str] = frozenset()) -> None:
    """Every tensor has the same bits; gradients of ``tied`` parameters may be off by rounding."""
    assert torch.equal(found.loss, expected.loss), f"loss {found.loss} instead of {expected.loss}"
    for kind in ("gradients", "parameters", "buffers"):
        mine, theirs = getattr(found, kind), getattr(expected, kind)
        assert mine.keys() == theirs.keys(), kind
        for fqn, tensor in mine.items():
            error = relative_error(tensor, theirs[fqn])
            if fqn in tied and kind == "gradients":
                assert error < TIED_ERROR, f"{kind} of {fqn}: relative error {error:.1e}"
            else:
                assert torch.equal(tensor, theirs[fqn]), f"{kind} of {fqn}: relative error {error:.1e}"


def relative_error(found: Tensor, expected: Tensor) -> float:
    dtype = torch.complex128 if expected.is_complex() else torch.float64
    difference, size = (found - expected).to(dtype).norm(), expected.to(dtype).norm()
    return float(difference / size) if size else float(difference)
