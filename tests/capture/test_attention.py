"""FlexAttention, functions of ``torch.vmap`` that write in place, attention in evaluations, and no caches."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from awkward_modules import Pair, assert_near, train_as_eager
from forward_modules import model
from huggingface_models import each, gpt2, llama, t5
from slow_params import slow, slow_but
from torch import Tensor, nn
from torch.nn.attention import flex_attention as library
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention
from transformers import Cache, LlamaConfig, LlamaForCausalLM
from unsplit_reference import relative_error

import pipec
from pipec.errors import CaptureError, InputError

ROWS, TOKENS, WIDTH = 4, 128, 8


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


@pytest.fixture
def trains_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager torch has a backward on CPUs, too, and refuses to use it."""
    monkeypatch.setattr(library, "_validate_device", lambda *tensors: None)


@pytest.mark.usefixtures("trains_on_cpus")
@pytest.mark.parametrize("kind", slow_but(KINDS, "documents"))
def test_gradients_and_outputs_are_those_of_eager_torch(kind: str) -> None:
    torch.manual_seed(0)
    model = Attention(**KINDS[kind]).double()
    x, documents = torch.randn(ROWS, TOKENS, WIDTH).double(), torch.randint(3, (ROWS, TOKENS)).sort()[0]
    pipe = train_as_eager(model, x, documents, target=x, loss_fn=lambda found, _: found.square().mean())
    with torch.no_grad():
        assert_near(pipe.eval()(x, documents), model(x, documents), "output")


@model(layer=lambda: nn.Linear(WIDTH, WIDTH))
def OfBlocks(self: Any, x: Tensor, documents: Tensor) -> Tensor:
    """The first of two blocks of keys, for all queries. The kernels of GPUs skip the other one."""
    count = torch.ones(1, 1, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(count, torch.zeros(1, 1, 1, 2, dtype=torch.int32), BLOCK_SIZE=(128, 64))
    heads = self.layer(x)[:, None]
    return flex_attention(heads, heads, heads, block_mask=mask)


REFUSED: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda own, s, b, h, q, k: s.softmax(0),
    "sum": lambda own, s, b, h, q, k: s.sum(),
    "getitem": lambda own, s, b, h, q, k: s + own.table[h][q, k],
}


@pytest.mark.parametrize("name", [*REFUSED, "blocks"])
def test_functions_that_are_not_elementwise_and_blocks_alone_are_refused(name: str) -> None:
    model = Attention(REFUSED[name]) if name in REFUSED else OfBlocks()
    message = f"calls {name}, which is not known" if name in REFUSED else "has blocks and no function"
    x, documents = torch.randn(ROWS, TOKENS, WIDTH), torch.zeros(ROWS, TOKENS)
    with pytest.raises(CaptureError, match=message):
        pipec.compile(model.eval(), 2, microbatches=2)(x, documents)


@model(
    layers=lambda: nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)),
    head=lambda: nn.Linear(WIDTH, 2),
)
def Masked(self: Any, x: Tensor, masks: dict[str, Any] | Any) -> Tensor:
    """Two layers of attention, whose masks are arguments."""
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


def masked(**options: Any) -> Pair:
    torch.manual_seed(0)
    return Pair(Masked().double(), nn.functional.mse_loss, **options)


def masked_batch(kind: str, length: int, rows: int = ROWS) -> tuple[Tensor, Any, Tensor]:
    x, target = (torch.randn(rows, length, size, dtype=torch.float64) for size in (WIDTH, 2))
    return x, ARGUMENTS[kind](torch.randint(3, (rows, length)).sort()[0]), target


@pytest.mark.usefixtures("trains_on_cpus")
@pytest.mark.parametrize("kind", slow_but(ARGUMENTS, "lists"))
def test_masks_may_be_arguments(kind: str, said: list[str]) -> None:
    """Their tensors differ from step to step, and their lengths."""
    pair = masked()
    for length in (16, 16, 24):
        x, mask, target = masked_batch(kind, length)
        pair.step(x, mask, target=target)
    assert sum(message.startswith("recompiling") for message in said) == (kind == "causal")


