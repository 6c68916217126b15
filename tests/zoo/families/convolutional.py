"""Image classifiers made of convolutions, as torchvision has them, written out."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import Branches, Residual, model, perceptron
from zoo.model_case import Case, batch, integers, normal


def conv(num_in: int, num_out: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU; height and width are divided by the stride."""
    layer = nn.Conv2d(num_in, num_out, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(num_out), nn.ReLU(inplace=True))


def head(num_in: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, 5)]


@model(narrow=lambda num: nn.Conv2d(num, num // 4, 1), widen=lambda num: nn.Conv2d(num // 4, num, 1))
def excitation(self, x: Tensor) -> Tensor:
    """Channels weighted by what their means say (Hu et al., 2018)."""
    means = F.adaptive_avg_pool2d(x, 1)
    return x * self.widen(F.silu(self.narrow(means))).sigmoid()


@model(inside=lambda inside, shortcut: inside, shortcut=lambda inside, shortcut: shortcut)
def block(self, x: Tensor) -> Tensor:
    return F.relu(self.inside(x) + self.shortcut(x))


def resnet(groups: int = 1, excited: bool = False) -> nn.Module:
    """The shortcut of a block is projected where the shape changes."""

    def residual(num_in: int, num_out: int, stride: int = 1) -> nn.Module:
        last = [nn.Conv2d(num_out, num_out, 3, padding=1, groups=groups), nn.BatchNorm2d(num_out)]
        inside = [conv(num_in, num_out, 3, stride), *last, *([excitation(num_out)] if excited else [])]
        same = num_in == num_out and stride == 1
        shortcut = nn.Identity() if same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)
        return block(nn.Sequential(*inside), shortcut)

    return nn.Sequential(conv(3, 16), residual(16, 16), residual(16, 32, 2), residual(32, 32), *head(32))


def inverted(excited: bool) -> nn.Module:
    """Blocks that are wide inside, narrow at their ends (Sandler et al., MobileNetV2, 2018)."""

    def block(num_in: int, num_out: int, stride: int) -> nn.Module:
        wide = 3 * num_in
        layers = [conv(num_in, wide, 1), conv(wide, wide, 3, stride, groups=wide)]
        layers += [excitation(wide)] if excited else []
        layers += [nn.Conv2d(wide, num_out, 1, bias=False), nn.BatchNorm2d(num_out)]
        return Residual(*layers) if num_in == num_out else nn.Sequential(*layers)

    return nn.Sequential(conv(3, 8), block(8, 8, 1), block(8, 16, 2), block(16, 16, 1), *head(16))


def vgg() -> nn.Module:
    layers = [conv(3, 16), conv(16, 16), nn.MaxPool2d(2), conv(16, 32), conv(32, 32), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), perceptron(32 * 16, 32, 5))


def alexnet() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 5, 2, 2), nn.ReLU(), nn.LocalResponseNorm(3), nn.MaxPool2d(2)]
    more = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, *more, perceptron(128, 32, 5))


def dense_layer(num_in: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(num_in), nn.ReLU(), nn.Conv2d(num_in, 4, 3, padding=1))


@model(layers=lambda num_in: nn.ModuleList(dense_layer(num_in + 4 * k) for k in range(3)))
def dense(self, x: Tensor) -> Tensor:
    """Every layer reads all layers before (Huang et al., 2017)."""
    features = [x]
    for layer in self.layers:
        features.append(layer(torch.cat(features, 1)))
    return torch.cat(features, 1)


def densenet() -> nn.Module:
    transition = nn.Sequential(nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 10, 1), nn.AvgPool2d(2))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), dense(8), transition, dense(10), *head(22))


def inception(num_in: int, num: int) -> nn.Module:
    """Branches of several sizes side by side (Szegedy et al., 2015)."""
    return Branches(
        conv(num_in, num, 1),
        nn.Sequential(conv(num_in, num, 1), conv(num, num, 3)),
        nn.Sequential(conv(num_in, num, 1), conv(num, num, 5)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(num_in, num, 1)),
    )


def googlenet() -> nn.Module:
    return nn.Sequential(conv(3, 16, 3, 2), inception(16, 8), inception(32, 8), *head(32))


@model(layers=lambda: nn.Sequential(conv(8, 8, 1), conv(8, 8, 3, groups=8), conv(8, 8, 1)))
def shuffle(self, x: Tensor) -> Tensor:
    """Half of the channels pass; then the halves are interleaved (Ma et al., ShuffleNetV2, 2018)."""
    kept, changed = x.chunk(2, 1)
    return torch.cat([kept, self.layers(changed)], 1).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def shufflenet() -> nn.Module:
    return nn.Sequential(conv(3, 16, 3, 2), *(shuffle() for _ in range(3)), *head(16))


def fire(num_in: int, narrow: int, wide: int) -> nn.Module:
    """A narrow layer, then two kinds of wide ones (Iandola et al., SqueezeNet, 2016)."""
    squeeze = nn.Conv2d(num_in, narrow, 1)
    sides = (nn.Conv2d(narrow, wide, size, padding=size // 2) for size in (1, 3))
    return nn.Sequential(squeeze, nn.ReLU(), Branches(*(nn.Sequential(side, nn.ReLU()) for side in sides)))


def squeezenet() -> nn.Module:
    last = [nn.Conv2d(32, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), fire(16, 4, 8), fire(16, 8, 16), *last)


@model(
    depthwise=lambda: nn.Conv2d(16, 16, 7, padding=3, groups=16),
    layers=lambda: nn.Sequential(nn.LayerNorm(16), perceptron(16, 32, 16, activation=nn.GELU)),
    scale=lambda: nn.Parameter(torch.full((16,), 0.1)),
)
def next_block(self, x: Tensor) -> Tensor:
    """A wide depthwise convolution, then a network for each place (Liu et al., 2022)."""
    inner = self.layers(self.depthwise(x).permute(0, 2, 3, 1))
    return x + (self.scale * inner).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 4, 4), *(next_block() for _ in range(3)), *head(16))


