"""Random straight-line programs over a batch, as Python source: what is drawn is what a report prints.

A program reads rows (``h``, ``s``, ``w``, ``k``, ``m``, ``p``) and what has none (``c``, ``t``). Each
statement is drawn from a menu of templates, and kept if it runs on batches of several sizes.
"""

import functools
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

ROWS, WIDTH, TIME = 8, 6, 5
SIZES = (5, 3)
"""The rows of the mini-batch, and of its microbatches."""

ARGUMENTS = ("h", "s", "w", "k", "m", "p", "c", "t")
BATCHED = ("h", "s", "w", "k", "m", "p")
TRAINED = ("h", "c")
"""Arguments that depend on parameters, as activations do."""

MOST_ELEMENTS, MOST_DIMENSIONS = 4000, 4


def arguments(rows: int = ROWS, seed: int = 0) -> dict[str, Tensor]:
    """Rows, a weight, a choice, a mask and another choice for each; and a vector and a matrix of weights."""
    generator = torch.Generator().manual_seed(seed)
    drawn = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return {
        "h": drawn(rows, WIDTH),
        "s": drawn(rows, TIME, WIDTH),
        "w": drawn(rows).abs() + 0.5,
        "k": torch.randint(WIDTH, (rows,), generator=generator),
        "m": torch.arange(rows) % 3 != 1,
        "p": torch.randint(2, (rows,), generator=generator),
        "c": drawn(WIDTH),
        "t": drawn(WIDTH, WIDTH),
    }


# {v}, {u}: values, {u} of the same shape where there is one; {d}, {e}: dimensions of {v}, and {r} how
# many it has; {n}: 1 to 3; {o}: the result.

ROW_BY_ROW = """
torch.tanh({v}) | {v} * 0.7 + 0.2 | F.gelu({v}) | {v}.clamp(min=-0.3) | {v} + {u} | {v} * {u} | {v} - {u}
torch.where({v} > 0.1, {v}, {u}) | torch.maximum({v}, {u}) | torch.lerp({v}, {u}, 0.3) | {v}.abs() + 0.1
{v} / ({u}.abs() + 1) | {v} * ({v} > 0) | torch.addcmul({v}, {v}, {u}) | {v} + c | {v} * c[None]
F.linear({v}, t) | {v} @ t | t @ {v}.mT | {v}.transpose(0, -1) * w | {v} * w[:, None] | {v} * w[:, None, None]
{v} + k[:, None] | {v}.masked_fill(m[:, None], 0.5) | F.embedding(k, t) | F.one_hot(k, 6) * {v} | t[k]
c[k] * {v}.sum(1) | {v}.double() | {v}.contiguous() | {v}.clone() | {v}.detach() | {v}.sigmoid().log()
torch.erf({v}).square() | {v}[...] | {v}[:] | {v}[None] | {v}[..., None] | {v}.nan_to_num(0.1)
"""

