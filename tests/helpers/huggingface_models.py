"""Small Hugging Face models with random weights, and a batch of eight rows for each.

Each factory returns a model in training mode and the keyword arguments of a call that returns its loss. None
draws random numbers but ``gpt2_with_dropout``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forward_modules import model
from torch import Tensor, nn

ROWS, TOKENS, VOCABULARY = 8, 12, 48
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"vocab_size": VOCABULARY, "max_position_embeddings": TOKENS}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

Factory = Callable[[], tuple[nn.Module, dict[str, Any]]]


def gpt2(dropout: float = 0.0) -> tuple[nn.Module, dict[str, Any]]:
    """Its output head is its token embedding, which is used on the first stage and on the last."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": TOKENS}
    ids = _ids()
    made = _made("GPT2LMHeadModel", **sizes, **rates, bos_token_id=0, eos_token_id=0)
    return made, {"input_ids": ids, "labels": ids}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    """Nothing is tied; two heads share their keys and values."""
    ids = _ids()
    return _made("LlamaForCausalLM", **SIZES, num_key_value_heads=1), {"input_ids": ids, "labels": ids}


def mixtral() -> tuple[nn.Module, dict[str, Any]]:
    """Four experts, balanced by a loss of all tokens that are no padding."""
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    ids, mask = _ids(), _padding()
    labels = ids.masked_fill(mask == 0, -100)
    made = _made("MixtralForCausalLM", **SIZES, **experts, num_key_value_heads=1)
    return made, {"input_ids": ids, "attention_mask": mask, "labels": labels}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    """Bidirectional, with padding; its output head is its token embedding, plus a bias."""
    ids = _ids()
    batch = {"input_ids": ids, "attention_mask": _padding(), "labels": ids}
    return _made("BertForMaskedLM", **SIZES, **NO_DROPOUT), batch


def bert_classifier() -> nn.Module:
    """Of three classes, in double precision."""
    return _made("BertForSequenceClassification", **SIZES, **NO_DROPOUT, num_labels=3).double()


def t5() -> tuple[nn.Module, dict[str, Any]]:
    """Encoder and decoder: every layer of the second reads the last value of the first."""
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    batch = {"input_ids": _ids(), "attention_mask": _padding(), "labels": _ids(TOKENS // 2)}
    return _made("T5ForConditionalGeneration", **sizes, dropout_rate=0.0, decoder_start_token_id=0), batch


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    """Convolutions, skips, and BatchNorm, whose running statistics every microbatch changes."""
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 10}
    random = torch.Generator().manual_seed(3)
    batch = {
        "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=random),
        "labels": torch.randint(0, 10, (ROWS,), generator=random),
    }
    return _made("ResNetForImageClassification", **sizes, layer_type="basic"), batch


@model(layers=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
def Perceptron(self, x: Tensor, y: Tensor) -> Tensor:
    """Three layers, and the loss as it returns it."""
    return nn.functional.mse_loss(self.layers(x), y)


def _encoder() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2))
    return nn.Sequential(*layers)


@model(layers=_encoder)
def Encoder(self, x: Tensor) -> Tensor:
    """torch's own transformer layers."""
    return self.layers(x).square().mean()


def encoder() -> tuple[nn.Module, dict[str, Any]]:
    """Attention and layers with names, without loading ``transformers``."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(), {"x": torch.randn(ROWS, TOKENS, 8, generator=torch.Generator().manual_seed(5))}


def perceptron() -> tuple[nn.Module, dict[str, Any]]:
    """Captured in a second, for tests of what does not depend on the model."""
    random = torch.Generator().manual_seed(4)
    inputs = {name: torch.randn(ROWS, size, generator=random) for name, size in (("x", 6), ("y", 3))}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Perceptron(), inputs


def gpt2_with_dropout() -> tuple[nn.Module, dict[str, Any]]:
    return gpt2(0.1)


MODELS: tuple[Factory, ...] = (gpt2, llama, bert, t5, resnet)


def each(*factories: Factory) -> list[Any]:
    return [pytest.param(factory, id=factory.__name__) for factory in factories]


def _made(name: str, **sizes: Any) -> nn.Module:
    """The transformers model of a class name."""
    import transformers

    model_class = getattr(transformers, name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class(model_class.config_class(**sizes)).train()


def _ids(tokens: int = TOKENS) -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, tokens), generator=torch.Generator().manual_seed(1))


def _padding() -> Tensor:
    """Rows of different lengths."""
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (ROWS, 1), generator=torch.Generator().manual_seed(2))
    return (torch.arange(TOKENS) < lengths).long()
