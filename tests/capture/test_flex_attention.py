"""FlexAttention in a model, and functions of ``torch.vmap`` that write in place, as its masks are made by."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_params import slow_but
from torch import Tensor, nn
from torch.nn.attention import flex_attention as library
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention
from transformers import LlamaConfig, LlamaForCausalLM
from unsplit_reference import relative_error

import pipec
from pipec.errors import CaptureError, InputError

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


@pytest.fixture
def trains_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager torch has a backward on CPUs, too, and refuses to use it."""
    monkeypatch.setattr(library, "_validate_device", lambda *tensors: None)


@pytest.mark.parametrize("kind", slow_but(KINDS, "causal"))
def test_outputs_are_those_of_eager_torch(kind: str) -> None:
    model, *batch = made(kind)
    with torch.no_grad():
        torch.testing.assert_close(pipec.compile(model.eval(), 2, microbatches=2)(*batch), model(*batch))


@pytest.mark.usefixtures("trains_on_cpus")
@pytest.mark.parametrize("kind", slow_but(KINDS, "documents", "slopes"))
def test_gradients_are_those_of_eager_torch(kind: str) -> None:
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


class Masked(nn.Module):
    """Two layers of attention, whose masks are arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, masks: dict[str, Any] | Any) -> Tensor:
        for number, layer in enumerate(self.layers):
            query, key, value = (each[:, None] for each in layer(x).chunk(3, -1))
            mask = masks[f"layer{number}"] if isinstance(masks, dict) else masks
            x = x + flex_attention(query, key, value, block_mask=mask)[:, 0]
        return self.head(x)


window = 9


def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() < window


def within(limit: int) -> Any:
    return lambda b, h, q, k: q - k < limit


def block_mask(function: Any, length: int, rows: int | None = None, heads: int | None = None) -> Any:
    return create_block_mask(function, rows, heads, length, length, device="cpu")


def of_documents(documents: Tensor) -> BlockMask:
    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (documents[b, q] == documents[b, k]) & (q >= k)

    return block_mask(mask, documents.shape[1], len(documents))


def of_lists(documents: Tensor) -> BlockMask:
    """Of functions that functions, lists and defaults hold."""

    def same(b: Tensor, *places: Tensor, documents: Tensor = documents) -> Tensor:
        return documents[b, places[0]] == documents[b, places[1]]

    last = torch.tensor(5)
    functions = [lambda b, h, q, k: same(b, q, k) | (k < last)]
    inner = and_masks(near, lambda b, h, q, k: functions[0](b, h, q, k))
    return block_mask(inner, documents.shape[1], len(documents))


ARGUMENTS: dict[str, Callable[[Tensor], Any]] = {
    "causal": lambda documents: block_mask(lambda b, h, q, k: q >= k, documents.shape[1]),
    "documents": of_documents,
    "lists": of_lists,
    "two": lambda documents: {
        "layer0": of_documents(documents),
        "layer1": block_mask(near, documents.shape[1]),
    },
}


def masked(**options: Any) -> tuple[nn.Module, pipec.Pipeline]:
    torch.manual_seed(0)
    model = Masked().double()
    return model, pipec.compile(model, 2, loss_fn=nn.functional.mse_loss, **options)


def masked_batch(kind: str, length: int, rows: int = ROWS) -> tuple[Tensor, Any, Tensor]:
    x, target = (torch.randn(rows, length, size, dtype=torch.float64) for size in (WIDTH, 2))
    return x, ARGUMENTS[kind](torch.randint(3, (rows, length)).sort()[0]), target


def expect_step(model: nn.Module, loss: Tensor, batches: list[tuple[Any, ...]]) -> None:
    """Expect the loss and gradients of eager torch, of the mean over some batches."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    losses = [nn.functional.mse_loss(plain(x, mask), target) for x, mask, target in batches]
    expected = torch.stack(losses).mean()
    expected.backward()
    assert relative_error(loss, expected.detach()) < ROUNDING
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert relative_error(one.grad, other.grad) < ROUNDING
    model.zero_grad()


@pytest.mark.usefixtures("trains_on_cpus")
@pytest.mark.parametrize("kind", slow_but(ARGUMENTS, "lists"))
def test_masks_may_be_arguments(kind: str, said: list[str]) -> None:
    """Their tensors differ from step to step, and their lengths."""
    model, pipe = masked(microbatches=2)
    for length in (16, 16, 24):
        x, mask, target = batch = masked_batch(kind, length)
        expect_step(model, pipe.step(x, mask, target=target), [batch])
    assert sum(message.startswith("recompiling") for message in said) == (kind == "causal")


