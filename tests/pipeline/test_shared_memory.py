"""Tensors whose memory says more than their elements do: shared between parameters, or read as it lies."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pipec


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def same(model: Two) -> None:
    model.b.weight.data = model.a.weight.data


def transposed(model: Two) -> None:
    model.b.weight = nn.Parameter(model.a.weight.detach().t())


def buffer(model: Two) -> None:
    model.register_buffer("view", model.a.weight.detach()[1:])


@pytest.mark.parametrize("share", [same, transposed, buffer])
def test_parameters_that_share_memory_are_refused(share: Callable[[Two], None]) -> None:
    model = Two()
    share(model)
    with pytest.raises(
        pipec.InputError, match=r"a\.weight and (b\.weight|view) share memory .* make them one"
    ):
        pipec.compile(model, 2)


def test_one_parameter_under_two_names_and_slices_of_one_memory_are_fine() -> None:
    model = Two()
    model.b.weight = model.a.weight
    flat = torch.randn(8)
    model.a.bias.data, model.b.bias.data = flat[:4], flat[4:]
    x = torch.randn(4, 4)
    unsplit = copy.deepcopy(model)
    loss = pipec.compile(model, 2, loss_fn=nn.functional.mse_loss, microbatches=1).step(x, target=x)
    nn.functional.mse_loss(unsplit(x), x).backward()
    assert torch.equal(loss, nn.functional.mse_loss(unsplit(x), x))
    torch.testing.assert_close(model.a.weight.grad, unsplit.a.weight.grad)


def test_a_parameter_that_comes_to_share_memory_is_refused() -> None:
    model, x = Two(), torch.randn(4, 4)
    pipe = pipec.compile(model, 2, loss_fn=nn.functional.mse_loss, microbatches=1)
    pipe.step(x, target=x)
    transposed(model)
    with pytest.raises(pipec.InputError, match="share memory"):
        pipe.step(x, target=x)


@pytest.mark.parametrize("conjugate", [torch.conj, lambda x: x])
def test_gradients_of_complex_parameters_are_summed(conjugate: Callable[[Tensor], Tensor]) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
            self.b = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            hidden = x.to(torch.complex64) @ conjugate(self.a)
            return (conjugate(hidden) @ self.b.mH).abs().square().mean()

    model, x = Complex(), torch.randn(8, 4)
    unsplit = copy.deepcopy(model)
    torch.testing.assert_close(pipec.compile(model, 2, microbatches=2).step(x), unsplit(x))
    unsplit(x).backward()
    for mine, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
