"""Kinds of models that eager torch can train, and what each needs of capture."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from awkward_modules import (
    SIZES,
    WIDTH,
    Between,
    Pair,
    assert_same_bits,
    batch,
    module,
    train_as_eager,
    trained_both_ways,
)
from slow_params import slow
from torch import Tensor, nn
from unsplit_reference import assert_equal

import pipec
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.errors import PlanError
from pipec.ir import Mode
from pipec.passes.assignments.follow_placement import FollowPlacement

mse = nn.functional.mse_loss


def words(tied: bool = False) -> nn.Sequential:
    embed, head = nn.Embedding(20, WIDTH, sparse=True), nn.Linear(WIDTH, 20, bias=False)
    if tied:
        head.weight = embed.weight
    return nn.Sequential(embed, nn.Linear(WIDTH, WIDTH), head)


IDS = {"x": torch.randint(20, (4, 3)), "target": torch.randn(4, 3, 20)}


def test_a_sparse_gradient_stays_sparse() -> None:
    model = words()
    pair = Pair(model, mse)
    for number in (1, 2):
        pair.pipe.step(IDS["x"], target=IDS["target"])
        for x, target in zip(IDS["x"].split(2), IDS["target"].split(2), strict=True):
            (mse(pair.unsplit(x), target) / 2).backward()
        found, expected = model[0].weight.grad, pair.unsplit[0].weight.grad
        assert found.is_sparse, number
        assert torch.equal(found._indices(), expected._indices())
        assert torch.equal(found._values(), expected._values())
    torch.optim.SparseAdam([model[0].weight]).step()


def test_a_sparse_gradient_and_a_dense_one_of_a_tied_weight_are_added_in_one_stage() -> None:
    assert_same_bits(words(tied=True), IDS, [4], devices=1)
    with pytest.raises(PlanError, match=r"stages 0, 1 all use 0\.weight, whose .*sparse=False"):
        pipec.compile(words(tied=True), 2, loss_fn=mse).step(IDS["x"], target=IDS["target"])


@module(
    lambda: {
        "before": nn.Linear(WIDTH, WIDTH),
        "tower": nn.Sequential(nn.BatchNorm1d(3), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(3)),
        "head": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    }
)
def Siamese(self: Any, x: Tensor) -> Tensor:
    """Two towers share a BatchNorm. What comes before it is used twice as well."""
    hidden = self.before(x)
    return self.head(self.tower(hidden) - self.tower(hidden + 1))


@module(lambda: {"layer": nn.Linear(WIDTH, WIDTH), "mean": torch.zeros(WIDTH)})
def Late(self: Any, x: Tensor) -> Tensor:
    """Reads a buffer in front of the layer after which it changes it."""
    hidden = self.layer(x - self.mean)
    self.mean.mul_(0.9).add_(hidden.detach().mean((0, 1)))
    return hidden.tanh()


@pytest.mark.parametrize("make", [slow(Siamese), lambda: Between(Late)], ids=["Siamese", "Late"])
@pytest.mark.parametrize("devices", [slow(2), 3])
def test_readers_and_writers_of_a_buffer_stay_together(make: Callable[[], nn.Module], devices: int) -> None:
    torch.manual_seed(0)
    model = make()
    found, expected, pipe = trained_both_ways(model, batch(), devices=devices)
    counters = {name for name in expected.buffers if name.endswith("num_batches_tracked")}
    assert all(0 < found.buffers[name] <= 2 * expected.buffers[name] for name in counters)  # those of a step
    expected.buffers.update({name: found.buffers[name] for name in counters})
    assert_equal(found, expected)
    unsplit = copy.deepcopy(model)  # that calls in other modes follow the stages of the first
    for training in (True, False):
        pipe.train(training)
        unsplit.train(training)
        with torch.no_grad():
            wanted = torch.cat([unsplit(x) for x in batch()["x"].split(SIZES)])
        assert torch.equal(pipe(batch()["x"]), wanted)
        for name, buffer in unsplit.named_buffers():
            assert name in counters or torch.equal(model.get_buffer(name), buffer)


@module(
    lambda: {"norm": nn.BatchNorm1d(3), "first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, WIDTH)}
)
def Throughout(self: Any, x: Tensor) -> Tensor:
    """Its first operator and its last change the same buffers."""
    return self.norm(self.last(self.first(self.norm(x))))


def test_stages_that_were_cut_without_a_change_of_buffers_refuse_one() -> None:
    x, target = batch().values()
    graph = capture(CaptureRequest(Throughout(), mse, Mode.TRAIN, ModelCall((x,), {}, target)))
    with pytest.raises(PlanError, match=r"uses last\.weight of stage 1, .*changes buffer .*prepare\(\) it"):
        FollowPlacement(2, {"first.weight": (0,), "last.weight": (1,)})(graph)


def test_a_buffer_that_leaves_too_few_parts_is_named() -> None:
    with pytest.raises(PlanError, match=r"into 2 stages at most, .*changes buffer norm\..*Use fewer devices"):
        pipec.compile(Throughout(), 3, loss_fn=mse).prepare(**batch())


class Enlarged(nn.Module):
    """Rows of ``x`` as images of so many dimensions, made larger by a factor or to a size, and summed."""

    def __init__(self, mode: str, dimensions: int, by_size: bool) -> None:
        super().__init__()
        self.mode, self.shape = mode, (1, *[1] * (dimensions - 1), WIDTH)
        self.sizes = {"size": (*[2] * (dimensions - 1), 7)} if by_size else {"scale_factor": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        images = x.reshape(-1, *self.shape)
        larger = nn.functional.interpolate(images, mode=self.mode, align_corners=False, **self.sizes)
        return larger.square().flatten(1)[:, :WIDTH].view(x.shape)


@pytest.mark.parametrize("by_size", [True, False], ids=["size", "factor"])
@pytest.mark.parametrize(
    ("mode", "dimensions"), [("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)]
)
def test_an_interpolation_is_one_operator_for_any_batch(mode: str, dimensions: int, by_size: bool) -> None:
    pipe = assert_same_bits(Between(lambda: Enlarged(mode, dimensions, by_size)), batch())
    assert pipe.plan.dynamic_batch
    source = pipe.source(0) + pipe.source(1)
    assert source.count("primitives.INTERPOLATE(") == source.count("primitives.INTERPOLATE_BACKWARD(") == 1


def ctc(output: Tensor, target: Tensor) -> Tensor:
    """Targets end with zeros, so that their lengths are known from values alone, and none is the longest."""
    scores = output.log_softmax(-1).transpose(0, 1)
    lengths = (target != 0).sum(1)
    return nn.functional.ctc_loss(scores, target, torch.full_like(lengths, output.shape[1]), lengths)


class Checkpointed(nn.Module):
    """Asks for a gradient that nobody reads, as Wav2Vec2 does for the sake of reentrant checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach()[:, None]
        x.requires_grad = True
        return x.squeeze(1)


