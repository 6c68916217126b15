"""PyTorch Geometric's graph classification: models and loaders of that library, on graphs made here.

A batch is many graphs merged into one: nodes are rows of one tensor, edges of another, graphs of a third. No
dimension is shared by all tensors. As a script it trains such models on all ranks.
"""

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_params import slow_but
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GAT, GCN, GIN, MLP, GraphSAGE, global_add_pool
from worker_processes import run_ranks

import pipec

loss_fn = nn.functional.cross_entropy
WAYS = ("outputs", "eval_step", "module", "outside", "stream", "artifact")
MODELS = {"gin": GIN, "gat": GAT, "gcn": GCN, "sage": GraphSAGE}


class Classifier(nn.Module):
    """As in the library's ``examples/mutag_gin.py``, with any of its layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = MODELS[kind](8, 16, num_layers=4)
        self.classify = MLP([16, 16, 3], norm=None, dropout=0.0)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, batch_size: int) -> Tensor:
        return self.classify(global_add_pool(self.layers(x, edge_index), batch, batch_size))


def make_model(kind: str = "gin") -> Classifier:
    torch.manual_seed(0)
    return Classifier(kind).double()


def graphs(count: int) -> Iterator[Data]:
    draw = torch.Generator().manual_seed(1)
    for number in range(count):
        nodes = 4 + (5 * number) % 7
        edges = torch.randint(nodes, (2, nodes + number % 5), generator=draw)
        x = torch.randn(nodes, 8, generator=draw, dtype=torch.float64)
        yield Data(x=x, edge_index=edges, y=torch.tensor([number % 3]))


def batches(count: int) -> list[tuple[dict[str, Any], Tensor]]:
    """The arguments and the target of so many batches, which differ in their numbers of graphs."""
    sizes = [3 + (2 * number) % 5 for number in range(count)]
    numbers = iter(range(sum(sizes)))
    chosen = [[*itertools.islice(numbers, size)] for size in sizes]
    loader = DataLoader([*graphs(sum(sizes))], batch_sampler=chosen)
    names = {"x": "x", "edge_index": "edge_index", "batch": "batch", "batch_size": "num_graphs"}
    return [({name: getattr(batch, own) for name, own in names.items()}, batch.y) for batch in loader]


def differences(pipe: Any, plain: nn.Module) -> float:
    """The largest difference of gradients, where this rank has them."""
    expected = dict(plain.named_parameters())
    found = ((name, x.grad) for name, x in pipe.named_parameters() if x.grad is not None)
    return max((x - expected[name].grad).abs().max().item() for name, x in found)


@pytest.mark.parametrize("kind", slow_but(MODELS, "gcn"))
def test_each_batch_and_lists_of_them_train_as_plain_pytorch(kind: str) -> None:
    """A few batches are accumulated, one by one and then in a list."""
    model = make_model(kind)
    plain = copy.deepcopy(model)
    pipe = pipec.compile(model, devices=2, loss_fn=loss_fn, microbatches=1)
    every = batches(6)
    for few in [*([each] for each in every), every]:
        expected = torch.stack([loss_fn(plain(**arguments), target) for arguments, target in few]).mean()
        expected.backward()
        given = [{**arguments, "target": target} for arguments, target in few]
        loss = pipe.step(**given[0]) if len(few) == 1 else pipe.step(microbatches=given)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        assert differences(pipe, plain) < 1e-12


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    printed = run_ranks(Path(__file__), 2, tmp_path)
    assert [each.splitlines()[-1] for each in printed] == ["equal"] * 2


@pytest.mark.parametrize("step", slow_but(WAYS, "outside", "artifact"))
def test_other_ways_to_run_a_batch(step: str, tmp_path: Path) -> None:
    model = make_model()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {} if step == "outside" else {"loss_fn": loss_fn}
    pipe = pipec.compile(model, devices=2, microbatches=1, **options)
    module = pipe.as_module()
    if step == "artifact":  # made for the sizes of two batches, it takes others
        for arguments, target in batches(2):
            pipe.step(**arguments, target=target)
        pipe.save(tmp_path / "artifact", tensors=True)
        pipe = pipec.load(tmp_path / "artifact")
    for arguments, target in batches(4):
        output = plain(**arguments)
        expected = loss_fn(output, target)
        plain.zero_grad()
        expected.backward()
        pipe.zero_grad()
        match step:
            case "outputs":
                loss, found = pipe.step(**arguments, target=target, outputs=True)
                torch.testing.assert_close(found, output.detach())
            case "eval_step":
                loss = pipe.eval_step(**arguments, target=target)
            case "module":
                loss = module(**arguments, target=target)
                loss.backward()
            case "outside":
                loss = loss_fn(module(**arguments), target)
                loss.backward()
            case "stream":
                [loss] = pipe.stream([{**arguments, "target": target}])
            case "artifact":
                loss = pipe.step(**arguments, target=target)
        torch.testing.assert_close(loss.detach(), expected.detach())
        if step != "eval_step":
            assert differences(pipe, plain) < 1e-12


if __name__ == "__main__":
    for each in MODELS:
        test_each_batch_and_lists_of_them_train_as_plain_pytorch(each)
    print("equal")
