"""FlexAttention in a model, and functions of ``torch.vmap`` that write in place, as its masks are made by."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as library
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from unsplit_reference import relative_error

import pipec
from pipec.errors import CaptureError

ROWS, TOKENS, WIDTH, ROUNDING = 4, 128, 8, 1e-12


class Attention(nn.Module):
    """Four heads of queries, two of keys, and tables that functions of scores and masks read."""

    def __init__(self, score_mod: Any = None, mask_mod: Any = None, rows: int | None = None) -> None:
        super().__init__()
        self.queries, self.others = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.head = nn.Linear(16, 2)
        self.slopes, self.table = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4, TOKENS, TOKENS))
        self.score_mod, self.mask_mod, self.rows = score_mod, mask_mod, rows

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        def split(values: Tensor, heads: int) -> Tensor:
            return values.view(len(x), TOKENS, heads, -1).transpose(1, 2)

        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self.score_mod(self, s, b, h, q, k) if self.score_mod else s

        def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self.mask_mod(documents, b, h, q, k)

        rows = len(x) if self.rows else None
        blocks = create_block_mask(mask, rows, 4, TOKENS, TOKENS, device="cpu") if self.mask_mod else None
        key, value = (split(each, 2) for each in self.others(x).chunk(2, -1))
        found = flex_attention(split(self.queries(x), 4), key, value, score, blocks, enable_gqa=True)
        return self.head(found.transpose(1, 2).flatten(2)).mean(1)


def causal(documents: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


KINDS: dict[str, dict[str, Any]] = {
    "causal": {"mask_mod": causal},
    "documents": {
        "mask_mod": lambda docs, b, h, q, k: (docs[b, q] == docs[b, k]) & (q >= k),
        "rows": ROWS,
    },
    "masked": {"mask_mod": lambda docs, b, h, q, k: (k < q - TOKENS // 2) | (h == 1)},
    "slopes": {"score_mod": lambda own, s, b, h, q, k: s + own.slopes[h] * (k - q), "mask_mod": causal},
    "numbers": {"score_mod": lambda own, s, b, h, q, k: torch.where(q >= k, s, -float("inf"))},
    "table": {"score_mod": lambda own, s, b, h, q, k: s + own.table[h, q, k]},
    "capped": {"score_mod": lambda own, s, b, h, q, k: torch.where(q > k, 2 * torch.tanh(s / 2), -s)},
}


def made(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Attention(**KINDS[kind]).to(dtype)
    return model, torch.randn(ROWS, TOKENS, WIDTH, dtype=dtype), torch.randint(3, (ROWS, TOKENS)).sort()[0]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_eager_torch(kind: str) -> None:
    model, *batch = made(kind)
    with torch.no_grad():
        torch.testing.assert_close(pipec.compile(model.eval(), 2, microbatches=2)(*batch), model(*batch))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_eager_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager torch has a backward on CPUs, too, and refuses to use it."""
    monkeypatch.setattr(library, "_validate_device", lambda *tensors: None)
    (plain, *batch), (split, *_) = made(kind, torch.float64), made(kind, torch.float64)
    loss = plain(*batch).square().mean()
    loss.backward()
    pipe = pipec.compile(split, 2, loss_fn=lambda found, _: found.square().mean(), microbatches=2)
    assert relative_error(pipe.step(*batch, target=batch[0]), loss.detach()) < ROUNDING
    for expected, found in zip(plain.parameters(), split.parameters(), strict=True):
        if expected.grad is not None and expected.grad.norm():
            assert found.grad is not None
            assert relative_error(found.grad, expected.grad) < ROUNDING


REFUSED: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda own, s, b, h, q, k: s.softmax(0),
    "sum": lambda own, s, b, h, q, k: s.sum(),
    "getitem": lambda own, s, b, h, q, k: s + own.table[h][q, k],
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_are_not_elementwise_are_refused(name: str) -> None:
    model = Attention(REFUSED[name]).eval()
    with pytest.raises(CaptureError, match=f"calls {name}, which is not known to work element by element"):
        pipec.compile(model, 2, microbatches=2)(torch.randn(ROWS, TOKENS, WIDTH), torch.zeros(ROWS, TOKENS))


class OfBlocks(nn.Module):
    """The first of two blocks of keys, for all queries. The kernels of GPUs skip the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        count = torch.ones(1, 1, 1, dtype=torch.int32)
        mask = BlockMask.from_kv_blocks(
            count, torch.zeros(1, 1, 1, 2, dtype=torch.int32), BLOCK_SIZE=(128, 64)
        )
        heads = self.layer(x)[:, None]
        return flex_attention(heads, heads, heads, block_mask=mask)


def test_a_mask_of_blocks_alone_is_refused() -> None:
    with pytest.raises(CaptureError, match="has blocks and no function"):
        pipec.compile(OfBlocks().eval(), 2, microbatches=2)(torch.randn(ROWS, TOKENS, WIDTH))


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def written(row: Tensor) -> Tensor:
            row = 2 * row
            row[1:3] = 3 * row[0]
            return row.add_(row.sum())

        return torch.vmap(written)(self.layer(x))


@pytest.mark.parametrize("mixes", [False, True], ids=["rows", "all rows"])
def test_a_mapped_function_may_write_in_place(mixes: bool, recwarn: pytest.WarningsRecorder) -> None:
    def loss_fn(found: Tensor, _: Tensor) -> Tensor:
        return (found @ found.T).softmax(1).square().mean() if mixes else found.square().mean()

    model, x = Mapped().double(), torch.randn(6, WIDTH, dtype=torch.float64)
    pipe = pipec.compile(model, 2, loss_fn=loss_fn, microbatches=3)
    assert relative_error(pipe.step(x, target=x), loss_fn(model(x), x).detach()) < ROUNDING
    assert not recwarn
