"""Generative models other than those that denoise. What they would draw is an argument."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import model, perceptron
from zoo.model_case import Case, batch, normal, uniform


@model(encoder=lambda: perceptron(16, 32, 32, 8), decoder=lambda: perceptron(4, 32, 32, 16))
def variational(self, x: Tensor, noise: Tensor) -> Tensor:
    """The evidence bound of a Gaussian latent (Kingma and Welling, 2014)."""
    mean, log_variance = self.encoder(x).chunk(2, -1)
    decoded = self.decoder(mean + (log_variance / 2).exp() * noise)
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1) / 2
    return ((x - decoded).square().sum(-1) + divergence).mean()


@model(encoder=lambda: perceptron(16, 32, 32, 8), decoder=lambda: perceptron(4, 32, 32, 16))
def of_distributions(self, x: Tensor, noise: Tensor) -> Tensor:
    mean, raw = self.encoder(x).chunk(2, -1)
    posterior = torch.distributions.Normal(mean, F.softplus(raw))
    prior = torch.distributions.Normal(0.0, 1.0)
    likelihood = torch.distributions.Bernoulli(logits=self.decoder(mean + posterior.stddev * noise))
    bound = likelihood.log_prob(x.sigmoid().round()).sum(-1)
    return (torch.distributions.kl_divergence(posterior, prior).sum(-1) - bound).mean()


@model(
    encoder=lambda: perceptron(16, 32, 32, 8),
    decoder=lambda: perceptron(8, 32, 32, 16),
    codes=lambda: nn.Embedding(12, 8),
)
def quantised(self, x: Tensor) -> Tensor:
    """Latents are the nearest of a code book; gradients pass straight through (van den Oord et al., 2017)."""
    hidden = self.encoder(x)
    apart = (hidden[:, None] - self.codes.weight).square().sum(-1)
    code = self.codes(apart.argmin(-1))
    commitment = F.mse_loss(code, hidden.detach()) + 0.25 * F.mse_loss(hidden, code.detach())
    return F.mse_loss(self.decoder(hidden + (code - hidden).detach()), x) + commitment


def generator() -> nn.Module:
    first = [nn.Linear(8, 64), nn.Unflatten(1, (16, 2, 2)), nn.ReLU(), nn.ConvTranspose2d(16, 8, 4, 2, 1)]
    return nn.Sequential(*first, nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh())


def discriminator() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 1)).requires_grad_(False)


@model(generator=generator, discriminator=discriminator)
def adversarial(self, noise: Tensor) -> Tensor:
    """The generator's loss, through a discriminator that it does not train (Goodfellow et al., 2014)."""
    return F.softplus(-self.discriminator(self.generator(noise))).mean()


@model(layers=lambda: perceptron(16, 32, 32, 1))
def critic(self, real: Tensor, made: Tensor, between: Tensor) -> Tensor:
    """The critic's loss with its gradient penalty (Gulrajani et al., WGAN-GP, 2017)."""
    mixed = (between * real + (1 - between) * made).requires_grad_()
    (slope,) = torch.autograd.grad(self.layers(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(dim=-1) - 1).square().mean()
    return self.layers(made).mean() - self.layers(real).mean() + 10 * penalty


@model(flipped=bool, layers=lambda flipped: perceptron(4, 32, 8))
def coupling(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """Half of a vector decides how the other half is scaled and moved (Dinh et al., RealNVP, 2017)."""
    kept, moved = reversed(x.chunk(2, -1)) if self.flipped else x.chunk(2, -1)
    scale, shift = self.layers(kept).chunk(2, -1)
    scale = scale.tanh()
    moved = moved * scale.exp() + shift
    return torch.cat([moved, kept] if self.flipped else [kept, moved], -1), scale.sum(-1)


def mixers(mixing: bool) -> nn.ParameterList:
    return nn.ParameterList(torch.linalg.qr(torch.randn(8, 8))[0] for _ in range(4 if mixing else 0))


@model(couplings=lambda mixing: nn.ModuleList(coupling(k % 2) for k in range(4)), mixers=mixers)
def flow(self, x: Tensor) -> Tensor:
    """Minus the likelihood of data under a chain of couplings and, in between, full matrices (Glow, 2018)."""
    total = x.new_zeros(x.shape[0])
    for k, coupling in enumerate(self.couplings):
        if len(self.mixers):
            x, total = x @ self.mixers[k], total + torch.linalg.slogdet(self.mixers[k])[1]
        x, volume = coupling(x)
        total = total + volume
    return ((x.square() + math.log(2 * math.pi)).sum(-1) / 2 - total).mean()


@model(layer=lambda mask: nn.Linear(*reversed(mask.shape)), mask=lambda mask: nn.Buffer(mask.float()))
def masked(self, x: Tensor) -> Tensor:
    """A layer some of whose weights are kept at zero by a mask."""
    return F.linear(x, self.layer.weight * self.mask, self.layer.bias)


def autoregressive(size: int = 8, width: int = 32) -> nn.Module:
    """Every number is predicted from those before it (Germain et al., MADE, 2015)."""
    order, hidden = torch.arange(size), torch.arange(width) % (size - 1)
    first, second = masked(hidden[:, None] >= order), masked(hidden[:, None] >= hidden)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), masked(order[:, None] > hidden))


