"""Image classifiers made of convolutions, as torchvision has them, written out."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.model_case import Case, Inputs


def conv(num_in: int, num_out: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU; height and width are divided by the stride."""
    layer = nn.Conv2d(num_in, num_out, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(num_out), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """``inside`` and a shortcut, which is projected where the shape changes."""

    def __init__(self, inside: nn.Module, num_in: int, num_out: int, stride: int = 1) -> None:
        super().__init__()
        self.inside = inside
        same = num_in == num_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inside(x) + self.shortcut(x))


class Excitation(nn.Module):
    """Channels weighted by what their means say (Hu et al., 2018)."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(num, num // 4, 1),
            nn.SiLU(),
            nn.Conv2d(num // 4, num, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.layers(x)


class Inverted(nn.Module):
    """Wide inside, narrow at its ends (Sandler et al., MobileNetV2, 2018)."""

    def __init__(self, num_in: int, num_out: int, stride: int, excited: bool) -> None:
        super().__init__()
        wide = 3 * num_in
        self.adds = stride == 1 and num_in == num_out
        self.layers = nn.Sequential(
            conv(num_in, wide, 1),
            conv(wide, wide, 3, stride, groups=wide),
            Excitation(wide) if excited else nn.Identity(),
            nn.Conv2d(wide, num_out, 1, bias=False),
            nn.BatchNorm2d(num_out),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


class Dense(nn.Module):
    """Every layer reads all layers before (Huang et al., 2017)."""

    def __init__(self, num_in: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(num_in + k * growth),
                nn.ReLU(),
                nn.Conv2d(num_in + k * growth, growth, 3, padding=1),
            )
            for k in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


class Inception(nn.Module):
    """Branches of several sizes side by side (Szegedy et al., 2015)."""

    def __init__(self, num_in: int, num: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                conv(num_in, num, 1),
                nn.Sequential(conv(num_in, num, 1), conv(num, num, 3)),
                nn.Sequential(conv(num_in, num, 1), conv(num, num, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(num_in, num, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Shuffle(nn.Module):
    """Half of the channels pass; then the halves are interleaved (Ma et al., ShuffleNetV2, 2018)."""

    def __init__(self, num: int) -> None:
        super().__init__()
        half = num // 2
        self.layers = nn.Sequential(
            conv(half, half, 1), conv(half, half, 3, groups=half), conv(half, half, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, 1)
        return torch.cat([kept, self.layers(changed)], 1).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


class Fire(nn.Module):
    """A narrow layer, then two kinds of wide ones (Iandola et al., SqueezeNet, 2016)."""

    def __init__(self, num_in: int, narrow: int, wide: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(num_in, narrow, 1)
        self.expand = nn.ModuleList([nn.Conv2d(narrow, wide, 1), nn.Conv2d(narrow, wide, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        narrow = F.relu(self.squeeze(x))
        return torch.cat([F.relu(each(narrow)) for each in self.expand], 1)


class UNet(nn.Module):
    """Each level of the way up reads its counterpart of the way down (Ronneberger et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(3, 8), conv(8, 16), conv(16, 32)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.merge = nn.ModuleList([conv(32, 16), conv(16, 8)])
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        hidden = self.down[2](F.max_pool2d(second, 2))
        for up, merge, skip in zip(self.up, self.merge, (second, first), strict=True):
            hidden = merge(torch.cat([up(hidden), skip], 1))
        return self.head(hidden)


class Atrous(nn.Module):
    """Convolutions of several dilations, and upsampling at the end (Chen et al., DeepLabV3, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2))
        self.rates = nn.ModuleList(nn.Conv2d(32, 16, 3, padding=rate, dilation=rate) for rate in (1, 2, 3))
        self.pooled = nn.Conv2d(32, 16, 1)
        self.head = nn.Conv2d(64, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        size = features.shape[-2:]
        pooled = F.interpolate(self.pooled(F.adaptive_avg_pool2d(features, 1)), size, mode="bilinear")
        joined = torch.cat([*(rate(features) for rate in self.rates), pooled], 1)
        return F.interpolate(self.head(joined), x.shape[-2:], mode="bilinear", align_corners=False)


class Pyramid(nn.Module):
    """Features of all levels, made alike and added from the top down (Lin et al., FPN, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([conv(3, 8, 3, 2), conv(8, 16, 3, 2), conv(16, 32, 3, 2)])
        self.lateral = nn.ModuleList(nn.Conv2d(width, 16, 1) for width in (8, 16, 32))
        self.head = nn.Conv2d(16, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
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


class Resolutions(nn.Module):
    """Two resolutions side by side that exchange what they know (Wang et al., HRNet, 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.lower = conv(3, 16), conv(16, 32, 3, 2)
        self.high = nn.ModuleList(conv(16, 16) for _ in range(2))
        self.low = nn.ModuleList(conv(32, 32) for _ in range(2))
        self.to_high = nn.ModuleList(nn.Conv2d(32, 16, 1) for _ in range(2))
        self.to_low = nn.ModuleList(nn.Conv2d(16, 32, 3, 2, 1) for _ in range(2))
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        high = self.stem(x)
        low = self.lower(high)
        for k in range(2):
            high, low = self.high[k](high), self.low[k](low)
            raised = F.interpolate(self.to_high[k](low), high.shape[-2:], mode="bilinear", align_corners=True)
            high, low = high + raised, low + self.to_low[k](high)
        return self.head(torch.cat([high.mean((2, 3)), low.mean((2, 3))], 1))


class ConvNeXt(nn.Module):
    """A wide depthwise convolution, then a network for each place (Liu et al., 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.layers(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + (self.scale * inner).permute(0, 3, 1, 2)


def head(num_in: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, 5)]


def resnet(groups: int = 1, excited: bool = False) -> nn.Module:
    def block(num_in: int, num_out: int, stride: int = 1) -> Residual:
        last = [nn.Conv2d(num_out, num_out, 3, padding=1, groups=groups), nn.BatchNorm2d(num_out)]
        weighed = [Excitation(num_out)] if excited else []
        inside = nn.Sequential(conv(num_in, num_out, 3, stride), *last, *weighed)
        return Residual(inside, num_in, num_out, stride)

    return nn.Sequential(conv(3, 16), block(16, 16), block(16, 32, 2), block(32, 32), *head(32))


def vgg() -> nn.Module:
    layers = [conv(3, 16), conv(16, 16), nn.MaxPool2d(2), conv(16, 32), conv(32, 32), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 32), nn.ReLU(), nn.Linear(32, 5))


def alexnet() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 5, 2, 2), nn.ReLU(), nn.LocalResponseNorm(3), nn.MaxPool2d(2)]
    more = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, *more, nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 5))


