"""Generative models other than those that denoise. What they would draw is an argument."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import perceptron
from zoo.model_case import Case, Inputs


class Variational(nn.Module):
    """The evidence bound of a Gaussian latent (Kingma and Welling, 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(16, 32, 32, 8), perceptron(4, 32, 32, 16)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        decoded = self.decoder(mean + (log_variance / 2).exp() * noise)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1) / 2
        return ((x - decoded).square().sum(-1) + divergence).mean()


class Distributed(nn.Module):
    """The same by torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(16, 32, 32, 8), perceptron(4, 32, 32, 16)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, raw = self.encoder(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, F.softplus(raw))
        prior = torch.distributions.Normal(0.0, 1.0)
        likelihood = torch.distributions.Bernoulli(logits=self.decoder(mean + posterior.stddev * noise))
        bound = likelihood.log_prob(x.sigmoid().round()).sum(-1)
        return (torch.distributions.kl_divergence(posterior, prior).sum(-1) - bound).mean()


class Quantised(nn.Module):
    """Latents are the nearest of a code book; gradients pass straight through (van den Oord et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(16, 32, 32, 8), perceptron(8, 32, 32, 16)
        self.codes = nn.Embedding(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        apart = (hidden[:, None] - self.codes.weight).square().sum(-1)
        code = self.codes(apart.argmin(-1))
        commitment = F.mse_loss(code, hidden.detach()) + 0.25 * F.mse_loss(hidden, code.detach())
        return F.mse_loss(self.decoder(hidden + (code - hidden).detach()), x) + commitment


class Adversarial(nn.Module):
    """The generator's loss, through a discriminator that it does not train (Goodfellow et al., 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(8, 64),
            nn.Unflatten(1, (16, 2, 2)),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 16, 4, 2, 1),
            nn.Flatten(),
            nn.Linear(64, 1),
        ).requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        return F.softplus(-self.discriminator(self.generator(noise))).mean()


class Critic(nn.Module):
    """The critic's loss with its gradient penalty (Gulrajani et al., WGAN-GP, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron(16, 32, 32, 1)

    def forward(self, real: Tensor, made: Tensor, between: Tensor) -> Tensor:
        mixed = (between * real + (1 - between) * made).requires_grad_()
        (slope,) = torch.autograd.grad(self.layers(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=-1) - 1).square().mean()
        return self.layers(made).mean() - self.layers(real).mean() + 10 * penalty


class Coupling(nn.Module):
    """Half of a vector decides how the other half is scaled and moved (Dinh et al., RealNVP, 2017)."""

    def __init__(self, flipped: bool) -> None:
        super().__init__()
        self.flipped = flipped
        self.layers = perceptron(4, 32, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = reversed(x.chunk(2, -1)) if self.flipped else x.chunk(2, -1)
        scale, shift = self.layers(kept).chunk(2, -1)
        scale = scale.tanh()
        moved = moved * scale.exp() + shift
        return torch.cat([moved, kept] if self.flipped else [kept, moved], -1), scale.sum(-1)


class Flow(nn.Module):
    """Minus the likelihood of data under a chain of couplings and, in between, full matrices (Glow, 2018)."""

    def __init__(self, mixing: bool) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(bool(k % 2)) for k in range(4))
        mixers = [torch.linalg.qr(torch.randn(8, 8))[0] for _ in range(4)] if mixing else []
        self.mixers = nn.ParameterList(mixers)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0])
        for k, coupling in enumerate(self.couplings):
            if len(self.mixers):
                x, total = x @ self.mixers[k], total + torch.linalg.slogdet(self.mixers[k])[1]
            x, volume = coupling(x)
            total = total + volume
        return ((x.square() + math.log(2 * math.pi)).sum(-1) / 2 - total).mean()