ALONG_A_DIMENSION = """
{v}.softmax({d}) | {v}.log_softmax({d}) | {v}.cumsum({d}) | {v}.sort({d}).values | {v}.argsort({d}).double()
{v}.flip({d}) | {v}.roll({n}, {d}) | {v}.sum({d}) | {v}.mean({d}) | {v}.mean({d}, keepdim=True)
{v}.sum({d}, True) | {v}.amax({d}) | {v}.amin({d}, keepdim=True) | {v}.std({d}, keepdim=True) | {v}.var({d})
{v}.logsumexp({d}) | {v}.cummax({d}).values | {v}.cumprod({d}) | F.normalize({v}, dim={d})
{v}.norm(dim={d}) | {v}.diff(dim={d}) | {v}.argmax({d}).double() | {v}.median({d}).values | {v}.prod({d})
{v}.topk(2, {d}).values | {v}.max({d})[0] | {v} - {v}.mean({d}, keepdim=True)
{v} / {v}.abs().sum({d}, keepdim=True) | {v}.min({d}).indices.double() | {v}.gather({d}, {v}.argsort({d}))
torch.take_along_dim({v}, {u}.argsort({d}), {d}) | {v}.kthvalue(2, {d}).values
torch.fft.fft({v}, dim={d}).real | {v}.renorm(2, {d}, 1.0) | {v}.logcumsumexp({d})
{v}.count_nonzero({d}).double() | {v}.scatter({d}, {v}.argsort({d}), {u})
{v}.scatter_add({d}, {v}.argsort({d}), {u}) | torch.quantile({v}, 0.3, {d}) | ({v} > 0).any({d}).double()
({v} > -1).all({d}).double() | {v}.nansum({d}) | F.softmin({v}, {d}) | F.glu({v}, {d})
F.cosine_similarity({v}, {u}, {d}) | torch.trapezoid({v}, dim={d}) | {v}.unfold({d}, 2, 1)
{v}.aminmax(dim={d}).max | {v}.index_select({d}, torch.tensor([1, 0]))
{v}.index_fill({d}, torch.tensor([1]), 0.5) | torch.cross({v}[..., :3], {u}[..., :3], -1)
{v}.index_add({d}, torch.tensor([0, 1]), {u}.narrow({d}, 0, 2))
{v}.index_copy({d}, torch.tensor([1, 0]), {u}.narrow({d}, 0, 2)) | {v}.select({d}, {n} - 1)
{v}.select({d}, -1) | {v}.narrow({d}, 0, 2) | {v}.unbind({d})[1] | {v}.chunk(2, {d})[0]
{v}.split(2, {d})[0] | {v}.tensor_split(2, {d})[0] | torch.stack({v}.unbind({d}), {d})
torch.cat({v}.chunk(2, {d})[::-1], {d}) | torch.select_scatter({v}, {u}.select({d}, 0), {d}, 1)
torch.slice_scatter({v}, {u}.narrow({d}, 0, 1), {d}, 1, 2) | F.layer_norm({v}, {v}.shape[{d}:])
{v}.sum(({d}, {e})) | {v}.mean(({d}, {e}), keepdim=True) | {v}.std(({d}, {e}))
torch.linalg.vector_norm({v}, dim=({d}, {e})) | {v}.amax(({d}, {e})) | {v}.flip({d}, {e})
{v}.roll((1, 1), ({d}, {e})) | torch.gradient({v}, dim={d})[0] | {v}.swapaxes({d}, {e}).cumsum({d})
torch.cumulative_trapezoid({v}, dim={d})
"""

