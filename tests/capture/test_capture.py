"""Awkward but real modules train in two stages with the bits of the unsplit model, and stay as they were."""

import copy
import functools
import logging
import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from awkward_modules import SIZES, WIDTH, Between, Pair, assert_same_bits, batch, trained_both_ways
from forward_modules import model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from unsplit_reference import StepResult, assert_equal

import pipec
from pipec.errors import CaptureError, InputError
from pipec.pipeline import Pipeline
from pipec.torch_compat.module_state import replace_with_fake_tensors, restore_module
from pipec.torch_compat.operator_patches import CACHED_METHODS, RECURRENT

mse = nn.functional.mse_loss


def compiled(net: nn.Module, loss_fn: Callable[..., Tensor] = mse, **options: Any) -> Pipeline:
    return pipec.compile(net, devices=2, loss_fn=loss_fn, microbatches=len(SIZES), **options)


@torch.library.custom_op("pipec_tests::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return 3 * x


@thrice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


thrice.register_autograd(lambda ctx, gradient: 5 * gradient)  # so that a lost backward shows


@model(mean=lambda: nn.Buffer(torch.zeros(WIDTH)), count=lambda: nn.Buffer(torch.tensor(0)))
def MovingMean(self: Any, x: Tensor) -> Tensor:
    """Buffers that ``forward`` changes: one by assignment, one in place."""
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
    self.count += 1
    return x - self.mean / self.count


@model()
def Sizes(self: Any, x: Tensor) -> Tensor:
    """Numbers that depend on the size of the batch, in operations on tensors."""
    rows = x.shape[0]
    x = x * (1 / rows) + x.sum() / x.numel() - (rows - 1)
    return x / math.sqrt(2 * rows) * math.ceil(rows / 2) + (x < rows - 2) * (rows % 2 + rows // 2)


LOCK = [threading.Lock()]


@model()
def Locked(self: Any, x: Tensor) -> Tensor:
    """Dynamo cannot trace it, and export can."""
    with LOCK[0]:
        return thrice(x).tanh()


@model()
def FailsTraced(self: Any, x: Tensor) -> Tensor:
    """It is differentiated directly."""
    if torch.compiler.is_compiling():
        raise ValueError("no mask")
    return x


@pytest.mark.parametrize(
    ("make", "sizes", "weight"),
    [(MovingMean, SIZES, "rows"), (Sizes, SIZES, "rows"), (Locked, [5], None), (FailsTraced, SIZES, None)],
)
def test_an_awkward_module_trains_with_the_bits_of_the_unsplit_model(
    make: Any, sizes: list[int], weight: str | None
) -> None:
    """Others are models of ``equality_rows``."""
    assert_same_bits(Between(make), batch(), sizes, microbatch_weight=weight)


@dataclass
class Sides:
    left: Tensor
    right: Tensor


torch.export.register_dataclass(Sides)


class Scores(NamedTuple):
    scores: Tensor
    extras: dict[str, Any]


@model(first=lambda: nn.Linear(WIDTH, WIDTH), last=lambda: nn.Linear(WIDTH, WIDTH))
def Nested(self: Any, inputs: dict[str, Any], *, options: tuple[Any, ...] = ()) -> Scores:
    """Takes a dataclass in a dict and a tuple with plain values; returns tensors and plain values in turn."""
    scale, name, mask = options
    hidden = torch.tanh(self.first(inputs["pair"].left)) + inputs["more"][0]
    scores = self.last(hidden) * scale + mask
    return Scores(scores, {"pair": Sides(hidden, inputs["pair"].right), "name": name, "none": None})


def nested_loss(output: Scores, target: dict[str, Tensor]) -> Tensor:
    return mse(output.scores + output.extras["pair"].left, target["wanted"])


def test_nested_arguments_are_split_and_nested_outputs_come_back_in_their_own_classes() -> None:
    x, target = batch().values()
    call = {"inputs": {"pair": Sides(x, target), "more": [target]}, "options": (0.5, "half", torch.ones(4))}
    pair = Pair(Nested(), nested_loss)
    pair.step(**call, target={"wanted": target})
    found, expected = pair.pipe(**call), pair.unsplit(**call)
    sides = found.extras["pair"]
    assert (type(found), type(sides)) == (Scores, Sides)
    torch.testing.assert_close(found.scores, expected.scores.detach())
    torch.testing.assert_close(sides.left, expected.extras["pair"].left.detach())
    assert torch.equal(sides.right, target)
    assert (found.extras["name"], found.extras["none"]) == ("half", None)


def test_fakes_of_another_device_stand_for_tensors_without_memory() -> None:
    """The model stays where it is. Tied tensors stay tied."""
    net, device = Between(MovingMean), torch.device("cuda", 0)
    net.last.weight = net.first.weight
    net.first.bias.requires_grad_(False)
    before = dict(net.state_dict(keep_vars=True))
    with restore_module(net):
        replace_with_fake_tensors(net, device)
        now = dict(net.state_dict(keep_vars=True))
        assert all(isinstance(tensor, FakeTensor) and tensor.device == device for tensor in now.values())
        assert net.first.weight is net.last.weight
        assert [x.requires_grad for x in now.values()] == [x.requires_grad for x in before.values()]
    after = net.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())


def test_constants_of_an_artifact_are_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickled tensor of ``cuda:0`` would be made there by every process."""
    pipe = compiled(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.CrossEntropyLoss(torch.ones(4)))
    pipe.prepare(torch.ones(4, 4), target=torch.zeros(4, dtype=torch.int64))
    (staged,) = pipe._executions.compiler.cache.staged_graphs
    with FakeTensorMode():
        on_gpu = {name: torch.empty(4, device="cuda:0") for name in staged.graph.constants}
    assert on_gpu
    monkeypatch.setitem(vars(staged.graph), "constants", on_gpu)
    constants = staged.evaluate(pipec.schedules.make_schedule("gpipe", 2, 2), 2).artifact().constants
    assert {x.device.type for x in constants.values()} == {"cpu"}


def test_a_tensor_on_meta_that_is_no_buffer_is_refused_where_it_is_used() -> None:
    @model(layer=lambda: nn.Linear(4, 4), mask=lambda: torch.ones(4))
    def Masked(self: Any, x: Tensor) -> Tensor:
        return self.layer(x) * self.mask

    with torch.device("meta"):
        net = Masked()
    with pytest.raises(InputError, match=r"\* self\.mask\n.*cpu(,| and) meta"):
        pipec.compile(net, 1).prepare(torch.zeros(4, 4))
    assert net.mask.is_meta


@model(
    embedding=lambda: nn.Embedding(16, 8),
    first=lambda: nn.Linear(8, 8),
    second=lambda: nn.Linear(8, 16),
)
def Attending(self: Any, tokens: Tensor) -> Tensor:
    x = self.first(self.embedding(tokens)).unsqueeze(1)
    return self.second(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.slow
def test_a_model_on_the_meta_device_is_compiled_as_on_its_device_and_trains_once_it_has_values() -> None:
    """torch differentiates a cross entropy on meta to no gradient, and takes attention apart there."""
    tokens, real = torch.zeros(5, 8, dtype=torch.int64), Attending()
    with torch.device("meta"):
        unmade = Attending()
    pipe, reference = (
        compiled(each, token_loss, microbatch_weight="rows").prepare(tokens, target=tokens)
        for each in (unmade, copy.deepcopy(real))
    )
    assert [pipe.source(stage) for stage in (0, 1)] == [reference.source(stage) for stage in (0, 1)]
    with pytest.raises(InputError, match=r"embedding\.weight and 4 other tensors are on the meta device"):
        pipe.step(tokens, target=tokens)
    pipe.to_empty(device="cpu").load_state_dict(real.state_dict())
    loss = pipe.step(tokens, target=tokens)
    expected, _, _ = trained_both_ways(real, {"x": tokens, "target": tokens}, loss_fn=token_loss)
    assert_equal(StepResult.of(loss, pipe), expected)


@model(
    angles=lambda: nn.Buffer(torch.arange(WIDTH) / WIDTH, persistent=False),
    scale=lambda: nn.Buffer(torch.full((WIDTH,), 0.5, device="cpu"), persistent=False),
)
def Turned(self: Any, x: Tensor) -> Tensor:
    """Has a buffer that no state dict holds, made by ``__init__``, and one that may be real on any device."""
    return x * self.angles.cos() * self.scale


@pytest.mark.slow
def test_a_tensor_that_nobody_gave_a_value_is_refused_by_name() -> None:
    real, inputs = Between(Turned), batch()
    with torch.device("meta"):
        pipe = compiled(Between(Turned))
    pipe.prepare(**inputs).to_empty(device="cpu")
    with pytest.raises(InputError, match=r"nothing was written to first\.weight, .*\.\.\. since to_empty"):
        pipe.step(**inputs)
    pipe.load_state_dict(real.state_dict())
    for given in (pipe, copy.deepcopy(pipe)):
        with pytest.raises(InputError, match=r"nothing was written to awkward\.angles since to_empty"):
            given.step(**inputs)
    pipe.get_buffer("awkward.angles").data.copy_(real.get_buffer("awkward.angles"))
    loss = pipe.step(**inputs)
    expected, _, _ = trained_both_ways(real, inputs)
    assert_equal(StepResult.of(loss, pipe), expected)


@model()
def RowByRow(self: Any, x: Tensor) -> Tensor:
    """Unrolls the batch, which becomes a constant by it."""
    return torch.stack([row * number for number, row in enumerate(x, start=1)])


@pytest.mark.slow
def test_a_model_that_unrolls_the_batch_is_compiled_for_each_size(caplog: pytest.LogCaptureFixture) -> None:
    assert_same_bits(Between(RowByRow), batch(), microbatch_weight="rows")
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == len(SIZES)
    for message, size in zip(messages, SIZES, strict=True):
        assert message.startswith(f"microbatches of {size} rows are compiled on their own")
        assert "enumerate(x, start=1)" in message
        assert "test_capture.py:" in message


@model(calls=int, last=lambda: None, layer=lambda: nn.Dropout(0.5))
def Counting(self: Any, x: Tensor) -> Tensor:
    """Sets attributes of itself, as logging and caching code does."""
    self.calls += 1
    self.last = x.detach()
    return self.layer(x)


@model()
def Branch(self: Any, x: Tensor) -> Tensor:
    """Cannot be captured: the value of a tensor decides what runs."""
    if x.sum() > 0:
        x = x + 1
    return x


def everything_of(net: nn.Module) -> list[tuple[str, object]]:
    """Every attribute of every module, by identity, and what torch keeps of every tensor."""
    state: list[tuple[str, object]] = []
    for path, part in net.named_modules():
        for name, value in vars(part).items():
            held = tuple(value.items()) if isinstance(value, dict) else value
            state.append(
                (f"{path}.{name}", [(k, id(v)) for k, v in held] if held is not value else id(value))
            )
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
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
        "validation": torch.distributions.Distribution._validate_args,
        "size arithmetic": [getattr(SymNode, name) for name in CACHED_METHODS],
        "recurrent": [dict(getattr(torch.ops.aten, name).input.py_kernels) for name in RECURRENT.values()],
        "levels": {name: logging.getLogger(name).level for name in ("torch", "torch._dynamo", "torch.fx")},
    }


@pytest.mark.parametrize(
    ("make", "training"),
    [(Counting, True), (MovingMean, True), (MovingMean, False), (Branch, True)],
)
def test_capture_leaves_the_model_and_its_surroundings_as_they_were(
    make: type[nn.Module], training: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile clears it
    net, inputs = Between(make).train(training), batch()
    net.first.eval()
    pipe = compiled(net, microbatch_weight="rows")
    before = everything_of(net), surroundings(), [vars(tensor).copy() for tensor in inputs.values()]
    try:
        pipe.prepare(**inputs)
    except CaptureError:
        assert make is Branch
    assert everything_of(net) == before[0]
    assert surroundings() == before[1]
    assert [vars(tensor) for tensor in inputs.values()] == before[2]
    if make is Counting:
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert warning.startswith("forward() of model.awkward (Counting) sets attributes of the module")
        assert "registered buffer" in warning


def test_captures_do_not_disturb_one_another() -> None:
    """Dynamo keeps what it compiled by code object: models that differ in a number share it."""

    @model(depth=int)
    def Deep(self: Any, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = torch.tanh(x) * self.depth
        return x

    for depth in (1, 2, 1):
        assert_same_bits(Between(functools.partial(Deep, depth)), batch())
