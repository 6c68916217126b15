"""What pipec relies on in the private parts of torch: each in one small assertion, for the day it changes."""

import logging
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

from pipec import torch_compat
from pipec.operators import OPERATOR_ID, number_operators
from pipec.torch_compat import Captured, JointGraph


class Scaled(nn.Module):
    """A parameter, a buffer that changes, and an attribute that does when ``count`` is not None."""

    def __init__(self, count: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        if self.count is not None:
            self.count += 1
        return (x.exp() * self.weight).mean()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 20


class UsesDoubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x * self.weight).mean()


class Hooked(UsesDoubled):
    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        y.register_hook(lambda gradient: gradient * 2)
        return y.mean()


class ReadsValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


FRONT_ENDS = (torch_compat.capture_with_dynamo, torch_compat.capture_with_export)


def captured(module: nn.Module, front_end: Any = torch_compat.capture_with_dynamo) -> Captured:
    x = torch.rand(4, 3)
    with torch_compat.quiet(), torch_compat.unchanged(module):
        return front_end(module, (x,), [x])


def differentiated(module: nn.Module, front_end: Any = torch_compat.capture_with_dynamo) -> JointGraph:
    with torch_compat.quiet(), torch_compat.unchanged(module):
        x = torch.rand(4, 3)
        graph = front_end(module, (x,), [x])
        number_operators(graph.module)
        return torch_compat.differentiate(graph, training=True)


def test_settings_of_dynamo_have_their_names() -> None:
    for name in torch_compat.DYNAMO_CONFIG:
        assert hasattr(torch._dynamo.config, name), name
    assert isinstance(torch._dynamo.config.ignore_logger_methods, set)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_marked_dimension_becomes_a_symbol_and_every_node_knows_its_operator(front_end: Any) -> None:
    joint = differentiated(Scaled(), front_end)
    nodes = list(joint.module.graph.nodes)
    x = next(n for n, (kind, _) in zip(nodes, joint.arguments, strict=False) if kind == "input")
    assert isinstance(x.meta["val"].shape[0].node.expr, sympy.Symbol)
    computed = [n for n in nodes if n.op == "call_function" and n.target is torch.ops.aten.exp.default]
    assert len(computed) == 1
    products = [n for n in nodes if n.target is torch.ops.aten.mul.Tensor]
    assert len(products) == 2  # forward, and the gradient of the weight
    assert len({n.meta["custom"][OPERATOR_ID] for n in products}) == 1


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_arguments_and_results_are_described(front_end: Any) -> None:
    joint = differentiated(Scaled(), front_end)
    arguments = {(kind, str(what).rpartition(".")[2]) for kind, what in joint.arguments}
    assert arguments == {("parameter", "weight"), ("buffer", "calls"), ("input", "0"), ("tangent", "0")}
    results = {(kind, str(what).rpartition(".")[2]) for kind, what in joint.results if kind != "ignored"}
    assert results == {("buffer", "calls"), ("output", "0"), ("gradient", "weight")}


def test_attributes_that_forward_sets_are_named_and_put_back() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Scaled(0)

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    module = Outer()
    assert captured(module).changed_state == ("model",)
    assert module.model.count == 0
    assert float(module.model.calls) == 0


def test_export_refuses_what_it_would_lose() -> None:
    with pytest.raises(TypeError, match="custom autograd function Doubled would be lost"):
        captured(UsesDoubled(), torch_compat.capture_with_export)
    with pytest.raises(TypeError, match=r"hook registered on a gradient .* would be lost"):
        captured(Hooked(), torch_compat.capture_with_export)
    x = torch.ones(2, requires_grad=True)
    Doubled.apply(x).sum().backward()  # both work again
    assert x.grad is not None
    assert x.grad.tolist() == [20, 20]


def test_dynamo_keeps_a_custom_backward() -> None:
    joint = differentiated(UsesDoubled())
    assert any(20 in node.args for node in joint.module.graph.nodes)


def test_a_failed_capture_tells_where_and_why() -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what torch raises is what is asked
        captured(ReadsValues())
    assert torch_compat.user_frames(caught.value)[-1].line == "return x if x.sum() > 0 else -x"
    assert "ata-dependent" in torch_compat.reason_of(caught.value)
    assert not torch_compat.model_raised(caught.value)


def test_an_error_of_the_model_is_told_from_a_failed_capture() -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what torch raises is what is asked
        captured(nn.Linear(7, 2))
    assert torch_compat.model_raised(caught.value)


def test_hooks_on_gradients_are_seen() -> None:
    hooks = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
    for register in hooks:
        parameter = nn.Parameter(torch.ones(2))
        assert not torch_compat.has_gradient_hook(parameter)
        register(parameter, lambda gradient: None)
        assert torch_compat.has_gradient_hook(parameter)


def test_loggers_are_quiet_only_meanwhile() -> None:
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    with torch_compat.quiet():
        assert not logger.isEnabledFor(logging.CRITICAL)
    assert logger.level == level


def test_sources_of_dynamo_become_names() -> None:
    assert torch_compat.fqn_of("L['self']._modules['model'].h[0]") == "model.h.0"
    assert torch_compat.fqn_of("getattr(L['self'].model.h, '0')") == "model.h.0"


def test_sizes_become_python() -> None:
    b = sympy.Symbol("b", integer=True, positive=True)
    assert eval(torch_compat.python_expression(sympy.Max(3 * b + 1, 5)), {"b": 4}) == 13
    assert eval(torch_compat.python_expression(sympy.floor(b / 3)), {"b": 7, "math": __import__("math")}) == 2