@pytest.mark.usefixtures("trains_on_cpus")
def test_given_microbatches_have_masks_of_their_own() -> None:
    pair = masked(microbatches=None)
    for lengths in ([12, 20, 16], [30, 7]):
        batches = [masked_batch("documents", length, rows=1) for length in lengths]
        given = [{"x": x, "masks": mask, "target": target} for x, mask, target in batches]
        pair.model.zero_grad()
        pair.unsplit.zero_grad()
        loss = pair.pipe.step(microbatches=given)
        expected = torch.stack([pair.loss(x, mask, target=target)[0] for x, mask, target in batches]).mean()
        expected.backward()
        assert relative_error(loss, expected.detach()) < 1e-12
        pair.check_gradients()


@pytest.mark.usefixtures("trains_on_cpus")
def test_what_a_function_reads_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = masked(check="off")
    for limit, width in ((3, 9), (7, 9), (3, 9), (3, 5)):
        monkeypatch.setitem(globals(), "window", width)
        x, _, target = masked_batch("causal", 16)
        pair.step(x, block_mask(and_masks(near, within(limit)), 16), target=target)


def of_blocks(number: int, index: Tensor, function: Any = None) -> BlockMask:
    """Two rows of blocks, each with so many blocks of keys."""
    count = torch.full((1, 1, 2), number, dtype=torch.int32)
    return BlockMask.from_kv_blocks(count, index.int().expand(1, 1, 2, 2), mask_mod=function)


def of_module() -> BlockMask:
    module = nn.Linear(1, 1)
    return block_mask(lambda b, h, q, k: q >= k * module.in_features, 16)


def of_columns() -> BlockMask:
    documents = torch.zeros(16, ROWS)
    return block_mask(lambda b, h, q, k: documents[q, b] == documents[k, b], 16, ROWS)


