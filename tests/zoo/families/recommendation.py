"""Models that recommend, mostly made of embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import linears, model, perceptron
from zoo.model_case import Case, batch, bits, integers, normal, uniform

FIELDS, ITEMS, WIDTH = 5, 40, 16


@model(
    bottom=lambda: perceptron(8, 32, WIDTH),
    top=lambda: perceptron(WIDTH + 15, 32, 1),
    bags=lambda: nn.ModuleList(nn.EmbeddingBag(ITEMS, WIDTH, mode="sum") for _ in range(FIELDS)),
    pairs=lambda: nn.Buffer(torch.tril_indices(FIELDS + 1, FIELDS + 1, -1)),
)
def interactions(self, dense: Tensor, fields: Tensor) -> Tensor:
    """Dense features and a bag for each field, and the products of all pairs (Naumov et al., DLRM, 2019)."""
    bottom = self.bottom(dense)
    vectors = [bottom, *(bag(fields[:, k]) for k, bag in enumerate(self.bags))]
    stacked = torch.stack(vectors, 1)
    products = (stacked @ stacked.mT)[:, self.pairs[0], self.pairs[1]]
    return self.top(torch.cat([bottom, products], 1)).squeeze(1)


@model(
    linear=lambda: nn.Embedding(FIELDS * ITEMS, 1),
    factors=lambda: nn.Embedding(FIELDS * ITEMS, WIDTH),
    deep=lambda: perceptron(FIELDS * WIDTH, 32, 32, 1),
    offsets=lambda: nn.Buffer(torch.arange(FIELDS) * ITEMS),
)
def factorisation(self, fields: Tensor) -> Tensor:
    """Factorisation machine beside a deep network over the same embeddings (Guo et al., DeepFM, 2017)."""
    ids = fields + self.offsets
    vectors = self.factors(ids)
    pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
    return self.linear(ids).sum((1, 2)) + pairs + self.deep(vectors.flatten(1)).squeeze(1)


@model(
    embed=lambda: nn.Embedding(ITEMS, WIDTH),
    crosses=lambda: linears(3, FIELDS * WIDTH, FIELDS * WIDTH),
    deep=lambda: perceptron(FIELDS * WIDTH, 32, 32),
    head=lambda: nn.Linear(FIELDS * WIDTH + 32, 1),
)
def crossed(self, fields: Tensor) -> Tensor:
    """Explicit crosses of features beside a deep network (Wang et al., DCN V2, 2021)."""
    start = x = self.embed(fields).flatten(1)
    for cross in self.crosses:
        x = start * cross(x) + x
    return self.head(torch.cat([x, self.deep(start)], 1)).squeeze(1)


def tower() -> nn.Module:
    return nn.Sequential(nn.Embedding(ITEMS, WIDTH), perceptron(WIDTH, 32, WIDTH))


@model(user=tower, item=tower)
def angle(self, user: Tensor, item: Tensor) -> Tensor:
    """A tower for users and one for items, and the angle between what they say."""
    return F.cosine_similarity(self.user(user), self.item(item)) * 5


@model(user=tower, item=tower)
def in_batch(self, user: Tensor, item: Tensor) -> Tensor:
    """Every other item of the batch is a negative."""
    users, items = F.normalize(self.user(user)), F.normalize(self.item(item))
    return F.cross_entropy(10 * users @ items.mT, torch.arange(user.shape[0]))


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)


@model(
    items=lambda: nn.Embedding(ITEMS, 32),
    places=lambda: nn.Embedding(10, 32),
    blocks=lambda: nn.ModuleList(encoder_layer() for _ in range(2)),
)
def sequential(self, history: Tensor) -> Tensor:
    """Attention over what somebody did before (Kang and McAuley, SASRec, 2018)."""
    x = self.items(history) + self.places.weight
    mask = nn.Transformer.generate_square_subsequent_mask(10)
    for block in self.blocks:
        x = block(x, mask, is_causal=True)
    return (x @ self.items.weight.T).mT


@model(
    items=lambda: nn.Embedding(ITEMS, WIDTH),
    score=lambda: perceptron(4 * WIDTH, 32, 1),
    head=lambda: perceptron(2 * WIDTH, 32, 1),
)
def interest(self, history: Tensor, item: Tensor) -> Tensor:
    """What somebody did before, weighted by the item in question (Zhou et al., DIN, 2018)."""
    past = self.items(history)
    asked = self.items(item)[:, None].expand_as(past)
    weight = self.score(torch.cat([asked, past, asked - past, asked * past], -1))
    return self.head(torch.cat([(weight * past).sum(1), asked[:, 0]], 1)).squeeze(1)


@model(
    experts=lambda: nn.ModuleList(perceptron(8, 32, WIDTH) for _ in range(3)),
    gates=lambda: linears(2, 8, 3),
    heads=lambda: linears(2, WIDTH, 1),
)
def gates(self, dense: Tensor) -> Tensor:
    """Experts that two tasks share, each with a gate of its own (Ma et al., MMoE, 2018)."""
    experts = torch.stack([expert(dense) for expert in self.experts], 1)
    tasks = zip(self.gates, self.heads, strict=True)
    return torch.cat([head((gate(dense).softmax(1)[..., None] * experts).sum(1)) for gate, head in tasks], 1)


@model(
    tables=lambda: nn.ModuleList(nn.Embedding(ITEMS, WIDTH) for _ in range(4)),
    deep=lambda: perceptron(2 * WIDTH, 32, WIDTH),
    head=lambda: nn.Linear(2 * WIDTH, 1),
)
def collaborative(self, user: Tensor, item: Tensor) -> Tensor:
    """Products of embeddings beside a network over them (He et al., NCF, 2017)."""
    first, second, third, fourth = self.tables
    deep = self.deep(torch.cat([third(user), fourth(item)], 1))
    return self.head(torch.cat([first(user) * second(item), deep], 1)).squeeze(1)


@model(layers=lambda: perceptron(ITEMS, 32, 32, ITEMS, activation=nn.Sigmoid))
def reconstruction(self, ratings: Tensor, known: Tensor) -> Tensor:
    """A row of ratings from itself; only what was rated counts (Sedhain et al., AutoRec, 2015)."""
    wrong = (self.layers(ratings * known) - ratings).square() * known
    return wrong.sum() / known.sum()


CLICKED = F.binary_cross_entropy_with_logits
LOGS = batch(dense=normal(8), fields=integers(ITEMS, FIELDS, 3), target=bits())
RECORDS = batch(fields=integers(ITEMS, FIELDS), target=bits())
CHOICES = batch(user=integers(ITEMS), item=integers(ITEMS), target=bits())
PAIRS = batch(user=integers(ITEMS), item=integers(ITEMS))
HISTORIES = batch(history=integers(ITEMS, 10), target=integers(ITEMS, 10))
OFFERS = batch(history=integers(ITEMS, 6), item=integers(ITEMS), target=bits())
BOTH = {"user": 0, "item": 0}

CASES = (
    Case("DLRM", interactions, LOGS, CLICKED),
    Case("DeepFM", factorisation, RECORDS, CLICKED),
    Case("DCN V2", crossed, RECORDS, CLICKED),
    Case("Two towers", angle, CHOICES, CLICKED),
    Case("Two towers, negatives in the batch", in_batch, PAIRS, batched=BOTH, by_microbatch=True),
    Case("SASRec", sequential, HISTORIES, F.cross_entropy),
    Case("DIN", interest, OFFERS, CLICKED),
    Case("MMoE", gates, batch(dense=normal(8), target=uniform(2)), CLICKED),
    Case("NCF", collaborative, CHOICES, CLICKED),
    Case("AutoRec", reconstruction, batch(ratings=normal(ITEMS), known=bits(ITEMS))),
)
