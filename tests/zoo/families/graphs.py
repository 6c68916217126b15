"""Graph networks. A row is a graph, or the features of all nodes of one graph that every row shares."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import linears, model, perceptron
from zoo.model_case import Case, batch, integers, normal

NODES, EDGES, FEATURES, WIDTH = 10, 30, 6, 32


@model(message=lambda: nn.Linear(2 * WIDTH, WIDTH), update=lambda: nn.Linear(2 * WIDTH, WIDTH))
def messages(self, x: Tensor, edges: Tensor) -> Tensor:
    """Messages along edges, added up where they arrive. ``x`` is ``[rows, nodes, width]``."""
    source, target = edges
    sent = F.relu(self.message(torch.cat([x[:, source], x[:, target]], -1)))
    arrived = torch.zeros_like(x).index_add(1, target, sent)
    return x + F.relu(self.update(torch.cat([x, arrived], -1)))


@model(layer=lambda: nn.Linear(WIDTH, WIDTH))
def convolution(self, x: Tensor, edges: Tensor) -> Tensor:
    """Neighbours' means by the roots of degrees (Kipf and Welling, GCN, 2017)."""
    source, target = edges
    degree = torch.ones(x.shape[1]).scatter_add(0, target, torch.ones_like(target, dtype=x.dtype))
    weight = (degree[source] * degree[target]).rsqrt()[:, None]
    hidden = self.layer(x)
    arrived = torch.zeros_like(hidden).index_add(1, target, weight * hidden[:, source])
    return F.relu(arrived + hidden / degree[:, None])


@model(layer=lambda: nn.Linear(WIDTH, WIDTH), score=lambda: nn.Linear(2 * WIDTH, 1))
def attention(self, x: Tensor, edges: Tensor) -> Tensor:
    """Neighbours weighted by a softmax over a node's edges (Velickovic et al., GAT, 2018)."""
    source, target = edges
    hidden = self.layer(x)
    score = F.leaky_relu(self.score(torch.cat([hidden[:, source], hidden[:, target]], -1)), 0.2)
    index = target[None, :, None].expand_as(score)
    most = torch.full_like(hidden[..., :1], -1e9).scatter_reduce(1, index, score.detach(), "amax")
    weight = (score - most[:, target]).exp()
    total = torch.zeros_like(most).index_add(1, target, weight)
    return F.elu(torch.zeros_like(hidden).index_add(1, target, weight / total[:, target] * hidden[:, source]))


@model(eps=lambda: nn.Parameter(torch.zeros(())), layers=lambda: perceptron(WIDTH, WIDTH, WIDTH))
def isomorphism(self, x: Tensor, edges: Tensor) -> Tensor:
    """The sum of neighbours through a network (Xu et al., GIN, 2019)."""
    source, target = edges
    return self.layers((1 + self.eps) * x + torch.zeros_like(x).index_add(1, target, x[:, source]))


@model(own=lambda: nn.Linear(WIDTH, WIDTH), others=lambda: nn.Linear(WIDTH, WIDTH, bias=False))
def sage(self, x: Tensor, edges: Tensor) -> Tensor:
    """The mean of neighbours beside the node's own features (Hamilton et al., GraphSAGE, 2017)."""
    source, target = edges
    index = target[None, :, None].expand(x.shape[0], -1, x.shape[2])
    mean = torch.zeros_like(x).scatter_reduce(1, index, x[:, source], "mean", include_self=False)
    return F.normalize(F.relu(self.own(x) + self.others(mean)), dim=-1)


@model(
    embed=lambda layer: nn.Linear(FEATURES, WIDTH),
    layers=lambda layer: nn.ModuleList(layer() for _ in range(3)),
    head=lambda layer: nn.Linear(WIDTH, 4),
)
def network(self, x: Tensor, edges: Tensor) -> Tensor:
    """Layers of one kind over a list of edges, and a class for every node."""
    hidden = self.embed(x)
    for layer in self.layers:
        hidden = layer(hidden, edges)
    return self.head(hidden).mT


@model(network=lambda: network(messages))
def without_loops(self, x: Tensor, edges: Tensor) -> Tensor:
    """Removes loops before it sends messages, so that the number of edges follows from values."""
    return self.network(x, edges[:, edges[0] != edges[1]])


