"""Awkward but real modules train in two stages with the bits of the unsplit model, and stay as they were."""

import copy
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from awkward_modules import (
    SIZES,
    WIDTH,
    Autocast,
    Between,
    Branch,
    MovingMean,
    Sizes,
    Unused,
    batch,
)
from torch import Tensor, nn
from unsplit_reference import Inputs, StepResult, assert_equal, microbatches, unsplit_step

import pipec
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.errors import CaptureError, InputError
from pipec.ir import Mode
from pipec.pipeline import Pipeline

mse = nn.functional.mse_loss


def compiled(model: nn.Module, loss_fn: Callable[..., Tensor] | None = mse) -> Pipeline:
    """Modules that mix the rows of a microbatch take the mean over microbatches on purpose."""
    mixes = any(isinstance(module, MovingMean | Sizes | RowByRow) for module in model.modules())
    options: dict[str, Any] = {"microbatch_weight": "rows"} if mixes else {}
    return pipec.compile(model, devices=2, loss_fn=loss_fn, microbatches=len(SIZES), **options)


def trained_both_ways(
    model: nn.Module, inputs: Inputs, loss_fn: Callable[..., Tensor] = mse
) -> tuple[StepResult, StepResult, Pipeline]:
    """What one step of the pipeline and of the unsplit model leave; ``inputs`` are ``x`` and ``target``."""
    unsplit, unsplit_loss_fn = copy.deepcopy((model, loss_fn))
    pipe = compiled(model, loss_fn)
    found = StepResult.of(pipe.step(inputs["x"], target=inputs["target"]), model)
    loss = unsplit_step(lambda x, target: unsplit_loss_fn(unsplit(x), target), inputs, SIZES, unsplit)
    return found, StepResult.of(loss, unsplit), pipe


def tied(pipe: Pipeline) -> frozenset[str]:
    """What several stages read."""
    return frozenset(fqn for stage in pipe.plan.stages for fqn in stage.borrowed_parameters)


AWKWARD: dict[str, Callable[[], nn.Module]] = {
    "autocast": Autocast,
    "changed buffers": MovingMean,
    "unused": Unused,
    "batch size": Sizes,
}
"""Others are models of ``equality_rows``."""


@pytest.mark.parametrize("make", AWKWARD.values(), ids=AWKWARD)
def test_an_awkward_module_trains_with_the_bits_of_the_unsplit_model(make: Callable[[], nn.Module]) -> None:
    found, expected, pipe = trained_both_ways(Between(make), batch())
    assert_equal(found, expected, tied(pipe))


def test_a_loss_function_may_be_a_module_with_buffers() -> None:
    class WeightedLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.linspace(0.5, 2, WIDTH))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (self.weight * (output - target).abs()).mean()

    found, expected, pipe = trained_both_ways(Between(Unused), batch(), WeightedLoss())
    assert_equal(found, expected)
    assert not [name for name, _ in pipe.named_buffers()]


# inputs and outputs of any shape


@dataclass
class Pair:
    left: Tensor
    right: Tensor


torch.export.register_dataclass(Pair)


class Scores(NamedTuple):
    scores: Tensor
    extras: dict[str, Any]