def inverted(excited: bool) -> nn.Module:
    blocks = [Inverted(8, 8, 1, excited), Inverted(8, 16, 2, excited), Inverted(16, 16, 1, excited)]
    return nn.Sequential(conv(3, 8), *blocks, *head(16))


def densenet() -> nn.Module:
    transition = nn.Sequential(nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 10, 1), nn.AvgPool2d(2))
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Dense(8, 4, 3), transition, Dense(10, 4, 3), *head(22)
    )


def squeezenet() -> nn.Module:
    last = [nn.Conv2d(32, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), Fire(16, 4, 8), Fire(16, 8, 16), *last)


def pictures(rows: int) -> Inputs:
    return {"input": torch.randn(rows, 3, 16, 16), "target": torch.randint(5, (rows,))}


def maps(rows: int) -> Inputs:
    return {"x": torch.randn(rows, 3, 16, 16), "target": torch.randint(5, (rows, 16, 16))}


def labelled(rows: int) -> Inputs:
    return {"x": torch.randn(rows, 3, 16, 16), "target": torch.randint(5, (rows,))}


CASES = (
    Case("ResNet", resnet, pictures, F.cross_entropy),
    Case("ResNeXt", lambda: resnet(groups=4), pictures, F.cross_entropy),
    Case("SENet", lambda: resnet(excited=True), pictures, F.cross_entropy),
    Case("VGG", vgg, pictures, F.cross_entropy),
    Case("AlexNet", alexnet, pictures, F.cross_entropy),
    Case("DenseNet", densenet, pictures, F.cross_entropy),
    Case("MobileNetV2", lambda: inverted(False), pictures, F.cross_entropy),
    Case("EfficientNet", lambda: inverted(True), pictures, F.cross_entropy),
    Case(
        "GoogLeNet",
        lambda: nn.Sequential(conv(3, 16, 3, 2), Inception(16, 8), Inception(32, 8), *head(32)),
        pictures,
        F.cross_entropy,
    ),
    Case(
        "ShuffleNet",
        lambda: nn.Sequential(conv(3, 16, 3, 2), *(Shuffle(16) for _ in range(3)), *head(16)),
        pictures,
        F.cross_entropy,
    ),
    Case("SqueezeNet", squeezenet, pictures, F.cross_entropy),
    Case(
        "ConvNeXt",
        lambda: nn.Sequential(nn.Conv2d(3, 16, 4, 4), *(ConvNeXt(16) for _ in range(3)), *head(16)),
        pictures,
        F.cross_entropy,
    ),
    Case("UNet", UNet, maps, F.cross_entropy),
    Case("DeepLab", Atrous, maps, F.cross_entropy),
    Case("Feature pyramid", Pyramid, labelled, F.cross_entropy),
    Case("HRNet", Resolutions, labelled, F.cross_entropy),
)
