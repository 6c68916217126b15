"""The forward cut out of a training graph is the graph that a capture of an evaluation makes."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from huggingface_models import Factory, bert, each, encoder, gpt2_with_dropout, llama, resnet, t5
from repeated_models import Block, Stack, assert_same_graph, call, capture_stack
from slow_params import slow_but
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pipec
from pipec import torch_compat
from pipec.capture import tracer
from pipec.capture.extract_forward import extract_forward
from pipec.capture.model_call import ModelCall
from pipec.compiler import compile as compiling
from pipec.ir import Mode

WIDTH = 4


def layers(*others: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *others, nn.Linear(WIDTH, WIDTH))


def tied() -> nn.Module:
    model = Stack(Block(), Block())
    model.head.weight = model.embed.weight
    return model


def loss_with_logs(output: Tensor, target: Tensor) -> Any:
    return F.mse_loss(output, target), {"largest": (output - target).abs().amax()}


class Attending(nn.Linear):
    """Products of several kinds, with a weight."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.matmul(x[:, None, :].expand(-1, 3, -1), self.weight)
        query = super().forward(wide)[:, None]
        return F.scaled_dot_product_attention(query, wide[:, None], query).sum((1, 2))


class Convolving(nn.Module):
    """A convolution with a batch norm, and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        image = self.norm(self.convolution(x[:, None, None, :].expand(-1, -1, 4, -1)))
        pooled = F.max_pool2d(F.relu(image), 2).flatten(1).mean(1, keepdim=True)
        return x + pooled


class Counting(nn.Module):
    """A buffer that each forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        found: Tensor = self.linear(x) * self.seen
        return found


EXTRACTED: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: layers(nn.ReLU(), nn.Dropout(0.3)),
    "evaluated": lambda: layers(nn.ReLU(), nn.Dropout(0.3)).eval(),
    "a batch norm": lambda: layers(nn.BatchNorm1d(WIDTH)),
    "tied weights": tied,
    "a frozen block": lambda: Stack(Block().requires_grad_(False), Block()),
    "equal blocks": lambda: Stack(*[Block() for _ in range(7)]),
    "attention": Attending,
    "convolution": Convolving,
    "a buffer that is replaced": Counting,
    "an encoder layer": lambda: layers(Rows(nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True))),
}


class Rows(nn.Module):
    """Calls a layer with each row as a sequence of one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x[:, None])
        return found[:, 0]


@pytest.mark.parametrize("name", slow_but(EXTRACTED, *(EXTRACTED.keys() - {"an encoder layer"})))
def test_the_forward_of_a_step_is_what_an_evaluation_captures(name: str) -> None:
    model = EXTRACTED[name]()
    extracted = extract_forward(capture_stack(model))
    assert extracted is not None
    assert_same_graph(extracted, capture_stack(model, Mode.LOSS))


@pytest.mark.parametrize("outputs", [False, True])
def test_logs_and_outputs_are_those_of_an_evaluation(outputs: bool) -> None:
    model = Stack(Block())
    step, evaluation = (
        tracer.capture(model, loss_with_logs, mode, call(), outputs=outputs)
        for mode in (Mode.TRAIN, Mode.LOSS)
    )
    extracted = extract_forward(step)
    assert extracted is not None
    assert extracted.logs == ("largest",)
    assert_same_graph(extracted, evaluation)


@pytest.mark.slow
@pytest.mark.parametrize("make", each(gpt2_with_dropout, llama, bert, t5, encoder, resnet))
@pytest.mark.parametrize("training", [True, False])
def test_transformers_evaluate_as_they_are_captured(make: Factory, training: bool) -> None:
    model, inputs = make()
    model.train(training)
    step, evaluation = (
        tracer.capture(model, None, mode, ModelCall((), inputs, None)) for mode in (Mode.TRAIN, Mode.LOSS)
    )
    extracted = extract_forward(step)
    if make is t5 or (make is encoder and not training):  # attention has other kernels without gradients
        assert extracted is None
    else:
        assert extracted is not None
        assert_same_graph(extracted, evaluation)


@pytest.mark.slow
def test_a_transformer_without_dropout_evaluates_in_eval_mode_as_in_training_mode() -> None:
    model, inputs = llama()
    step, evaluation = (
        tracer.capture(model.train(training), None, mode, ModelCall((), inputs, None))
        for training, mode in ((True, Mode.TRAIN), (False, Mode.LOSS))
    )
    extracted = extract_forward(step)
    assert extracted is not None
    assert_same_graph(replace(extracted, training=False), evaluation)


class Doubled(nn.Linear):
    """Doubles its result where it finds that gradients are disabled."""

    def __init__(self, has_gradients: Callable[[Tensor], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.has_gradients = has_gradients

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found if self.has_gradients(found) else found * 2


class Scaled(torch.autograd.Function):
    """Has a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@torch._dynamo.assume_constant_result