def pixels_before(itself: bool) -> Tensor:
    mask = torch.ones(5, 5)
    mask[2, 2 + itself :] = 0
    mask[3:] = 0
    return mask


def repeated(rows: int) -> dict[str, Tensor]:
    return dict.fromkeys(("input", "target"), torch.randn(rows, 8))


@model(
    layer=lambda num, itself: nn.Conv2d(num, 16, 5, padding=2),
    mask=lambda num, itself: nn.Buffer(pixels_before(itself)),
)
def causal(self, x: Tensor) -> Tensor:
    """A convolution over the pixels above and to the left."""
    return F.conv2d(x, self.layer.weight * self.mask, self.layer.bias, padding=2)


def pixelcnn() -> nn.Module:
    hidden = [nn.ReLU(), causal(16, True), nn.ReLU(), causal(16, True)]
    return nn.Sequential(causal(1, False), *hidden, nn.ReLU(), nn.Conv2d(16, 4, 1))


def pixels(rows: int) -> dict[str, Tensor]:
    levels = torch.randint(4, (rows, 8, 8))
    return {"input": levels[:, None] / 3, "target": levels}


@model(
    embed=lambda: nn.Embedding(16, 16),
    gates=lambda: nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**k) for k in range(3)),
    mixers=lambda: nn.ModuleList(nn.Conv1d(16, 32, 1) for _ in range(3)),
    head=lambda: nn.Sequential(nn.ReLU(), nn.Conv1d(16, 16, 1)),
)
def wavenet(self, wave: Tensor) -> Tensor:
    """Gated convolutions over the past with skips to the end (van den Oord et al., WaveNet, 2016)."""
    x, skips = self.embed(wave).mT, []
    for k, (gate, mix) in enumerate(zip(self.gates, self.mixers, strict=True)):
        new, opened = gate(F.pad(x, (2**k, 0))).chunk(2, 1)
        residual, skip = mix(new.tanh() * opened.sigmoid()).chunk(2, 1)
        x = x + residual
        skips.append(skip)
    return self.head(torch.stack(skips).sum(0))


def waves(rows: int) -> dict[str, Tensor]:
    wave = torch.randint(16, (rows, 20))
    return {"wave": wave, "target": wave.roll(-1, 1)}


@model(layers=lambda: perceptron(16, 32, 32, 1, activation=nn.SiLU))
def energy(self, real: Tensor, made: Tensor) -> Tensor:
    """Contrastive divergence with negatives that were drawn before."""
    low, high = self.layers(real), self.layers(made)
    return (low - high).mean() + 0.1 * (low.square() + high.square()).mean()


ENCODED = batch(x=normal(16), noise=normal(4))
PAIRS = {"real": normal(16), "made": normal(16)}

CASES = (
    Case("VAE", variational, ENCODED),
    Case("VAE of distributions", of_distributions, ENCODED),
    Case("VQ-VAE", quantised, batch(x=normal(16))),
    Case("GAN", adversarial, batch(noise=normal(8))),
    Case("WGAN-GP", critic, batch(**PAIRS, between=uniform(1))),
    Case("RealNVP", lambda: flow(False), batch(x=normal(8))),
    Case("Glow", lambda: flow(True), batch(x=normal(8))),
    Case("MADE", autoregressive, repeated, F.mse_loss),
    Case("PixelCNN", pixelcnn, pixels, F.cross_entropy),
    Case("WaveNet", wavenet, waves, F.cross_entropy),
    Case("Energy-based", energy, batch(**PAIRS)),
)
