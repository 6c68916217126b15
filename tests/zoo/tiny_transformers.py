"""Small models of the transformers library, with random weights: any configuration, its sizes made small.

Configurations name the same size in many ways. ``SIZES`` has the names, and what is not in it keeps its
default. Dropout is off, because a pipeline and a whole batch draw other numbers.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zoo.model_case import Case, Inputs, Loss, batch, integers, normal

WIDTH, HEADS, LAYERS, TOKENS, VOCABULARY, LABELS, PIXELS = 32, 4, 2, 12, 64, 2, 32
END = 3
"""The token that ends a text."""

NAMES: tuple[tuple[Any, str], ...] = (
    (
        WIDTH,
        """hidden_size d_model n_embd embed_dim dim model_dim encoder_hidden_size decoder_hidden_size emb_dim
        attention_hidden_size q_lora_rank kv_lora_rank embedding_size word_embed_proj_dim hidden_dim lru_width
        hidden_size_per_layer_input d_latents conv_dim_out state_dim cross_attention_hidden_size
        pooler_hidden_size""",
    ),
    (
        2 * WIDTH,
        """intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size mlp_dim
        moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
        shared_intermediate_size d_inner""",
    ),
    (
        HEADS,
        """num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads n_heads
        decoder_num_attention_heads mamba_n_heads""",
    ),
    (2, "num_key_value_heads num_kv_heads n_kv_heads multi_query_group_num"),
    (
        LAYERS,
        """num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers
        num_encoder_layers num_hidden_groups depth""",
    ),
    (WIDTH // HEADS, "head_dim d_kv kv_channels d_head"),
    (WIDTH // HEADS, "qk_nope_head_dim v_head_dim qk_rope_head_dim rotary_dim"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts"),
    (2, "num_experts_per_tok moe_topk moe_k top_k_experts"),
    (VOCABULARY, "vocab_size decoder_vocab_size entity_vocab_size vocab_size_per_layer_input n_words"),
    (1, "n_group topk_group n_groups first_k_dense_replace n_shared_experts"),
    (PIXELS, "image_size"),
    (8, "patch_size"),
    (16, "num_latents"),
    (END, "eos_token_id"),
    (0, "num_logits_to_keep"),
    (False, "axial_pos_embds apply_spec_augment"),
    ("single_label_classification", "problem_type"),
)
"""Values, each with the names of its options."""

SIZES = {name: size for size, names in NAMES for name in names.split()}

FILLED = {
    *("head_dim", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("num_key_value_heads", "problem_type", "vocab_size"),
}
"""What has no default in some configurations, although a model needs it."""


def config_of(config_class: type, sizes: Mapping[str, Any]) -> Any:
    """A configuration whose sizes are small. ``sizes`` wins over ``SIZES``, also in configurations inside."""
    default = config_class().to_dict()
    return config_class(
        **dict(_small(default, sizes)), **{k: v for k, v in sizes.items() if k not in default}
    )


def _small(default: Mapping[str, Any], sizes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What differs from the defaults of a configuration, by name."""
    layers = sizes.get("num_hidden_layers", LAYERS)
    for name, value in default.items():
        if name in sizes:
            yield name, sizes[name]
        elif name == "num_key_value_heads" and "kv_lora_rank" in default:
            yield name, HEADS  # latent attention shares no heads
        elif isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value):
            yield name, {key: of_layer for key, of_layer in value.items() if int(key) < layers}
        elif isinstance(value, Mapping) and (name.endswith("_config") or "model_type" in value):
            yield name, {**value, **dict(_small(value, sizes))}
        elif name in SIZES and (name in FILLED or (value is not None and not isinstance(value, list))):
            yield name, SIZES[name]
        elif "drop" in name and isinstance(value, float):
            yield name, 0.0
        elif name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            yield name, 2
        elif name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            yield name, _each_kind(value, layers)
        elif isinstance(value, list) and len(value) == default.get("num_hidden_layers"):
            yield name, value[:layers]


def _each_kind(kinds: list[str], layers: int) -> list[str]:
    """So many layers, of as many kinds as possible."""
    distinct = list(dict.fromkeys(kinds))
    return (distinct * layers)[:layers]


def tiny(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Makes the transformers model of a class name."""

    def make() -> nn.Module:
        import transformers

        model_class = getattr(transformers, name)
        config = config_of(model_class.config_class, sizes)
        config._attn_implementation = sizes.get("attn_implementation") or config._attn_implementation
        model: nn.Module = model_class(config)
        return model

    return make


def transformer(
    name: str, batch: Callable[[int], Inputs], loss_fn: Loss | None = None, **options: Any
) -> Case:
    """The case of the transformers model of a class name. Options that a case does not have are sizes."""
    own = {option: options.pop(option) for option in options.keys() & {"refused", "batched", "by_microbatch"}}
    return Case(name, tiny(name, **options), batch, loss_fn, **own)


def words(rows: int, tokens: int = TOKENS) -> Tensor:
    """Tokens, none of them special."""
    return torch.randint(5, VOCABULARY, (rows, tokens))


def causal(rows: int) -> Inputs:
    ids = words(rows)
    return {"input_ids": ids, "labels": ids}


def masked(rows: int) -> Inputs:
    """Padded at the end; some tokens count."""
    ids = words(rows)
    padding = (torch.arange(TOKENS) < torch.randint(TOKENS // 2, TOKENS + 1, (rows, 1))).long()
    return {
        "input_ids": ids,
        "attention_mask": padding,
        "labels": ids.where(torch.rand(ids.shape) < 0.5, -100),
    }


def classified(rows: int) -> Inputs:
    ids = words(rows)
    ids[:, -1] = END
    return {"input_ids": ids, "labels": torch.randint(LABELS, (rows,))}


translated = batch(input_ids=words, labels=functools.partial(words, tokens=TOKENS // 2))
answered = batch(input_ids=words, labels=words)
"""As many tokens as in the question, for there are models that put one behind the other."""

images = batch(pixel_values=normal(3, PIXELS, PIXELS), labels=integers(LABELS))

decoder = functools.partial(transformer, batch=causal)
"""The case of a language model."""
