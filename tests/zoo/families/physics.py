"""Networks that solve equations, learn operators, or have an equation inside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import Apply, model, perceptron
from zoo.model_case import Case, batch, normal, uniform


def network(num_in: int, num_out: int, depth: int = 3) -> nn.Sequential:
    return perceptron(num_in, *[32] * (depth + 1), num_out, activation=nn.Tanh)


@model(network=lambda: network(2, 1))
def burgers(self, points: Tensor) -> Tensor:
    """How far a network is from solving Burgers' equation (Raissi et al., PINN, 2019)."""
    points = points.requires_grad_()
    u = self.network(points)
    (slopes,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    in_x, in_t = slopes[:, :1], slopes[:, 1:]
    (curved,) = torch.autograd.grad(in_x.sum(), points, create_graph=True)
    return (in_t + u * in_x - 0.01 * curved[:, :1]).square().mean()


@model(network=lambda: network(2, 1))
def functional(self, points: Tensor) -> Tensor:
    """The same kind of loss by torch.func: forward derivatives of a function of one point."""

    def residual(point: Tensor) -> Tensor:
        slope = torch.func.jacrev(lambda p: self.network(p)[0])(point)
        return (slope[1] + self.network(point)[0] * slope[0]).square()

    return torch.func.vmap(residual)(points).mean()


@model(energy=lambda: network(4, 1))
def hamiltonian(self, state: Tensor) -> Tensor:
    """Motion that follows from a learned energy (Greydanus et al., 2019)."""
    with torch.enable_grad():
        state = state.requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(state).sum(), state, create_graph=True)
    place, momentum = slope.chunk(2, -1)
    return torch.cat([momentum, -place], -1)


@model(
    branch=lambda: network(16, 32), trunk=lambda: network(1, 32), bias=lambda: nn.Parameter(torch.zeros(()))
)
def operator(self, sensors: Tensor, places: Tensor) -> Tensor:
    """A function through its values at sensors, asked at some places (Lu et al., DeepONet, 2021)."""
    return torch.einsum("bw,bpw->bp", self.branch(sensors), self.trunk(places)) + self.bias


WIDTH, MODES = 16, 4


@model(
    weight=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH, MODES, dtype=torch.cfloat) / WIDTH),
    local=lambda: nn.Conv1d(WIDTH, WIDTH, 1),
)
def spectral(self, x: Tensor) -> Tensor:
    """A convolution by low frequencies alone (Li et al., FNO, 2021)."""
    spectrum = torch.fft.rfft(x)
    low = torch.einsum("bim,iom->bom", spectrum[..., :MODES], self.weight)
    padded = F.pad(torch.view_as_real(low), (0, 0, 0, spectrum.shape[-1] - MODES))
    return F.gelu(torch.fft.irfft(torch.view_as_complex(padded), n=x.shape[-1]) + self.local(x))


def with_places(x: Tensor) -> Tensor:
    return torch.cat([x, torch.linspace(0, 1, x.shape[-1]).expand(x.shape[0], 1, -1)], 1)


def fourier() -> nn.Module:
    lift, project = nn.Conv1d(2, WIDTH, 1), nn.Conv1d(WIDTH, 1, 1)
    return nn.Sequential(Apply(with_places), lift, *(spectral() for _ in range(3)), project)


@model(slope=lambda: network(9, 8, depth=1), head=lambda: nn.Linear(8, 3))
def ordinary(self, x: Tensor) -> Tensor:
    """A differential equation, solved by four steps of Runge and Kutta (Chen et al., neural ODE, 2018)."""

    def slope(time: float, state: Tensor) -> Tensor:
        return self.slope(torch.cat([state, torch.full_like(state[:, :1], time)], -1))

    step = 0.25
    for k in range(4):
        first = slope(k * step, x)
        second = slope((k + 0.5) * step, x + step / 2 * first)
        third = slope((k + 0.5) * step, x + step / 2 * second)
        x = x + step / 6 * (first + 2 * second + 2 * third + slope((k + 1) * step, x + step * third))
    return self.head(x)


def siren() -> nn.Module:
    """Layers whose activation is a sine (Sitzmann et al., SIREN, 2020)."""
    return perceptron(2, 32, 32, 32, 3, activation=lambda: Apply(lambda x: torch.sin(30 * x)))


@model(
    centres=lambda num_in, num_out: nn.Buffer(torch.linspace(-2, 2, 6)),
    weight=lambda num_in, num_out: nn.Parameter(torch.randn(num_out, num_in, 6) / num_in),
    base=lambda num_in, num_out: nn.Linear(num_in, num_out),
)
def splines(self, x: Tensor) -> Tensor:
    """A learned function on every edge, as a sum of bumps (Liu et al., KAN, 2024)."""
    bumps = (-((x[..., None] - self.centres) * 2).square()).exp()
    return self.base(F.silu(x)) + torch.einsum("...ik,oik->...o", bumps, self.weight)


def kan() -> nn.Module:
    return nn.Sequential(splines(4, 16), splines(16, 16), splines(16, 2))


POINTS = batch(points=uniform(2))
FUNCTIONS = batch(sensors=normal(16), places=uniform(10, 1), target=normal(10))

CASES = (
    Case("PINN", burgers, POINTS),
    Case("PINN by torch.func", functional, POINTS),
    Case("Hamiltonian network", hamiltonian, batch(state=normal(4), target=normal(4)), F.mse_loss),
    Case("DeepONet", operator, FUNCTIONS, F.mse_loss),
    Case("FNO", fourier, batch(input=normal(1, 32), target=normal(1, 32)), F.mse_loss),
    Case("Neural ODE", ordinary, batch(x=normal(8), target=normal(3)), F.mse_loss),
    Case("SIREN", siren, batch(input=normal(2), target=normal(3)), F.mse_loss),
    Case("KAN", kan, batch(input=normal(4), target=normal(2)), F.mse_loss),
)
