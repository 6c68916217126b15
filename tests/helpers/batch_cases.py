"""Small models and losses that treat the rows of a batch in all ways that people write, and what is right.

Each group is a table from a name to a case; the group says what its cases may come to. Cases with a star
before the name are tried whenever the tests run, the others if slow tests run.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from batch_comparison import BatchCase, Expect
from forward_modules import model
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
        return torch.tanh(self.function(torch.tanh(self.first(x)), *self.parts, *others) * self.scale)


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


def rows_of(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Random numbers of this shape for each row."""
    return lambda rows: (torch.randn(rows, *shape),)


def time_first(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(TIME, rows, WIDTH),)


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


def last_classes(rows: int) -> Tensor:
    """The first microbatch has only the class that losses ignore."""
    return torch.where(torch.arange(rows) < 3, 1, classes(rows))


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


flat = functools.partial(model_case, rows_of(WIDTH))
sequential = functools.partial(model_case, rows_of(TIME, WIDTH))
in_time = functools.partial(
    model_case, time_first, target=lambda rows: torch.randn(TIME, rows, WIDTH), loss_fn=same_shape
)
pictured = functools.partial(model_case, rows_of(3, 4, WIDTH))


def loss(loss_fn: Callable[..., Any], target: Callable[[int], Any] = classes, **more: Any) -> BatchCase:
    """A loss of the logits of two layers."""
    return BatchCase(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)),
        rows_of(WIDTH),
        target,
        loss_fn,
        **more,
    )


def output(function: Callable[..., Any], *modules: Callable[[], nn.Module], **more: Any) -> BatchCase:
    """What ``pipe(...)`` returns for a model that ends in the function."""
    others = more.pop("others", ())
    return BatchCase(
        lambda: Returning(function, *(make() for make in modules)),
        lambda rows: (*rows_of(WIDTH)(rows), *(make(rows) for make in others)),
        **more,
    )


def called(h: Tensor, layer: nn.Module) -> Tensor:
    return layer(h)


# Functions and modules of the cases that do not fit on a line.


def gate() -> nn.Module:
    importlib.import_module("transformers.integrations.moe")  # registers the product of sorted experts
    return nn.Linear(WIDTH, 3)