MOVING = """
{v}.transpose({d}, {e}) | {v}.movedim({d}, {e}) | {v}.unsqueeze({d}) | {v}.unsqueeze(-1) | {v}.squeeze()
{v}.squeeze({d}) | {v}.flatten({d}) | {v}.flatten(0, {d}) | {v}.reshape(-1)
{v}.reshape({v}.shape[{d}], -1) | {v}.reshape(-1, {v}.shape[{d}])
{v}.reshape({v}.shape[{d}], {v}.shape[{e}], -1) | {v}.unflatten({d}, (2, -1)) | {v}.unflatten({d}, (-1, 2))
{v}.mT | {v}.unflatten({d}, (3, 2)) | {v}.flatten(0, 1).unflatten(0, (-1, {v}.shape[1]))
{v}.flatten(0, 1).unflatten(0, ({v}.shape[0], -1)) | {v}.transpose({d}, {e}).reshape({v}.shape)
{v}.flatten({d}).unflatten({d}, {v}.shape[{d}:]) | {v}.reshape(-1, 3)
{v}.transpose({d}, {e}).flatten().view({v}.shape) | {v}.permute(*range({r})[::-1]) | {v}.reshape(-1, 2)
torch.cat([{v}, {u}], {d}) | torch.stack([{v}, {u}], {d}) | {v}.repeat_interleave(2, {d})
torch.cat([{v}, {v}.roll(1, {d})], {e}) | {v}[None].expand(2, *[-1] * {r})
torch.cat([{v}, {u}], {d}).chunk(2, {d})[1] | torch.stack([{v}, {u}], {d}).unbind({d})[1]
{v}.repeat(2, *[1] * ({r} - 1)) | {v}.repeat(*[1] * ({r} - 1), 2) | torch.tile({v}, (2, 1))
torch.stack([{v}, {u}], {d}).flatten({d}, {d} + 1)
{v}.repeat_interleave(2, {d}).unflatten({d}, (-1, 2)).sum({d} + 1)
{v}.repeat_interleave(2, {d}).unflatten({d}, (2, -1)).sum({d})
torch.cat([{v}, {u}], {d}).unflatten({d}, (-1, 2)).sum({d} + 1)
torch.cat([{v}, {u}], {d}).unflatten({d}, (2, -1)).sum({d}) | F.pad({v}, (1, 1)) | F.pad({v}, (0, 0, 1, 0))
F.pad({v}, (0, 0, -1, 1)) | F.pad({v}, (1, 0), value=0.5) | {v}[1:] | {v}[:-1] | {v}[::2] | {v}[:, ::2]
{v}[:, 1:] | {v}[..., -1] | {v}[-1] | {v}[0] | {v}[:2] | {v}[:, [1, 0]] | {v}[[0, 1]] | {v}[:, None]
{v}.tril() | {v}.triu(1) | {v}.diagonal(0, {d}, {e}) | {v}.transpose({d}, {e}).tril() | {v}.roll({n})
{v}.roll({n}).roll(-{n}) | {v}.as_strided((2, 3), (1, 2)) | {v}.T | {v}.ravel() | torch.hstack([{v}, {u}])
torch.vstack([{v}, {u}]) | torch.dstack([{v}, {u}]) | torch.flipud({v}) | torch.fliplr({v})
torch.rot90({v}) | {v}.view_as({u}) | {v}.reshape_as({u}) | torch.atleast_3d({v})
{v}.reshape({v}.shape[{d}] * {v}.shape[{e}], -1) | {v}.unflatten({d}, ({v}.shape[{d}] // 2, 2))
torch.column_stack([{v}, {u}]) | torch.block_diag({v}, {u}) | torch.diag_embed({v})
{v}.unsqueeze({d}).expand(*[-1] * {d}, 3, *[-1] * ({r} - {d})).flatten({d}, {d} + 1)
"""