class MaskedLinear(nn.Linear):
    """A layer some of whose weights are kept at zero by a mask."""

    def __init__(self, num_in: int, num_out: int, mask: Tensor) -> None:
        super().__init__(num_in, num_out)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class Autoregressive(nn.Module):
    """Every number is predicted from those before it (Germain et al., MADE, 2015)."""

    def __init__(self, size: int = 8, width: int = 32) -> None:
        super().__init__()
        order, hidden = torch.arange(size), torch.arange(width) % (size - 1)
        self.layers = nn.Sequential(
            MaskedLinear(size, width, (hidden[:, None] >= order).float()),
            nn.ReLU(),
            MaskedLinear(width, width, (hidden[:, None] >= hidden).float()),
            nn.ReLU(),
            MaskedLinear(width, size, (order[:, None] > hidden).float()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class CausalPixels(nn.Conv2d):
    """A convolution over the pixels above and to the left."""

    def __init__(self, num_in: int, num_out: int, itself: bool) -> None:
        super().__init__(num_in, num_out, 5, padding=2)
        mask = torch.ones(5, 5)
        mask[2, 2 + itself :] = 0
        mask[3:] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=2)


class Waves(nn.Module):
    """Gated convolutions over the past with skips to the end (van den Oord et al., WaveNet, 2016)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**k) for k in range(3))
        self.mixers = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(3))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 16, 1))

    def forward(self, wave: Tensor) -> Tensor:
        x, skips = self.embed(wave).mT, []
        for k, (gate, mix) in enumerate(zip(self.gates, self.mixers, strict=True)):
            new, opened = gate(F.pad(x, (2**k, 0))).chunk(2, 1)
            residual, skip = mix(new.tanh() * opened.sigmoid()).chunk(2, 1)
            x = x + residual
            skips.append(skip)
        return self.head(torch.stack(skips).sum(0))


class Energy(nn.Module):
    """Contrastive divergence with negatives that were drawn before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron(16, 32, 32, 1, activation=nn.SiLU)

    def forward(self, real: Tensor, made: Tensor) -> Tensor:
        low, high = self.layers(real), self.layers(made)
        return (low - high).mean() + 0.1 * (low.square() + high.square()).mean()


def pixelcnn() -> nn.Module:
    hidden = [nn.ReLU(), CausalPixels(16, 16, True), nn.ReLU(), CausalPixels(16, 16, True)]
    return nn.Sequential(CausalPixels(1, 16, False), *hidden, nn.ReLU(), nn.Conv2d(16, 4, 1))


def encoded(rows: int) -> Inputs:
    return {"x": torch.randn(rows, 16), "noise": torch.randn(rows, 4)}


def pixels(rows: int) -> Inputs:
    levels = torch.randint(4, (rows, 8, 8))
    return {"input": levels[:, None] / 3, "target": levels}


def waves(rows: int) -> Inputs:
    wave = torch.randint(16, (rows, 20))
    return {"wave": wave, "target": wave.roll(-1, 1)}


def told(rows: int, *names: str) -> Inputs:
    return {name: torch.randn(rows, 16) for name in names}


CASES = (
    Case("VAE", Variational, encoded),
    Case("VAE of distributions", Distributed, encoded),
    Case("VQ-VAE", Quantised, lambda rows: told(rows, "x")),
    Case("GAN", Adversarial, lambda rows: {"noise": torch.randn(rows, 8)}),
    Case(
        "WGAN-GP",
        Critic,
        lambda rows: {**told(rows, "real", "made"), "between": torch.rand(rows, 1)},
    ),
    Case("RealNVP", lambda: Flow(False), lambda rows: {"x": torch.randn(rows, 8)}),
    Case("Glow", lambda: Flow(True), lambda rows: {"x": torch.randn(rows, 8)}),
    Case("MADE", Autoregressive, lambda rows: {"x": (x := torch.randn(rows, 8)), "target": x}, F.mse_loss),
    Case("PixelCNN", pixelcnn, pixels, F.cross_entropy),
    Case("WaveNet", Waves, waves, F.cross_entropy),
    Case("Energy-based", Energy, lambda rows: told(rows, "real", "made")),
)
