"""Graph networks. A row is a graph, or the features of all nodes of one graph that every row shares."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.model_case import Case, Inputs

NODES, EDGES, FEATURES, WIDTH = 10, 30, 6, 32


class Layer(nn.Module):
    """Messages along edges, added up where they arrive. ``x`` is ``[rows, nodes, width]``."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = F.relu(self.message(torch.cat([x[:, source], x[:, target]], -1)))
        arrived = torch.zeros_like(x).index_add(1, target, messages)
        return x + F.relu(self.update(torch.cat([x, arrived], -1)))


class Convolution(nn.Module):
    """Neighbours' means by the roots of degrees (Kipf and Welling, GCN, 2017)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = torch.ones(x.shape[1]).scatter_add(0, target, torch.ones_like(target, dtype=x.dtype))
        weight = (degree[source] * degree[target]).rsqrt()[:, None]
        hidden = self.layer(x)
        arrived = torch.zeros_like(hidden).index_add(1, target, weight * hidden[:, source])
        return F.relu(arrived + hidden / degree[:, None])


class Attention(nn.Module):
    """Neighbours weighted by a softmax over a node's edges (Velickovic et al., GAT, 2018)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layer, self.score = nn.Linear(width, width), nn.Linear(2 * width, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        hidden = self.layer(x)
        score = F.leaky_relu(self.score(torch.cat([hidden[:, source], hidden[:, target]], -1)), 0.2)
        index = target[None, :, None].expand_as(score)
        most = torch.full_like(hidden[..., :1], -1e9).scatter_reduce(1, index, score.detach(), "amax")
        weight = (score - most[:, target]).exp()
        total = torch.zeros_like(most).index_add(1, target, weight)
        return F.elu(
            torch.zeros_like(hidden).index_add(1, target, weight / total[:, target] * hidden[:, source])
        )


class Isomorphism(nn.Module):
    """The sum of neighbours through a network (Xu et al., GIN, 2019)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(()))
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        return self.layers((1 + self.eps) * x + torch.zeros_like(x).index_add(1, target, x[:, source]))


class Sage(nn.Module):
    """The mean of neighbours beside the node's own features (Hamilton et al., GraphSAGE, 2017)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        index = target[None, :, None].expand(x.shape[0], -1, x.shape[2])
        mean = torch.zeros_like(x).scatter_reduce(1, index, x[:, source], "mean", include_self=False)
        return F.normalize(F.relu(self.own(x) + self.others(mean)), dim=-1)


class Network(nn.Module):
    """Layers of one kind over a list of edges, and a class for every node."""

    def __init__(self, layer: type[nn.Module], num_layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden, edges)
        return self.head(hidden).mT


class Adjacent(nn.Module):
    """Graph convolutions over an adjacency matrix for each row, then one number for the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        connected = adjacency + torch.eye(NODES)
        scaled = connected / connected.sum(-1, keepdim=True)
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = F.relu(layer(scaled @ hidden))
        return self.head(hidden.sum(1))


class Neighbours(nn.Module):
    """Edges to the nearest points, found anew in every layer (Wang et al., DGCNN, 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 16), nn.Linear(32, 16), nn.Linear(32, 16)])
        self.head = nn.Linear(48, 4)

    def forward(self, points: Tensor) -> Tensor:
        x, features = points, []
        for layer in self.layers:
            near = (x[:, :, None] - x[:, None]).square().sum(-1).topk(4, largest=False).indices
            index = near.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
            others = x.gather(1, index).unflatten(1, near.shape[1:])
            own = x[:, :, None].expand_as(others)
            x = F.relu(layer(torch.cat([own, others - own], -1))).amax(2)
            features.append(x)
        return self.head(torch.cat(features, -1).amax(1))


class Continuous(nn.Module):
    """Convolutions whose filters are functions of the distance of atoms (Schutt et al., SchNet, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.Embedding(8, WIDTH)
        self.centres = nn.Buffer(torch.linspace(0, 5, 12))
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(12, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )
        self.mixers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, atoms: Tensor, places: Tensor) -> Tensor:
        x = self.atoms(atoms)
        apart = (places[:, :, None] - places[:, None] + 1e-6).norm(dim=-1)
        basis = (-(apart[..., None] - self.centres).square()).exp()
        for make, mix in zip(self.filters, self.mixers, strict=True):
            x = x + F.softplus(mix((make(basis) * x[:, None]).sum(2)))
        return self.head(x).sum((1, 2))


class Looped(nn.Module):
    """Removes loops before it sends messages, so that the number of edges follows from values."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network(Layer, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.network(x, edges[:, edges[0] != edges[1]])


def nodes(rows: int) -> Inputs:
    return {
        "x": torch.randn(rows, NODES, FEATURES),
        "edges": torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(1)),
        "target": torch.randint(4, (rows, NODES)),
    }


def matrices(rows: int) -> Inputs:
    adjacency = (torch.rand(rows, NODES, NODES) < 0.3).float()
    return {
        "x": torch.randn(rows, NODES, FEATURES),
        "adjacency": adjacency,
        "target": torch.randint(4, (rows,)),
    }


def clouds(rows: int) -> Inputs:
    return {"points": torch.randn(rows, NODES, 3), "target": torch.randint(4, (rows,))}


def molecules(rows: int) -> Inputs:
    places = 2 * torch.randn(rows, NODES, 3)
    return {"atoms": torch.randint(8, (rows, NODES)), "places": places, "target": torch.randn(rows)}


SHARED = {"edges": None}

KINDS = {
    "Message passing": Layer,
    "GCN": Convolution,
    "GAT": Attention,
    "GIN": Isomorphism,
    "GraphSAGE": Sage,
}

CASES = (
    *(
        Case(name, lambda kind=kind: Network(kind), nodes, F.cross_entropy, batched=SHARED)
        for name, kind in KINDS.items()
    ),
    Case("Dense GCN", Adjacent, matrices, F.cross_entropy),
    Case("DGCNN", Neighbours, clouds, F.cross_entropy),
    Case("SchNet", Continuous, molecules, F.mse_loss),
    Case(
        "Self-loops removed",
        Looped,
        nodes,
        F.cross_entropy,
        batched=SHARED,
    ),
)
