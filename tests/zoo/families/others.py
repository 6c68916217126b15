"""Fields, sets, points, pairs, and other shapes that a network may have."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import Apply, Residual, linears, model, perceptron, turned
from zoo.model_case import Case, batch, bits, integers, normal, uniform


@model(
    body=lambda: perceptron(27, 32, 32, 32),
    density=lambda: nn.Linear(32, 1),
    colour=lambda: perceptron(35, 32, 3),
)
def radiance(self, origin: Tensor, direction: Tensor) -> Tensor:
    """Colours along rays, from densities of a field (Mildenhall et al., NeRF, 2020)."""
    depth = torch.linspace(0.5, 2, 8)
    points = origin[:, None] + depth[:, None] * direction[:, None]
    waves = [part(points * 2.0**k) for k in range(4) for part in (torch.sin, torch.cos)]
    hidden = self.body(torch.cat([points, *waves], -1)).relu()
    toward = direction[:, None].expand_as(points)
    colour = self.colour(torch.cat([hidden, toward], -1)).sigmoid()
    opaque = 1 - (-self.density(hidden).relu() * 0.2).exp()
    through = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque + 1e-10], 1), 1)[:, :-1]
    return (through * opaque * colour).sum(1)


@model(
    points=lambda: nn.Parameter(torch.randn(1, 4, 32)),
    gather=lambda: nn.MultiheadAttention(32, 4, batch_first=True),
    spread=lambda: nn.MultiheadAttention(32, 4, batch_first=True),
    layers=lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU()),
)
def set_attention(self, x: Tensor) -> Tensor:
    """Attention from some inducing points to a set and back (Lee et al., 2019)."""
    points = self.points.expand(x.shape[0], -1, -1)
    gathered = self.gather(points, x, x, need_weights=False)[0]
    return x + self.layers(x + self.spread(x, gathered, gathered, need_weights=False)[0])


def set_transformer() -> nn.Module:
    embed, head = nn.Linear(3, 32), nn.Linear(32, 4)
    return nn.Sequential(embed, set_attention(), set_attention(), Apply(lambda x: x.mean(1)), head)


def deep_sets() -> nn.Module:
    """Every element by itself, then their sum (Zaheer et al., 2017)."""
    return nn.Sequential(perceptron(3, 32, 32, 32), Apply(lambda x: x.sum(1)), perceptron(32, 32, 4))


@model(
    turn=lambda: perceptron(3, 32, 9), each=lambda: perceptron(3, 32, 32), all=lambda: perceptron(32, 32, 4)
)
def pointnet(self, points: Tensor) -> Tensor:
    """Points turned by a matrix that they decide on, and the largest feature of all (Qi et al., 2017)."""
    matrix = self.turn(points).amax(1).unflatten(1, (3, 3)) + torch.eye(3)
    return self.all(self.each(points @ matrix).amax(1))


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), perceptron(32, 32, 8))


@model(tower=lambda: tower())
def siamese(self, left: Tensor, right: Tensor, same: Tensor) -> Tensor:
    """One network for both of a pair, and a margin between what differs (Hadsell et al., 2006)."""
    apart = F.pairwise_distance(self.tower(left), self.tower(right))
    return (same * apart.square() + (1 - same) * F.relu(1 - apart).square()).mean()


@model(tower=lambda: perceptron(16, 32, 32, 8))
def triplets(self, anchor: Tensor, like: Tensor, unlike: Tensor) -> Tensor:
    towers = (F.normalize(self.tower(each)) for each in (anchor, like, unlike))
    return F.triplet_margin_loss(*towers, margin=0.5)


@model(body=lambda: perceptron(16, 32, 32), head=lambda: perceptron(32, 32, 8))
def contrastive(self, first: Tensor, second: Tensor) -> Tensor:
    """Two views of each row, every other row of the batch being a negative (Chen et al., SimCLR, 2020)."""
    views = F.normalize(self.head(self.body(torch.cat([first, second])).relu()))
    rows = first.shape[0]
    scores = (views @ views.mT / 0.5).masked_fill(torch.eye(2 * rows, dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.cat([torch.arange(rows) + rows, torch.arange(rows)]))


def mixer() -> nn.Module:
    """Networks over places and over channels in turn (Tolstikhin et al., 2021)."""
    layers = [nn.Conv2d(3, 32, 4, 4), nn.Flatten(2), turned()]
    for _ in range(2):
        layers.append(Residual(nn.LayerNorm(32), turned(), perceptron(16, 32, 16), turned()))
        layers.append(Residual(nn.LayerNorm(32), perceptron(32, 64, 32)))
    return nn.Sequential(*layers, Apply(lambda x: x.mean(1)), nn.Linear(32, 4))


@model(parts=lambda: nn.Linear(16, 8 * 4), votes=lambda: nn.Parameter(torch.randn(8, 4, 4, 6) / 4))
def capsules(self, x: Tensor) -> Tensor:
    """Parts vote for wholes, and agreement decides (Sabour et al., 2017)."""
    parts = self.parts(x).unflatten(1, (8, 4))
    votes = torch.einsum("bpi,pcio->bpco", parts, self.votes)
    agreed = torch.zeros_like(votes[..., :1])
    for _ in range(3):
        whole = (agreed.softmax(2) * votes).sum(1, keepdim=True)
        size = whole.square().sum(-1, keepdim=True)
        whole = whole * size.sqrt() / (1 + size)
        agreed = agreed + (votes * whole).sum(-1, keepdim=True)
    return 5 * whole[:, 0].norm(dim=-1)


@model(maker=lambda: perceptron(4, 32, 16 * 8 + 8), head=lambda: nn.Linear(8, 4))
def hyper(self, x: Tensor, task: Tensor) -> Tensor:
    """A network that makes the weights of another (Ha et al., 2017)."""
    weight, bias = self.maker(task).split([16 * 8, 8], 1)
    hidden = torch.baddbmm(bias[:, None], x[:, None], weight.unflatten(1, (16, 8)))
    return self.head(hidden.relu().squeeze(1))


@model(layers=lambda: linears(4, 16, 16), gates=lambda: linears(4, 16, 16), head=lambda: nn.Linear(16, 4))
def highway(self, x: Tensor) -> Tensor:
    """Gates between a layer and its input (Srivastava et al., 2015)."""
    for layer, gate in zip(self.layers, self.gates, strict=True):
        x = torch.lerp(x, layer(x).relu(), gate(x).sigmoid())
    return self.head(x)


def tied_layers() -> nn.ModuleList:
    layers = linears(7, 16, 16)
    layers[-1].weight = layers[0].weight
    return layers


@model(layers=tied_layers)
def skips(self, x: Tensor) -> Tensor:
    """A chain whose first value every later layer reads, and whose last layer has the first one's weights."""
    first, *middle, last = self.layers
    start = hidden = torch.tanh(first(x))
    for layer in middle:
        hidden = torch.tanh(layer(hidden)) + start
    return last(hidden)[:, :4]