def gradients_once() -> bool:
    return torch.is_grad_enabled()


@torch.compiler.allow_in_graph
def opaque(x: Tensor) -> Tensor:
    return x if torch.is_grad_enabled() else x * 2


class Called(nn.Linear):
    """Calls a function on its result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(super().forward(x))


def masked_attention(x: Tensor) -> Tensor:
    """The mask requires a gradient, which the fused kernel cannot make."""
    query = x[:, None, None].expand(-1, -1, 3, -1)
    return F.scaled_dot_product_attention(query, query, query, attn_mask=x[:, None, :3, None])[:, 0, 0]


def folded_product(x: Tensor) -> Tensor:
    """The right factor is computed, and requires a gradient: torch makes one product of many then."""
    return torch.matmul(x[:, None].expand(-1, 3, -1), x[:WIDTH].sum() * torch.eye(WIDTH)).sum(1)


ASKING: dict[str, Callable[[], nn.Module]] = {
    "is_grad_enabled": lambda: Doubled(lambda x: torch.is_grad_enabled()),
    "requires_grad": lambda: Doubled(lambda x: x.requires_grad),
    "getattr": lambda: Doubled(lambda x: getattr(x, "".join(["requires_", "grad"]))),
    "is_leaf": lambda: Doubled(lambda x: not x.is_leaf),
    "a constant": lambda: Doubled(lambda x: gradients_once()),
    "a function of an autograd": lambda: Called(Scaled.apply),
    "a checkpoint": lambda: Called(lambda x: checkpoint(torch.relu, x, use_reentrant=False)),
    "attention with a trained mask": lambda: Called(masked_attention),
    "a product that is folded": lambda: Called(folded_product),
    "code that is not traced": lambda: Called(opaque),
}


@pytest.mark.parametrize("name", ASKING)
def test_what_may_ask_for_gradients_is_captured_again(name: str) -> None:
    assert extract_forward(capture_stack(ASKING[name]())) is None


def test_a_graph_for_one_number_of_rows_is_captured_again() -> None:
    graph = tracer.capture(layers(), F.mse_loss, Mode.TRAIN, call(), symbolic=False)
    assert extract_forward(graph) is None


class Branching(nn.Linear):
    """Takes the branch that its argument asks for, or its result."""

    def __init__(self, of_argument: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.of_argument = of_argument

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        asked = x if self.of_argument else self.bias
        return found if asked.isfinite().all() else found * 2


@pytest.mark.parametrize("of_argument", [True, False])
def test_a_branch_on_values_is_captured_again(of_argument: bool) -> None:
    graph = capture_stack(Branching(of_argument))
    assert bool(graph.input_branches.branches) is of_argument
    assert extract_forward(graph) is None


# evaluations of a pipeline


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Mode]:
    """The mode of each capture."""
    modes, capture = list[Mode](), compiling.capture

    def noted(model: nn.Module, loss_fn: Any, mode: Mode, *args: Any, **kwargs: Any) -> Any:
        modes.append(mode)
        return capture(model, loss_fn, mode, *args, **kwargs)

    monkeypatch.setattr(compiling, "capture", noted)
    return modes


class Gained(nn.Module):
    """Multiplies by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.linear, self.drop = 2.0, nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.drop(self.linear(x)) * self.gain
        return found


def pipeline(model: nn.Module) -> pipec.Pipeline:
    return pipec.compile(model, devices=1, microbatches=2, loss_fn=F.mse_loss)


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return F.mse_loss(model(x), x)


