"""What is written into the memory of an operand: only what nobody reads later, under whatever name."""

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

import pipec
from pipec.graph import Parameter, recv, send
from pipec.graph.functions import Function
from pipec.graph.in_place import readers, written_in_place
from pipec.ir import Phase

aten = torch.ops.aten

Make = Callable[["Body"], fx.Node]


class Body(fx.Graph):
    """A graph of nodes that have their values, as those of a training graph have."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.placeholder("x")
        self.x.meta = {"val": torch.ones(4, 4), "role": Parameter("x")}
        self.saved: list[fx.Node] = []

    def call(self, target: object, *args: object) -> fx.Node:
        node = self.call_function(target, args)  # type: ignore[arg-type]
        values = fx.map_arg(args, lambda read: read.meta["val"])
        node.meta = {"val": target(*values), "phase": Phase.FORWARD, "operator": 0}  # type: ignore[operator]
        return node

    def made(self) -> fx.Node:
        return self.call(aten.mm.default, self.x, self.x)


def written(make: Make) -> str | None:
    """The name of the operand that the last node writes into."""
    body = Body()
    last = make(body)
    body.output((last, *body.saved))
    nodes = tuple(node for node in body.nodes if node.op == "call_function")
    results = (("result", last), *((f"saved {k}", node) for k, node in enumerate(body.saved)))
    function = Function(0, Phase.FORWARD, nodes, (), (), (), (), (), gradients=results)
    found = written_in_place(function).get(last)
    return found and found.name.removesuffix("_default")


def saved(body: Body) -> fx.Node:
    body.saved.append(body.made())
    return body.call(aten.relu.default, body.saved[0])


def read_by_another(body: Body) -> fx.Node:
    product = body.made()
    body.call(aten.exp.default, body.call(aten.t.default, product))
    return body.call(aten.relu.default, product)


def row(body: Body) -> fx.Node:
    return body.call(aten.sum.dim_IntList, body.made(), [0])


def through(view: object, *args: object) -> Make:
    return lambda body: body.call(aten.relu.default, body.call(view, body.made(), *args))


def with_itself(transform: object) -> Make:
    def make(body: Body) -> fx.Node:
        product = body.made()
        return body.call(aten.add.Tensor, product, body.call(transform, product))

    return make


WRITTEN: dict[str, tuple[Make, str]] = {
    "first": (lambda body: body.call(aten.relu.default, body.made()), "mm"),
    "second, of a sum": (lambda body: body.call(aten.add.Tensor, body.x, body.made()), "mm"),
    "a view of all": (through(aten.view.default, [2, 8]), "view"),
    "twice the same": (lambda body: body.call(aten.mul.Tensor, product := body.made(), product), "mm"),
}

NOT_WRITTEN: dict[str, Make] = {
    "what the stage holds": lambda body: body.call(aten.relu.default, body.x),
    "what is received": lambda body: body.call(aten.relu.default, body.call(recv, body.x)),
    "what is sent": lambda body: (
        product := body.made(),
        body.call(send, product, 1),
        body.call(aten.relu.default, product),
    )[2],
    "what is saved": saved,
    "what another one reads": read_by_another,
    "a part": through(aten.slice.Tensor, 0, 0, 2),
    "what is repeated": lambda body: body.call(
        aten.mul.Tensor, body.call(aten.expand.default, row(body), [4, 4]), body.x
    ),
    "elements in another order": with_itself(aten.t.default),
    "another shape": lambda body: body.call(aten.add.Tensor, row(body), body.x),
    "another type": lambda body: body.call(aten.eq.Scalar, body.made(), 1),
    "another order in memory": lambda body: body.call(
        aten.add.Tensor, body.x, body.call(aten.t.default, body.made())
    ),
    "the second, of a difference": lambda body: body.call(aten.sub.Tensor, body.x, body.made()),
    "a single number": lambda body: body.call(aten.relu.default, body.call(aten.sum.default, body.x)),
    "no operator of each element": lambda body: body.call(aten.cumsum.default, body.made(), 0),
    "what torch did not make": lambda body: body.call(aten.relu.default, body.call(torch.mm, body.x, body.x)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_dies_is_written_into(name: str) -> None:
    make, operand = WRITTEN[name]
    assert written(make) == operand


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_what_somebody_reads_or_lies_otherwise_is_not(name: str) -> None:
    assert written(NOT_WRITTEN[name]) is None


class Aliases(nn.Module):
    """Each product is read twice: by what could write into it, and by what comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            product = layer(x)
            flat = product.view(-1)
            x = torch.where(flat.sigmoid() > 0.5, flat.neg(), flat.mul(2)).view_as(product) + product
            x = x + layer(x)
        return x.square().mean()


def step_of(recompute: str) -> tuple[bool, str]:
    """Whether a step has the bits of eager torch, and the code of both stages."""
    torch.manual_seed(0)
    model, x = Aliases(), torch.randn(4, 4)
    eager = copy.deepcopy(model)
    for rows in x.split(2):
        (eager(rows) / 2).backward()
    pipe = pipec.compile(model, 2, microbatches=2, recompute=recompute, dynamic=False)
    pipe.step(x)
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return all(torch.equal(a.grad, b.grad) for a, b in pairs), pipe.source(0) + pipe.source(1)  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_keeps_its_bits(recompute: str) -> None:
    is_equal, source = step_of(recompute)
    assert is_equal
    assert "_(" in source


def test_the_rule_about_readers_matters() -> None:
    def first_reader(owner: fx.Node) -> list[fx.Node]:
        order = list(owner.graph.nodes)
        return [min(readers(owner), key=order.index)]

    with mock.patch("pipec.graph.in_place.readers", first_reader):
        is_equal, source = step_of("none")
    assert ".sigmoid_()" in source
    assert not is_equal