@model(first=lambda: nn.Linear(16, 16), second=lambda: nn.Linear(16, 16), head=lambda: nn.Linear(16, 4))
def early(self, x: Tensor) -> Tensor:
    """Leaves early where it is sure, which the values of a batch decide."""
    hidden = torch.tanh(self.first(x))
    if self.head(hidden).softmax(-1).amin() > 0.9:
        return self.head(hidden)
    return self.head(torch.tanh(self.second(hidden)))


@model(
    words=lambda: nn.Embedding(32, 32),
    body=lambda: nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True),
    head=lambda: nn.Linear(32, 32),
)
def translation(self, source: Tensor, written: Tensor) -> Tensor:
    """torch's own encoder and decoder."""
    mask = nn.Transformer.generate_square_subsequent_mask(written.shape[1])
    hidden = self.body(self.words(source), self.words(written), tgt_mask=mask, tgt_is_causal=True)
    return self.head(hidden).mT


RAYS = batch(origin=normal(3), direction=lambda rows: F.normalize(torch.randn(rows, 3)), target=uniform(3))
SETS = batch(input=normal(10, 3), target=integers(4))
POINTS = batch(points=normal(10, 3), target=integers(4))
COUPLES = batch(left=normal(16), right=normal(16), same=bits())
TRIPLES = batch(anchor=normal(16), like=normal(16), unlike=normal(16))
VECTORS = batch(x=normal(16), target=integers(4))
TASKS = batch(x=normal(16), target=integers(4), task=normal(4))
IMAGES = batch(input=normal(3, 16, 16), target=integers(4))
SENTENCES = batch(source=integers(32, 8), written=integers(32, 6), target=integers(32, 6))

CASES = (
    Case("NeRF", radiance, RAYS, F.mse_loss),
    Case("Set transformer", set_transformer, SETS, F.cross_entropy),
    Case("Deep sets", deep_sets, SETS, F.cross_entropy),
    Case("PointNet", pointnet, POINTS, F.cross_entropy),
    Case("Siamese", siamese, COUPLES),
    Case("Triplets", triplets, TRIPLES),
    Case("SimCLR", contrastive, batch(first=normal(16), second=normal(16)), by_microbatch=True),
    Case("MLP-Mixer", mixer, IMAGES, F.cross_entropy),
    Case("Capsules", capsules, VECTORS, F.cross_entropy),
    Case("Hypernetwork", hyper, TASKS, F.cross_entropy),
    Case("Highway network", highway, VECTORS, F.cross_entropy),
    Case("Skips and a tied layer", skips, VECTORS, F.cross_entropy),
    Case("Early exit", early, VECTORS, F.cross_entropy),
    Case("nn.Transformer", translation, SENTENCES, F.cross_entropy),
)
