"""What is computed of sizes while a model is captured is computed once, and is what torch would compute."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from awkward_modules import module
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pipec.torch_compat.differentiation import differentiate
from pipec.torch_compat.dynamo_front_end import capture_with_dynamo
from pipec.torch_compat.operator_patches import CACHED_METHODS, Method, cached_size_arithmetic


@pytest.fixture
def env() -> ShapeEnv:
    return ShapeEnv(duck_shape=False)


@pytest.fixture
def sizes(env: ShapeEnv) -> tuple[torch.SymInt, ...]:
    """Three symbols; the first and the last of them are equal in this call."""
    fake: Any = FakeTensorMode(shape_env=env).from_tensor(torch.empty(6, 7, 6), source=ConstantSource("x"))
    return tuple(fake.shape)


@pytest.fixture
def remembered() -> Iterator[None]:
    with cached_size_arithmetic():
        yield


def test_torch_is_as_it_was() -> None:
    before = dict(vars(SymNode))
    with pytest.raises(KeyError), cached_size_arithmetic():
        raise KeyError
    assert dict(vars(SymNode)) == before


@pytest.mark.usefixtures("remembered")
def test_equal_sizes_make_one_result(env: ShapeEnv, sizes: tuple[torch.SymInt, ...]) -> None:
    first, second, last = sizes
    assert (first * second).node is (first * second).node
    assert str(first * second + 1) == str(second * first + 1)
    before = str(first + 1), str(last + 1)
    assert before[0] != before[1], "sizes that are equal in this call alone"
    assert str(first + 1) != str(first + 2)
    assert isinstance(first // 2 < second, torch.SymBool)
    assert isinstance(first / 1, torch.SymFloat), "not the size that 1 makes of it as a whole number"
    size = env.create_unbacked_symint()
    assert (size * 2).node is not (size * 2).node, "a size that values tell is left out"
    assert first == last  # a guard, which makes one symbol of both
    assert str(first + 1) == str(last + 1)
    assert first == 6
    assert (last + 1).node.maybe_as_int() == 7


@module(lambda: {"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
def Blocks(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x).view(-1, 2, 2).transpose(1, 2).reshape(x.shape[0] * 1, 4)
    return x.sum() * (2 if x.shape[0] > 2 else 3)


@pytest.mark.slow
def test_a_graph_is_the_same_and_takes_less_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, methods = Counter[str](), {name: getattr(SymNode, name) for name in CACHED_METHODS}

    def counted(name: str) -> Method:
        def computed(self: SymNode, other: SymNode) -> SymNode:
            counts[name] += 1
            result: SymNode = methods[name](self, other)
            return result

        return computed

    for name in methods:
        monkeypatch.setattr(SymNode, name, counted(name))
    plain, num_plain = _joint_graph(), counts.total()
    counts.clear()
    with cached_size_arithmetic():
        assert _joint_graph() == plain
    assert 8 * counts.total() < num_plain


def _joint_graph() -> tuple[list[str], list[str]]:
    """The operators with the shapes of their results, and the guards."""
    x = torch.zeros(4, 4)
    captured = capture_with_dynamo(Blocks(), (x,), [(x, 0)])
    joint = differentiate(captured, training=True)
    values = [(x.target, x.meta.get("val")) for x in joint.module.graph.nodes]
    nodes = [f"{target} {value.shape}" for target, value in values if isinstance(value, Tensor)]
    return nodes, list(map(str, joint.guards))