class Nested(nn.Module):
    """Takes a dataclass in a dict and a tuple with plain values; returns tensors and plain values in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: dict[str, Any], *, options: tuple[Any, ...] = ()) -> Scores:
        scale, name, mask = options
        hidden = torch.tanh(self.first(inputs["pair"].left)) + inputs["more"][0]
        scores = self.last(hidden) * scale + mask
        return Scores(scores, {"pair": Pair(hidden, inputs["pair"].right), "name": name, "none": None})


def nested_call() -> dict[str, Any]:
    x, more = batch().values()
    return {"inputs": {"pair": Pair(x, more), "more": [more]}, "options": (0.5, "half", torch.ones(WIDTH))}


def split(call: dict[str, Any]) -> list[dict[str, Any]]:
    """The call of each microbatch, where every tensor but the mask is split."""
    inputs = call["inputs"]
    parts = microbatches({"x": inputs["pair"].left, "more": inputs["more"][0]}, SIZES)
    return [
        {"inputs": {"pair": Pair(p["x"], p["more"]), "more": [p["more"]]}, "options": call["options"]}
        for p in parts
    ]


def nested_loss(output: Scores, target: dict[str, Tensor]) -> Tensor:
    return mse(output.scores + output.extras["pair"].left, target["wanted"])


def test_nested_arguments_are_split_leaf_by_leaf() -> None:
    model, call, wanted = Nested(), nested_call(), batch()["target"]
    unsplit = copy.deepcopy(model)
    loss = compiled(model, nested_loss).step(**call, target={"wanted": wanted})
    expected = torch.tensor(0.0)
    for part, target, size in zip(split(call), wanted.split(SIZES), SIZES, strict=True):
        one = nested_loss(unsplit(**part), {"wanted": target})
        one.backward(gradient=torch.tensor(size / sum(SIZES)))
        expected = expected + one.detach() * (size / sum(SIZES))
    assert_equal(StepResult.of(loss, model), StepResult.of(expected, unsplit))


def test_nested_outputs_come_back_in_their_own_classes() -> None:
    model, call = Nested(), nested_call()
    found = compiled(model, nested_loss)(**call)
    parts = [model(**part) for part in split(call)]
    pair = found.extras["pair"]
    assert type(found) is Scores
    assert type(pair) is Pair
    assert torch.equal(found.scores, torch.cat([part.scores for part in parts]))
    assert torch.equal(pair.left, torch.cat([part.extras["pair"].left for part in parts]))
    assert torch.equal(pair.right, call["inputs"]["pair"].right)
    assert (found.extras["name"], found.extras["none"]) == ("half", None)


def test_a_sample_has_the_layout_of_the_call() -> None:
    images = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    sample = ModelCall((images,), {}).sample(6, None).leaves[0]
    assert sample.shape == (6, 3, 2, 2)
    assert sample.stride() == images.stride()


# meta


@pytest.mark.slow
def test_a_model_on_meta_is_captured_as_on_its_device() -> None:
    """torch differentiates a cross entropy on meta to no gradient, and takes attention apart there."""

    def graph_on(device: str) -> list[str]:
        with torch.device(device):
            model, tokens = _Attending(), torch.zeros(4, 8, dtype=torch.int64)
        graph = capture(CaptureRequest(model, _token_loss, Mode.TRAIN, ModelCall((tokens,), {}, tokens)))
        assert all(parameter.device.type == device for parameter in model.parameters())
        return [f"{node.name} {node.target} {node.meta['phase']}" for node in graph.nodes]

    assert graph_on("meta") == graph_on("cpu")
    assert any("nll_loss_backward" in line for line in graph_on("meta"))


def test_a_tensor_on_meta_that_is_no_buffer_is_refused_where_it_is_used() -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.mask = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.mask

    with torch.device("meta"):
        model = Masked()
    with pytest.raises(InputError, match=r"\* self\.mask\n.*cpu(,| and) meta"):
        pipec.compile(model, 1).prepare(torch.zeros(4, 4))
    assert model.mask.is_meta


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embedding(tokens)).unsqueeze(1)
        return self.second(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1))


def _token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.slow
def test_a_model_on_the_meta_device_is_compiled_and_trains_once_it_has_values() -> None:
    real, inputs = Between(MovingMean), batch()
    with torch.device("meta"):
        model = Between(MovingMean)
    pipe = compiled(model).prepare(inputs["x"], target=inputs["target"])
    reference = compiled(copy.deepcopy(real)).prepare(inputs["x"], target=inputs["target"])
    assert [pipe.source(stage) for stage in (0, 1)] == [reference.source(stage) for stage in (0, 1)]
    with pytest.raises(InputError, match=r"first\.weight and 5 other tensors are on the meta device"):
        pipe.step(inputs["x"], target=inputs["target"])
    pipe.to_empty(device="cpu").load_state_dict(real.state_dict())
    loss = pipe.step(inputs["x"], target=inputs["target"])
    expected, _, _ = trained_both_ways(real, inputs)
    assert_equal(StepResult.of(loss, pipe), expected)


class Turned(nn.Module):
    """Has a buffer that no state dict holds, made by ``__init__``, and one that may be real on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(WIDTH) / WIDTH, persistent=False)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5, device="cpu"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.cos() * self.scale