def test_an_evaluation_after_a_step_captures_nothing(captured: list[Mode]) -> None:
    model = Gained()
    pipe, x = pipeline(copy.deepcopy(model)), torch.randn(6, WIDTH)
    pipe.step(x, target=x)
    torch.testing.assert_close(pipe.eval_step(x, target=x), evaluated(model, x))
    assert captured == [Mode.TRAIN]


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda model: setattr(model, "gain", 3.0),
    "its type": lambda model: setattr(model, "gain", 2),
    "a probability": lambda model: setattr(model.drop, "p", 1.0),
    "the mode": lambda model: model.eval(),
    "the mode of one module": lambda model: model.drop.eval(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_evaluation_of_a_changed_model_is_captured_anew(name: str, captured: list[Mode]) -> None:
    model, unsplit = Gained(), Gained()
    unsplit.load_state_dict(model.state_dict())
    pipe, x = pipeline(model), torch.randn(6, WIDTH)
    pipe.step(x, target=x)
    for each_model in (model, unsplit):
        CHANGES[name](each_model)
    torch.testing.assert_close(pipe.eval_step(x, target=x), evaluated(unsplit, x))
    assert captured == [Mode.TRAIN, Mode.LOSS]


@pytest.fixture
def differentiated(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each graph that torch takes apart is one of a step."""
    found, differentiate = list[bool](), torch_compat.differentiate

    def noted(captured: torch_compat.CapturedGraph, training: bool) -> torch_compat.JointGraph:
        found.append(training)
        return differentiate(captured, training)

    monkeypatch.setattr(torch_compat, "differentiate", noted)
    return found


class Modal(nn.Linear):
    """Reads its mode where ``asks``, and has a factor."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__(WIDTH, WIDTH)
        self.asks, self.factor = asks, 1.5

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.factor + (self.asks and self.training))


@pytest.mark.parametrize("asks", [False, True])
def test_in_eval_mode_the_same_trace_is_the_same_graph(asks: bool, differentiated: list[bool]) -> None:
    model = Modal(asks)
    pipe, x = pipeline(copy.deepcopy(model)), torch.randn(6, WIDTH)
    pipe.step(x, target=x)
    torch.testing.assert_close(pipe.eval().eval_step(x, target=x), evaluated(model.eval(), x))
    assert differentiated == [True] + [False] * asks
    torch.testing.assert_close(pipe.eval_step(x[:3], target=x[:3]), evaluated(model, x[:3]))
    assert differentiated == [True] + [False] * asks


def test_in_eval_mode_the_same_trace_has_guards_of_its_own(differentiated: list[bool]) -> None:
    model, unsplit = Modal(), Modal().eval()
    unsplit.load_state_dict(model.state_dict())
    pipe, x = pipeline(model), torch.randn(6, WIDTH)
    pipe.step(x, target=x)
    pipe.eval().eval_step(x, target=x)
    model.factor = unsplit.factor = 2.5
    torch.testing.assert_close(pipe.eval_step(x, target=x), evaluated(unsplit, x))
    assert differentiated == [True, False]


def test_in_eval_mode_what_asks_for_gradients_is_another_graph(differentiated: list[bool]) -> None:
    model = Doubled(lambda x: x.requires_grad)
    pipe, x = pipeline(copy.deepcopy(model)), torch.randn(6, WIDTH)
    pipe.step(x, target=x)
    torch.testing.assert_close(pipe.eval().eval_step(x, target=x), evaluated(model.eval(), x))
    assert differentiated == [True, False]


def test_guards_of_an_extracted_graph_are_checked(captured: list[Mode]) -> None:
    model, unsplit = Gained(), Gained()
    unsplit.load_state_dict(model.state_dict())
    pipe, x = pipeline(model), torch.randn(6, WIDTH)
    pipe.step(x, target=x)
    pipe.eval_step(x, target=x)
    model.gain = unsplit.gain = 3.0
    torch.testing.assert_close(pipe.eval_step(x, target=x), evaluated(unsplit, x))
    assert captured == [Mode.TRAIN, Mode.LOSS]


def test_other_arguments_than_those_of_the_steps_are_captured(captured: list[Mode]) -> None:
    pipe, x = pipeline(Gained()), torch.randn(6, WIDTH)
    pipe.step(x, target=x)
    pipe.eval_step(x.double().float()[:, None], target=x[:, None])
    assert captured == [Mode.TRAIN, Mode.LOSS]


def test_evaluations_have_the_lengths_of_the_steps(captured: list[Mode]) -> None:
    model = Gained()
    pipe = pipeline(copy.deepcopy(model))
    batches = [torch.randn(6, length, WIDTH) for length in (3, 5, 7)]
    for x in batches:
        pipe.step(x, target=x)
    assert captured == [Mode.TRAIN, Mode.TRAIN]
    for x in batches:
        torch.testing.assert_close(pipe.eval_step(x, target=x), evaluated(model, x))
    assert captured == [Mode.TRAIN, Mode.TRAIN]


def test_an_evaluation_of_other_rows_is_that_of_the_model(captured: list[Mode]) -> None:
    model = Gained()
    pipe, x = pipeline(copy.deepcopy(model)), torch.randn(6, WIDTH)
    pipe.step(x, target=x)
    for rows in (4, 5, 3, 2):
        few = x[:rows]
        torch.testing.assert_close(pipe.eval_step(few, target=few), evaluated(model, few))
    assert captured == [Mode.TRAIN]