@pytest.mark.usefixtures("trains_on_cpus")
def test_given_microbatches_have_masks_of_their_own() -> None:
    model, pipe = masked()
    for lengths in ([12, 20, 16], [30, 7]):
        batches = [masked_batch("documents", length, rows=1) for length in lengths]
        given = [{"x": x, "masks": mask, "target": target} for x, mask, target in batches]
        expect_step(model, pipe.step(microbatches=given), batches)


@pytest.mark.usefixtures("trains_on_cpus")
def test_what_a_function_reads_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pipe = masked(microbatches=2, check="off")
    for limit, width in ((3, 9), (7, 9), (3, 9), (3, 5)):
        monkeypatch.setitem(globals(), "window", width)
        mask = block_mask(and_masks(near, within(limit)), 16)
        x, _, target = masked_batch("causal", 16)
        expect_step(model, pipe.step(x, mask, target=target), [(x, mask, target)])


def test_blocks_that_are_not_those_of_the_function_are_refused() -> None:
    _, pipe = masked(microbatches=2)
    x, _, target = masked_batch("causal", 256)
    count, index = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    for function in (None, lambda b, h, q, k: q >= k):
        mask = BlockMask.from_kv_blocks(count, index, mask_mod=function)
        with pytest.raises(InputError, match=r"the blocks of args\[1\] are not those of its function"):
            pipe.step(x, mask, target=target)


@pytest.mark.usefixtures("trains_on_cpus")
def test_blocks_are_compared_in_every_step() -> None:
    _, pipe = masked(microbatches=2)
    x, _, target = masked_batch("causal", 256)
    for number in (2, 1):
        count = torch.full((1, 1, 2), number, dtype=torch.int32)
        mask = BlockMask.from_kv_blocks(count, torch.arange(2, dtype=torch.int32).expand(1, 1, 2, 2))
        if number == 2:
            pipe.step(x, mask, target=target)
        else:
            with pytest.raises(InputError, match="are not those of its function"):
                pipe.step(x, mask, target=target)


def test_a_function_of_a_module_is_refused() -> None:
    _, pipe = masked(microbatches=2)
    x, _, target = masked_batch("causal", 16)
    module = nn.Linear(1, 1)
    with pytest.raises(InputError, match="reads 'module', a torch"):
        pipe.step(x, block_mask(lambda b, h, q, k: q >= k * module.in_features, 16), target=target)


def test_a_function_finds_rows_where_it_looks() -> None:
    _, pipe = masked(microbatches=2, batched={"masks": 1})
    x, _, target = masked_batch("causal", 16)
    documents = torch.zeros(16, ROWS)
    mask = block_mask(lambda b, h, q, k: documents[q, b] == documents[k, b], 16, ROWS)
    with pytest.raises(InputError, match="expected them in dimension 0"):
        pipe.step(x, mask, target=target)


def test_a_mask_is_not_sent_to_other_ranks() -> None:
    _, pipe = masked(microbatches=2, batch="rank0")
    x, mask, target = masked_batch("causal", 16)
    with pytest.raises(InputError, match="a BlockMask has a function"):
        pipe.step(x, mask, target=target)


@pytest.mark.usefixtures("trains_on_cpus")
def test_a_step_with_a_mask_is_not_saved(tmp_path: Path) -> None:
    _, pipe = masked(microbatches=2)
    x, mask, target = masked_batch("causal", 16)
    pipe.step(x, mask, target=target)
    with pytest.raises(InputError, match="BlockMask cannot be saved"):
        pipe.save(tmp_path / "artifact")


@pytest.mark.slow
def test_a_model_of_transformers_with_padded_rows() -> None:
    """Its ``forward`` compiles ``create_block_mask``, which cannot run on fake tensors, and warns."""
    ids, mask = torch.randint(64, (ROWS, 24)), torch.ones(ROWS, 24, dtype=torch.long)
    mask[1, 16:] = 0
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    models = []
    for kind in ("flex_attention", "eager"):
        torch.manual_seed(0)
        models.append(LlamaForCausalLM._from_config(config, attn_implementation=kind).double())
    model, plain = models
    expected = plain(input_ids=ids, attention_mask=mask, labels=ids).loss
    expected.backward()
    pipe = pipec.compile(model, 2, microbatches=2, check="off")  # torch has no backward of it on CPUs
    loss = pipe.step(input_ids=ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(loss, expected.detach())
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert relative_error(one.grad, other.grad) < 1e-6  # logits are float32 in the loss


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