@pytest.mark.slow
def test_a_tensor_that_nobody_gave_a_value_is_refused_by_name() -> None:
    real, inputs = Between(Turned), batch()
    with torch.device("meta"):
        pipe = compiled(Between(Turned))
    pipe.prepare(inputs["x"], target=inputs["target"]).to_empty(device="cpu")
    with pytest.raises(InputError, match=r"nothing was written to first\.weight, .*\.\.\. since to_empty"):
        pipe.step(inputs["x"], target=inputs["target"])
    pipe.load_state_dict(real.state_dict())
    for given in (pipe, copy.deepcopy(pipe)):
        with pytest.raises(InputError, match=r"nothing was written to awkward\.angles since to_empty"):
            given.step(inputs["x"], target=inputs["target"])
    pipe.get_buffer("awkward.angles").data.copy_(real.get_buffer("awkward.angles"))
    loss = pipe.step(inputs["x"], target=inputs["target"])
    expected, _, _ = trained_both_ways(real, inputs)
    assert_equal(StepResult.of(loss, pipe), expected)


# a batch that cannot be symbolic


class RowByRow(nn.Module):
    """Unrolls the batch, which becomes a constant by it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * number for number, row in enumerate(x, start=1)])


@pytest.mark.slow
def test_a_model_that_unrolls_the_batch_is_compiled_for_each_size(caplog: pytest.LogCaptureFixture) -> None:
    found, expected, _ = trained_both_ways(Between(RowByRow), batch())
    assert_equal(found, expected)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == len(SIZES)
    for message, size in zip(messages, SIZES, strict=True):
        assert message.startswith(f"microbatches of {size} rows are compiled on their own")
        assert "enumerate(x, start=1)" in message
        assert "test_capture.py:" in message


# the model is left as it was


class Counting(nn.Module):
    """Sets attributes of itself, as logging and caching code does; and prints."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last, self.layer = 0, None, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach()
        return self.layer(x)


def everything_of(model: nn.Module) -> list[tuple[str, object]]:
    """Every attribute of every module, by identity, and what torch keeps of every tensor."""
    state: list[tuple[str, object]] = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            held = tuple(value.items()) if isinstance(value, dict) else value
            state.append(
                (f"{path}.{name}", [(k, id(v)) for k, v in held] if held is not value else id(value))
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state.append((name, (tensor._version, tensor.requires_grad, tensor.grad, sorted(vars(tensor)))))
    return state


def surroundings() -> dict[str, object]:
    """What a capture might change outside the model."""
    return {
        "torch's random state": torch.get_rng_state().tolist(),
        "Python's random state": random.getstate(),
        "gradient mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "oneDNN": torch.backends.mkldnn.enabled,
        "dtype": torch.get_default_dtype(),
        "apply": torch.autograd.Function.__dict__["apply"],
        "register_hook": Tensor.register_hook,
        "levels": {name: logging.getLogger(name).level for name in ("torch", "torch._dynamo", "torch.fx")},
    }


@pytest.mark.parametrize(
    ("make", "training"),
    [(Counting, True), (MovingMean, True), (MovingMean, False), (Branch, True)],
)
def test_capture_leaves_the_model_and_its_surroundings_as_they_were(
    make: type[nn.Module], training: bool
) -> None:
    model, inputs = Between(make).train(training), batch()
    model.first.eval()
    pipe = compiled(model)
    before = everything_of(model), surroundings(), [vars(tensor).copy() for tensor in inputs.values()]
    try:
        pipe.prepare(inputs["x"], target=inputs["target"])
    except CaptureError:
        assert make is Branch
    assert everything_of(model) == before[0]
    assert surroundings() == before[1]
    assert [vars(tensor) for tensor in inputs.values()] == before[2]


def test_attributes_that_forward_sets_are_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    inputs = batch()
    compiled(Between(Counting)).prepare(inputs["x"], target=inputs["target"])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("forward() of model.awkward (Counting) sets attributes of the module")
    assert "registered buffer" in warning


def test_captures_do_not_disturb_one_another() -> None:
    """Dynamo keeps what it compiled by code object: models that differ in a number share it."""

    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.depth):
                x = torch.tanh(x) * self.depth
            return x

    for depth in (1, 2, 1):
        model = Between(Deep)
        model.awkward.depth = depth
        found, expected, _ = trained_both_ways(model, batch())
        assert_equal(found, expected)
