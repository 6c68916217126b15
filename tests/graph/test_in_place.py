"""What is written into the memory of an operand: only what nobody reads later, under whatever name."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from awkward_modules import assert_same_bits
from forward_modules import model
from torch import Tensor, fx, nn

from pipec.graph import Parameter, recv, send
from pipec.graph.in_place import ELEMENTWISE, ROWWISE, out_variant
from pipec.graph.phase_functions import PhaseFunction
from pipec.ir import Phase
from pipec.primitives import cross_entropy_gradient

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
    function = PhaseFunction(0, Phase.FORWARD, nodes, (), (), (), (), (), gradients=results)
    found = function.lifetimes.in_place.get(last)
    return found and found.name.removesuffix("_default")


def saved(body: Body) -> fx.Node:
    body.saved.append(body.made())
    return body.call(aten.relu.default, body.saved[0])


def read_by_another(body: Body) -> fx.Node:
    product = body.made()
    body.call(aten.exp.default, body.call(aten.t.default, product))
    return body.call(aten.relu.default, product)


def sent(body: Body) -> fx.Node:
    product = body.made()
    body.call(send, product, 1)
    return body.call(aten.relu.default, product)


def rows_read_again(body: Body) -> fx.Node:
    product = body.made()
    shown = body.call(aten._softmax.default, product, 1, False)
    body.call(aten.mul.Tensor, body.call(aten.exp.default, product), body.x)
    return shown


def row(body: Body) -> fx.Node:
    return body.call(aten.sum.dim_IntList, body.made(), [0])


def through(view: object, *args: object) -> Make:
    return lambda body: body.call(aten.relu.default, body.call(view, body.made(), *args))


def with_itself(transform: object) -> Make:
    def make(body: Body) -> fx.Node:
        product = body.made()
        return body.call(aten.add.Tensor, product, body.call(transform, product))

    return make


PLACES: dict[str, tuple[Make, str | None]] = {
    "first": (lambda body: body.call(aten.relu.default, body.made()), "mm"),
    "second, of a sum": (lambda body: body.call(aten.add.Tensor, body.x, body.made()), "mm"),
    "a view of all": (through(aten.view.default, [2, 8]), "view"),
    "the gradient of an activation": (
        lambda body: body.call(aten.gelu_backward.default, body.made(), body.x),
        "mm",
    ),
    "the second, of such a gradient": (
        lambda body: body.call(aten.tanh_backward.default, body.x, body.made()),
        "mm",
    ),
    "rows": (lambda body: body.call(aten._log_softmax.default, body.made(), 1, False), "mm"),
    "twice the same": (lambda body: body.call(aten.mul.Tensor, product := body.made(), product), "mm"),
    "what the stage holds": (lambda body: body.call(aten.relu.default, body.x), None),
    "a received value": (lambda body: body.call(aten.relu.default, body.call(recv, body.x)), None),
    "a sent value": (sent, None),
    "a saved value": (saved, None),
    "what another one reads": (read_by_another, None),
    "a part": (through(aten.slice.Tensor, 0, 0, 2), None),
    "a repeated value": (
        lambda body: body.call(aten.mul.Tensor, body.call(aten.expand.default, row(body), [4, 4]), body.x),
        None,
    ),
    "elements in another order": (with_itself(aten.t.default), None),
    "another shape": (lambda body: body.call(aten.add.Tensor, row(body), body.x), None),
    "another type": (lambda body: body.call(aten.eq.Scalar, body.made(), 1), None),
    "another order in memory": (
        lambda body: body.call(aten.add.Tensor, body.x, body.call(aten.t.default, body.made())),
        None,
    ),
    "the second, of a difference": (lambda body: body.call(aten.sub.Tensor, body.x, body.made()), None),
    "a single number": (
        lambda body: body.call(aten.relu.default, body.call(aten.sum.default, body.x)),
        None,
    ),
    "no operator of each element": (lambda body: body.call(aten.cumsum.default, body.made(), 0), None),
    "rows that lie otherwise": (
        lambda body: body.call(aten._softmax.default, body.call(aten.t.default, body.made()), 0, False),
        None,
    ),
    "rows that are read again": (rows_read_again, None),
    "what torch did not make": (
        lambda body: body.call(aten.relu.default, body.call(torch.mm, body.x, body.x)),
        None,
    ),
}
"""Last nodes, and the operand that each writes into: only one that nobody reads later and that lies alike."""


@pytest.mark.parametrize("name", PLACES)
def test_what_dies_is_written_into(name: str) -> None:
    make, operand = PLACES[name]
    assert written(make) == operand


SIZES = ((1, 1), (3, 7), (6, 33), (2, 5, 3, 19), (3, 2, 1031), (2, 70000))


def values_of(dtype: torch.dtype, *sizes: int) -> list[Tensor]:
    """Two tensors with some infinities, and one that is no number."""
    generator = torch.Generator().manual_seed(0)
    made = [4 * torch.randn(sizes, generator=generator) for _ in range(2)]
    if made[0].numel() > 20:
        made[0].view(-1)[5], made[0].view(-1)[-3], made[1].view(-1)[2] = -torch.inf, torch.nan, torch.inf
    return [each.to(dtype) for each in made]


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", [*ROWWISE, *ELEMENTWISE], ids=str)
def test_kernels_read_a_row_before_they_write_it(target: Any, dtype: torch.dtype) -> None:
    """What ``ROWWISE`` takes for granted of each operand. So do kernels that take element by element."""
    variant = out_variant(target)
    assert variant is not None
    place = variant._schema.arguments[-1].name
    num_operands = sum(str(argument.type) == "Tensor" for argument in target._schema.arguments)
    for sizes in SIZES:
        others: list[tuple[object, ...]] = [()]
        if target in ROWWISE:
            others = [(dim, dtype if num_operands == 2 else False) for dim in range(len(sizes))]
        elif target is aten.threshold_backward.default:
            others = [(0,)]
        for rest, written_into in itertools.product(others, range(num_operands)):
            operands = values_of(dtype, *sizes)[:num_operands]
            expected = target(*operands, *rest)
            found = variant(*operands, *rest, **{place: operands[written_into]})
            assert found is operands[written_into]
            assert same(found, expected), (sizes, rest, written_into)


@pytest.mark.parametrize(("reduction", "shape"), [(0, (200,)), (1, ()), (2, ())], ids=["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_gradient_of_cross_entropy_has_torchs_bits(
    reduction: int, shape: tuple[int, ...], weighted: bool, dtype: torch.dtype
) -> None:
    classes = 3000
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, classes, generator=generator).to(dtype)
    logits[7, 5] = torch.inf
    target = torch.randint(classes, (200,), generator=generator)
    target[3::7] = -100
    weight = torch.rand(classes, generator=generator).to(dtype) if weighted else None
    grad = torch.randn(shape, generator=generator).to(dtype)
    lp = torch.log_softmax(logits, 1)
    _, total = aten.nll_loss_forward(lp, target, weight, reduction, -100)
    terms = aten.nll_loss_backward(grad, lp, target, weight, reduction, -100, total)
    expected = aten._log_softmax_backward_data(terms, lp, 1, dtype)
    arguments = (target, weight, reduction, -100, total)
    assert same(cross_entropy_gradient(grad, lp, *arguments), expected)
    assert same(cross_entropy_gradient(grad, lp, *arguments, out=lp), expected)


def saved_for(*shared_by: Callable[[Body, fx.Node], object], read_after: bool = False) -> str | None:
    """What the gradient of cross entropy is written into, if others do this to the probabilities, too.

    ``read_after``: whether the function reads them again.
    """
    body = Body()
    lp = body.call(aten._log_softmax.default, body.x, 1, False)
    target = body.call(aten.zeros.default, [4])
    target.meta["val"] = torch.zeros(4, dtype=torch.int64)
    for share in shared_by:
        share(body, lp)
    number = body.call(aten.sum.default, body.x)
    gradient = body.call(cross_entropy_gradient, number, lp, target, None, 2, -100, number)
    after = [body.call(aten.exp.default, body.call(aten.t.default, lp))] if read_after else []
    body.output((gradient, *body.saved))
    results = tuple((f"result {k}", node) for k, node in enumerate((gradient, *body.saved)))
    function = PhaseFunction(
        0, Phase.BACKWARD, (number, gradient, *after), (), (), (target, lp), (), (), gradients=results
    )
    found = function.lifetimes.in_place.get(gradient)
    return found and found.name


def test_what_was_saved_for_the_gradient_of_cross_entropy_alone_takes_it() -> None:
    assert saved_for() == "_log_softmax_default"
    assert saved_for(lambda body, lp: body.call(aten.exp.default, lp)) == "_log_softmax_default"
    assert saved_for(lambda body, lp: body.call(send, lp, 1)) is None
    assert saved_for(lambda body, lp: body.call(send, body.call(aten.t.default, lp), 1)) is None
    assert saved_for(lambda body, lp: body.saved.append(lp)) is None
    assert saved_for(read_after=True) is None


@model(
    layers=lambda read_again: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2100)),
    scale=lambda read_again: nn.Parameter(torch.ones(2100)) if read_again else None,
)
def Classes(self: Any, x: Tensor) -> Tensor:
    """Cross entropy of so many classes that its gradient is made in one piece.

    With ``read_again`` the backward reads the probabilities for another gradient, too.
    """
    shown = self.layers(x).log_softmax(1)
    other = 0.0 if self.scale is None else (self.scale * shown.detach()).mean()
    return nn.functional.nll_loss(shown, x[:, 0].mul(2100).long()) + other


@pytest.mark.parametrize("options", [{}, {"schedule": "zb-h1"}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize("read_again", [False, True], ids=["", "read again"])
def test_probabilities_are_overwritten_only_if_nobody_reads_them_again(
    read_again: bool, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    pipe = assert_same_bits(Classes(read_again), {"x": torch.rand(8, 4)}, [4, 4], None, devices=1, **options)
    assert "primitives.cross_entropy_gradient(" in pipe.source(0)
    assert ("out=shown" in pipe.source(0)) != read_again