OTHERS: dict[str, tuple[Callable[[], BlockMask], int, dict[str, Any], str]] = {
    "blocks that are none of all": (
        lambda: of_blocks(1, torch.zeros(2)),
        256,
        {},
        r"the blocks of args\[1\] are not those of its function",
    ),
    "blocks that are none of a function": (
        lambda: of_blocks(1, torch.zeros(2), lambda b, h, q, k: q >= k),
        256,
        {},
        r"the blocks of args\[1\] are not those of its function",
    ),
    "a function of a module": (of_module, 16, {}, "reads 'module', a torch"),
    "rows in another dimension": (of_columns, 16, {"batched": {"masks": 1}}, "expected them in dimension 0"),
    "other ranks": (lambda: block_mask(near, 16), 16, {"batch": "rank0"}, "a BlockMask has a function"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_masks_that_no_stage_can_have_are_refused(name: str) -> None:
    make, length, options, message = OTHERS[name]
    x, _, target = masked_batch("causal", length)
    with pytest.raises(InputError, match=message):
        masked(**options).pipe.step(x, make(), target=target)


@pytest.mark.usefixtures("trains_on_cpus")
def test_blocks_are_compared_in_every_step_and_a_step_with_a_mask_is_not_saved(tmp_path: Path) -> None:
    pipe, (x, _, target) = masked().pipe, masked_batch("causal", 256)
    pipe.step(x, of_blocks(2, torch.arange(2)), target=target)
    with pytest.raises(InputError, match="BlockMask cannot be saved"):
        pipe.save(tmp_path / "artifact")
    with pytest.raises(InputError, match="are not those of its function"):
        pipe.step(x, of_blocks(1, torch.arange(2)), target=target)


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
    pair = Pair(models[0], check="off")  # torch has no backward of it on CPUs
    pair.unsplit = models[1]
    pair.step(input_ids=ids, attention_mask=mask, labels=ids, error=1e-6)  # logits are float32 in the loss


@model(layer=lambda: nn.Linear(WIDTH, WIDTH))
def Mapped(self: Any, x: Tensor) -> Tensor:
    def written(row: Tensor) -> Tensor:
        row = 2 * row
        row[1:3] = 3 * row[0]
        return row.add_(row.sum())

    return torch.vmap(written)(self.layer(x))


@pytest.mark.parametrize("mixes", [False, True], ids=["rows", "all rows"])
def test_a_mapped_function_may_write_in_place(mixes: bool, recwarn: pytest.WarningsRecorder) -> None:
    def loss_fn(found: Tensor, _: Tensor) -> Tensor:
        return (found @ found.T).softmax(1).square().mean() if mixes else found.square().mean()

    x = torch.randn(6, WIDTH, dtype=torch.float64)
    train_as_eager(Mapped().double(), x, target=x, loss_fn=loss_fn, options={"microbatches": 3})
    assert not recwarn


# torch's modules, which have one operator in evaluations that reads all weights, and caches of transformers


LENGTH = 5
X = torch.randn(6, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
PADDING = torch.arange(LENGTH) >= torch.tensor([5, 3, 1, 4, 2, 5])[:, None]
CAUSAL = torch.ones(LENGTH, LENGTH).triu(1).bool()


def layers(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@model(
    first=lambda average: nn.Linear(WIDTH, WIDTH),
    attention=lambda average: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    last=lambda average: nn.Linear(WIDTH, WIDTH),
    average=bool,
)
def Weighing(self: Any, src: Tensor, src_key_padding_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns its weights, too."""
    x = self.first(src)
    y, weights = self.attention(x, x, x, src_key_padding_mask, average_attn_weights=self.average)
    return self.last(y), weights


def distance(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output if isinstance(output, Tensor) else output[0], target)


@pytest.mark.parametrize(
    ("make", "masks", "devices"),
    [
        slow(layers, {"src_key_padding_mask": PADDING, "mask": CAUSAL}, 4),
        slow(lambda: layers(norm_first=True, activation="gelu"), {"src_key_padding_mask": PADDING}, 4),
        slow(lambda: layers(layer_norm_eps=1e-2), {}, 4),
        (lambda: Weighing(True), {"src_key_padding_mask": PADDING}, 2),
        slow(lambda: Weighing(False), {"src_key_padding_mask": PADDING}, 2),
    ],
)
def test_modules_evaluate_on_the_stages_of_training(
    make: Any, masks: dict[str, Tensor], devices: int
) -> None:
    """The cuts of four stages are inside layers: a stage has fewer weights than one."""
    torch.manual_seed(0)
    net, given = make(), {"src": X, **masks}
    batched = {name: None if name == "mask" else 0 for name in given}
    pipe = pipec.compile(net, devices, loss_fn=distance, microbatches=3, batched=batched)
    pipe.step(**given, target=X)
    net.eval()
    with torch.no_grad():
        expected = net(**given)
        torch.testing.assert_close(pipe(**given), expected)
        torch.testing.assert_close(pipe.eval_step(**given, target=X), distance(expected, X))


@pytest.mark.slow
@pytest.mark.parametrize("factory", each(gpt2, llama, t5))
def test_results_have_no_cache_of_keys_and_values(factory: Any) -> None:
    """Models of transformers compute with theirs, as in eager torch."""
    made, inputs = factory()
    unsplit = copy.deepcopy(made).eval()
    pipe = pipec.compile(made.eval(), devices=2, microbatches=2)
    found = pipe(**inputs)
    with torch.no_grad():
        expected = unsplit(**inputs)
    assert type(found) is type(expected)
    assert list(found) == [name for name, each in expected.items() if not isinstance(each, Cache)]
    assert torch.allclose(found.logits, expected.logits, atol=1e-6)
    in_order = pipe(**inputs, return_dict=False)
    assert [x is None for x in in_order] == [isinstance(x, Cache) for x in expected.to_tuple()]
    with pytest.raises(InputError, match="use_cache=True asks for a cache"):
        pipe(**inputs, use_cache=True)
    assert pipe.train().step(**inputs, use_cache=True).isfinite()
