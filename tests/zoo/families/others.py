"""Fields, sets, points, pairs, and other shapes that a network may have."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import perceptron
from zoo.model_case import Case, Inputs


class Radiance(nn.Module):
    """Colours along rays, from densities of a field (Mildenhall et al., NeRF, 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.density, self.colour = (
            perceptron(27, 32, 32, 32),
            nn.Linear(32, 1),
            perceptron(35, 32, 3),
        )

    def forward(self, origin: Tensor, direction: Tensor) -> Tensor:
        depth = torch.linspace(0.5, 2, 8)
        points = origin[:, None] + depth[:, None] * direction[:, None]
        waves = [part(points * 2.0**k) for k in range(4) for part in (torch.sin, torch.cos)]
        hidden = self.body(torch.cat([points, *waves], -1)).relu()
        toward = direction[:, None].expand_as(points)
        colour = self.colour(torch.cat([hidden, toward], -1)).sigmoid()
        opaque = 1 - (-self.density(hidden).relu() * 0.2).exp()
        through = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque + 1e-10], 1), 1)[:, :-1]
        return (through * opaque * colour).sum(1)


class SetAttention(nn.Module):
    """Attention from some inducing points to a set and back (Lee et al., 2019)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(1, 4, width))
        self.gather = nn.MultiheadAttention(width, 4, batch_first=True)
        self.spread = nn.MultiheadAttention(width, 4, batch_first=True)
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        points = self.points.expand(x.shape[0], -1, -1)
        gathered = self.gather(points, x, x, need_weights=False)[0]
        return x + self.layers(x + self.spread(x, gathered, gathered, need_weights=False)[0])


class SetTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 32), nn.Linear(32, 4)
        self.blocks = nn.Sequential(SetAttention(), SetAttention())

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(points)).mean(1))


class DeepSets(nn.Module):
    """Every element by itself, then their sum (Zaheer et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = perceptron(3, 32, 32, 32), perceptron(32, 32, 4)

    def forward(self, points: Tensor) -> Tensor:
        return self.all(self.each(points).sum(1))


class PointNet(nn.Module):
    """Points turned by a matrix that they decide on, and the largest feature of all (Qi et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.each, self.all = perceptron(3, 32, 9), perceptron(3, 32, 32), perceptron(32, 32, 4)

    def forward(self, points: Tensor) -> Tensor:
        matrix = self.turn(points).amax(1).unflatten(1, (3, 3)) + torch.eye(3)
        return self.all(self.each(points @ matrix).amax(1))


class Siamese(nn.Module):
    """One network for both of a pair, and a margin between what differs (Hadsell et al., 2006)."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)
        )

    def forward(self, left: Tensor, right: Tensor, same: Tensor) -> Tensor:
        apart = F.pairwise_distance(self.tower(left), self.tower(right))
        return (same * apart.square() + (1 - same) * F.relu(1 - apart).square()).mean()


class Triplets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = perceptron(16, 32, 32, 8)

    def forward(self, anchor: Tensor, like: Tensor, unlike: Tensor) -> Tensor:
        towers = (F.normalize(self.tower(each)) for each in (anchor, like, unlike))
        return F.triplet_margin_loss(*towers, margin=0.5)