MIXING = """
{v}.sum() | {v}.mean() | {v}.max() | {v}.norm() | {v}.std() | {v} - {v}.mean() | {v} / ({v}.abs().sum() + 1)
({v} == {v}.max()).double() | {v} @ {u}.mT | {v}.mT @ {u} | {v} @ {u}.mT @ {v} | torch.cdist({v}, {u})
torch.cdist({v}, t) | torch.outer(w, {v}.reshape(-1)[:3]) | torch.einsum({equation!r}, {v}, {u})
torch.einsum({equation!r}, {v}, {u}) | torch.einsum({equation!r}, {v}, t) | torch.tensordot({v}, {u}.mT, 1)
torch.kron({v}, c) | {v}[k % 2] | {v}[p] | {v}.index_select(0, p) | {v}[:, p] | {v}[p, k % 2]
{v}.index_add(0, p, {v}) | {v}.new_zeros(6, {v}.shape[1]).index_add(0, k, {v})
{v}.new_zeros(6).scatter_add(0, k, w) | {v}.new_zeros(6).index_add(0, k, w)[k]
{v}.index_copy(0, arange({v}.shape[0]), {u}) | {v}[arange({v}.shape[0])] | {v}[arange({v}.shape[0]), k % 2]
{v}[arange({v}.shape[0]), p] | {v} * arange({v}.shape[{d}]).reshape(-1, 1)
{v} + arange({v}.shape[0])[:, None] | {v} * arange({v}.shape[-1]) | eye({v}.shape[0]) @ {v}
{v} + eye({v}.shape[0], {v}.shape[-1]) | {v} * {v}.shape[{d}] | {v} / {v}.numel()
{v} * {v}.shape[0] / {v}.shape[1] | {v}.sum(0) / {v}.shape[0] | {v}.sum({d}) / {v}.shape[{d}]
{v} + {v}.new_ones({v}.shape[0]).cumsum(0)[:, None] | {v}.new_ones({v}.shape[0], 1) * {v}
{v}.new_zeros({v}.shape[0], 2).sum(1) + w | ones({v}.shape[0]).sum() * {v} | full({v}.shape[0], 0.5) * w
{v}[m] | {v}[m].sum() | {v}.masked_select({v} > 0).sum() | {v}[{v} > 0.1].mean() | {v} * ({v} > 0.1).sum()
({v} * m[:, None]).sum() / m.sum() | (w * k).sum() / w.sum() | {v} / w.sum() | {v} * w.mean()
{v} / k.double().mean() | w / w.sum() | {v} - w.max() | {v} * m.sum() | w.softmax(0)
F.conv1d({v}, t[:, :5, None]) | F.conv1d({v}, t[:5, :5, None], padding=1)
F.avg_pool1d({v}, 2) | F.max_pool1d({v}, 2, 1) | F.conv1d({v}.mT, t[:, :, None])
F.conv1d({v}.mT[None], t[:, :, None])[0] | F.interpolate({v}, scale_factor=2) | F.adaptive_avg_pool1d({v}, 2)
F.instance_norm({v}) | F.group_norm({v}, 1) | F.batch_norm({v}, c, c.abs())
F.batch_norm({v}, c[:5], c[:5].abs())
F.scaled_dot_product_attention({v}, {u}, {u})
F.scaled_dot_product_attention({v}.transpose(0, 1), {u}.transpose(0, 1), {u}.transpose(0, 1))
F.mse_loss({v}, {u}, reduction="none") | F.mse_loss({v}, {u}) | F.cross_entropy({v}, k, reduction="none")
F.cross_entropy({v}, k, ignore_index=2) | F.cross_entropy({v}, k, c.abs())
F.cross_entropy({v}, k, label_smoothing=0.1, reduction="sum") | F.nll_loss({v}, k)
F.kl_div({v}, {u}.abs(), reduction="batchmean") | F.l1_loss({v}, {u}, reduction="sum")
F.cosine_embedding_loss({v}, {u}, 2 * m - 1) | F.triplet_margin_loss({v}, {u}, {v}.roll(1, -1))
torch.bincount(k, minlength=6).double() | torch.bincount(k, w, minlength=6)
torch.bincount(k, minlength=6)[k].double() | F.one_hot(k, 6).sum(0).double()
F.one_hot(k, 6).double().T @ {v}
torch.histc({v}, 4, -1, 1) | torch.bucketize({v}, c.sort().values).double()
torch.searchsorted({v}.sort(-1).values, {u}).double() | torch.searchsorted(w.sort().values, w).double()
torch.cov({v}) | torch.corrcoef({v}.T) | torch.linalg.qr({v}).R.abs()
torch.linalg.inv({v}.mT @ {v} + eye({v}.shape[-1]))
torch.linalg.det({v}.mT @ {v}) | torch.linalg.matrix_norm({v}) | torch.fft.fftn({v}).real | torch.trace({v})
F.bilinear({v}, {u}, t[None].expand(2, -1, -1)) | {v}.unique().numel() * {v} | torch.fft.fft2({v}).real
torch.pdist({v}) | F.pairwise_distance({v}, {u}) | F.normalize({v}) | F.softmax({v})
F.embedding_bag(k[:, None], t, mode="sum") | F.embedding(k % 2, {v}) | torch.combinations(w).sum()
torch.meshgrid(w, w, indexing="ij")[0] | torch.cartesian_prod(w, w).sum(1) | {v}.reshape(-1)[k]
torch.vander(w, 3) | w.cumsum(0) | w[:, None] * w | (w[:, None] == w).sum(1) * {v}.sum(-1)
(k[:, None] == k).double() @ {v} | {v}.nonzero().sum() * {v} | F.local_response_norm({v}, 2)
F.unfold({v}[:, None], (2, 2)) | F.pixel_shuffle({v}.repeat(1, 4, 1)[..., None].transpose(-1, -2), 2)
F.lp_pool1d({v}, 2, 2) | F.conv2d({v}[:, None], t[None, None, :2, :2])
F.conv_transpose1d({v}.mT, t[:, :, None]) | F.rms_norm({v}, {v}.shape[{d}:]) | F.hardtanh({v}).prod()
"""