def sorted_experts(x: Tensor, gate: nn.Module, experts: nn.Bilinear, fault: str = "") -> Tensor:
    """Two of three experts for each row: rows are sorted by expert for one grouped product, and put back.

    ``fault`` lets a row depend on others, or on its place among them.
    """
    gates, chosen = gate(x).softmax(-1).topk(2, dim=-1)
    keys, order = chosen.reshape(-1).sort()
    rows = x[order // 2 if fault != "other rows" else order // 2 * 0]
    ends = torch.histc(keys.double(), 3, 0, 2).cumsum(0).int()
    y = torch.ops.transformers.grouped_mm_fallback(rows, experts.weight, ends)
    y = y * gates.reshape(-1)[order][:, None]
    if fault == "places":
        y = y * order[:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return y[back].view(-1, 2, WIDTH).sum(1)


def experts() -> nn.Bilinear:
    """Its weight has a matrix for each of three experts."""
    return nn.Bilinear(WIDTH, WIDTH, 3, bias=False)


def with_backward(function: Callable[..., Tensor], backward: Callable[..., Any]) -> Any:
    """A function with a backward of its own."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> Tensor:
            ctx.save_for_backward(*given)
            return function(*given)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return backward(grad, *ctx.saved_tensors)

    return Made.apply


def weighed_by_mean_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight's gradient with a number of rows in it that only the backward knows."""
    return grad * weight, (grad * x).mean(0)


rounding = with_backward(torch.sign, lambda grad, x: grad * (x.abs() < 0.9))
mixing_forward = with_backward(lambda x: x - x.mean(0), lambda grad, x: grad)
mixing_backward = with_backward(torch.clone, lambda grad, x: grad / (grad.norm() + 1))
summing_backward = with_backward(torch.mul, weighed_by_mean_backward)


def operator(name: str, function: Callable[..., Tensor], backward: Callable[..., Any], more: str = "") -> Any:
    """A custom operator that pipec knows nothing of; ``more`` declares arguments behind ``x``."""
    made = torch.library.custom_op(
        f"batch_cases::{name}",
        lambda *given: function(*given),
        mutates_args=(),
        schema=f"(Tensor x{more}) -> Tensor",
    )
    made.register_fake(lambda x, *_: torch.empty_like(x))
    made.register_autograd(
        lambda ctx, grad: backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return made


weighed_by_mean = operator("weighed_by_mean", torch.mul, weighed_by_mean_backward, ", Tensor weight")
doubled = operator("doubled", lambda x: 2 * x, lambda grad, x: 2 * grad)
centred = operator("centred", lambda x: x - x.mean(0), lambda grad, x: grad - grad.mean(0))
reversed_rows = operator("reversed_rows", lambda x: x.flip(0), lambda grad, x: grad.flip(0))
centring_backward = operator("centring_backward", lambda x: 2 * x, lambda grad, x: grad - grad.mean(0))


@model(mean=lambda: nn.Buffer(torch.zeros(WIDTH)))
def Averaged(self: Any, x: Tensor) -> Tensor:
    """A buffer that follows the mean of activations."""
    with torch.no_grad():
        self.mean.lerp_(x.mean(0), 0.1)
    return x


@model(keys=lambda: nn.Buffer(torch.randn(12, WIDTH)))
def Queue(self: Any, x: Tensor) -> Tensor:
    """MoCo's queue: keys of former batches, into which the rows of this one are written."""
    scores = x @ self.keys.clone().T
    with torch.no_grad():
        self.keys[: x.shape[0]] = x
    return scores


def quantized(x: Tensor, codes: nn.Embedding) -> Tensor:
    """The nearest code, straight through."""
    nearest = codes(torch.cdist(x, codes.weight).argmin(-1))
    return x + (nearest - x).detach() + 0.1 * nearest


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


by_pick, by_index = (functools.partial(flat, others=(each,)) for each in (picks, chosen_rows))


def lengths(rows: int) -> Tensor:
    return torch.arange(rows) % TIME + 1


def padding(rows: int) -> Tensor:
    return torch.arange(TIME)[None, :] >= lengths(rows)[:, None]


def table_of(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(*shape)


def by_size(h: Tensor) -> Tensor:
    return h * 2 if h.shape[0] > 4 else h


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


def returned_and_written(h: Tensor) -> tuple[Tensor, Tensor]:
    total = h.sum(0)
    twice = total * 2
    total.add_(1)
    return total, twice


def packed(h: Tensor, rnn: nn.LSTM, lengths: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
    return rnn(rows)[1][0][-1]


# What people write that no row of another batch could change.

ROW_WISE: dict[str, BatchCase] = {
    "* instance norm": pictured(called, lambda: nn.InstanceNorm2d(3, affine=True)),
    "batch norm in eval mode": flat(called, lambda: nn.BatchNorm1d(WIDTH).eval()),
    "* softmax of features": flat(lambda h: h.softmax(-1)),
    "* features by index": flat(lambda h: h[:, torch.tensor([2, 0, 1, 3, 5, 4])]),
    "* features copied into two places": flat(
        lambda h, a: a(h.new_zeros(2, len(h)).copy_(h[:, 0]).T), lambda: nn.Linear(2, WIDTH)
    ),
    "the last of two places of each row": sequential(
        lambda h, m: h[m, :].view(h.size(0), -1, WIDTH)[:, -1], others=(two_places,)
    ),
    "* a feature for each row": by_pick(lambda h, p: h[torch.arange(h.shape[0]), p]),
    "bags of equal length": flat(
        lambda h, a, p: h + a(p),
        lambda: nn.EmbeddingBag(9, WIDTH, mode="sum"),
        others=(lambda rows: torch.randint(9, (rows, 3)),),
    ),
    "* a column of ones": flat(lambda h: torch.cat([h, h.new_ones(h.shape[0], 1)], 1)),
    "* einsum ib,ij->bj": flat(
        lambda h, a: torch.einsum("ib,ij->bj", h.t(), a.weight), lambda: nn.Linear(WIDTH, WIDTH)
    ),
    "multihead attention with padding": sequential(
        lambda h, a, mask: a(h, h, h, key_padding_mask=mask)[0],
        lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        others=(padding,),
    ),
    "quantized": flat(quantized, lambda: nn.Embedding(5, WIDTH)),
    "* sorted experts": flat(sorted_experts, gate, experts),
    "* LSTM, batch first": sequential(lambda h, a: a(h)[0], lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "grid sample": pictured(
        lambda h: F.grid_sample(
            h, F.affine_grid(h[:, 0, :2, :3], [h.shape[0], 3, 4, 4], align_corners=False), align_corners=False
        )
    ),
    "* rows in blocks": flat(lambda h: h.reshape(-1, 3).softmax(-1).reshape(h.shape[0], -1)),
    "* stacked and taken apart": flat(lambda h: torch.stack([h, 2 * h]).softmax(-1).sum(0)),
    "* rows last": flat(lambda h, a: (a.weight @ h.t() + a.bias[:, None]).t(), lambda: nn.Linear(WIDTH, 3)),
    "vmap": flat(lambda h: torch.vmap(lambda row: row.softmax(0) * row.max())(h)),
    "custom backward": flat(rounding),
    "checkpoint": flat(lambda h, a: checkpoint(a, h, use_reentrant=False), lambda: nn.Linear(WIDTH, WIDTH)),
    "dropout": flat(lambda h: F.dropout(h, 0.5), random=True),
    "* masked mean over time": sequential(
        lambda h, mask: (h * ~mask[..., None]).sum(1) / (~mask).sum(1, keepdim=True), others=(padding,)
    ),
}

# Rows that depend on others, or on how many there are. What pipec can make right, it may.

MIXING: dict[str, BatchCase] = {
    "* multihead attention, given rows first": sequential(
        lambda h, a: a(h, h, h)[0], lambda: nn.MultiheadAttention(WIDTH, 2)
    ),
    "RNN, given rows first": sequential(lambda h, a: a(h)[0], lambda: nn.RNN(WIDTH, WIDTH)),
    "transformer layer, time first": in_time(called, lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0)),
    "* LSTM, time first": in_time(lambda h, a: a(h)[0], lambda: nn.LSTM(WIDTH, WIDTH)),
    "LSTM, time first, flattened target": in_time(
        lambda h, a: a(h)[0].flatten(0, 1),
        lambda: nn.LSTM(WIDTH, WIDTH),
        target=lambda rows: torch.randint(WIDTH, (TIME * rows,)),
        loss_fn=F.cross_entropy,
    ),
    "* rows by a permutation": flat(lambda h, p: h[p], others=(permutation,)),
    "* rows by an index": by_index(lambda h, p: h[p]),
    "rows by gather": by_index(lambda h, p: h.gather(0, p[:, None].expand(-1, WIDTH))),
    "* rows by index_add": by_index(lambda h, p: h.index_add(0, p, 2 * h)),
    "rows by index_put": by_index(lambda h, p: torch.index_put(h, (p,), 2 * h)),
    "rows by scatter": by_index(lambda h, p: h.scatter_add(0, p[:, None].expand(-1, WIDTH), h)),
    "rows by masks": by_index(lambda h, p: h.masked_scatter(p[:, None] > 3, h)),
    "* edges of a graph": flat(
        lambda h, p: torch.zeros_like(h).index_add(0, p, h[p.flip(0)]),
        others=(lambda rows: (torch.arange(rows) + 1) % rows,),
    ),
    "mean of each group": flat(scatter_mean, others=(classes,), expect=Expect.TOLD),
    "* centred": flat(lambda h: h - h.mean(0)),
    "scaled by the sum": flat(lambda h: h / (h.sum() + 9)),
    "cumulative sums of rows": flat(lambda h: h.cumsum(0)),
    "* softmax without dim": sequential(lambda h: F.softmax(h)),
    "* sorted rows": flat(lambda h: h.sort(0).values),
    "gradient of rows": flat(lambda h: torch.gradient(h, dim=0)[0]),
    "* layer norm over all": flat(lambda h: F.layer_norm(h, h.shape)),
    "* convolution without a batch": flat(
        lambda h: F.conv1d(h.t(), torch.ones(WIDTH, WIDTH, 3, dtype=h.dtype), padding=1).t()
    ),
    "convolution over rows and features": flat(
        lambda h: F.conv2d(h[None, None], torch.ones(1, 1, 3, 3, dtype=h.dtype), padding=1)[0, 0]
    ),
    "interpolation over rows": flat(
        lambda h: (
            F.interpolate(h.t()[None], h.shape[0], mode="linear")[0].t()
            + F.interpolate(h[None, None], (h.shape[0], 6), mode="bicubic")[0, 0]
        )
    ),
    "* searchsorted": flat(
        lambda h: h * torch.searchsorted(h[:, 0].detach().sort().values, h[:, 0].detach())[:, None]
    ),
    **{
        f"sorted experts, {fault}": flat(functools.partial(sorted_experts, fault=fault), gate, experts)
        for fault in ("other rows", "places")
    },
    "places of rows that choose unequally many": sequential(
        lambda h, m: h[m].view(h.size(0), -1, WIDTH)[:, -1], others=(two_places_in_the_mean,)
    ),
    "* tril": flat(lambda h: h.tril()),
    "* diagonal filled": flat(written(lambda h: h.fill_diagonal_(0.5))),
    "* the first row set": flat(written(setting(0, 0.0))),
    "a select_scatter": flat(lambda h: torch.select_scatter(h, h[1], 0, 0)),
    "* pairs of rows": flat(lambda h: h.view(4, 2, WIDTH).mean(1).repeat_interleave(2, 0)),
    "minibatch standard deviation": flat(lambda h: torch.cat([h, h.std(0).mean().expand(h.shape[0], 1)], 1)),
    "carried from row to row": flat(last_row_carried),
    "states of a bidirectional GRU viewed": sequential(
        lambda h, a: a(h)[1].view(h.shape[0], -1),
        lambda: nn.GRU(WIDTH, 3, bidirectional=True, batch_first=True),
    ),
    "* a copy of the batch taken apart wrongly": flat(
        lambda h: torch.cat([h, 2 * h]).view(h.shape[0], 2, -1).mean(1)
    ),
    "tensordot over rows": flat(lambda h: h @ torch.tensordot(h, h, ([0], [0]))),
    "vmap with the sum of all": flat(lambda h: torch.vmap(lambda row: row * h.sum())(h)),
    "custom forward that mixes": flat(mixing_forward),
    "* custom backward that mixes": flat(mixing_backward),
    "custom gradient that is a mean": flat(
        lambda h, a: summing_backward(h, a.weight), lambda: nn.PReLU(WIDTH)
    ),
    "* custom operator that mixes": flat(centred),
    "custom operator that reverses": flat(reversed_rows),
    "* custom operator whose backward mixes": flat(centring_backward),
    "custom operator whose weight's gradient is a mean": flat(
        lambda h, a: weighed_by_mean(h, a.weight), lambda: nn.PReLU(WIDTH)
    ),
    "* if more than four rows": flat(by_size),
    "if more than four rows, later none": flat(by_size, rows=(3, 8), microbatches=2),
    "* the number of rows as a factor": flat(lambda h: h * h.shape[0]),
    "the number of rows as a tensor": flat(lambda h: h * torch.tensor(h.shape[0])),
    "* the number of a row as a weight": flat(lambda h: h * torch.arange(h.shape[0])[:, None]),
    "the number of a row by a table": flat(
        lambda h, a: h + a.weight[: h.shape[0]], lambda: nn.Embedding(20, WIDTH)
    ),
    "the number of a row by linspace": flat(
        lambda h: h * torch.linspace(0, 1, h.shape[0], dtype=h.dtype)[:, None], expect=Expect.TOLD
    ),
    "the number of a row by nonzero": flat(
        lambda h: h * torch.ones(h.shape[0]).nonzero(), expect=Expect.TOLD
    ),
    "the first element of an input changed": flat(
        lambda h, x: h * written(lambda z: z.view(-1)[0].add_(1))(x), others=(values(WIDTH),)
    ),
    "* all rows by their number": flat(lambda h: h[torch.arange(h.shape[0])]),
    "* an identity": flat(lambda h: h + torch.eye(*h.shape, dtype=h.dtype)),
    "a queue of keys": flat(called, Queue, expect=Expect.TOLD),
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
    "a squeeze of one row": model_case(rows_of(1, WIDTH), lambda h: h.squeeze(), rows=(4,)),
    "rows as many as features": model_case(rows_of(8), lambda h: h * torch.eye(8, dtype=h.dtype)),
    "a table with as many rows": flat(lambda h, t: h + t, others=(table_of(8, WIDTH),)),
}

# What is drawn once for the batch, or which row goes where: each microbatch would draw its own.

drawn = functools.partial(flat, random=True)
DRAWN: dict[str, BatchCase] = {
    "* mixup": drawn(lambda h: 0.3 * h + 0.7 * h[torch.randperm(h.shape[0])]),
    "* rows by a permutation drawn": drawn(lambda h: h[torch.randperm(h.shape[0])]),
    "rows drawn with replacement": drawn(lambda h: h[torch.randint(h.shape[0], (h.shape[0],))]),
    "rows sampled by their weight": drawn(
        lambda h: h[torch.multinomial(h[:, 0].exp(), h.shape[0], replacement=True)]
    ),
    "a number drawn for the batch": drawn(lambda h: h * torch.rand(()), expect=Expect.TOLD),
    "a mask drawn for the batch": drawn(lambda h: h * (torch.rand(1, WIDTH) > 0.5), expect=Expect.TOLD),
}


# Losses.


def dice_of_batch(y: Tensor, target: Tensor) -> Tensor:
    p, t = y.sigmoid(), F.one_hot(target, CLASSES)
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def masked_mean(y: Tensor, target: Tensor) -> Tensor:
    mask = (target != 0).to(y.dtype)
    return (F.cross_entropy(y, target, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


def by_own_weights(y: Tensor, target: Tensor) -> Tensor:
    weights = y[:, 0].sigmoid()
    return (F.cross_entropy(y, target, reduction="none") * weights).sum() / weights.sum()


def contrastive(y: Tensor, target: Tensor) -> Tensor:
    logits = F.normalize(y, dim=1) @ F.normalize(y.sin(), dim=1).T / 0.1
    return F.cross_entropy(logits, torch.arange(y.shape[0]))


def barlow(y: Tensor, target: Tensor) -> Tensor:
    c = y.T @ y.sin() / len(y)
    return (c - torch.eye(CLASSES, dtype=y.dtype)).square().sum()


def concordance(y: Tensor, target: Tensor) -> Tensor:
    a, b = y[:, 0], target.to(y.dtype)
    covariance = ((a - a.mean()) * (b - b.mean())).mean()
    return 1 - 2 * covariance / (a.var() + b.var() + (a.mean() - b.mean()) ** 2)


def balanced(y: Tensor, target: Tensor) -> Tensor:
    counts = torch.bincount(target, minlength=CLASSES).clamp(min=1)
    return F.cross_entropy(y, target, weight=(counts.sum() / counts).to(y.dtype))


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


def distilled(y: Tensor, target: Tensor) -> Tensor:
    return F.kl_div((y / 2).log_softmax(1), (target / 2).softmax(1), reduction="batchmean") * 4


def even(y: Tensor, chosen: Tensor) -> Tensor:
    """Reads tokens in pairs: each microbatch must have a whole number of them."""
    tokens = y[chosen]
    torch._check(tokens.shape[0] % 2 == 0)
    return tokens.reshape(-1, 2, WIDTH).sum(1).square().sum()


def of_tokens(loss_fn: Callable[..., Any], target: Callable[[int], Any] | None = None) -> BatchCase:
    """A loss of a sequence of tokens."""
    drawn = target or (lambda rows: torch.randint(WIDTH, (rows, TIME)))
    return sequential(lambda h: h, target=drawn, loss_fn=loss_fn, options={"batched": {"target": 0}})


LOSSES: dict[str, BatchCase] = {
    "* cross entropy": loss(F.cross_entropy),
    "cross entropy, class weights, smoothed": loss(
        lambda y, t: F.cross_entropy(
            y, t, torch.tensor([0.2, 1.5, 0.7, 1.0]).to(y), ignore_index=1, label_smoothing=0.1
        ),
        last_classes,
    ),
    "* cross entropy, ignored": loss(lambda y, t: F.cross_entropy(y, t, ignore_index=1), last_classes),
    "cross entropy of shifted tokens": of_tokens(
        lambda y, t: F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten())
    ),
    "* cross entropy of chosen tokens": of_tokens(lambda y, t: F.cross_entropy(y[t != 0], t[t != 0])),
    "a sum of chosen tokens": of_tokens(lambda y, t: y[t != 0].square().sum()),
    "* chosen tokens over their count": of_tokens(lambda y, t: y[t != 0].square().sum() / (t != 0).sum()),
    "* pairs of chosen tokens": of_tokens(even, two_places),
    "* likelihood by arange": loss(lambda y, t: -y.log_softmax(1)[torch.arange(len(t)), t].mean()),
    "* likelihood, class weights, ignored": loss(
        lambda y, t: F.nll_loss(y.log_softmax(1), t, torch.arange(1.0, 5.0).to(y), ignore_index=1)
    ),
    "cross entropy of sequences": loss(
        lambda y, t: F.cross_entropy(torch.stack([y, y * y], 2), torch.stack([t, (t + 2) % 4], 1))
    ),
    "cross entropy of probabilities": loss(lambda y, t: F.cross_entropy(y, F.one_hot(t, CLASSES).to(y))),
    "* mse, summed over the rows": loss(
        lambda y, t: F.mse_loss(y, t, reduction="sum") / y.shape[0], values(CLASSES)
    ),
    "* a sum": loss(lambda y, t: F.cross_entropy(y, t, reduction="sum")),
    "a sum over a number": loss(lambda y, t: y.square().sum() / 57),
    "a sum over the elements": loss(lambda y, t: y.square().sum() / y.numel()),
    "rows over the rows": loss(lambda y, t: (y.square().sum(1) / torch.tensor(y.shape[0])).sum()),
    "stacked": loss(lambda y, t: torch.stack([F.cross_entropy(y, t, ignore_index=1), y.sum()], 0).sum()),
    "* stacked rows": loss(lambda y, t: torch.stack([y, y * y, y * 2]).sum((0, 2)).mean()),
    "python's sum": loss(lambda y, t: sum([F.cross_entropy(y, t, ignore_index=1), y.sum(), t.sum()])),
    "times a new tensor": loss(lambda y, t: y.new_ones([1]).sum() * F.cross_entropy(y, t, ignore_index=1)),
    "* kl, batchmean": loss(distilled, values(CLASSES)),
    "* masked mean": loss(masked_mean),
    "cosine embedding": loss(lambda y, t: F.cosine_embedding_loss(y, y.cos(), (t > 1) * 2 - 1)),
    "evidence": loss(evidence, values(2)),
    "policy gradient": loss(clipped_policy, policy_target),
    "* several terms": loss(
        lambda y, t: F.cross_entropy(y, t) + 0.1 * y.abs().mean() + 0.01 * y.square().sum() + 0.5
    ),
    "logs": loss(lambda y, t: (F.cross_entropy(y, t), {"accuracy": (y.argmax(1) == t).double().mean()})),
    "* advantage, normalised": loss(normalised_advantage, policy_target),
    "in-place terms": loss(lambda y, t: F.cross_entropy(y, t).add_(y.mean()).mul_(2)),
}
"""Sums and means over rows: the mini-batch's loss can be had from microbatches."""

LOSSES_THAT_MIX: dict[str, BatchCase] = {
    "mean of masked elements": loss(lambda y, t: F.cross_entropy(y, t, reduction="none")[t != 0].mean()),
    "mean by masked_select": loss(lambda y, t: y.sum(1).masked_select(t != 0).mean()),
    "ctc": loss(ctc, lambda rows: (torch.randint(1, CLASSES, (rows, 2)), torch.arange(rows) % 2 + 1)),
    "* dice of the batch": loss(dice_of_batch),
    "* mean by own weights": loss(by_own_weights),
    "mean of positive elements": loss(lambda y, t: y[y > 0].mean()),
    "* contrastive": loss(contrastive),
    "barlow": loss(barlow),
    "maximum mean discrepancy": loss(lambda y, t: (-torch.cdist(y, y).square()).exp().mean()),
    "concordance": loss(concordance),
    "balanced": loss(balanced),
    "mean of the means of classes": loss(mean_of_classes),
    "centres": loss(centres),
    "load balancing": loss(load_balancing),
    "* weights by arange": loss(lambda y, t: (y.square().mean(1) * torch.arange(len(y))).mean()),
    "total variation": loss(lambda y, t: (y[1:] - y[:-1]).abs().mean()),
    "* the first row": loss(lambda y, t: y[0].square().sum()),
    "times the rows": loss(lambda y, t: F.cross_entropy(y, t) * len(y)),
    "over the root of the rows": loss(lambda y, t: F.cross_entropy(y, t, reduction="sum") / len(y) ** 0.5),
    "* over the rows less one": loss(lambda y, t: y.square().sum() / (len(y) - 1)),
    "if more than four rows": loss(lambda y, t: F.cross_entropy(y, t) if len(y) > 4 else y.square().mean()),
    "rows by a permutation": loss(lambda y, p: (y * y[p].detach()).sum(1).mean(), chosen_rows),
    "* a table in the target": loss(
        lambda y, t: F.cross_entropy(y, t[0], t[1][:CLASSES]),
        lambda rows: (classes(rows), torch.rand(8) + 0.2),
    ),
    "prototypes in the target": loss(
        lambda y, t: F.cross_entropy(y @ t[1].T, t[0]), lambda rows: (classes(rows), torch.randn(8, CLASSES))
    ),
    "prototypes looked up": loss(
        lambda y, t: (y - t[1][t[0]]).square().mean(), lambda rows: (classes(rows), torch.randn(8, CLASSES))
    ),
    "flattened the wrong way": of_tokens(
        lambda y, t: F.cross_entropy(y.transpose(0, 1).reshape(-1, WIDTH), t.view(-1))
    ),
    "tokens chosen by activations": of_tokens(lambda y, t: y[y > 0].mean() + y[t != 0].sum()),
    "* the most of chosen tokens": of_tokens(lambda y, t: y[t != 0].amax(0).sum()),
    "chosen tokens over their size": of_tokens(lambda y, t: y[t != 0].sum() / y[t != 0].shape[0]),
}
"""What needs other rows, or numbers of rows: right, or refused."""

LOSSES_OF_THE_BATCH: dict[str, BatchCase] = {
    "* root of the mean": loss(lambda y, t: (y - t).square().mean().sqrt(), values(CLASSES)),
    "entropy of the mean": loss(lambda y, t: -(y.softmax(1).mean(0) * y.softmax(1).mean(0).log()).sum()),
    "* largest": loss(lambda y, t: F.cross_entropy(y, t, reduction="none").max()),
    "logsumexp": loss(lambda y, t: y.logsumexp((0, 1))),
    "variance": loss(lambda y, t: y.var()),
    "norm": loss(lambda y, t: y.norm()),
    "quantile": loss(lambda y, t: torch.quantile(y.square().mean(1), 0.8)),
    "product": loss(lambda y, t: y.sigmoid().prod()),
    "a clamped mean": loss(lambda y, t: F.cross_entropy(y, t).clamp(min=1.3)),
    "the larger of two means": loss(lambda y, t: torch.maximum(y[:, 0].mean(), y[:, 1].mean())),
    "normalised by itself": loss(lambda y, t: y.square().mean() / y.square().mean().detach()),
}
"""Functions of the batch's sums and means: a warning is a word, too."""

NORMS: dict[str, BatchCase] = {
    "* batch norm": flat(called, lambda: nn.BatchNorm1d(WIDTH)),
    "batch norm of pictures": pictured(called, lambda: nn.BatchNorm2d(3)),
    "batch norm without statistics": flat(called, lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False)),
    "batch norm by function": flat(lambda h: F.batch_norm(h, None, None, training=True)),
    "a buffer of means that nothing reads": flat(called, Averaged),
}
"""BatchNorm in training mode sees microbatches: the declared exception, which must be said."""

# Outputs.

OUTPUTS: dict[str, BatchCase] = {
    "* rows, sums and means": output(
        lambda y: {
            **{"rows": y.exp(), "last": y[:, -1], "sum": y.sum(0), "mean": y.mean(0)},
            **{"count": (y > 0).sum(), "sum of sums": torch.stack([y.sum(), (2 * y).sum()]).sum()},
        }
    ),
    "rows and a table": output(lambda y, a: (y, a.weight * 2), lambda: nn.Linear(WIDTH, 2)),
    "* a sum over the rows": output(lambda y: y.sum(0) / len(y)),
}

OUTPUTS_THAT_MIX: dict[str, BatchCase] = {
    "* two copies of the batch": output(lambda y: torch.cat([y, 2 * y], 0)),
    "* repeated": output(lambda y: y.repeat(2, 1)),
    "two copies of each row": output(lambda y: y.repeat_interleave(2, 0)),
    "flattened": output(lambda y: y.flatten()),
    "* a transpose, flattened": output(lambda y: y.t().flatten()),
    "a transpose": output(lambda y: y.t()),
    "time first": output(lambda y: y.view(y.shape[0], 3, 2).transpose(0, 1)),
    "* sorted": output(lambda y: y.sort(0).values),
    "histogram": output(lambda y: y.histc(4, -1, 1)),
    "unbind": output(lambda y: y.unbind(0)),
    "* the number of rows": output(lambda y: (y, y.shape[0])),
    "the number of rows, as a tensor": output(lambda y: torch.tensor(y.shape[0])),
    "* numbers of rows": output(lambda y: torch.arange(y.shape[0])),
    "variance": output(lambda y: y.var(0)),
    "* the first row": output(lambda y: y[0]),
    "all but the first": output(lambda y: y[1:]),
    "reversed": output(lambda y: y.flip(0)),
    "rolled": output(lambda y: y.roll(1, 0)),
    "positive elements": output(lambda y: y[y > 0]),
    "unique": output(lambda y: (y > 0).long().unique()),
    "a mean for each group": output(lambda y, c: scatter_mean(y, c), others=(classes,)),
    "states of a GRU": output(
        lambda y, a: a(y[:, None])[1], lambda: nn.GRU(WIDTH, 3, bidirectional=True, batch_first=True)
    ),
    "* a sum made in place": output(
        lambda y, c: y.new_zeros(CLASSES, WIDTH).index_add_(0, c, y), others=(classes,)
    ),
    "rows written after they are returned": output(returned_and_written),
    "a sum times the rows": output(lambda y: y.mean(0) * len(y)),
    "a sum over the root of rows": output(lambda y: y.sum(0) / len(y) ** 0.5),
    "a constant with as many rows": output(lambda y: (y, torch.arange(8))),
    "batch norm": output(lambda y, a: a(y), lambda: nn.BatchNorm1d(WIDTH), expect=Expect.TOLD),
}

# Models that are compiled for one number of rows, two of four microbatches: a run tells what comes from it.


def fixed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loop over the rows makes a constant of their number."""

    def unrolled(h: Tensor, *others: Any) -> Tensor:
        for _ in range(h.shape[0]):
            pass
        return function(h, *others)

    return unrolled


def fixed_case(function: Callable[..., Tensor], **more: Any) -> BatchCase:
    return flat(fixed(function), lambda: nn.Embedding(16, WIDTH), microbatches=4, **more)


def branch_on_places(h: Tensor, a: nn.Embedding) -> Tensor:
    """As Longformer asks whether any position has global attention."""
    mask = torch.arange(12)[None].expand(h.shape[0], -1) % 3 - 1
    return h + 1 if (mask > 0).flatten().any() else h


FIXED: dict[str, BatchCase] = {
    "* as many places as rows": fixed_case(lambda h, a: h + a(torch.arange(2)).sum(0)),
    "* a multiple of the rows": fixed_case(lambda h, a: h + a(torch.arange(0, 12)).mean(0)),
    "* a constant of their size": fixed_case(lambda h, a: h * torch.full((2, 2), 0.5).sum()),
    "* a branch on places": fixed_case(branch_on_places),
    "a loss that counts": fixed_case(
        lambda h, a: h, target=picks, loss_fn=lambda y, t: F.cross_entropy(y, t, ignore_index=0)
    ),
}

FIXED_AND_MIXING: dict[str, BatchCase] = {
    "at least four": fixed_case(lambda h, a: h + a(torch.arange(max(h.shape[0], 4))).sum(0)),
    "at most four": fixed_case(lambda h, a: h + a(torch.arange(min(h.shape[0], 4))).sum(0)),
    "* one more": fixed_case(lambda h, a: h + a(torch.arange(h.shape[0] + 1)).sum(0)),
    "both": fixed_case(lambda h, a: h + torch.zeros(h.shape[0], 2).add(1).sum()),
    "* ones of all rows": fixed_case(lambda h, a: h * torch.ones(h.shape[0]).sum()),
    "another computation": fixed_case(lambda h, a: h * 3 if h.shape[0] == 2 else h + 1 + h),
    "a number of each row": fixed_case(lambda h, a: h * torch.arange(h.shape[0])[:, None]),
    "a place of each row": fixed_case(lambda h, a: h + a(torch.arange(h.shape[0]))),
    "an output": output(fixed(lambda y: y + torch.ones(y.shape[0] + 1).sum()), microbatches=4),
}

# What an error tells to do, followed.

ALONG_DIMENSION_1: dict[str, Any] = {"options": {"batched": {"x": 1, "target": 1}}}
REMEDIES: dict[str, BatchCase] = {
    "if more than four rows, the batch taken whole": flat(by_size, rows=(8, 3), microbatches=None),
    "* a contrastive loss, one microbatch": loss(contrastive, microbatches=1),
    "mixup, permutation drawn outside": flat(lambda h, other: 0.3 * h + 0.7 * other, others=(values(WIDTH),)),
    "* LSTM, time first, split along dimension 1": replace(MIXING["* LSTM, time first"], **ALONG_DIMENSION_1),
    "transformer, time first, split along dimension 1": replace(
        MIXING["transformer layer, time first"], **ALONG_DIMENSION_1
    ),
    "weights by arange, made outside": loss(
        lambda y, w: (y.square().mean(1) * w).mean(), lambda rows: torch.arange(rows).float()
    ),
    "a table, whole": flat(
        lambda h, t: h @ t.T, others=(table_of(8, WIDTH),), options={"batched": {1: None}}
    ),
}

CUSTOM_OPERATORS = {
    "* custom operator by row": flat(doubled),
    "vmap of a custom operator": flat(lambda h: torch.vmap(lambda row: row * 2)(doubled(h))),
}
"""Nobody can know that they do not mix rows: they may be warned of, but then they are right."""

GROUPS: Mapping[str, tuple[Expect, Mapping[str, BatchCase]]] = {
    "row-wise": (Expect.RIGHT, ROW_WISE),
    "mixing": (Expect.NEVER_WRONG, MIXING),
    "drawn": (Expect.RIGHT, DRAWN),
    "loss": (Expect.RIGHT, LOSSES),
    "loss that mixes": (Expect.NEVER_WRONG, LOSSES_THAT_MIX),
    "loss of the batch": (Expect.TOLD, LOSSES_OF_THE_BATCH),
    "norm": (Expect.TOLD, NORMS),
    "output": (Expect.RIGHT, OUTPUTS),
    "output that mixes": (Expect.NEVER_WRONG, OUTPUTS_THAT_MIX),
    "fixed": (Expect.RIGHT, FIXED),
    "fixed and mixing": (Expect.REFUSED, FIXED_AND_MIXING),
    "remedy": (Expect.RIGHT, REMEDIES),
    "custom": (Expect.NEVER_WRONG, CUSTOM_OPERATORS),
}

NOT_PROVED = {
    *("row-wise: sorted experts", "row-wise: grid sample", "row-wise: custom backward"),
    *("loss: stacked", "norm: a buffer of means that nothing reads", "drawn: mixup"),
    *("drawn: rows by a permutation drawn", "drawn: rows drawn with replacement"),
    "drawn: rows sampled by their weight",
    *("fixed: as many places as rows", "fixed: a multiple of the rows"),
}
"""What is right, and left to the check or to a tail."""

if torch.__version__.startswith("2.11"):  # does not know that two selections by one mask have one size
    del LOSSES["* cross entropy of chosen tokens"]

CASES: dict[str, BatchCase] = {}
for group, (expect, table) in GROUPS.items():
    for key, case in table.items():
        name = f"{group}: {key.removeprefix('* ')}"
        wanted = expect if case.expect is Expect.NEVER_WRONG else case.expect
        CASES[name] = replace(case, name=name, expect=wanted, quick=key.startswith("* "))
