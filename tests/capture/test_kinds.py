"""Kinds of models that eager torch can train, and what each needs of capture."""

import copy
import logging
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
    train_as_eager,
    trained_both_ways,
)
from forward_modules import model
from slow_params import slow
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from unsplit_reference import assert_equal

import pipec
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.errors import CaptureError, PlanError
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
    net = words()
    pair = Pair(net, mse)
    for number in (1, 2):
        pair.pipe.step(IDS["x"], target=IDS["target"])
        for x, target in zip(IDS["x"].split(2), IDS["target"].split(2), strict=True):
            (mse(pair.unsplit(x), target) / 2).backward()
        found, expected = net[0].weight.grad, pair.unsplit[0].weight.grad
        assert found.is_sparse, number
        assert torch.equal(found._indices(), expected._indices())
        assert torch.equal(found._values(), expected._values())
    torch.optim.SparseAdam([net[0].weight]).step()


def test_a_sparse_gradient_and_a_dense_one_of_a_tied_weight_are_added_in_one_stage() -> None:
    assert_same_bits(words(tied=True), IDS, [4], devices=1)
    with pytest.raises(PlanError, match=r"stages 0, 1 all use 0\.weight, whose .*sparse=False"):
        pipec.compile(words(tied=True), 2, loss_fn=mse).step(IDS["x"], target=IDS["target"])


@model(
    before=lambda: nn.Linear(WIDTH, WIDTH),
    tower=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(3)),
    head=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
)
def Siamese(self: Any, x: Tensor) -> Tensor:
    """Two towers share a BatchNorm. What comes before it is used twice as well."""
    hidden = self.before(x)
    return self.head(self.tower(hidden) - self.tower(hidden + 1))


@model(layer=lambda: nn.Linear(WIDTH, WIDTH), mean=lambda: nn.Buffer(torch.zeros(WIDTH)))
def Late(self: Any, x: Tensor) -> Tensor:
    """Reads a buffer in front of the layer after which it changes it."""
    hidden = self.layer(x - self.mean)
    self.mean.mul_(0.9).add_(hidden.detach().mean((0, 1)))
    return hidden.tanh()


@pytest.mark.parametrize("make", [slow(Siamese), lambda: Between(Late)], ids=["Siamese", "Late"])
@pytest.mark.parametrize("devices", [slow(2), 3])
def test_readers_and_writers_of_a_buffer_stay_together(make: Callable[[], nn.Module], devices: int) -> None:
    torch.manual_seed(0)
    net = make()
    found, expected, pipe = trained_both_ways(net, batch(), devices=devices)
    counters = {name for name in expected.buffers if name.endswith("num_batches_tracked")}
    assert all(0 < found.buffers[name] <= 2 * expected.buffers[name] for name in counters)  # those of a step
    expected.buffers.update({name: found.buffers[name] for name in counters})
    assert_equal(found, expected)
    unsplit = copy.deepcopy(net)  # that calls in other modes follow the stages of the first
    for training in (True, False):
        pipe.train(training)
        unsplit.train(training)
        with torch.no_grad():
            wanted = torch.cat([unsplit(x) for x in batch()["x"].split(SIZES)])
        assert torch.equal(pipe(batch()["x"]), wanted)
        for name, buffer in unsplit.named_buffers():
            assert name in counters or torch.equal(net.get_buffer(name), buffer)