NUMBERS_OF_ROWS = """
({v}.new_zeros({v}.shape[0] // 2) + 1).sum() * {v} | {v}[: {v}.shape[0] // 2].sum(0)
({v}[1:] * 0 + 1).sum() * {v} | ({v}.new_zeros({v}.shape[0] + 1) + 1).sum() * w
{v}.narrow({d}, 0, {v}.shape[{d}] - 1) | {v} / ({v}.shape[0] - 1) | {v}.chunk(2, {d})[0] * 0 + 1
{v}.new_ones({v}.shape[{d}], 2).mean() * {v} | {v}.new_ones({v}.shape[{d}]).sum() + {v}
arange({v}.shape[0]).flip(0) * w | arange({v}.shape[0]) % 2 * w | (arange({v}.shape[0]) < 3) * w
arange({v}.shape[0]).cumsum(0) * w | arange({v}.shape[0], 0, -1) * w | arange(1, {v}.shape[0] + 1) * w
arange({v}.shape[0]).max() * {v} | arange({v}.shape[0] * 2)[::2] * w
arange({v}.shape[0])[:, None] * {v} - arange({v}.shape[0])[:, None]
torch.cat([arange({v}.shape[0]), arange({v}.shape[0])]).double()
(arange({v}.shape[0])[:, None] == arange({v}.shape[0])).double() @ {v}
(arange({v}.shape[0]) - arange({v}.shape[0])) * w
(arange({v}.shape[0])[:, None] >= arange({v}.shape[0])).double() @ {v}
torch.stack([arange({v}.shape[0]), p], 1).double() | arange({v}.shape[0]).repeat_interleave(2) * 1.0
arange({v}.shape[0]).double().mean() * {v} | arange({v}.shape[0]).neg().exp() * w
{v}[arange({v}.shape[0]) // 2] | {v}[arange({v}.shape[0]).flip(0)]
{v}.index_select(0, arange({v}.shape[0])) | t[arange({v}.shape[0]) % 6]
{v}.gather(0, arange({v}.shape[0])[:, None].expand(-1, {v}.shape[1]))
{v}.index_put((arange({v}.shape[0]), p), w) | {v}.index_put((arange({v}.shape[0]),), {u})
{v}.index_add(0, arange({v}.shape[0]), {u}) | {v}.index_fill(0, arange({v}.shape[0]), 0.5)
eye({v}.shape[0])[p] @ {v} | eye({v}.shape[0]).sum(0) * w | eye({v}.shape[0])[:, :2] * w[:, None]
eye(6)[k] * {v} | eye({v}.shape[0]).diagonal() * w | {v} * ({v}.shape[0] > 0) | {v} * {v}.shape[0] ** 0.5
{v}.sum(0) / {v}.shape[0] ** 0.5 | {v}.shape[0] / {v}.numel() * {v} | {v}.sum(0) * (1 / {v}.shape[0])
"""