@model(
    down=lambda: nn.ModuleList([conv(3, 8), conv(8, 16), conv(16, 32)]),
    up=lambda: nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)]),
    merge=lambda: nn.ModuleList([conv(32, 16), conv(16, 8)]),
    head=lambda: nn.Conv2d(8, 5, 1),
)
def unet(self, x: Tensor) -> Tensor:
    """Each level of the way up reads its counterpart of the way down (Ronneberger et al., 2015)."""
    first = self.down[0](x)
    second = self.down[1](F.max_pool2d(first, 2))
    hidden = self.down[2](F.max_pool2d(second, 2))
    for up, merge, skip in zip(self.up, self.merge, (second, first), strict=True):
        hidden = merge(torch.cat([up(hidden), skip], 1))
    return self.head(hidden)


@model(
    body=lambda: nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2)),
    rates=lambda: nn.ModuleList(nn.Conv2d(32, 16, 3, padding=rate, dilation=rate) for rate in (1, 2, 3)),
    pooled=lambda: nn.Conv2d(32, 16, 1),
    head=lambda: nn.Conv2d(64, 5, 1),
)
def deeplab(self, x: Tensor) -> Tensor:
    """Convolutions of several dilations, and upsampling at the end (Chen et al., DeepLabV3, 2017)."""
    features = self.body(x)
    size = features.shape[-2:]
    pooled = F.interpolate(self.pooled(F.adaptive_avg_pool2d(features, 1)), size, mode="bilinear")
    joined = torch.cat([*(rate(features) for rate in self.rates), pooled], 1)
    return F.interpolate(self.head(joined), x.shape[-2:], mode="bilinear", align_corners=False)


@model(
    levels=lambda: nn.ModuleList([conv(3, 8, 3, 2), conv(8, 16, 3, 2), conv(16, 32, 3, 2)]),
    lateral=lambda: nn.ModuleList(nn.Conv2d(width, 16, 1) for width in (8, 16, 32)),
    head=lambda: nn.Conv2d(16, 5, 3, padding=1),
)
def pyramid(self, x: Tensor) -> Tensor:
    """Features of all levels, made alike and added from the top down (Lin et al., FPN, 2017)."""
    features = []
    for level in self.levels:
        x = level(x)
        features.append(x)
    lateral = [layer(feature) for layer, feature in zip(self.lateral, features, strict=True)]
    total = lateral[-1]
    scores = self.head(total).mean((2, 3))
    for side in reversed(lateral[:-1]):
        total = side + F.interpolate(total, scale_factor=2, mode="nearest")
        scores = scores + self.head(total).mean((2, 3))
    return scores


@model(
    stem=lambda: conv(3, 16),
    lower=lambda: conv(16, 32, 3, 2),
    high=lambda: nn.ModuleList(conv(16, 16) for _ in range(2)),
    low=lambda: nn.ModuleList(conv(32, 32) for _ in range(2)),
    to_high=lambda: nn.ModuleList(nn.Conv2d(32, 16, 1) for _ in range(2)),
    to_low=lambda: nn.ModuleList(nn.Conv2d(16, 32, 3, 2, 1) for _ in range(2)),
    head=lambda: nn.Linear(48, 5),
)
def hrnet(self, x: Tensor) -> Tensor:
    """Two resolutions side by side that exchange what they know (Wang et al., HRNet, 2019)."""
    high = self.stem(x)
    low = self.lower(high)
    for k in range(2):
        high, low = self.high[k](high), self.low[k](low)
        raised = F.interpolate(self.to_high[k](low), high.shape[-2:], mode="bilinear", align_corners=True)
        high, low = high + raised, low + self.to_low[k](high)
    return self.head(torch.cat([high.mean((2, 3)), low.mean((2, 3))], 1))


PICTURES = batch(input=normal(3, 16, 16), target=integers(5))
LABELLED = batch(x=normal(3, 16, 16), target=integers(5))
MAPS = batch(x=normal(3, 16, 16), target=integers(5, 16, 16))

CASES = (
    Case("ResNet", resnet, PICTURES, F.cross_entropy),
    Case("ResNeXt", lambda: resnet(groups=4), PICTURES, F.cross_entropy),
    Case("SENet", lambda: resnet(excited=True), PICTURES, F.cross_entropy),
    Case("VGG", vgg, PICTURES, F.cross_entropy),
    Case("AlexNet", alexnet, PICTURES, F.cross_entropy),
    Case("DenseNet", densenet, PICTURES, F.cross_entropy),
    Case("MobileNetV2", lambda: inverted(False), PICTURES, F.cross_entropy),
    Case("EfficientNet", lambda: inverted(True), PICTURES, F.cross_entropy),
    Case("GoogLeNet", googlenet, PICTURES, F.cross_entropy),
    Case("ShuffleNet", shufflenet, PICTURES, F.cross_entropy),
    Case("SqueezeNet", squeezenet, PICTURES, F.cross_entropy),
    Case("ConvNeXt", convnext, PICTURES, F.cross_entropy),
    Case("UNet", unet, MAPS, F.cross_entropy),
    Case("DeepLab", deeplab, MAPS, F.cross_entropy),
    Case("Feature pyramid", pyramid, LABELLED, F.cross_entropy),
    Case("HRNet", hrnet, LABELLED, F.cross_entropy),
)
