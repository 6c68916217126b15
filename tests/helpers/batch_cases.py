"""Small models and losses that treat the rows of a batch in all ways that people write, and what is right.

Each group is a table from a name to a case; the group says what its cases may come to. ``python -m
batch_cases`` tries them all, or those whose names contain one of the arguments, and prints a table.
"""

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from batch_comparison import BatchCase, Expect
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, TIME, CLASSES = 6, 5, 4


class Around(nn.Module):
    """A layer, then what a case is about, then a scale: ``function(h, *modules, *others)``."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.function = function
        self.parts = nn.ModuleList(modules)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.finish(self.function(torch.tanh(self.first(x)), *self.parts, *others))

    def finish(self, y: Tensor) -> Tensor:
        return torch.tanh(y * self.scale)


class Returning(Around):
    """As above, but returns what the function makes of the second layer's rows."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__(function, *modules)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.function(self.last(torch.tanh(self.first(x))), *self.parts, *others)


def weighted(y: Tensor, weights: Tensor) -> Tensor:
    """A mean in which no row counts as much as another, so that it matters which row is which."""
    by_row = y.square().flatten(1).mean(1) if y.ndim > 1 else y.square()
    return (by_row * weights).mean()


def same_shape(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def plain(y: Tensor, target: Tensor) -> Tensor:
    return (y - 0.3).square().mean()


def flat_rows(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, WIDTH),)


def sequences(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, TIME, WIDTH),)


def time_first(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(TIME, rows, WIDTH),)


def pictures(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 3, 4, WIDTH),)


def row_weights(rows: int) -> Tensor:
    return torch.rand(rows) + 0.5


def two_places(rows: int) -> Tensor:
    """A mask that chooses two places of each row."""
    return torch.rand(rows, TIME).argsort(1) < 2


def two_places_in_the_mean(rows: int) -> Tensor:
    """A mask that chooses one place of each of the first rows, and three of each of the last."""
    numbers = torch.where(torch.arange(rows) < rows // 2, 1, 3)
    return torch.rand(rows, TIME).argsort(1) < numbers[:, None]


def classes(rows: int) -> Tensor:
    return torch.randint(CLASSES, (rows,))


def values(*shape: int) -> Callable[[int], Tensor]:
    """A target of random numbers of this shape for each row."""
    return lambda rows: torch.randn(rows, *shape)


def model_case(
    inputs: Callable[[int], tuple[Any, ...]],
    function: Callable[..., Any],
    *modules: Callable[[], nn.Module],
    others: tuple[Callable[[int], Any], ...] = (),
    target: Callable[[int], Any] = row_weights,
    loss_fn: Callable[..., Any] = weighted,
    **more: Any,
) -> BatchCase:
    return BatchCase(
        lambda: Around(function, *(make() for make in modules), width=inputs(2)[0].shape[-1]),
        lambda rows: (*inputs(rows), *(make(rows) for make in others)),
        target,
        loss_fn,
        **more,
    )


flat = functools.partial(model_case, flat_rows)
sequential = functools.partial(model_case, sequences)
in_time = functools.partial(model_case, time_first)
pictured = functools.partial(model_case, pictures)


def module(make: Callable[[], nn.Module], inputs: Any, **more: Any) -> BatchCase:
    """A model as it is, without another layer."""
    return BatchCase(make, inputs, **{"target": row_weights, "loss_fn": weighted, **more})


def loss(loss_fn: Callable[..., Any], target: Callable[[int], Any] = classes, **more: Any) -> BatchCase:
    """A loss of the logits of two layers."""
    return BatchCase(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)),
        flat_rows,
        target,
        loss_fn,
        **more,
    )


def output(function: Callable[..., Any], *modules: Callable[[], nn.Module], **more: Any) -> BatchCase:
    """What ``pipe(...)`` returns for a model that ends in the function."""
    others = more.pop("others", ())
    return BatchCase(
        lambda: Returning(function, *(make() for make in modules)),
        lambda rows: (*flat_rows(rows), *(make(rows) for make in others)),
        **more,
    )


def quick(case: BatchCase) -> BatchCase:
    return replace(case, quick=True)


# Functions and modules of the cases that do not fit on a line.