WRITING_INTO_A_COPY = """
setitem({o}, 0, 0.5) | setitem({o}, slice(None, 2), 0.5) | setitem({o}, (slice(None), 0), 0.5)
setitem({o}, (Ellipsis, slice(1, None)), 0.5) | setitem({o}, m, 0.5) | setitem({o}, {v} > 0.3, 0.5)
setitem({o}, (slice(None), 0), {u}[:, 1]) | setitem({o}, 0, {u}[1]) | setitem({o}, p, {u})
setitem({o}, (arange({v}.shape[0]), p), 0.5) | {o}[0].mul_(2) | {o}[:, 0].mul_(2)
{o}.select({d}, 0).copy_({u}.select({d}, 1)) | {o}.narrow({d}, 0, 2).add_(1) | {o}.transpose({d}, {e}).mul_(2)
{o}.view(-1)[0].add_(1) | {o}.view(-1).mul_(2) | {o}.fill_diagonal_(0.5) | {o}.masked_fill_(m[:, None], 0.5)
{o}.index_fill_({d}, torch.tensor([1]), 0.5) | {o}.sub_({o}.mean({d}, keepdim=True))
{o}.copy_({u}.flip({d})) | {o}.chunk(2, {d})[0].zero_() | {o}.diagonal(0, {d}, {e}).mul_(3)
{o}.unbind({d})[0].mul_(3) | {o}.squeeze().mul_(3) | {o}.unsqueeze({d}).expand_as({o}.unsqueeze({d})).mul_(3)
{o}.view(-1, 2)[:, 0].mul_(3) | {o}.reshape(-1, 2)[0].mul_(3) | {o}.detach().mul_(2) | {o}.t().copy_({u}.t())
{o}.cumsum_({d}) | {o}.unflatten({d}, (-1, 2)).select({d} + 1, 0).mul_(3)
{o}.unflatten({d}, (2, -1)).select({d}, 0).mul_(3)
"""

WRITING_INTO_NEW = """
{o} = {v}.new_zeros({v}.shape); {o}.add_({v}.sum({d}, keepdim=True))
{o} = {v}.new_zeros({v}.shape); {o}.scatter_({d}, {v}.argsort({d}), {u})
{o} = {v}.new_zeros({v}.shape[0], 2); setitem({o}, (slice(None), 1), w)
{o} = {v}.new_zeros({v}.shape[0]); {o}.index_add_(0, p, w)
{o} = {v}.new_zeros({v}.shape[0]); {o}[1:].add_(w[:-1])
{o} = {v}.new_zeros({v}.shape[0]); {o}.add_(w); {o}.resize_({v}.shape[0])
{o} = {v}.new_empty({v}.shape[0], 2); {o}.fill_(0.5); {o}[:, :1].add_(w[:, None])
{o} = {v}.new_zeros(6); {o}.index_add_(0, k, w) | {o} = {v}.new_zeros(6); {o}.add_(w.sum())
"""


def _menu(text: str, before: str = "{o} = ") -> list[str]:
    """Statements, one or several a line."""
    return [before + part.strip() for line in text.strip().splitlines() for part in line.split(" | ")]


MENU = {
    "row by row": _menu(ROW_BY_ROW),
    "along": _menu(ALONG_A_DIMENSION),
    "moving": _menu(MOVING),
    "mixing": _menu(MIXING),
    "numbers of rows": _menu(NUMBERS_OF_ROWS),
    "writing": _menu(WRITING_INTO_A_COPY, "{o} = {v}.clone(); ") + _menu(WRITING_INTO_NEW, before=""),
}


@dataclass(frozen=True)
class Program:
    """``statements`` in order; the names of their results are ``names``."""

    statements: tuple[str, ...]
    names: tuple[str, ...]
    seed: int = -1

    @property
    def source(self) -> str:
        return "\n".join(statement.replace("; ", "\n") for statement in self.statements)

    @property
    def reads(self) -> tuple[str, ...]:
        """The arguments that the statements name, and ``h``."""
        words = set(re.findall(r"\b[a-z]\b", self.source)) | {"h"}
        return tuple(name for name in ARGUMENTS if name in words)

    def function(self, results: str, arguments: Sequence[str] = ARGUMENTS) -> Callable[..., Any]:
        """A Python function of these arguments that runs the statements and returns an expression."""
        lines = "\n    ".join(self.source.splitlines())
        text = f"def program({', '.join(arguments)}):\n    {lines}\n    return {results}\n"
        scope = dict(SCOPE)
        exec(compile(text, f"<program {self.seed}>", "exec"), scope)
        return scope["program"]  # type: ignore[no-any-return]


