"""Networks that solve equations, learn operators, or have an equation inside."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.model_case import Case, Inputs


def network(num_in: int, num_out: int, depth: int = 3, width: int = 32) -> nn.Sequential:
    hidden = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(num_in, width), nn.Tanh(), *hidden, nn.Linear(width, num_out))


class Burgers(nn.Module):
    """How far a network is from solving Burgers' equation (Raissi et al., PINN, 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network(2, 1)

    def forward(self, points: Tensor) -> Tensor:
        points = points.requires_grad_()
        u = self.network(points)
        (slopes,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        in_x, in_t = slopes[:, :1], slopes[:, 1:]
        (curved,) = torch.autograd.grad(in_x.sum(), points, create_graph=True)
        return (in_t + u * in_x - 0.01 * curved[:, :1]).square().mean()


class Functional(nn.Module):
    """The same kind of loss by torch.func: forward derivatives of a function of one point."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network(2, 1)

    def forward(self, points: Tensor) -> Tensor:
        def residual(point: Tensor) -> Tensor:
            slope = torch.func.jacrev(lambda p: self.network(p)[0])(point)
            return (slope[1] + self.network(point)[0] * slope[0]).square()

        return torch.func.vmap(residual)(points).mean()


class Hamiltonian(nn.Module):
    """Motion that follows from a learned energy (Greydanus et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = network(4, 1)

    def forward(self, state: Tensor) -> Tensor:
        with torch.enable_grad():
            state = state.requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(state).sum(), state, create_graph=True)
        place, momentum = slope.chunk(2, -1)
        return torch.cat([momentum, -place], -1)


class Operator(nn.Module):
    """A function through its values at sensors, asked at some places (Lu et al., DeepONet, 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = network(16, 32), network(1, 32)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, sensors: Tensor, places: Tensor) -> Tensor:
        return torch.einsum("bw,bpw->bp", self.branch(sensors), self.trunk(places)) + self.bias


class Spectral(nn.Module):
    """A convolution by low frequencies alone (Li et al., FNO, 2021)."""

    def __init__(self, width: int = 16, modes: int = 4) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)
        self.local = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        low = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], self.weight)
        padded = F.pad(torch.view_as_real(low), (0, 0, 0, spectrum.shape[-1] - self.modes))
        return F.gelu(torch.fft.irfft(torch.view_as_complex(padded), n=x.shape[-1]) + self.local(x))


class FourierOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv1d(2, 16, 1), nn.Conv1d(16, 1, 1)
        self.layers = nn.Sequential(*(Spectral() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        grid = torch.linspace(0, 1, x.shape[-1]).expand(x.shape[0], 1, -1)
        return self.project(self.layers(self.lift(torch.cat([x, grid], 1))))


class Ordinary(nn.Module):
    """A differential equation, solved by four steps of Runge and Kutta (Chen et al., neural ODE, 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.head = network(9, 8, depth=1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        def slope(time: float, state: Tensor) -> Tensor:
            return self.slope(torch.cat([state, torch.full_like(state[:, :1], time)], -1))

        step = 0.25
        for k in range(4):
            first = slope(k * step, x)
            second = slope((k + 0.5) * step, x + step / 2 * first)
            third = slope((k + 0.5) * step, x + step / 2 * second)
            x = x + step / 6 * (first + 2 * second + 2 * third + slope((k + 1) * step, x + step * third))
        return self.head(x)


class Sine(nn.Module):
    """A layer whose activation is a sine (Sitzmann et al., SIREN, 2020)."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.layer = nn.Linear(num_in, num_out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * self.layer(x))


class Splines(nn.Module):
    """A learned function on every edge, as a sum of bumps (Liu et al., KAN, 2024)."""

    def __init__(self, num_in: int, num_out: int, bumps: int = 6) -> None:
        super().__init__()
        self.centres = nn.Buffer(torch.linspace(-2, 2, bumps))
        self.weight = nn.Parameter(torch.randn(num_out, num_in, bumps) / num_in)
        self.base = nn.Linear(num_in, num_out)

    def forward(self, x: Tensor) -> Tensor:
        bumps = (-((x[..., None] - self.centres) * 2).square()).exp()
        return self.base(F.silu(x)) + torch.einsum("...ik,oik->...o", bumps, self.weight)


def points(rows: int) -> Inputs:
    return {"points": torch.rand(rows, 2)}


def to_numbers(num_in: int, num_out: int, name: str = "input") -> Callable[[int], Inputs]:
    """Makes batches of vectors with vectors as targets."""
    return lambda rows: {name: torch.randn(rows, num_in), "target": torch.randn(rows, num_out)}


CASES = (
    Case("PINN", Burgers, points),
    Case("PINN by torch.func", Functional, points),
    Case(
        "Hamiltonian network",
        Hamiltonian,
        to_numbers(4, 4, "state"),
        F.mse_loss,
    ),
    Case(
        "DeepONet",
        Operator,
        lambda rows: {
            "sensors": torch.randn(rows, 16),
            "places": torch.rand(rows, 10, 1),
            "target": torch.randn(rows, 10),
        },
        F.mse_loss,
    ),
    Case(
        "FNO",
        FourierOperator,
        lambda rows: {"x": torch.randn(rows, 1, 32), "target": torch.randn(rows, 1, 32)},
        F.mse_loss,
    ),
    Case("Neural ODE", Ordinary, to_numbers(8, 3, "x"), F.mse_loss),
    Case(
        "SIREN",
        lambda: nn.Sequential(Sine(2, 32), Sine(32, 32), Sine(32, 32), nn.Linear(32, 3)),
        to_numbers(2, 3),
        F.mse_loss,
    ),
    Case(
        "KAN",
        lambda: nn.Sequential(Splines(4, 16), Splines(16, 16), Splines(16, 2)),
        to_numbers(4, 2),
        F.mse_loss,
    ),
)