class Attention(nn.Module):
    """Attention of several heads as GPT-2 writes it, batch first."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, 2, WIDTH // 2).transpose(1, 2) for y in self.qkv(x).split(WIDTH, dim=2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // 2)
        if self.causal:
            scores = scores.masked_fill(torch.ones(t, t).tril() == 0, float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, t, WIDTH)
        return self.out(y)


class Windows(nn.Module):
    """Attention within windows of two by three pixels, as Swin's, shifted by one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, -1)[..., :3].roll((-1, -1), (1, 2)).repeat(1, 1, 1, 2)
        b, h, w, c = x.shape
        windows = x.view(b, h // 2, 2, w // 3, 3, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 6, c)
        y = self.attention(windows).view(b, h // 2, w // 3, 2, 3, c).permute(0, 1, 3, 2, 4, 5)
        return y.reshape(b, h, w, c)


class Experts(nn.Module):
    """Two of three experts for each row, chosen by the largest gates; their rows are looked up."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.gate, self.sparse = nn.Linear(WIDTH, 3), sparse
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.sparse:
                rows, which = torch.where(chosen == number)
                y = y.index_add(0, rows, expert(x[rows]) * gates[rows, which].unsqueeze(-1))
            else:
                y = y + expert(x) * (gates * (chosen == number)).sum(-1, keepdim=True)
        return y


class SortedExperts(nn.Module):
    """Two of three experts for each row: rows are sorted by expert for one grouped product, and put back.

    ``fault`` lets a row depend on others, or on its place among them.
    """

    def __init__(self, fault: str = "", adds: bool = False) -> None:
        super().__init__()
        importlib.import_module("transformers.integrations.moe")  # registers the product
        self.gate, self.fault, self.adds = nn.Linear(WIDTH, 3), fault, adds
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        fault = self.fault
        gates, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        keys, order = chosen.reshape(-1).sort(descending=fault == "descending")
        rows = x[order // 2 if fault != "other rows" else order // 2 * 0]
        counted = keys if fault != "counts of others" else chosen.reshape(-1) // 2
        ends = torch.histc(counted.double(), 3, 0, 2).cumsum(0).int()
        ends = (ends - 1).clamp(min=0) if fault == "shifted ends" else ends
        y = torch.ops.transformers.grouped_mm_fallback(rows, self.weights, ends)
        y = y * gates.reshape(-1)[order][:, None]
        if fault == "weights by place":
            y = y * torch.linspace(0, 1, len(order))[:, None]
        elif fault == "added up":
            y = y.cumsum(0)
        elif fault == "the first ones":
            y = torch.cat([y[:5], y[5:] * 0])
        elif fault == "neighbours":
            y = y + y.roll(1, 0)
        elif fault == "places":
            y = y * order[:, None]
        if self.adds:
            return x.new_zeros(len(x), WIDTH).index_add(0, order // 2, y)
        if fault == "another order":
            order = (chosen + chosen.flip(1)).reshape(-1).sort().indices
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return y[back if fault != "put back twice" else order].view(-1, 2, WIDTH).sum(1)


FAULTS = (
    *("descending", "other rows", "counts of others", "shifted ends", "weights by place", "added up"),
    *("the first ones", "neighbours", "places", "another order", "put back twice"),
)


class Capacity(nn.Module):
    """Experts that take at most three rows each, the first ones: a row depends on those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(self.gate(x).argmax(-1), 2)
        place = (chosen.cumsum(0) * chosen).sum(-1)
        return torch.where((place <= 3).unsqueeze(-1), self.expert(x), x)


class Rows(torch.autograd.Function):
    """A row-wise function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 0.9)


class MixingForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class MixingBackward(torch.autograd.Function):
    """The identity, whose backward normalises the gradient over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1)


class SummingBackward(torch.autograd.Function):
    """A weight's gradient with a number of rows in it that only the backward knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).mean(0)


class Weighing(nn.Module):
    """Multiplies with a parameter through a function that has its own backward."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight)


def operator(name: str, function: Callable[[Tensor], Tensor], backward: Callable[..., Tensor]) -> Any:
    """A custom operator that nothing is known of."""
    made = torch.library.custom_op(
        f"batch_cases::{name}", lambda x: function(x), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    made.register_fake(torch.empty_like)
    made.register_autograd(
        lambda ctx, grad: backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return made


def weighing_operator(name: str, weight_gradient: Callable[[Tensor], Tensor]) -> Any:
    """A custom operator that multiplies rows with a weight."""
    made = torch.library.custom_op(
        f"batch_cases::{name}",
        lambda x, weight: x * weight,
        mutates_args=(),
        schema="(Tensor x, Tensor weight) -> Tensor",
    )
    made.register_fake(lambda x, weight: torch.empty_like(x))
    made.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[1], weight_gradient(grad * ctx.saved_tensors[0])),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return made


class WeighingOperator(Weighing):
    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


weighed = weighing_operator("weighed", lambda products: products.sum(0))
weighed_by_mean = weighing_operator("weighed_by_mean", lambda products: products.mean(0))
doubled = operator("doubled", lambda x: 2 * x, lambda grad, x: 2 * grad)
centred = operator("centred", lambda x: x - x.mean(0), lambda grad, x: grad - grad.mean(0))
reversed_rows = operator("reversed_rows", lambda x: x.flip(0), lambda grad, x: grad.flip(0))
centring_backward = operator("centring_backward", lambda x: 2 * x, lambda grad, x: grad - grad.mean(0))


def halves(h: Tensor) -> Tensor:
    """Whole rows in place of half of another: cutmix with the neighbour."""
    return torch.cat([h[:, :3], h.roll(1, 0)[:, 3:]], 1)


def momentum(h: Tensor, norm: nn.Module) -> Tensor:
    return norm(h)


class Averaged(nn.Module):
    """A buffer that follows the mean of activations, and is subtracted."""

    def __init__(self, subtract: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.subtract = subtract

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean if self.subtract else x


class Counting(nn.Module):
    """Counts its calls in a buffer, and weighs with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class Queue(nn.Module):
    """MoCo's queue: keys of former batches, into which the rows of this one are written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.keys.clone().T
        with torch.no_grad():
            self.keys[: x.shape[0]] = x
        return scores


class Quantizer(nn.Module):
    """The nearest of five codes, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        nearest = self.codes(torch.cdist(x, self.codes.weight).argmin(-1))
        return x + (nearest - x).detach() + 0.1 * nearest


class RelativeBias(nn.Module):
    """Attention over time with a learned bias for each distance."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(2 * TIME - 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.arange(x.shape[1])
        bias = self.bias(t[:, None] - t[None, :] + TIME - 1).squeeze(-1)
        return (x @ x.mT + bias).softmax(-1) @ x


class Cells(nn.Module):
    def __init__(self, steps_of: Callable[[Tensor], Any], dim: int) -> None:
        super().__init__()
        self.cell, self.steps_of, self.dim = nn.LSTMCell(WIDTH, WIDTH), steps_of, dim

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in self.steps_of(x):
            state = self.cell(step, state)
            outputs.append(state[0])
        return torch.stack(outputs, self.dim)


def rotary(h: Tensor) -> Tensor:
    """Rotates pairs of features by the position in time."""
    angle = torch.arange(h.shape[1], dtype=h.dtype)[:, None] / torch.tensor([1.0, 10.0, 100.0], dtype=h.dtype)
    pairs = torch.view_as_complex(h.reshape(*h.shape[:2], 3, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(2)


def centred_on_time(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, 0] = 0
    h[:, 1:3].mul_(2)
    h[..., -1] += 1
    return h


def written(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A copy of the rows that is written to in place."""

    def function(h: Tensor) -> Tensor:
        h = h.clone()
        write(h)
        return h

    return function


def setting(index: Any, value: Any) -> Callable[[Tensor], Any]:
    return lambda h: h.__setitem__(index, value)


def picks(rows: int) -> Tensor:
    return torch.randint(WIDTH, (rows,))


def permutation(rows: int) -> Tensor:
    return torch.arange(rows).flip(0)


def chosen_rows(rows: int) -> Tensor:
    """An index that is right for the batch, and that each microbatch has, too."""
    return torch.arange(rows) % 2


def neighbours(rows: int) -> Tensor:
    return (torch.arange(rows) + 1) % rows


def lengths(rows: int) -> Tensor:
    return torch.arange(rows) % TIME + 1


def padding(rows: int) -> Tensor:
    return torch.arange(TIME)[None, :] >= lengths(rows)[:, None]


def table_of(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(*shape)


def by_size(h: Tensor) -> Tensor:
    return h * 2 if h.shape[0] > 4 else h


def by_shape(h: Tensor) -> Tensor:
    return h * 2 if h.shape[0] > h.shape[1] else h


def by_parity(h: Tensor) -> Tensor:
    return h * 2 if h.shape[0] % 2 else h


def by_exact_size(h: Tensor) -> Tensor:
    return h * 2 if h.shape[0] == 8 else h


def by_width(h: Tensor) -> Tensor:
    return h * 2 if h.shape[1] > 4 else h


def by_both(h: Tensor) -> Tensor:
    return h * 2 if h.shape[1] > 4 and h.shape[0] >= 1 else h


def for_each_row(h: Tensor) -> Tensor:
    return torch.stack([row * 2 for row in h])


def last_row_carried(h: Tensor) -> Tensor:
    rows, carried = [], torch.zeros(WIDTH, dtype=h.dtype)
    for row in h:
        carried = 0.5 * carried + row
        rows.append(carried)
    return torch.stack(rows)


def scatter_mean(h: Tensor, groups: Tensor) -> Tensor:
    """The mean of the rows of each group, back at each row: what graph networks do."""
    sums = torch.zeros(CLASSES, WIDTH, dtype=h.dtype).index_add(0, groups, h)
    counts = torch.bincount(groups, minlength=CLASSES).clamp(min=1)
    return (sums / counts[:, None])[groups]


def summed_in_place(h: Tensor, groups: Tensor) -> Tensor:
    sums = h.new_zeros(CLASSES, WIDTH)
    sums.index_add_(0, groups, h)
    return sums


def returned_and_written(h: Tensor) -> tuple[Tensor, Tensor]:
    total = h.sum(0)
    twice = total * 2
    total.add_(1)
    return total, twice


def packed(h: Tensor, rnn: nn.LSTM, lengths: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
    return rnn(rows)[1][0][-1]


def straight_through(h: Tensor) -> Tensor:
    hard = F.one_hot(h.argmax(-1), WIDTH).to(h.dtype)
    return hard - h.detach() + h


def mixed_up(h: Tensor) -> Tensor:
    share = 0.3
    return share * h + (1 - share) * h[torch.randperm(h.shape[0])]


# What people write that no row of another batch could change.

ROW_WISE: dict[str, BatchCase] = {
    "linear relu": flat(lambda h, a: F.relu(a(h)), lambda: nn.Linear(WIDTH, WIDTH)),
    "matmul of a constant": flat(lambda h: h @ torch.ones(WIDTH, 3, dtype=h.dtype)),
    "addmm": flat(lambda h, a: torch.addmm(a.bias, h, a.weight), lambda: nn.Linear(WIDTH, WIDTH)),
    "bilinear": flat(lambda h, a: a(h, h * 2), lambda: nn.Bilinear(WIDTH, WIDTH, 3)),
    "layer norm": flat(lambda h, a: a(h), lambda: nn.LayerNorm(WIDTH)),
    "layer norm over sequences": sequential(lambda h: F.layer_norm(h, h.shape[1:])),
    "rms norm": flat(lambda h: h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt()),
    "group norm": pictured(lambda h, a: a(h), lambda: nn.GroupNorm(3, 3)),
    "instance norm": pictured(lambda h, a: a(h), lambda: nn.InstanceNorm2d(3, affine=True)),
    "instance norm of sequences": sequential(lambda h, a: a(h.mT), lambda: nn.InstanceNorm1d(WIDTH)),
    "local response norm": pictured(lambda h: F.local_response_norm(h, 2)),
    "batch norm in eval mode": flat(lambda h, a: a(h), lambda: nn.BatchNorm1d(WIDTH).eval()),
    "batch norm of pictures in eval mode": pictured(lambda h, a: a(h), lambda: nn.BatchNorm2d(3).eval()),
    "softmax of features": quick(flat(lambda h: h.softmax(-1))),
    "softmax of a transpose": flat(lambda h: h.t().softmax(0).t()),
    "log softmax": flat(lambda h: F.log_softmax(h, dim=1)),
    "normalize": flat(lambda h: F.normalize(h, dim=1)),
    "standard deviation of features": flat(lambda h: (h - h.mean(1, keepdim=True)) / h.std(1, keepdim=True)),
    "reductions of features": flat(
        lambda h: torch.stack([h.amax(1), h.logsumexp(1), h.prod(1), h.median(1).values, h.norm(dim=1)], 1)
    ),
    "cumulative over features": flat(lambda h: h.cumsum(1) + h.cummax(1).values + h.flip(1) + h.roll(2, 1)),
    "sorted features": flat(lambda h: h.sort(1).values + h.topk(3, 1).values.sum(1, keepdim=True)),
    "argsort of features": flat(lambda h: h * h.argsort(1).argsort(1)),
    "quantile of features": flat(lambda h: torch.quantile(h, 0.3, dim=1)),
    "diff of features": flat(lambda h: h.diff(dim=1)),
    "fft of features": flat(lambda h: torch.fft.rfft(h, dim=-1).abs()),
    "cat of features": flat(lambda h: torch.cat([h, 2 * h], 1)),
    "stack of features": flat(lambda h: torch.stack([h, h.sin()], -1).flatten(1)),
    "chunks of features": flat(lambda h: torch.mul(*h.chunk(2, 1)) + h.unbind(1)[0].unsqueeze(1)),
    "repeated features": flat(lambda h: h.repeat(1, 2) + h.repeat_interleave(2, 1) + h.tile((1, 2))),
    "features by index": quick(flat(lambda h: h[:, torch.tensor([2, 0, 1, 3, 5, 4])])),
    "features by index_select": flat(lambda h: h.index_select(1, torch.tensor([2, 0, 0]))),
    "features by slice": flat(lambda h: h[:, ::2] + h[..., 1::2]),
    "a new dimension": flat(lambda h: h[:, None, :].expand(-1, 3, -1).reshape(h.shape[0], -1)),
    "the last of two places of each row": sequential(
        lambda h, m: h[m, :].view(h.size(0), -1, WIDTH)[:, -1], others=(two_places,)
    ),
    "features by gather": flat(lambda h, p: h.gather(1, p[:, None]), others=(picks,)),
    "features by take_along_dim": flat(lambda h, p: torch.take_along_dim(h, p[:, None], 1), others=(picks,)),
    "a feature for each row": quick(flat(lambda h, p: h[torch.arange(h.shape[0]), p], others=(picks,))),
    "the last state of each row": sequential(
        lambda h, n: h[torch.arange(h.size(0)), n - 1], others=(lengths,)
    ),
    "scattered features": flat(
        lambda h, p: torch.zeros_like(h).scatter(1, p[:, None], h[:, :1]),
        others=(picks,),
        options={"batched": {1: 0}},
    ),
    "features by index_add": flat(lambda h: h.index_add(1, torch.tensor([0, 0, 1]), h[:, 3:])),
    "features by index_copy": flat(lambda h: h.index_copy(1, torch.tensor([0, 2]), h[:, 4:])),
    "features written in place": sequential(centred_on_time),
    "features masked in place": flat(written(lambda h: h.masked_fill_(h > 0.3, 0.1))),
    "one hot of a choice": flat(lambda h, p: h * F.one_hot(p, WIDTH), others=(picks,)),
    "straight through": flat(straight_through),
    "embedding of a choice": flat(
        lambda h, a, p: h + a(p), lambda: nn.Embedding(WIDTH, WIDTH), others=(picks,)
    ),
    "bags of equal length": flat(
        lambda h, a, p: h + a(p),
        lambda: nn.EmbeddingBag(9, WIDTH, mode="sum"),
        others=(lambda rows: torch.randint(9, (rows, 3)),),
    ),
    "where": flat(lambda h: torch.where(h > 0, h, h.exp() * h.shape[1])),
    "clamp and round": flat(lambda h: h.clamp(-0.4, 0.4) + (h * 4).round().detach()),
    "bucketize": flat(
        lambda h: h * torch.bucketize(h.detach(), torch.tensor([-0.5, 0.0, 0.5], dtype=h.dtype))
    ),
    "a column of ones": quick(flat(lambda h: torch.cat([h, h.new_ones(h.shape[0], 1)], 1))),
    "zeros of the batch": flat(lambda h: h + torch.zeros(h.shape[0], WIDTH, dtype=h.dtype)),
    "outer products": flat(lambda h: torch.bmm(h.unsqueeze(2), h.unsqueeze(1)).diagonal(dim1=1, dim2=2)),
    "einsum bi,bj->bij": flat(lambda h: torch.einsum("bi,bj->bij", h, h.sin())),
    "einsum bi,ij,bj->b": flat(
        lambda h, a: torch.einsum("bi,ij,bj->b", h, a.weight, h), lambda: nn.Linear(WIDTH, WIDTH)
    ),
    "einsum ib,ij->bj": quick(
        flat(lambda h, a: torch.einsum("ib,ij->bj", h.t(), a.weight), lambda: nn.Linear(WIDTH, WIDTH))
    ),
    "einsum bid,bjd->bij": sequential(lambda h: torch.einsum("bid,bjd->bij", h, h).softmax(-1)),
    "einsum tbd,ed->bte": sequential(
        lambda h, a: torch.einsum("tbd,ed->bte", h.transpose(0, 1), a.weight), lambda: nn.Linear(WIDTH, WIDTH)
    ),
    "bmm of sequences": sequential(lambda h: torch.baddbmm(h @ h.mT, h, h.mT).softmax(-1) @ h),
    "attention": sequential(lambda h, a: a(h), Attention),
    "causal attention": sequential(lambda h, a: a(h), lambda: Attention(causal=True)),
    "scaled dot product attention": sequential(
        lambda h: F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], is_causal=True)
    ),
    "multihead attention, batch first": sequential(
        lambda h, a: a(h, h, h)[0], lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    ),
    "multihead attention with padding": sequential(
        lambda h, a, mask: a(h, h, h, key_padding_mask=mask)[0],
        lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        others=(padding,),
    ),
    "transformer layer, batch first": sequential(
        lambda h, a: a(h), lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)
    ),
    "transformer layer between transposes": sequential(
        lambda h, a: a(h.transpose(0, 1)).transpose(0, 1),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0),
    ),
    "decoder layer, batch first": sequential(
        lambda h, a: a(h, h * 2), lambda: nn.TransformerDecoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)
    ),
    "relative bias": sequential(lambda h, a: a(h), RelativeBias),
    "rotary positions": sequential(rotary),
    "positions in time": sequential(lambda h: h + torch.arange(h.shape[1])[None, :, None] / 10),
    "a table of positions": sequential(
        lambda h, a: h + a.weight[: h.shape[1]], lambda: nn.Embedding(9, WIDTH)
    ),
    "windows": pictured(lambda h, a: a(h), Windows),
    "quantized": flat(lambda h, a: a(h), Quantizer),
    "distances from codes": flat(lambda h, a: torch.cdist(h, a.weight), lambda: nn.Embedding(5, WIDTH)),
    "a prototype for each class": flat(lambda h, t: h @ t.T, others=(table_of(3, WIDTH),)),
    "pairwise distance": flat(lambda h: F.pairwise_distance(h, h.cos())),
    "cosine similarity": flat(lambda h: F.cosine_similarity(h, h.cos(), dim=1)),
    "dense experts": flat(lambda h, a: a(h), lambda: Experts(sparse=False)),
    "sparse experts": flat(lambda h, a: a(h), lambda: Experts(sparse=True)),
    "sorted experts": quick(flat(lambda h, a: a(h), SortedExperts)),
    "sorted experts, added up": flat(lambda h, a: a(h), lambda: SortedExperts(adds=True)),
    "sorted experts of tokens": sequential(
        lambda h, a: a(h.flatten(0, 1)).view(h.shape), lambda: SortedExperts(adds=True)
    ),
    "LSTM, batch first": quick(
        sequential(lambda h, a: a(h)[0], lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))
    ),
    "LSTM between transposes": sequential(
        lambda h, a: a(h.transpose(0, 1))[0].transpose(0, 1), lambda: nn.LSTM(WIDTH, WIDTH)
    ),
    "GRU's last states": sequential(
        lambda h, a: torch.cat([*a(h)[1]], 1),
        lambda: nn.GRU(WIDTH, 3, bidirectional=True, batch_first=True),
    ),
    "GRU's states with rows first": sequential(
        lambda h, a: a(h)[1].transpose(0, 1).reshape(h.shape[0], -1),
        lambda: nn.GRU(WIDTH, 3, bidirectional=True, batch_first=True),
    ),
    "LSTM cells over time": sequential(lambda h, a: a(h), lambda: Cells(lambda x: x.unbind(1), 1)),
    "convolution over time": sequential(
        lambda h, a: a(h.transpose(1, 2)).transpose(1, 2), lambda: nn.Conv1d(WIDTH, 4, 3, padding=1)
    ),
    "convolution": pictured(lambda h, a: a(h), lambda: nn.Conv2d(3, 4, 3, padding=1)),
    "transposed convolution": pictured(lambda h, a: a(h), lambda: nn.ConvTranspose2d(3, 2, 2, stride=2)),
    "pooling": pictured(lambda h: F.max_pool2d(h, 2) + F.avg_pool2d(h, 2) + F.adaptive_avg_pool2d(h, (1, 1))),
    "nearest interpolation": pictured(lambda h: F.interpolate(h, scale_factor=2)),
    "bilinear interpolation": pictured(
        lambda h: F.interpolate(h, (5, 7), mode="bilinear", align_corners=False)
    ),
    "padding and unfold": pictured(lambda h: F.unfold(F.pad(h, (1, 1, 1, 1), mode="reflect"), 3)),
    "grid sample": pictured(
        lambda h: F.grid_sample(
            h, F.affine_grid(h[:, 0, :2, :3], [h.shape[0], 3, 4, 4], align_corners=False), align_corners=False
        )
    ),
    "pixel shuffle": pictured(lambda h: F.pixel_shuffle(h.repeat(1, 4, 1, 1), 2)),
    "patches": pictured(lambda h: h.unfold(2, 2, 2).unfold(3, 2, 2).flatten(2, 3).flatten(3)),
    "squeeze and excitation": pictured(lambda h: h * h.mean((2, 3), keepdim=True).sigmoid()),
    "rows in blocks": quick(flat(lambda h: h.reshape(-1, 3).softmax(-1).reshape(h.shape[0], -1))),
    "time flattened into rows": sequential(
        lambda h, a: a(h.flatten(0, 1)).unflatten(0, (h.shape[0], TIME)), lambda: nn.Linear(WIDTH, 3)
    ),
    "two copies of each row": flat(lambda h: h.repeat_interleave(2, 0).view(h.shape[0], 2, -1).mean(1)),
    "two copies of the batch": flat(lambda h: h.repeat(2, 1).view(2, h.shape[0], -1).mean(0)),
    "stacked and taken apart": quick(flat(lambda h: torch.stack([h, 2 * h]).softmax(-1).sum(0))),
    "concatenated and taken apart": flat(lambda h: torch.sub(*torch.cat([h, 2 * h]).softmax(-1).chunk(2))),
    "a transpose of features": flat(lambda h: h.view(-1, 2, 3).transpose(1, 2).flatten(1)),
    "permuted, and back": sequential(lambda h: h.permute(2, 0, 1).softmax(0).permute(1, 2, 0)),
    "rows last": quick(
        flat(lambda h, a: (a.weight @ h.t() + a.bias[:, None]).t(), lambda: nn.Linear(WIDTH, 3))
    ),
    "vmap": flat(lambda h: torch.vmap(lambda row: row.softmax(0) * row.max())(h)),
    "vmap over a matrix": sequential(lambda h: torch.vmap(lambda rows: rows @ rows.T)(h)),
    "linear algebra of each row": model_case(
        lambda rows: (torch.randn(rows, 3, 3),),
        lambda h: torch.matrix_exp(h).tril() + torch.linalg.det(h)[:, None, None],
    ),
    "complex numbers": flat(
        lambda h: torch.view_as_real(torch.view_as_complex(h.view(-1, 3, 2)).exp()).flatten(1)
    ),
    "custom backward": flat(Rows.apply),
    "checkpoint": flat(lambda h, a: checkpoint(a, h, use_reentrant=False), lambda: nn.Linear(WIDTH, WIDTH)),
    "weight norm": flat(
        lambda h, a: a(h), lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3))
    ),
    "a squeeze of a dimension": flat(lambda h: h.unsqueeze(1).squeeze(1)),
    "a condition on features": flat(by_width),
    "a condition that always holds": flat(by_both),
    "a scalar from features": flat(lambda h: h * (h.shape[-1] / 3) + h.size(1)),
    "dropout": flat(lambda h: F.dropout(h, 0.5), random=True),
    "noise": flat(lambda h: h + torch.randn_like(h), random=True),
    "stochastic depth": flat(lambda h: h + h * (torch.rand(h.shape[0], 1) > 0.3), random=True),
    "class token": sequential(
        lambda h, a: torch.cat([a.weight.expand(h.shape[0], 1, -1), h], 1), lambda: nn.Embedding(1, WIDTH)
    ),
    "deep sets within a row": sequential(lambda h, a: a(h.mean(1)), lambda: nn.Linear(WIDTH, 3)),
    "masked mean over time": quick(
        sequential(
            lambda h, mask: (h * ~mask[..., None]).sum(1) / (~mask).sum(1, keepdim=True), others=(padding,)
        )
    ),
    "two inputs": flat(lambda h, other: h * other, others=(values(WIDTH),)),
    "the last batch has one row less": flat(lambda h: h.softmax(-1), rows=(9, 8)),
    "half precision inside": flat(lambda h: h.to(torch.float32).softmax(-1).to(h.dtype)),
}

# Rows that depend on others, or on how many there are. What pipec can make right, it may.

MIXING: dict[str, BatchCase] = {
    "transformer layer, given rows first": sequential(
        lambda h, a: a(h), lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0)
    ),
    "multihead attention, given rows first": quick(
        sequential(lambda h, a: a(h, h, h)[0], lambda: nn.MultiheadAttention(WIDTH, 2))
    ),
    "LSTM, given rows first": sequential(lambda h, a: a(h)[0], lambda: nn.LSTM(WIDTH, WIDTH)),
    "GRU, given rows first": sequential(lambda h, a: a(h)[0], lambda: nn.GRU(WIDTH, WIDTH)),
    "RNN, given rows first": sequential(lambda h, a: a(h)[0], lambda: nn.RNN(WIDTH, WIDTH)),
    "transformer layer, time first": in_time(
        lambda h, a: a(h),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0),
        target=lambda rows: torch.randn(TIME, rows, WIDTH),
        loss_fn=same_shape,
    ),
    "LSTM, time first": quick(
        in_time(
            lambda h, a: a(h)[0],
            lambda: nn.LSTM(WIDTH, WIDTH),
            target=lambda rows: torch.randn(TIME, rows, WIDTH),
            loss_fn=same_shape,
        )
    ),
    "multihead attention, time first": in_time(
        lambda h, a: a(h, h, h)[0],
        lambda: nn.MultiheadAttention(WIDTH, 2),
        target=lambda rows: torch.randn(TIME, rows, WIDTH),
        loss_fn=same_shape,
    ),
    "LSTM, time first, as many steps as rows": model_case(
        lambda rows: (torch.randn(rows, rows, WIDTH),),
        lambda h, a: a(h)[0],
        lambda: nn.LSTM(WIDTH, WIDTH),
        target=lambda rows: torch.randn(rows, rows, WIDTH),
        loss_fn=same_shape,
    ),
    "LSTM's last state, time first": in_time(lambda h, a: a(h)[1][0][-1], lambda: nn.LSTM(WIDTH, WIDTH)),
    "LSTM, time first, flattened target": in_time(
        lambda h, a: a(h)[0].flatten(0, 1),
        lambda: nn.LSTM(WIDTH, WIDTH),
        target=lambda rows: torch.randint(WIDTH, (TIME * rows,)),
        loss_fn=F.cross_entropy,
    ),
    "LSTM of one sequence": flat(lambda h, a: a(h)[0], lambda: nn.LSTM(WIDTH, WIDTH)),
    "LSTM cells over rows": sequential(lambda h, a: a(h), lambda: Cells(lambda x: x.unbind(0), 0)),
    "attention over rows": flat(lambda h: (h @ h.T).softmax(-1) @ h),
    "attention over rows by head": sequential(
        lambda h: F.scaled_dot_product_attention(*3 * [h.transpose(0, 1)]).transpose(0, 1)
    ),
    "axial attention": sequential(lambda h, a: a(h) + a(h.transpose(0, 1)).transpose(0, 1), Attention),
    "rows by a permutation": quick(flat(lambda h, p: h[p], others=(permutation,))),
    "rows by an index": quick(flat(lambda h, p: h[p], others=(chosen_rows,))),
    "rows by index_select": flat(lambda h, p: h.index_select(0, p), others=(chosen_rows,)),
    "rows by gather": flat(lambda h, p: h.gather(0, p[:, None].expand(-1, WIDTH)), others=(chosen_rows,)),
    "rows by take_along_dim": flat(
        lambda h, p: torch.take_along_dim(h, p[:, None], 0), others=(chosen_rows,)
    ),
    "rows by take": flat(lambda h, p: h.take(p), others=(chosen_rows,)),
    "rows by embedding": flat(lambda h, p: F.embedding(p, h), others=(chosen_rows,)),
    "rows by index_add": quick(flat(lambda h, p: h.index_add(0, p, 2 * h), others=(chosen_rows,))),
    "rows by index_copy": flat(lambda h, p: h.index_copy(0, p, 2 * h), others=(chosen_rows,)),
    "rows by index_put": flat(lambda h, p: torch.index_put(h, (p,), 2 * h), others=(chosen_rows,)),
    "rows by scatter": flat(
        lambda h, p: h.scatter_add(0, p[:, None].expand(-1, WIDTH), h), others=(chosen_rows,)
    ),
    "rows by two indices": flat(lambda h, p, q: h[p, q], others=(chosen_rows, picks)),
    "rows by masks": flat(lambda h, p: h.masked_scatter(p[:, None] > 3, h), others=(chosen_rows,)),
    "edges of a graph": quick(
        flat(lambda h, p: torch.zeros_like(h).index_add(0, p, h[p.flip(0)]), others=(neighbours,))
    ),
    "mean of each group": flat(scatter_mean, others=(classes,)),
    "hard negatives": flat(lambda h: h[(h @ h.T).argmin(1)]),
    "nearest neighbours": flat(lambda h: h[torch.cdist(h, h).topk(3, largest=False).indices].mean(1)),
    "distances of rows": flat(lambda h: torch.cdist(h, h).sum(1)),
    "similarities of rows": flat(lambda h: (h @ h.T).diagonal() + (h @ h.T).sum(1)),
    "differences of rows": flat(lambda h: (h[:, None] - h[None]).square().sum((1, 2))),
    "centred": quick(flat(lambda h: h - h.mean(0))),
    "centred, kept dimension": flat(lambda h: h - h.mean(0, keepdim=True).detach()),
    "standardised": flat(lambda h: (h - h.mean(0)) / h.std(0)),
    "scaled by the largest": flat(lambda h: h / h.abs().max()),
    "scaled by the norm": flat(lambda h: h / h.norm()),
    "scaled by the sum": flat(lambda h: h / (h.sum() + 9)),
    "whitened": flat(lambda h: h @ torch.linalg.inv(h.T @ h + torch.eye(WIDTH, dtype=h.dtype))),
    "the largest of all": flat(lambda h: h * (h == h.max())),
    "above the median": flat(lambda h: h * (h > h.median())),
    "below a quantile": flat(lambda h: h.clamp(max=torch.quantile(h.detach(), 0.7))),
    "scaled by the deviation": flat(lambda h: h * h.detach().std()),
    "softmax of rows": flat(lambda h: h.softmax(0)),
    "softmax without dim": quick(sequential(lambda h: F.softmax(h))),
    "softmax without dim of a transpose": flat(lambda h: F.softmax(h.t(), 1).t()),
    "log softmax of rows": flat(lambda h: h.log_softmax(0)),
    "normalize rows": flat(lambda h: F.normalize(h, dim=0)),
    "logsumexp of rows": flat(lambda h: h - h.logsumexp(0)),
    "sorted rows": quick(flat(lambda h: h.sort(0).values)),
    "msort": flat(lambda h: h.msort()),
    "ranks": flat(lambda h: h * h.argsort(0).argsort(0)),
    "topk of rows": flat(lambda h: h * (h >= h.topk(2, 0).values[-1])),
    "cummax": flat(lambda h: h.cummax(0).values),
    "cumsum": flat(lambda h: h.cumsum(0)),
    "cumprod": flat(lambda h: h.cumprod(0)),
    "logcumsumexp": flat(lambda h: h.logcumsumexp(0)),
    "diff of rows": flat(lambda h: h.diff(dim=0, prepend=h[:1])),
    "gradient of rows": flat(lambda h: torch.gradient(h, dim=0)[0]),
    "roll": flat(lambda h: h.roll(1, 0)),
    "roll without dims": flat(lambda h: h.roll(1)),
    "roll of features without dims": flat(lambda h: h.roll(3)),
    "flip": flat(lambda h: h.flip(0)),
    "flip of both": flat(lambda h: h.flip(0, 1)),
    "flipud": flat(lambda h: torch.flipud(h)),
    "rot90": model_case(lambda rows: (torch.randn(rows, 8),), lambda h: torch.rot90(h)),
    "shifted rows": flat(lambda h: torch.cat([h[1:], h[:1]])),
    "the row before": flat(lambda h: h + F.pad(h, (0, 0, 1, 0))[:-1]),
    "fftn": flat(lambda h: torch.fft.fftn(h).abs()),
    "fft of rows": flat(lambda h: torch.fft.fft(h, dim=0).abs()),
    "layer norm over all": quick(flat(lambda h: F.layer_norm(h, h.shape))),
    "rms norm over all": flat(lambda h: F.rms_norm(h, h.shape)),
    "instance norm without a batch": flat(lambda h, a: a(h), lambda: nn.InstanceNorm1d(8)),
    "convolution without a batch": quick(
        flat(lambda h: F.conv1d(h.t(), torch.ones(WIDTH, WIDTH, 3, dtype=h.dtype), padding=1).t())
    ),
    "convolution over rows": flat(
        lambda h: F.conv1d(h.t()[None], torch.ones(2, WIDTH, 3, dtype=h.dtype), padding=1)[0].t()
    ),
    "convolution over rows and features": flat(
        lambda h: F.conv2d(h[None, None], torch.ones(1, 1, 3, 3, dtype=h.dtype), padding=1)[0, 0]
    ),
    "average pool over rows": flat(lambda h: F.avg_pool1d(h.t(), 3, 1, 1).t()),
    "max pool over rows": flat(lambda h: F.max_pool1d(h.t()[None], 3, 1, 1)[0].t()),
    "interpolation over rows": flat(
        lambda h: (
            F.interpolate(h.t()[None], h.shape[0], mode="linear")[0].t()
            + F.interpolate(h[None, None], (h.shape[0], 6), mode="bicubic")[0, 0]
        )
    ),
    "searchsorted": quick(
        flat(lambda h: h * torch.searchsorted(h[:, 0].detach().sort().values, h[:, 0].detach())[:, None])
    ),
    "histogram": flat(lambda h: h * torch.histc(h.detach(), 4, -1, 1)[2]),
    "bincount": flat(lambda h, c: h / torch.bincount(c, minlength=CLASSES)[c][:, None], others=(classes,)),
    "counts of a choice": flat(
        lambda h: h / (h.argmax(1)[:, None] == h.argmax(1)[None]).sum(1, keepdim=True)
    ),
    "unique": flat(lambda h, c: h / torch.unique(c, return_counts=True)[1].max(), others=(classes,)),
    "covariance": flat(lambda h: h @ torch.cov(h.T)),
    "correlation": flat(lambda h: h @ torch.corrcoef(h.T)),
    "QR of the batch": flat(lambda h: torch.linalg.qr(h).Q.abs()),
    "least squares": flat(lambda h: h @ torch.linalg.lstsq(h, h.cos()).solution),
    "kron": flat(lambda h: torch.kron(h, h).view(h.shape[0], -1)),
    **{
        f"sorted experts, {fault}": flat(lambda h, a: a(h), functools.partial(SortedExperts, fault))
        for fault in FAULTS
    },
    "places of rows that choose unequally many": sequential(
        lambda h, m: h[m].view(h.size(0), -1, WIDTH)[:, -1], others=(two_places_in_the_mean,)
    ),
    "tril": quick(flat(lambda h: h.tril())),
    "triu": flat(lambda h: h.triu(1)),
    "diagonal filled": quick(flat(written(lambda h: h.fill_diagonal_(0.5)))),
    "diagonal": model_case(lambda rows: (torch.randn(rows, 8),), lambda h: h.diagonal()),
    "diag of a table": model_case(
        lambda rows: (torch.randn(rows, 8),), lambda h: h * torch.diag(h)[: h.shape[0], None]
    ),
    "trace": flat(lambda h: h * h.trace()),
    "the first row set": quick(flat(written(setting(0, 0.0)))),
    "the last row set": flat(written(setting(-1, 0.0))),
    "some rows set": flat(written(setting(slice(2, 4), 0.0))),
    "every other row set": flat(written(setting(slice(None, None, 2), 0.0))),
    "a place set": flat(written(setting((0, 0), 0.0))),
    "the first row scaled": flat(written(lambda h: h[0].mul_(2))),
    "a view of the first rows written": flat(written(lambda h: h[:2].add_(1).mul_(2))),
    "rows copied in place": flat(written(lambda h: h[1:].copy_(h[:-1].clone()))),
    "a select_scatter": flat(lambda h: torch.select_scatter(h, h[1], 0, 0)),
    "a slice_scatter": flat(lambda h: torch.slice_scatter(h, h[:2] * 3, 0, 1, 3)),
    "the first row as a reference": flat(lambda h: h - h[0]),
    "the last row as a reference": flat(lambda h: h - h[-1:]),
    "rows taken from the front": flat(lambda h: torch.cat([h[:2] * 2, h[2:]])),
    "the other half": flat(lambda h: torch.cat(h.chunk(2)[::-1])),
    "pairs of rows": quick(flat(lambda h: h.view(4, 2, WIDTH).mean(1).repeat_interleave(2, 0))),
    "pairs of rows by stride": flat(lambda h: (h[::2] + h[1::2]).repeat_interleave(2, 0)),
    "groups of four, prefix sizes": flat(
        lambda h: h.view(-1, 4, WIDTH).cumsum(1).view(-1, WIDTH), microbatches=2
    ),
    "ghost norm": flat(
        lambda h: (h.view(2, -1, WIDTH) - h.view(2, -1, WIDTH).mean(1, keepdim=True)).view(-1, WIDTH)
    ),
    "minibatch discrimination": flat(
        lambda h: torch.cat([h, (-(h[:, None] - h[None]).abs().sum(2)).exp().sum(1, keepdim=True)], 1)
    ),
    "minibatch standard deviation": flat(lambda h: torch.cat([h, h.std(0).mean().expand(h.shape[0], 1)], 1)),
    "carried from row to row": flat(last_row_carried),
    "cutmix with the neighbour": flat(halves),
    "shuffled channels of the batch": sequential(
        lambda h: h.reshape(h.shape[0], -1).t().reshape(h.shape[0], -1)
    ),
    "states of a bidirectional GRU viewed": sequential(
        lambda h, a: a(h)[1].view(h.shape[0], -1),
        lambda: nn.GRU(WIDTH, 3, bidirectional=True, batch_first=True),
    ),
    "viewed as time first": model_case(
        lambda rows: (torch.randn(rows, TIME, WIDTH),), lambda h: h.view(TIME, h.shape[0], -1).sum(0)
    ),
    "transposed and reshaped": flat(lambda h: h.t().reshape(h.shape[0], -1)),
    "permuted and flattened": sequential(lambda h: h.permute(1, 0, 2).reshape(h.shape[0], TIME, -1)),
    "a wrong unflatten": sequential(
        lambda h: h.transpose(0, 1).flatten(0, 1).unflatten(0, (h.shape[0], TIME))
    ),
    "a copy of the batch taken apart wrongly": quick(
        flat(lambda h: torch.cat([h, 2 * h]).view(h.shape[0], 2, -1).mean(1))
    ),
    "two copies of each row taken apart wrongly": flat(
        lambda h: h.repeat_interleave(2, 0).cos().cumsum(1).view(2, h.shape[0], -1)[0]
    ),
    "einsum bi,bj->ij": flat(lambda h: h @ torch.einsum("bi,bj->ij", h, h.cos())),
    "einsum bi,ci->bc": flat(lambda h: torch.einsum("bi,ci->bc", h, h).sum(1)),
    "einsum bi,cj->bj": flat(lambda h: torch.einsum("bi,cj->bj", h, h)),
    "einsum tbd,sbd->tsb": sequential(lambda h: torch.einsum("tbd,sbd->tsb", h, h).sum(1)),
    "tensordot over rows": flat(lambda h: h @ torch.tensordot(h, h, ([0], [0]))),
    "vmap over features": flat(lambda h: torch.vmap(lambda column: column - column.mean(), 1, 1)(h)),
    "vmap with the sum of all": flat(lambda h: torch.vmap(lambda row: row * h.sum())(h)),
    "capacity of experts": flat(lambda h, a: a(h), Capacity),
    "custom forward that mixes": flat(MixingForward.apply),
    "custom backward that mixes": quick(flat(MixingBackward.apply)),
    "custom gradient that is a mean": flat(lambda h, a: a(h), lambda: Weighing(SummingBackward)),
    "custom operator that mixes": quick(flat(centred)),
    "custom operator that reverses": flat(reversed_rows),
    "custom operator whose backward mixes": quick(flat(centring_backward)),
    "custom operator whose weight's gradient is a mean": flat(
        lambda h, a: a(h), lambda: WeighingOperator(weighed_by_mean)
    ),
    "if more than four rows": quick(flat(by_size)),
    "if more rows than features": flat(by_shape),
    "if an odd number of rows": flat(by_parity, rows=(8,)),
    "if eight rows": flat(by_exact_size),
    "if more than four rows, later": flat(by_size, rows=(15, 8)),
    "if more than four rows, later none": flat(by_size, rows=(3, 8), microbatches=2),
    "the number of rows as a factor": quick(flat(lambda h: h * h.shape[0])),
    "the number of rows as a divisor": flat(lambda h: h / len(h)),
    "the number of rows as an exponent": flat(lambda h: h.abs() ** (1 / h.shape[0])),
    "the number of elements as a factor": flat(lambda h: h * h.numel() / 48),
    "the number of rows as a tensor": flat(lambda h: h * torch.tensor(h.shape[0])),
    "the number of rows in a range": flat(lambda h: h * torch.arange(h.shape[0]).sum()),
    "the number of a row as a weight": quick(flat(lambda h: h * torch.arange(h.shape[0])[:, None])),
    "the number of a row as a position": flat(
        lambda h, a: h + a(torch.arange(h.shape[0])), lambda: nn.Embedding(20, WIDTH)
    ),
    "the number of a row by a table": flat(
        lambda h, a: h + a.weight[: h.shape[0]], lambda: nn.Embedding(20, WIDTH)
    ),
    "the number of a row by linspace": flat(
        lambda h: h * torch.linspace(0, 1, h.shape[0], dtype=h.dtype)[:, None]
    ),
    "the number of a row by cumsum": flat(lambda h: h * torch.ones(h.shape[0]).cumsum(0)[:, None]),
    "the number of a row by nonzero": flat(lambda h: h * torch.ones(h.shape[0]).nonzero()),
    "the number of a row backwards": flat(lambda h: h[torch.arange(h.shape[0] - 1, -1, -1)]),
    "the number of a row, every other": flat(lambda h: h * (torch.arange(h.shape[0]) % 2)[:, None]),
    "the number of a row is even": flat(
        lambda h: torch.where((torch.arange(h.shape[0]) % 2 == 0)[:, None], h, -h)
    ),
    "the number of a row plus one": flat(lambda h: h[(torch.arange(h.shape[0]) + 1) % h.shape[0]]),
    "the number of a row, squared": flat(lambda h: h + torch.arange(h.shape[0])[:, None] ** 2 / 10),
    "rows by half their number": flat(lambda h: h[torch.arange(h.shape[0]) // 2]),
    "rows added at their number": flat(lambda h: h.index_add(0, torch.arange(h.shape[0]), h)),
    "rows filled at their number": flat(lambda h: h.index_fill(0, torch.arange(h.shape[0]), 0.5) * h),
    "half the number of rows": flat(lambda h: h * (h.new_zeros(h.shape[0] // 2) + 1).sum()),
    "one row more": flat(lambda h: h * (h.new_zeros(h.shape[0] + 1) + 1).sum()),
    "one row less": flat(lambda h: h * (h[1:] * 0 + 1).sum()),
    "features renormed over the batch": flat(lambda h: h.renorm(2, 1, 1.0)),
    "the first row of an input scaled": flat(
        lambda h, x: h * written(lambda z: z[0].mul_(2))(x),
        others=(values(WIDTH),),
    ),
    "the first element of an input changed": flat(
        lambda h, x: h * written(lambda z: z.view(-1)[0].add_(1))(x), others=(values(WIDTH),)
    ),
    "half of an input zeroed": flat(
        lambda h, x: h * written(lambda z: z.chunk(2)[0].zero_())(x), others=(values(WIDTH),)
    ),
    "all but the first of an input zeroed": flat(
        lambda h, x: h * written(lambda z: z[1:].zero_())(x), others=(values(WIDTH),)
    ),
    "all rows by their number": quick(flat(lambda h: h[torch.arange(h.shape[0])])),
    "an identity": quick(flat(lambda h: h + torch.eye(*h.shape, dtype=h.dtype))),
    "an identity of the batch": flat(lambda h: h + torch.eye(h.shape[0], dtype=h.dtype).sum(1, keepdim=True)),
    "an identity times the batch": flat(lambda h: torch.eye(h.shape[0], dtype=h.dtype) @ h),
    "a triangle of the batch": flat(lambda h: torch.ones(h.shape[0], h.shape[0], dtype=h.dtype).tril() @ h),
    "positional table from rows": sequential(lambda h: h + torch.arange(h.shape[0])[:, None, None] / 10),
    "a buffer of means": flat(lambda h, a: a(h), lambda: Averaged(subtract=True)),
    "a buffer of calls": flat(lambda h, a: a(h), Counting),
    "a queue of keys": flat(lambda h, a: a(h), Queue),
    "packed sequences": sequential(
        packed, lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), others=(lengths,)
    ),
    "bags by offsets": flat(
        lambda h, a, ids, offsets: h + a(ids, offsets),
        lambda: nn.EmbeddingBag(9, WIDTH, mode="sum"),
        others=(lambda rows: torch.randint(9, (2 * rows,)), lambda rows: 2 * torch.arange(rows)),
    ),
    "rows that are not masked": flat(lambda h: h * h[h > 0].sum(), target=row_weights),
    "masked rows alone": flat(
        lambda h, m: h * h[m].mean(), others=(lambda rows: torch.arange(rows) % 2 == 0,)
    ),
    "a squeeze of all dimensions": flat(lambda h: h.squeeze(), rows=(8, 3), microbatches=2),
    "a squeeze of one row": model_case(
        lambda rows: (torch.randn(rows, 1, WIDTH),), lambda h: h.squeeze(), rows=(4,)
    ),
    "rows as many as features": model_case(
        lambda rows: (torch.randn(rows, 8),), lambda h: h * torch.eye(8, dtype=h.dtype)
    ),
    "rows as many as features, transposed": model_case(lambda rows: (torch.randn(rows, 8),), lambda h: h.t()),
    "rows as many as features, product": model_case(lambda rows: (torch.randn(rows, 8),), lambda h: h @ h),
    "a table with as many rows": flat(lambda h, t: h + t, others=(table_of(8, WIDTH),)),
    "sinkhorn": flat(
        lambda h: functools.reduce(
            lambda s, _: (s / s.sum(0)) / (s / s.sum(0)).sum(1, keepdim=True), range(3), h.exp()
        )
    ),
    "spectral of a batch": flat(lambda h: h / torch.linalg.matrix_norm(h, 2)),
}

# What is drawn once for the batch, or which row goes where: each microbatch would draw its own.

DRAWN: dict[str, BatchCase] = {
    "mixup": quick(flat(mixed_up, random=True, expect=Expect.RIGHT)),
    "rows by a permutation drawn": quick(
        flat(lambda h: h[torch.randperm(h.shape[0])], random=True, expect=Expect.RIGHT)
    ),
    "rows drawn with replacement": flat(
        lambda h: h[torch.randint(h.shape[0], (h.shape[0],))], random=True, expect=Expect.RIGHT
    ),
    "rows sampled by their weight": flat(
        lambda h: h[torch.multinomial(h[:, 0].exp(), h.shape[0], replacement=True)],
        random=True,
        expect=Expect.RIGHT,
    ),
    "a number drawn for the batch": flat(lambda h: h * torch.rand(()), random=True),
    "a mask drawn for the batch": flat(lambda h: h * (torch.rand(1, WIDTH) > 0.5), random=True),
}


# Losses.


def focal(y: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(y, target, reduction="none")
    return (0.25 * (1 - (-each).exp()) ** 2 * each).mean()


def dice_of_rows(y: Tensor, target: Tensor) -> Tensor:
    p, t = y.softmax(1), F.one_hot(target, CLASSES)
    return (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


def dice_of_batch(y: Tensor, target: Tensor) -> Tensor:
    p, t = y.sigmoid(), F.one_hot(target, CLASSES)
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def masked_mean(y: Tensor, target: Tensor) -> Tensor:
    mask = (target != 0).to(y.dtype)
    return (F.cross_entropy(y, target, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


def confident(y: Tensor, target: Tensor) -> Tensor:
    """The mean over the rows that the model is sure of."""
    each, sure = F.cross_entropy(y, target, reduction="none"), (y.softmax(1).amax(1) > 0.3).to(y.dtype)
    return (each * sure).sum() / sure.sum().clamp(min=1)


def by_own_weights(y: Tensor, target: Tensor) -> Tensor:
    weights = y[:, 0].sigmoid()
    return (F.cross_entropy(y, target, reduction="none") * weights).sum() / weights.sum()


def contrastive(y: Tensor, target: Tensor) -> Tensor:
    logits = F.normalize(y, dim=1) @ F.normalize(y.sin(), dim=1).T / 0.1
    return F.cross_entropy(logits, torch.arange(y.shape[0]))


def clip_loss(y: Tensor, target: Tensor) -> Tensor:
    logits, numbers = y @ y.cos().T, torch.arange(len(y))
    return (F.cross_entropy(logits, numbers) + F.cross_entropy(logits.T, numbers)) / 2


def nt_xent(y: Tensor, target: Tensor) -> Tensor:
    z = F.normalize(torch.cat([y, y.cos()]), dim=1)
    scores = (z @ z.T).masked_fill(torch.eye(2 * len(y), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(scores, torch.arange(2 * len(y)).roll(len(y)))


def supervised_contrastive(y: Tensor, target: Tensor) -> Tensor:
    same = (target[:, None] == target[None]).to(y.dtype)
    return -((y @ y.T).log_softmax(1) * same).sum(1).div(same.sum(1)).mean()


def hardest_triplet(y: Tensor, target: Tensor) -> Tensor:
    distances, same = torch.cdist(y, y), target[:, None] == target[None]
    far = distances.masked_fill(~same, 0).amax(1)
    near = distances.masked_fill(same, 1e3).amin(1)
    return F.relu(far - near + 1).mean()


def ranking(y: Tensor, target: Tensor) -> Tensor:
    score, value = y[:, 0], target.to(y.dtype)
    return F.softplus(-(score[:, None] - score[None]) * (value[:, None] - value[None]).sign()).mean()


def list_net(y: Tensor, target: Tensor) -> Tensor:
    return -(target.to(y.dtype).softmax(0) * y[:, 0].log_softmax(0)).sum()


def cox(y: Tensor, target: Tensor) -> Tensor:
    return -(y[:, 0] - y[:, 0].logcumsumexp(0)).mean()


def barlow(y: Tensor, target: Tensor) -> Tensor:
    c = y.T @ y.sin() / len(y)
    return (c - torch.eye(CLASSES, dtype=y.dtype)).square().sum()


def variance(y: Tensor, target: Tensor) -> Tensor:
    return F.relu(1 - (y.var(0) + 1e-4).sqrt()).mean() + y.square().mean()


def discrepancy(y: Tensor, target: Tensor) -> Tensor:
    return (-torch.cdist(y, y).square()).exp().mean()


def concordance(y: Tensor, target: Tensor) -> Tensor:
    a, b = y[:, 0], target.to(y.dtype)
    covariance = ((a - a.mean()) * (b - b.mean())).mean()
    return 1 - 2 * covariance / (a.var() + b.var() + (a.mean() - b.mean()) ** 2)


def explained(y: Tensor, target: Tensor) -> Tensor:
    a, b = y[:, 0], target.to(y.dtype)
    return (a - b).square().sum() / (b - b.mean()).square().sum()


def balanced(y: Tensor, target: Tensor) -> Tensor:
    counts = torch.bincount(target, minlength=CLASSES).clamp(min=1)
    return F.cross_entropy(y, target, weight=(counts.sum() / counts).to(y.dtype))


def by_class_of_row(y: Tensor, target: Tensor) -> Tensor:
    counts = torch.bincount(target, minlength=CLASSES)
    return (F.cross_entropy(y, target, reduction="none") / counts[target]).sum()


def mean_of_classes(y: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(y, target, reduction="none")
    sums = torch.zeros(CLASSES, dtype=y.dtype).scatter_add(0, target, each)
    return (sums / F.one_hot(target, CLASSES).sum(0).clamp(min=1)).mean()


def centres(y: Tensor, target: Tensor) -> Tensor:
    marks = F.one_hot(target, CLASSES).to(y.dtype)
    means = marks.T @ y / marks.sum(0).clamp(min=1)[:, None]
    return (y - means[target]).square().mean()


def load_balancing(y: Tensor, target: Tensor) -> Tensor:
    gates = y.softmax(1)
    share = F.one_hot(gates.argmax(1), CLASSES).to(y.dtype).mean(0)
    return F.cross_entropy(y, target) + CLASSES * (share * gates.mean(0)).sum()


def ctc(y: Tensor, target: tuple[Tensor, ...]) -> Tensor:
    words, count = target
    steps = torch.stack([y, y.sin(), y.cos(), -y]).log_softmax(2)
    return F.ctc_loss(steps, words, torch.full((len(y),), 4), count)


def ctc_target(rows: int) -> tuple[Tensor, ...]:
    return torch.randint(1, CLASSES, (rows, 2)), torch.arange(rows) % 2 + 1


def evidence(y: Tensor, target: Tensor) -> Tensor:
    mean, log_variance = y.chunk(2, 1)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return ((mean - target).square().sum() + divergence) / y.shape[0]


def clipped_policy(y: Tensor, target: tuple[Tensor, ...]) -> Tensor:
    action, advantage, old = target
    ratio = (y.log_softmax(1).gather(1, action[:, None]).squeeze(1) - old).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def normalised_advantage(y: Tensor, target: tuple[Tensor, ...]) -> Tensor:
    action, advantage, old = target
    return clipped_policy(y, (action, (advantage - advantage.mean()) / (advantage.std() + 1e-8), old))


def policy_target(rows: int) -> tuple[Tensor, ...]:
    return classes(rows), torch.randn(rows), -torch.rand(rows)


def normal(y: Tensor, target: Tensor) -> Tensor:
    return -torch.distributions.Normal(y[:, 0], y[:, 1].exp()).log_prob(target).mean()


def categorical(y: Tensor, target: Tensor) -> Tensor:
    choice = torch.distributions.Categorical(logits=y)
    return -(choice.log_prob(target) + 0.01 * choice.entropy()).mean()


def logged(y: Tensor, target: Tensor) -> Any:
    return F.cross_entropy(y, target), {"accuracy": (y.argmax(1) == target).double().mean()}


def r_drop(y: Tensor, target: Tensor) -> Tensor:
    """Both halves of the batch should be alike."""
    first, second = y.chunk(2)
    return F.kl_div(first.log_softmax(1), second.softmax(1), reduction="batchmean")


def distilled(y: Tensor, target: Tensor) -> Tensor:
    return F.kl_div((y / 2).log_softmax(1), (target / 2).softmax(1), reduction="batchmean") * 4


LOSSES: dict[str, BatchCase] = {
    "cross entropy": quick(loss(F.cross_entropy)),
    "cross entropy, class weights, smoothed": loss(
        lambda y, t: F.cross_entropy(
            y, t, torch.tensor([0.2, 1.5, 0.7, 1.0], dtype=y.dtype), label_smoothing=0.1
        )
    ),
    "cross entropy, ignored": quick(loss(lambda y, t: F.cross_entropy(y, t, ignore_index=1))),
    "cross entropy, summed": loss(lambda y, t: F.cross_entropy(y, t, reduction="sum")),
    "cross entropy of tokens": sequential(
        lambda h: h,
        target=lambda rows: torch.randint(WIDTH, (rows, TIME)),
        loss_fn=lambda y, t: F.cross_entropy(y.view(-1, WIDTH), t.view(-1), ignore_index=1),
    ),
    "cross entropy of permuted tokens": sequential(
        lambda h: h,
        target=lambda rows: torch.randint(WIDTH, (rows, TIME)),
        loss_fn=lambda y, t: F.cross_entropy(y.permute(0, 2, 1), t),
    ),
    "cross entropy of shifted tokens": sequential(
        lambda h: h,
        target=lambda rows: torch.randint(WIDTH, (rows, TIME)),
        loss_fn=lambda y, t: F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
    ),
    "cross entropy of transposed tokens": sequential(
        lambda h: h.transpose(0, 1),
        target=lambda rows: torch.randint(WIDTH, (rows, TIME)),
        loss_fn=lambda y, t: F.cross_entropy(y.reshape(-1, WIDTH), t.t().reshape(-1)),
    ),
    "likelihood by gather": loss(lambda y, t: -y.log_softmax(1).gather(1, t[:, None]).mean()),
    "likelihood by arange": quick(loss(lambda y, t: -y.log_softmax(1)[torch.arange(len(t)), t].mean())),
    "nll": loss(lambda y, t: F.nll_loss(y.log_softmax(1), t)),
    "binary, weighted": loss(
        lambda y, t: F.binary_cross_entropy_with_logits(
            y, F.one_hot(t, CLASSES).to(y.dtype), pos_weight=torch.arange(1, 5, dtype=y.dtype)
        )
    ),
    "mse": loss(F.mse_loss, values(CLASSES)),
    "mse, a weight for each row": loss(lambda y, w: (w * y.square().mean(1)).mean(), row_weights),
    "mse, summed over the rows": loss(
        lambda y, t: F.mse_loss(y, t, reduction="sum") / y.shape[0], values(CLASSES)
    ),
    "mse, summed over the elements": loss(lambda y, t: (y - t).square().sum() / t.numel(), values(CLASSES)),
    "l1, smooth l1, huber": loss(
        lambda y, t: F.l1_loss(y, t) + F.smooth_l1_loss(y, t) + F.huber_loss(y, t), values(CLASSES)
    ),
    "kl, batchmean": quick(loss(distilled, values(CLASSES))),
    "poisson": loss(lambda y, t: F.poisson_nll_loss(y, t.abs()), values(CLASSES)),
    "focal": loss(focal),
    "dice of each row": loss(dice_of_rows),
    "masked mean": quick(loss(masked_mean)),
    "cosine embedding": loss(lambda y, t: F.cosine_embedding_loss(y, y.cos(), (t > 1) * 2 - 1)),
    "triplet": loss(lambda y, t: F.triplet_margin_loss(y, y.sin(), y.cos())),
    "margin ranking": loss(
        lambda y, t: F.margin_ranking_loss(y[:, 0], y[:, 1], (t > 1) * 2.0 - 1, margin=0.1)
    ),
    "multi margin": loss(F.multi_margin_loss),
    "hinge": loss(lambda y, t: F.relu(1 - y * (F.one_hot(t, CLASSES) * 2 - 1)).mean()),
    "soft margin": loss(lambda y, t: F.soft_margin_loss(y, t.sign()), values(CLASSES)),
    "evidence": loss(evidence, values(2)),
    "quantile": loss(lambda y, t: torch.max(0.9 * (t - y), -0.1 * (t - y)).mean(), values(CLASSES)),
    "policy gradient": loss(clipped_policy, policy_target),
    "normal": loss(normal, values()),
    "categorical": loss(categorical),
    "several terms": loss(
        lambda y, t: F.cross_entropy(y, t) + 0.1 * y.abs().mean() + 0.01 * y.square().sum()
    ),
    "logs": loss(logged),
    "penalty of the model": flat(lambda h: h),
    "label smoothing by hand": loss(
        lambda y, t: -((F.one_hot(t, CLASSES) * 0.9 + 0.1 / CLASSES) * y.log_softmax(1)).sum(1).mean()
    ),
    "ratio of sums over the target": loss(lambda y, t: (y - t).abs().sum() / t.abs().sum(), values(CLASSES)),
    "advantage, normalised": loss(normalised_advantage, policy_target),
    "in-place terms": loss(lambda y, t: F.cross_entropy(y, t).add_(y.mean()).mul_(2)),
    "mean of means": loss(lambda y, t: y.mean(1).mean(0)),
}
"""Sums and means over rows: the mini-batch's loss can be had from microbatches."""

LOSSES_THAT_MIX: dict[str, BatchCase] = {
    "mean of masked elements": loss(lambda y, t: F.cross_entropy(y, t, reduction="none")[t != 0].mean()),
    "mean by masked_select": loss(lambda y, t: y.sum(1).masked_select(t != 0).mean()),
    "ctc": loss(ctc, ctc_target),
    "dice of the batch": quick(loss(dice_of_batch)),
    "mean of the confident": loss(confident),
    "mean by own weights": quick(loss(by_own_weights)),
    "mean of positive elements": loss(lambda y, t: y[y > 0].mean()),
    "contrastive": quick(loss(contrastive)),
    "clip": loss(clip_loss),
    "nt-xent": loss(nt_xent),
    "supervised contrastive": loss(supervised_contrastive),
    "hardest triplet": loss(hardest_triplet),
    "ranking": loss(ranking),
    "list net": loss(list_net),
    "cox": loss(cox),
    "barlow": loss(barlow),
    "vicreg": loss(variance),
    "maximum mean discrepancy": loss(discrepancy),
    "concordance": loss(concordance),
    "explained": loss(explained),
    "balanced": loss(balanced),
    "divided by the count of its class": loss(by_class_of_row),
    "mean of the means of classes": loss(mean_of_classes),
    "centres": loss(centres),
    "load balancing": loss(load_balancing),
    "halves alike": loss(r_drop),
    "weights by arange": quick(loss(lambda y, t: (y.square().mean(1) * torch.arange(len(y))).mean())),
    "discounted by arange": loss(lambda y, t: (y.square().mean(1) * 0.9 ** torch.arange(len(y))).sum()),
    "total variation": loss(lambda y, t: (y[1:] - y[:-1]).abs().mean()),
    "the first row": quick(loss(lambda y, t: y[0].square().sum())),
    "the last row": loss(lambda y, t: y[-1].square().sum()),
    "the first rows": loss(lambda y, t: y[:4].square().mean()),
    "every other row": loss(lambda y, t: y[::2].square().mean() - y[1::2].mean()),
    "an element": loss(lambda y, t: y[2, 1] ** 2),
    "times the rows": loss(lambda y, t: F.cross_entropy(y, t) * len(y)),
    "over the root of the rows": loss(lambda y, t: F.cross_entropy(y, t, reduction="sum") / len(y) ** 0.5),
    "over the rows less one": quick(loss(lambda y, t: y.square().sum() / (len(y) - 1))),
    "summed over all but one": loss(
        lambda y, t: F.mse_loss(y, t, reduction="sum") / (t.numel() - 1), values(CLASSES)
    ),
    "if more than four rows": loss(lambda y, t: F.cross_entropy(y, t) if len(y) > 4 else y.square().mean()),
    "rows by a permutation": loss(lambda y, p: (y * y[p].detach()).sum(1).mean(), chosen_rows),
    "a diagonal": loss(lambda y, t: (y @ y.T).diagonal().mean() - (y @ y.T).mean()),
    "a trace": loss(lambda y, t: (y @ y.T).trace()),
    "a table in the target": quick(
        loss(
            lambda y, t: F.cross_entropy(y, t[0], t[1][:CLASSES]),
            lambda rows: (classes(rows), torch.rand(8) + 0.2),
        )
    ),
    "prototypes in the target": loss(
        lambda y, t: F.cross_entropy(y @ t[1].T, t[0]), lambda rows: (classes(rows), torch.randn(8, CLASSES))
    ),
    "prototypes looked up": loss(
        lambda y, t: (y - t[1][t[0]]).square().mean(), lambda rows: (classes(rows), torch.randn(8, CLASSES))
    ),
    "flattened the wrong way": sequential(
        lambda h: h,
        target=lambda rows: torch.randint(WIDTH, (rows, TIME)),
        loss_fn=lambda y, t: F.cross_entropy(y.transpose(0, 1).reshape(-1, WIDTH), t.view(-1)),
    ),
}
"""What needs other rows, or numbers of rows: right, or refused."""

LOSSES_OF_THE_BATCH: dict[str, BatchCase] = {
    "root of the mean": quick(loss(lambda y, t: (y - t).square().mean().sqrt(), values(CLASSES))),
    "root of the mean plus epsilon": loss(
        lambda y, t: ((y - t).square().mean() + 1e-6).sqrt(), values(CLASSES)
    ),
    "square of the mean": loss(lambda y, t: y.mean().square()),
    "log of the mean": loss(lambda y, t: y.exp().mean().log()),
    "exponential of the mean": loss(lambda y, t: y.mean().exp()),
    "absolute mean": loss(lambda y, t: y.mean().abs()),
    "means of features": loss(lambda y, t: y.mean(0).square().sum()),
    "entropy of the mean": loss(lambda y, t: -(y.softmax(1).mean(0) * y.softmax(1).mean(0).log()).sum()),
    "largest": quick(loss(lambda y, t: F.cross_entropy(y, t, reduction="none").max())),
    "largest by amax": loss(lambda y, t: y.amax()),
    "logsumexp": loss(lambda y, t: y.logsumexp((0, 1))),
    "variance": loss(lambda y, t: y.var()),
    "standard deviation": loss(lambda y, t: y.std(0).sum()),
    "norm": loss(lambda y, t: y.norm()),
    "matrix norm": loss(lambda y, t: torch.linalg.matrix_norm(y, "nuc")),
    "median": loss(lambda y, t: F.cross_entropy(y, t, reduction="none").median()),
    "quantile": loss(lambda y, t: torch.quantile(y.square().mean(1), 0.8)),
    "hardest examples": loss(lambda y, t: F.cross_entropy(y, t, reduction="none").topk(3).values.mean()),
    "trimmed": loss(lambda y, t: F.cross_entropy(y, t, reduction="none").sort().values[1:-1].mean()),
    "product": loss(lambda y, t: y.sigmoid().prod()),
    "uncertainty over the batch": loss(lambda y, t: F.cross_entropy(y, t).log1p()),
    "a clamped mean": loss(lambda y, t: F.cross_entropy(y, t).clamp(min=1.3)),
    "a flooded mean": loss(lambda y, t: (F.cross_entropy(y, t) - 1.3).abs() + 1.3),
    "products of means": loss(lambda y, t: y[:, 0].mean() * y[:, 1].mean()),
    "a mean of a mean of squares": loss(lambda y, t: (y.mean(0, keepdim=True) - 1).square().mean()),
    "the larger of two means": loss(lambda y, t: torch.maximum(y[:, 0].mean(), y[:, 1].mean())),
    "softmax of means": loss(lambda y, t: y.mean(0).softmax(0)[0]),
    "normalised by itself": loss(lambda y, t: y.square().mean() / y.square().mean().detach()),
    "mean divided by a mean": loss(lambda y, t: y.square().mean() / y.abs().mean()),
}
"""Functions of the batch's sums and means: a warning is a word, too."""

NORMS: dict[str, BatchCase] = {
    "batch norm": quick(flat(lambda h, a: a(h), lambda: nn.BatchNorm1d(WIDTH))),
    "batch norm of pictures": pictured(lambda h, a: a(h), lambda: nn.BatchNorm2d(3)),
    "batch norm of sequences": sequential(lambda h, a: a(h.mT).mT, lambda: nn.BatchNorm1d(WIDTH)),
    "batch norm without statistics": flat(
        lambda h, a: a(h), lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False)
    ),
    "batch norm by function": flat(lambda h: F.batch_norm(h, None, None, training=True)),
}
"""BatchNorm in training mode sees microbatches: the declared exception, which must be said."""
NORMS["a buffer of means that nothing reads"] = flat(lambda h, a: a(h), lambda: Averaged(subtract=False))

# Outputs.

OUTPUTS: dict[str, BatchCase] = {
    "rows": quick(output(lambda y: y.exp())),
    "a dict of rows": output(lambda y: {"a": y.exp(), "b": (y[:, 0], [y.sum(1)])}),
    "rows and a table": output(lambda y, a: (y, a.weight * 2), lambda: nn.Linear(WIDTH, 2)),
    "whole numbers": output(lambda y: y.argmax(1)),
    "truth values": output(lambda y: y > 0),
    "features chosen": output(lambda y: y[:, 1:4].contiguous()),
    "softmax of features": output(lambda y: y.softmax(-1).topk(2, -1)),
    "rows taken apart by features": output(lambda y: y.unbind(1)),
    "pairs of features": output(lambda y: y.reshape(y.shape[0], 3, 2)),
    "attention over features": output(lambda y: y[:, :, None] * y[:, None, :]),
    "last": output(lambda y: y[:, -1]),
    "sum": quick(output(lambda y: y.sum(0))),
    "mean": output(lambda y: y.mean()),
    "count": output(lambda y: (y > 0).sum()),
    "sum over rows, by hand": output(lambda y: y.sum(0) / len(y)),
    "a constant": output(lambda y: (y, torch.arange(3))),
    "the input": output(lambda y, x: (y, x), others=(values(3),)),
    "reconstruction": output(lambda y: (y, y.tanh(), y.square().mean(1))),
    "dropout in eval mode": output(lambda y: F.dropout(y, 0.5, False)),
}

OUTPUTS_THAT_MIX: dict[str, BatchCase] = {
    "two copies of the batch": quick(output(lambda y: torch.cat([y, 2 * y], 0))),
    "repeated": quick(output(lambda y: y.repeat(2, 1))),
    "tiled": output(lambda y: y.tile((2, 1))),
    "two copies of each row": output(lambda y: y.repeat_interleave(2, 0)),
    "rows in blocks": output(lambda y: y.reshape(-1, 3)),
    "flattened": output(lambda y: y.flatten()),
    "a transpose, flattened": quick(output(lambda y: y.t().flatten())),
    "a transpose": output(lambda y: y.t()),
    "a transpose, contiguous": output(lambda y: y.t().contiguous()),
    "rows last": output(lambda y: torch.stack([y.t(), y.t()])),
    "time first": output(lambda y: y.view(y.shape[0], 3, 2).transpose(0, 1)),
    "two copies stacked": output(lambda y: torch.stack([y, y.sin()])),
    "sorted": quick(output(lambda y: y.sort(0).values)),
    "sorted without dim, by row": output(lambda y: y.t().sort().values),
    "argsort": output(lambda y: y.argsort(0)),
    "histogram": output(lambda y: y.histc(4, -1, 1)),
    "bincount": output(lambda y: torch.bincount(y.argmax(1), minlength=WIDTH)),
    "unbind": output(lambda y: y.unbind(0)),
    "split": output(lambda y: y.split(2)),
    "chunk": output(lambda y: y.chunk(2)),
    "a list of rows": output(lambda y: [row * 2 for row in y]),
    "a dict of rows by number": output(lambda y: {str(i): y[i] for i in range(2)}),
    "tensor_split": output(lambda y: y.tensor_split(3)),
    "the number of rows": quick(output(lambda y: (y, y.shape[0]))),
    "the number of rows, as a tensor": output(lambda y: torch.tensor(y.shape[0])),
    "the shape": output(lambda y: (y, tuple(y.shape))),
    "the number of elements": output(lambda y: (y, y.numel())),
    "numbers of rows": quick(output(lambda y: torch.arange(y.shape[0]))),
    "numbers of rows, as weights": output(lambda y: y * torch.arange(y.shape[0])[:, None]),
    "an identity": output(lambda y: torch.eye(y.shape[0], dtype=y.dtype)),
    "largest": output(lambda y: y.amax(0)),
    "largest, and where": output(lambda y: y.max(0)),
    "variance": output(lambda y: y.var(0)),
    "norm": output(lambda y: y.norm()),
    "argmax of all": output(lambda y: y.argmax()),
    "argmax of rows": output(lambda y: y.argmax(0)),
    "all and any": output(lambda y: (y > -9).all(), expect=Expect.NEVER_WRONG),
    "any": output(lambda y: (y > 1.2).any()),
    "product": output(lambda y: y.prod(0)),
    "logsumexp": output(lambda y: y.logsumexp(0)),
    "root of a mean": output(lambda y: y.square().mean().sqrt()),
    "similarities": output(lambda y: y @ y.T),
    "products of features": output(lambda y: y.T @ y),
    "covariance": output(lambda y: torch.cov(y.T)),
    "the first row": quick(output(lambda y: y[0])),
    "the last row": output(lambda y: y[-1]),
    "the first rows": output(lambda y: y[:2]),
    "all but the first": output(lambda y: y[1:]),
    "every other row": output(lambda y: y[::2]),
    "reversed": output(lambda y: y.flip(0)),
    "rolled": output(lambda y: y.roll(1, 0)),
    "softmax of rows": output(lambda y: y.softmax(0)),
    "cumsum": output(lambda y: y.cumsum(0)),
    "centred": output(lambda y: y - y.mean(0)),
    "positive elements": output(lambda y: y[y > 0]),
    "where positive": output(lambda y: (y > 0).nonzero()),
    "where positive, by row": output(lambda y: torch.where(y[:, 0] > 0)),
    "unique": output(lambda y: (y > 0).long().unique()),
    "rows that are positive": output(lambda y: y[y[:, 0] > 0]),
    "by pairs": output(lambda y: y.view(4, 2, WIDTH).mean(1)),
    "by pairs, transposed": output(lambda y: y.view(-1, 2, WIDTH).transpose(0, 1)),
    "a mean for each group": output(lambda y, c: scatter_mean(y, c), others=(classes,)),
    "states of a GRU": output(
        lambda y, a: a(y[:, None])[1], lambda: nn.GRU(WIDTH, 3, bidirectional=True, batch_first=True)
    ),
    "output and states of an LSTM": output(
        lambda y, a: a(y[:, None]), lambda: nn.LSTM(WIDTH, 3, batch_first=True)
    ),
    "a sum made in place": quick(
        output(
            summed_in_place,
            others=(classes,),
        )
    ),
    "rows written after they are returned": output(returned_and_written),
    "a squeeze": output(lambda y: y.squeeze(), rows=(4,)),
    "a sum times the rows": output(lambda y: y.mean(0) * len(y)),
    "a sum over the root of rows": output(lambda y: y.sum(0) / len(y) ** 0.5),
    "a constant with as many rows": output(lambda y: (y, torch.arange(8))),
    "a parameter with as many rows": output(lambda y, a: (y, a.weight), lambda: nn.Linear(WIDTH, 8)),
    "ones with as many rows": output(lambda y: y.new_ones(y.shape[0])),
    "pairs of rows": output(lambda y: torch.combinations(y[:, 0])),
    "meshgrid": output(lambda y: torch.meshgrid(y[:, 0], y[:, 1], indexing="ij")),
    "cartesian product": output(lambda y: torch.cartesian_prod(y[:, 0], y[:, 1])),
    "upper distances": output(lambda y: torch.pdist(y)),
    "batch norm": output(lambda y, a: a(y), lambda: nn.BatchNorm1d(WIDTH), expect=Expect.TOLD),
}

# What an error tells to do, followed.

REMEDIES: dict[str, BatchCase] = {
    "if more than four rows, the batch taken whole": flat(by_size, rows=(8, 3), microbatches=None),
    "sorted rows, one microbatch": flat(lambda h: h.sort(0).values, microbatches=1),
    "a contrastive loss, one microbatch": quick(loss(contrastive, microbatches=1)),
    "mixup, permutation drawn outside": flat(lambda h, other: 0.3 * h + 0.7 * other, others=(values(WIDTH),)),
    "LSTM, time first, split along dimension 1": quick(
        in_time(
            lambda h, a: a(h)[0],
            lambda: nn.LSTM(WIDTH, WIDTH),
            target=lambda rows: torch.randn(TIME, rows, WIDTH),
            loss_fn=same_shape,
            options={"batched": {"x": 1, "target": 1}},
        )
    ),
    "transformer, time first, split along dimension 1": in_time(
        lambda h, a: a(h),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0),
        target=lambda rows: torch.randn(TIME, rows, WIDTH),
        loss_fn=same_shape,
        options={"batched": {"x": 1, "target": 1}},
    ),
    "weights by arange, made outside": loss(
        lambda y, w: (y.square().mean(1) * w).mean(), lambda rows: torch.arange(rows).float()
    ),
    "a table, whole": flat(
        lambda h, t: h @ t.T, others=(table_of(8, WIDTH),), options={"batched": {1: None}}
    ),
}

GROUPS: Mapping[str, tuple[Expect, Mapping[str, BatchCase]]] = {
    "row-wise": (Expect.RIGHT, ROW_WISE),
    "mixing": (Expect.NEVER_WRONG, MIXING),
    "drawn": (Expect.REFUSED, DRAWN),
    "loss": (Expect.RIGHT, LOSSES),
    "loss that mixes": (Expect.NEVER_WRONG, LOSSES_THAT_MIX),
    "loss of the batch": (Expect.TOLD, LOSSES_OF_THE_BATCH),
    "norm": (Expect.TOLD, NORMS),
    "output": (Expect.RIGHT, OUTPUTS),
    "output that mixes": (Expect.NEVER_WRONG, OUTPUTS_THAT_MIX),
    "remedy": (Expect.RIGHT, REMEDIES),
}

CUSTOM_OPERATORS = {
    "custom operator by row": quick(flat(doubled)),
    "custom operator with a weight": flat(lambda h, a: a(h), lambda: WeighingOperator(weighed)),
    "vmap of a custom operator": flat(lambda h: torch.vmap(lambda row: row * 2)(doubled(h))),
}
"""Nobody can know that they do not mix rows: they may be warned of, but then they are right."""

ONLY_TOLD = (
    "mixing: a buffer of calls",
    "mixing: a queue of keys",
    "mixing: the number of a row by linspace",
    "mixing: the number of a row by nonzero",
    "mixing: mean of each group",
    "drawn: a number drawn for the batch",
    "drawn: a mask drawn for the batch",
)
"""How names begin of cases that are not proved: a warning names the line."""


CASES: dict[str, BatchCase] = {
    f"{group}: {name}": replace(
        case, name=f"{group}: {name}", expect=expect if case.expect is Expect.NEVER_WRONG else case.expect
    )
    for group, (expect, table) in {**GROUPS, "custom": (Expect.NEVER_WRONG, CUSTOM_OPERATORS)}.items()
    for name, case in table.items()
}

CASES = {
    name: replace(case, expect=Expect.TOLD) if name.startswith(ONLY_TOLD) else case
    for name, case in CASES.items()
}