def recorded(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """A function of numbers alone, which symbolic tracing does not see otherwise."""

    def call(*args: Any) -> Any:
        proxies = [arg for arg in args if isinstance(arg, fx.Proxy)]
        if proxies:
            return proxies[0].tracer.create_proxy("call_function", function, args, options)
        return function(*args, **options)

    return call


SCOPE: Mapping[str, Any] = {
    "torch": torch,
    "F": F,
    "setitem": recorded(operator.setitem),
    "arange": recorded(torch.arange),
    "eye": recorded(torch.eye, dtype=torch.float64),
    "ones": recorded(torch.ones, dtype=torch.float64),
    "full": lambda size, value: recorded(torch.ones, dtype=torch.float64)(size) * value,
}


def draw_program(seed: int, most: int = 6, menu: Mapping[str, Sequence[str]] = MENU) -> Program:
    """A program of 2 to ``most`` statements, fewer if others do not run on the batch and each microbatch."""
    choose = random.Random(seed)
    weights = {kind: choose.random() for kind in menu}
    careful = choose.choice([0.0, 0.5, 0.9])
    batches = [arguments(rows) for rows in (ROWS, *sorted(set(SIZES)))]
    statements: list[str] = []
    names: list[str] = []
    wanted, attempts = choose.randint(2, most), 0
    while len(names) < wanted and attempts < 60:
        attempts += 1
        kind = choose.choices(list(weights), list(weights.values()))[0]
        name = f"v{len(names)}"
        try:
            statement = _fill(choose, choose.choice(menu[kind]), batches[0], names, name, careful)
            made = [_run(statement, batch) for batch in batches]
        except Exception:
            continue
        if all(_is_usable(each[name]) for each in made):
            batches = made
            names.append(name)
            statements.append(statement)
    return Program(tuple(statements), tuple(names), seed)


def _fill(
    choose: random.Random,
    template: str,
    values: Mapping[str, Any],
    names: list[str],
    name: str,
    careful: float,
) -> str:
    """A template with values, dimensions and numbers in its places."""
    chosen = names[-1] if names and choose.random() < 0.7 else choose.choice([*names, "h", "s", "h", "s"])
    value = values[chosen]
    alike = [other for other in (*names, "h", "s") if values[other].shape == value.shape]
    dims = list(range(value.ndim)) or [0]
    without = [dim for dim in dims if value.ndim and value.shape[dim] % ROWS]
    first = choose.choice(without if without and choose.random() < careful else dims)
    letters = "".join(choose.sample("abc", value.ndim)) if value.ndim <= 3 else "abcd"
    others = "".join(choose.sample("abcd", value.ndim)) if value.ndim <= 4 else "abcd"
    both = sorted(set(letters + others))
    result = "".join(choose.sample(both, choose.randint(1, min(3, len(both)))))
    return template.format(
        o=name,
        v=chosen,
        u=choose.choice(alike),
        d=first,
        e=choose.choice([dim for dim in dims if dim != first] or dims),
        n=choose.randint(1, 3),
        r=value.ndim,
        equation=f"{letters},{others}->{result}",
    )


def _run(statement: str, batch: Mapping[str, Any]) -> dict[str, Any]:
    scope = {**SCOPE, **batch}
    exec(statement, scope)
    return {**batch, **{name: value for name, value in scope.items() if name.startswith("v")}}


def _is_usable(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and 0 < value.numel() <= MOST_ELEMENTS
        and value.ndim <= MOST_DIMENSIONS
        and bool(torch.isfinite(value).all())
    )