def ctc_of_words(output: Tensor, target: Tensor) -> Tensor:
    """As transformers computes it: the targets stand one after the other, and the losses are summed."""
    scores, mask = output.log_softmax(-1).transpose(0, 1), target != 0
    frames = torch.full_like(target[:, 0], output.shape[1])
    with torch.backends.cudnn.flags(enabled=False):
        return nn.functional.ctc_loss(
            scores, target.masked_select(mask), frames, mask.sum(1), reduction="sum"
        )


@pytest.mark.parametrize("loss_fn", [ctc, ctc_of_words])
def test_the_loss_of_connectionist_temporal_classification(loss_fn: Callable[..., Tensor]) -> None:
    model = nn.Sequential(Checkpointed() if loss_fn is ctc_of_words else nn.Identity(), Between(nn.Tanh))
    x, target = torch.randn(4, 6, WIDTH), torch.tensor([[1, 2, 0]] * 3 + [[3, 0, 0]])
    pipe = train_as_eager(model, x, target=target, loss_fn=loss_fn)
    assert pipe.plan.dynamic_batch


INSTALLING = threading.Lock()


class Recording(nn.Module):
    """Installs a hook at its first call, under a lock, as transformers does to collect outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Tensor] = []

    def install(self) -> None:
        with INSTALLING:
            self.layer.register_forward_hook(lambda module, args, output: output * 2)
            self.installed = True

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "installed"):
            self.install()
        self.seen.append(x)
        return self.layer(x)


def test_what_the_first_call_sets_up_is_captured_and_undone() -> None:
    model, inputs = Between(Recording), batch()
    pair = Pair(model, mse, microbatches=1)
    pair.pipe.prepare(inputs["x"], target=inputs["target"])
    assert not model.awkward.layer._forward_hooks
    assert not model.awkward.seen
    assert not hasattr(model.awkward, "installed")
    pair.step(inputs["x"], target=inputs["target"])


@module(
    lambda: {
        "norm": nn.BatchNorm1d(WIDTH),
        "linear": nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        "num_calls": torch.zeros((), dtype=torch.int64),
        "mean": torch.zeros(WIDTH),
    }
)
def Counting(self: Any, x: Tensor) -> Tensor:
    """Counts forwards, averages activations, and iterates towards the norm of a weight."""
    self.num_calls += 1
    self.mean.lerp_(x.detach().mean(0), 0.1)
    return self.linear(self.norm(x)) - self.mean


@pytest.mark.slow
def test_buffers_that_do_not_depend_on_rows_change_once_a_step(said: list[str]) -> None:
    pipe = pipec.compile(Counting(), devices=1, loss_fn=mse, microbatches=3)
    for _ in range(2):
        pipe.step(torch.randn(6, WIDTH), target=torch.randn(6, WIDTH))
    assert pipe.get_buffer("num_calls") == 2
    assert not [message for message in said if "forward() changes" in message]


@module(lambda: {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 1)})
def Squeezed(self: Any, x: Tensor) -> Tensor:
    """Scores of rows, squeezed in every way."""
    hidden = self.first(x).tanh().squeeze(0).squeeze((0, 1))
    gates = hidden.mean(-1, keepdim=True)[:, None].squeeze()
    scores = self.last(hidden * gates[:, None])
    return (scores.squeeze().sin() + scores.clone().squeeze_()) * scores.squeeze((0, 1)).cos()


def test_a_microbatch_of_one_row_is_squeezed_as_the_batch_is() -> None:
    pair, x = Pair(Squeezed(), mse), torch.randn(3, WIDTH)
    pair.step(x, target=torch.randn(3))
    torch.testing.assert_close(pair.pipe(x), pair.unsplit(x).detach())


def test_a_batch_of_one_row_keeps_it_and_says_so(said: list[str]) -> None:
    pipe = pipec.compile(Squeezed(), devices=1, loss_fn=mse, microbatches=1)
    x = torch.randn(2, WIDTH)
    whole = pipe(x)
    assert not said
    torch.testing.assert_close(pipe(x[:1]), whole[:1])
    (warning,) = said
    assert "the batch has one row: eager torch would squeeze this dimension" in warning
    assert "hidden = self.first(x).tanh().squeeze(0)" in warning