class Contrastive(nn.Module):
    """Two views of each row, every other row of the batch being a negative (Chen et al., SimCLR, 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = perceptron(16, 32, 32), perceptron(32, 32, 8)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        views = F.normalize(self.head(self.body(torch.cat([first, second])).relu()))
        rows = first.shape[0]
        scores = (views @ views.mT / 0.5).masked_fill(torch.eye(2 * rows, dtype=torch.bool), -1e9)
        return F.cross_entropy(scores, torch.cat([torch.arange(rows) + rows, torch.arange(rows)]))


class Mixer(nn.Module):
    """Networks over places and over channels in turn (Tolstikhin et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.places = nn.ModuleList(perceptron(16, 32, 16) for _ in range(2))
        self.channels = nn.ModuleList(perceptron(32, 64, 32) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.head = nn.Linear(32, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).mT
        for k in range(2):
            x = x + self.places[k](self.norms[2 * k](x).mT).mT
            x = x + self.channels[k](self.norms[2 * k + 1](x))
        return self.head(x.mean(1))


class Capsules(nn.Module):
    """Parts vote for wholes, and agreement decides (Sabour et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(16, 8 * 4)
        self.votes = nn.Parameter(torch.randn(8, 4, 4, 6) / 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts(x).unflatten(1, (8, 4))
        votes = torch.einsum("bpi,pcio->bpco", parts, self.votes)
        agreed = torch.zeros_like(votes[..., :1])
        for _ in range(3):
            whole = (agreed.softmax(2) * votes).sum(1, keepdim=True)
            size = whole.square().sum(-1, keepdim=True)
            whole = whole * size.sqrt() / (1 + size)
            agreed = agreed + (votes * whole).sum(-1, keepdim=True)
        return 5 * whole[:, 0].norm(dim=-1)


class Hyper(nn.Module):
    """A network that makes the weights of another (Ha et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.head = perceptron(4, 32, 16 * 8 + 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        weight, bias = self.maker(task).split([16 * 8, 8], 1)
        return self.head(
            torch.baddbmm(bias[:, None], x[:, None], weight.unflatten(1, (16, 8))).relu().squeeze(1)
        )


class Highway(nn.Module):
    """Gates between a layer and its input (Srivastava et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.gates = (nn.ModuleList(nn.Linear(16, 16) for _ in range(4)) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = torch.lerp(x, layer(x).relu(), gate(x).sigmoid())
        return self.head(x)


class Skips(nn.Module):
    """A chain whose first value every later layer reads, and whose last layer has the first one's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.last = nn.Linear(16, 16)
        self.last.weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        start = hidden = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            hidden = torch.tanh(layer(hidden)) + start
        return self.last(hidden)[:, :4]


class Early(nn.Module):
    """Leaves early where it is sure, which the values of a batch decide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.head(hidden).softmax(-1).amin() > 0.9:
            return self.head(hidden)
        return self.head(torch.tanh(self.second(hidden)))


class Translation(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 32)
        self.body = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 32)

    def forward(self, source: Tensor, written: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(written.shape[1])
        hidden = self.body(self.words(source), self.words(written), tgt_mask=mask, tgt_is_causal=True)
        return self.head(hidden).mT


def rays(rows: int) -> Inputs:
    origin, direction = torch.randn(2, rows, 3)
    return {"origin": origin, "direction": F.normalize(direction), "target": torch.rand(rows, 3)}


def vectors(rows: int) -> Inputs:
    return {"x": torch.randn(rows, 16), "target": torch.randint(4, (rows,))}


def points(rows: int) -> Inputs:
    return {"points": torch.randn(rows, 10, 3), "target": torch.randint(4, (rows,))}


def told(rows: int, *names: str) -> Inputs:
    return {name: torch.randn(rows, 16) for name in names}


def sentences(rows: int) -> Inputs:
    return {
        name: torch.randint(32, (rows, size)) for name, size in (("source", 8), ("written", 6), ("target", 6))
    }


CASES = (
    Case("NeRF", Radiance, rays, F.mse_loss),
    Case("Set transformer", SetTransformer, points, F.cross_entropy),
    Case("Deep sets", DeepSets, points, F.cross_entropy),
    Case("PointNet", PointNet, points, F.cross_entropy),
    Case(
        "Siamese",
        Siamese,
        lambda rows: {**told(rows, "left", "right"), "same": torch.randint(2, (rows,)).float()},
    ),
    Case("Triplets", Triplets, lambda rows: told(rows, "anchor", "like", "unlike")),
    Case("SimCLR", Contrastive, lambda rows: told(rows, "first", "second"), by_microbatch=True),
    Case(
        "MLP-Mixer",
        Mixer,
        lambda rows: {"image": torch.randn(rows, 3, 16, 16), "target": torch.randint(4, (rows,))},
        F.cross_entropy,
    ),
    Case("Capsules", Capsules, vectors, F.cross_entropy),
    Case(
        "Hypernetwork", Hyper, lambda rows: {**vectors(rows), "task": torch.randn(rows, 4)}, F.cross_entropy
    ),
    Case("Highway network", Highway, vectors, F.cross_entropy),
    Case("Skips and a tied layer", Skips, vectors, F.cross_entropy),
    Case("Early exit", Early, vectors, F.cross_entropy),
    Case("nn.Transformer", Translation, sentences, F.cross_entropy),
)