@model(
    embed=lambda: nn.Linear(FEATURES, WIDTH),
    head=lambda: nn.Linear(WIDTH, 4),
    layers=lambda: linears(3, WIDTH, WIDTH),
)
def adjacent(self, x: Tensor, adjacency: Tensor) -> Tensor:
    """Graph convolutions over an adjacency matrix for each row, then one number for the graph."""
    connected = adjacency + torch.eye(NODES)
    scaled = connected / connected.sum(-1, keepdim=True)
    hidden = self.embed(x)
    for layer in self.layers:
        hidden = F.relu(layer(scaled @ hidden))
    return self.head(hidden.sum(1))


@model(
    layers=lambda: nn.ModuleList(nn.Linear(width, 16) for width in (6, 32, 32)), head=lambda: nn.Linear(48, 4)
)
def neighbours(self, points: Tensor) -> Tensor:
    """Edges to the nearest points, found anew in every layer (Wang et al., DGCNN, 2019)."""
    x, features = points, []
    for layer in self.layers:
        near = (x[:, :, None] - x[:, None]).square().sum(-1).topk(4, largest=False).indices
        index = near.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
        others = x.gather(1, index).unflatten(1, near.shape[1:])
        own = x[:, :, None].expand_as(others)
        x = F.relu(layer(torch.cat([own, others - own], -1))).amax(2)
        features.append(x)
    return self.head(torch.cat(features, -1).amax(1))


@model(
    atoms=lambda: nn.Embedding(8, WIDTH),
    centres=lambda: nn.Buffer(torch.linspace(0, 5, 12)),
    filters=lambda: nn.ModuleList(perceptron(12, WIDTH, WIDTH, activation=nn.Softplus) for _ in range(3)),
    mixers=lambda: linears(3, WIDTH, WIDTH),
    head=lambda: nn.Linear(WIDTH, 1),
)
def schnet(self, atoms: Tensor, places: Tensor) -> Tensor:
    """Convolutions whose filters are functions of the distance of atoms (Schutt et al., SchNet, 2017)."""
    x = self.atoms(atoms)
    apart = (places[:, :, None] - places[:, None] + 1e-6).norm(dim=-1)
    basis = (-(apart[..., None] - self.centres).square()).exp()
    for make, mix in zip(self.filters, self.mixers, strict=True):
        x = x + F.softplus(mix((make(basis) * x[:, None]).sum(2)))
    return self.head(x).sum((1, 2))


def edges(rows: int) -> Tensor:
    return torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(1))


def matrices(rows: int) -> Tensor:
    return (torch.rand(rows, NODES, NODES) < 0.3).float()


def places(rows: int) -> Tensor:
    return 2 * torch.randn(rows, NODES, 3)


GRAPHS = batch(x=normal(NODES, FEATURES), edges=edges, target=integers(4, NODES))
DENSE = batch(adjacency=matrices, x=normal(NODES, FEATURES), target=integers(4))
CLOUDS = batch(points=normal(NODES, 3), target=integers(4))
MOLECULES = batch(places=places, atoms=integers(8, NODES), target=normal())
SHARED = {"edges": None}

CASES = (
    Case("Message passing", lambda: network(messages), GRAPHS, F.cross_entropy, batched=SHARED),
    Case("GCN", lambda: network(convolution), GRAPHS, F.cross_entropy, batched=SHARED),
    Case("GAT", lambda: network(attention), GRAPHS, F.cross_entropy, batched=SHARED),
    Case("GIN", lambda: network(isomorphism), GRAPHS, F.cross_entropy, batched=SHARED),
    Case("GraphSAGE", lambda: network(sage), GRAPHS, F.cross_entropy, batched=SHARED),
    Case("Dense GCN", adjacent, DENSE, F.cross_entropy),
    Case("DGCNN", neighbours, CLOUDS, F.cross_entropy),
    Case("SchNet", schnet, MOLECULES, F.mse_loss),
    Case("Self-loops removed", without_loops, GRAPHS, F.cross_entropy, batched=SHARED),
)
