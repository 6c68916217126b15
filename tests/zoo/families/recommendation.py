"""Models that recommend, mostly made of embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import perceptron
from zoo.model_case import Case

FIELDS, ITEMS, WIDTH = 5, 40, 16


class Interactions(nn.Module):
    """Dense features and a bag for each field, and the products of all pairs (Naumov et al., DLRM, 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top = perceptron(8, 32, WIDTH), perceptron(WIDTH + 15, 32, 1)
        self.bags = nn.ModuleList(nn.EmbeddingBag(ITEMS, WIDTH, mode="sum") for _ in range(FIELDS))
        self.pairs = nn.Buffer(torch.tril_indices(FIELDS + 1, FIELDS + 1, -1))

    def forward(self, dense: Tensor, fields: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        vectors = [bottom, *(bag(fields[:, k]) for k, bag in enumerate(self.bags))]
        stacked = torch.stack(vectors, 1)
        products = (stacked @ stacked.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, products], 1)).squeeze(1)


class Factors(nn.Module):
    """Factorisation machine beside a deep network over the same embeddings (Guo et al., DeepFM, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factors = nn.Embedding(FIELDS * ITEMS, 1), nn.Embedding(FIELDS * ITEMS, WIDTH)
        self.deep = perceptron(FIELDS * WIDTH, 32, 32, 1)
        self.offsets = nn.Buffer(torch.arange(FIELDS) * ITEMS)

    def forward(self, fields: Tensor) -> Tensor:
        ids = fields + self.offsets
        vectors = self.factors(ids)
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        return self.linear(ids).sum((1, 2)) + pairs + self.deep(vectors.flatten(1)).squeeze(1)


class Crossed(nn.Module):
    """Explicit crosses of features beside a deep network (Wang et al., DCN V2, 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ITEMS, WIDTH)
        self.crosses = nn.ModuleList(nn.Linear(FIELDS * WIDTH, FIELDS * WIDTH) for _ in range(3))
        self.deep, self.head = perceptron(FIELDS * WIDTH, 32, 32), nn.Linear(FIELDS * WIDTH + 32, 1)

    def forward(self, fields: Tensor) -> Tensor:
        start = x = self.embed(fields).flatten(1)
        for cross in self.crosses:
            x = start * cross(x) + x
        return self.head(torch.cat([x, self.deep(start)], 1)).squeeze(1)


class Towers(nn.Module):
    """A tower for users and one for items, and the angle between what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(ITEMS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.user, self.item = perceptron(WIDTH, 32, WIDTH), perceptron(WIDTH, 32, WIDTH)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return F.cosine_similarity(self.user(self.users(user)), self.item(self.items(item))) * 5


class InBatch(Towers):
    """The same, every other item of the batch being a negative."""

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        users, items = F.normalize(self.user(self.users(user))), F.normalize(self.item(self.items(item)))
        return F.cross_entropy(10 * users @ items.mT, torch.arange(user.shape[0]))


class Sequential(nn.Module):
    """Attention over what somebody did before (Kang and McAuley, SASRec, 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(ITEMS, 32), nn.Embedding(10, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )

    def forward(self, history: Tensor) -> Tensor:
        x = self.items(history) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(10)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return (x @ self.items.weight.T).mT


class Interest(nn.Module):
    """What somebody did before, weighted by the item in question (Zhou et al., DIN, 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.score, self.head = perceptron(4 * WIDTH, 32, 1), perceptron(2 * WIDTH, 32, 1)

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        past = self.items(history)
        asked = self.items(item)[:, None].expand_as(past)
        weight = self.score(torch.cat([asked, past, asked - past, asked * past], -1))
        return self.head(torch.cat([(weight * past).sum(1), asked[:, 0]], 1)).squeeze(1)


class Gates(nn.Module):
    """Experts that two tasks share, each with a gate of its own (Ma et al., MMoE, 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(perceptron(8, 32, WIDTH) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

    def forward(self, dense: Tensor) -> Tensor:
        experts = torch.stack([expert(dense) for expert in self.experts], 1)
        tasks = zip(self.gates, self.heads, strict=True)
        return torch.cat(
            [head((gate(dense).softmax(1)[..., None] * experts).sum(1)) for gate, head in tasks], 1
        )


class Collaborative(nn.Module):
    """Products of embeddings beside a network over them (He et al., NCF, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ITEMS, WIDTH) for _ in range(4))
        self.deep, self.head = perceptron(2 * WIDTH, 32, WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        first, second, third, fourth = self.tables
        deep = self.deep(torch.cat([third(user), fourth(item)], 1))
        return self.head(torch.cat([first(user) * second(item), deep], 1)).squeeze(1)


class Reconstruction(nn.Module):
    """A row of ratings from itself; only what was rated counts (Sedhain et al., AutoRec, 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(ITEMS, 32), nn.Sigmoid(), nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, ITEMS)
        )

    def forward(self, ratings: Tensor, known: Tensor) -> Tensor:
        wrong = (self.layers(ratings * known) - ratings).square() * known
        return wrong.sum() / known.sum()


def ids(rows: int, *shape: int) -> Tensor:
    return torch.randint(ITEMS, (rows, *shape))


def clicks(rows: int) -> Tensor:
    return torch.randint(2, (rows,)).float()


clicked = F.binary_cross_entropy_with_logits

CASES = (
    Case(
        "DLRM",
        Interactions,
        lambda rows: {"dense": torch.randn(rows, 8), "fields": ids(rows, FIELDS, 3), "target": clicks(rows)},
        clicked,
    ),
    Case("DeepFM", Factors, lambda rows: {"fields": ids(rows, FIELDS), "target": clicks(rows)}, clicked),
    Case("DCN V2", Crossed, lambda rows: {"fields": ids(rows, FIELDS), "target": clicks(rows)}, clicked),
    Case(
        "Two towers",
        Towers,
        lambda rows: {"user": ids(rows), "item": ids(rows), "target": clicks(rows)},
        clicked,
    ),
    Case(
        "Two towers, negatives in the batch",
        InBatch,
        lambda rows: {"user": ids(rows), "item": ids(rows)},
        batched={"user": 0, "item": 0},
        by_microbatch=True,
    ),
    Case(
        "SASRec",
        Sequential,
        lambda rows: {"history": ids(rows, 10), "target": ids(rows, 10)},
        F.cross_entropy,
    ),
    Case(
        "DIN",
        Interest,
        lambda rows: {"history": ids(rows, 6), "item": ids(rows), "target": clicks(rows)},
        clicked,
    ),
    Case("MMoE", Gates, lambda rows: {"dense": torch.randn(rows, 8), "target": torch.rand(rows, 2)}, clicked),
    Case(
        "NCF",
        Collaborative,
        lambda rows: {"user": ids(rows), "item": ids(rows), "target": clicks(rows)},
        clicked,
    ),
    Case(
        "AutoRec",
        Reconstruction,
        lambda rows: {"ratings": torch.randn(rows, ITEMS), "known": torch.randint(2, (rows, ITEMS)).float()},
    ),
)