@model(
    norm=lambda: nn.BatchNorm1d(3),
    first=lambda: nn.Linear(WIDTH, WIDTH),
    last=lambda: nn.Linear(WIDTH, WIDTH),
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


@pytest.mark.parametrize("by_size", [True, False], ids=["size", "factor"])
@pytest.mark.parametrize(
    ("mode", "dimensions"), [("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)]
)
def test_an_interpolation_is_one_operator_for_any_batch(mode: str, dimensions: int, by_size: bool) -> None:
    """Rows as images of so many dimensions, made larger by a factor or to a size."""
    ones = [1] * (dimensions - 1)
    sizes = {"size": (*[2] * (dimensions - 1), 7)} if by_size else {"scale_factor": 2.0}

    @model()
    def Enlarged(self: Any, x: Tensor) -> Tensor:
        images = x.reshape(-1, 1, *ones, WIDTH)
        larger = nn.functional.interpolate(images, mode=mode, align_corners=False, **sizes)
        return larger.square().flatten(1)[:, :WIDTH].view(x.shape)

    pipe = assert_same_bits(Between(Enlarged), batch())
    assert pipe.plan.dynamic_batch
    source = pipe.source(0) + pipe.source(1)
    assert source.count("primitives.INTERPOLATE(") == source.count("primitives.INTERPOLATE_BACKWARD(") == 1


@model()
def Checkpointed(self: Any, x: Tensor) -> Tensor:
    """Asks for a gradient that nobody reads, as Wav2Vec2 does for the sake of reentrant checkpoints."""
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


def test_the_loss_of_connectionist_temporal_classification() -> None:
    net = nn.Sequential(Checkpointed(), Between(nn.Tanh))
    x, target = torch.randn(4, 6, WIDTH), torch.tensor([[1, 2, 0]] * 3 + [[3, 0, 0]])
    assert train_as_eager(net, x, target=target, loss_fn=ctc_of_words).plan.dynamic_batch


INSTALLING = threading.Lock()


@model(layer=lambda: nn.Linear(WIDTH, WIDTH), seen=list)
def Recording(self: Any, x: Tensor) -> Tensor:
    """Installs a hook at its first call, under a lock, as transformers does to collect outputs."""
    if not hasattr(self, "installed"):
        with INSTALLING:
            self.layer.register_forward_hook(lambda module, args, output: output * 2)
            self.installed = True
    self.seen.append(x)
    return self.layer(x)


def test_what_the_first_call_sets_up_is_captured_and_undone() -> None:
    net, inputs = Between(Recording), batch()
    pair = Pair(net, mse, microbatches=1)
    pair.pipe.prepare(inputs["x"], target=inputs["target"])
    assert not net.awkward.layer._forward_hooks
    assert not net.awkward.seen
    assert not hasattr(net.awkward, "installed")
    pair.step(inputs["x"], target=inputs["target"])


@model(first=lambda: nn.Linear(WIDTH, WIDTH), last=lambda: nn.Linear(WIDTH, 1))
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


# models that differentiate something themselves: forward and backward are traced together

ROWS = 8


@model(net=lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
def Physics(self: Any, x: Tensor) -> Tensor:
    """A network trained by the residual of the heat equation."""
    x = x.detach().requires_grad_(True)
    (first,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (first[:, 1] - second[:, 0]).square().mean()


class Recomputed(torch.autograd.Function):
    """``tanh(x w)``: the backward computes the forward again, and doubles the gradient of ``w``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.tanh(x @ w)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.tanh(x @ w)
        of_x, of_w = torch.autograd.grad(y, [x, w], gradient)
        return of_x, 2 * of_w


@model(
    first=lambda: nn.Linear(WIDTH, WIDTH),
    norm=lambda: nn.BatchNorm1d(WIDTH),
    last=lambda: nn.Linear(WIDTH, 1),
    weight=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH)),
)
def Custom(self: Any, x: Tensor) -> Tensor:
    """A custom backward that differentiates, a hook on a node of autograd, a constant and a conversion."""
    first = self.first.to(torch.float32)(x) + torch.tensor([1.0] * WIDTH)
    h = Recomputed.apply(self.norm(first), self.weight)
    h.grad_fn.register_hook(lambda inputs, outputs: tuple(3 * each for each in inputs))  # type: ignore[union-attr]
    return self.last(h).square().mean()


@pytest.mark.parametrize(
    ("make", "width", "microbatches"),
    [(Physics, 2, 2), (Custom, WIDTH, 1)],
)
def test_gradients_are_those_of_eager_mode(
    make: Callable[[], nn.Module], width: int, microbatches: int, caplog: pytest.LogCaptureFixture
) -> None:
    """For two sizes of the batch, and losses that are means over rows: no warning speaks of them."""
    torch.manual_seed(0)
    pair = Pair(make(), microbatches=microbatches)
    for rows in (ROWS, ROWS - 2):
        pair.step(torch.randn(rows, width), error=1e-5)
        for found, expected in zip(pair.model.buffers(), pair.unsplit.buffers(), strict=True):
            torch.testing.assert_close(found, expected)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("forward and backward were traced together")
    (staged,) = pair.pipe._executions.compiler.cache.staged_graphs
    assert all(operator.source.startswith("test_kinds.py:") for operator in staged.graph.operators)
    assert make is not Physics or "# net.2 · Linear" in pair.pipe.source(0)


class Traced(nn.Module):
    """Two layers, in a forward that no other front end takes."""

    def __init__(self, width: int, compute: Callable[[Any, Tensor], Tensor], between: Any = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 8), between or nn.Identity(), nn.Linear(8, 8))
        self.compute, self.scale = compute, 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.compute(self, x)
        assert y.grad_fn.metadata is not None  # type: ignore[union-attr]
        return y.square().mean() * self.scale


def test_what_changes_a_value_that_was_read_compiles_anew() -> None:
    """Nobody tells what the code read, so all that it could read is compared."""
    model, x = Traced(2, lambda self, x: self.net(x)), torch.randn(ROWS, 2)
    pipe = pipec.compile(model, 2, microbatches=2)
    before = pipe.step(x)
    model.scale = 3.0
    torch.testing.assert_close(pipe.step(x), 3 * before)


# refusals


def checkpointed(self: Any, x: Tensor) -> Any:
    return checkpoint(self.net, x, use_reentrant=False)


class Accumulating(torch.autograd.Function):
    """Its backward adds to a gradient by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.weight.grad = torch.ones_like(ctx.weight)
        return gradient @ ctx.weight.T, None


def accumulates(self: Any, x: Tensor) -> Any:
    return Accumulating.apply(self.net[0](x), self.net[2].weight)


@pytest.mark.parametrize(
    ("compute", "between", "message"),
    [
        (checkpointed, nn.Dropout(0.5), "a backward draws random numbers"),
        (checkpointed, nn.BatchNorm1d(8), "the backward changes net.1.running_mean"),
        (accumulates, None, "the backward writes to the .grad of a parameter"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(compute: Any, between: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        pipec.compile(Traced(2, compute, between), 2, microbatches=2).step(torch.randn(ROWS, 2))
