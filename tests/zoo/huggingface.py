"""``python -m zoo.huggingface [KIND[/ARCHITECTURE] ...]``: every architecture of transformers, made small.

It tries the models of five mappings of ``AutoModelFor...`` that a small configuration can be made of. All of
them make a section of docs/models.md anew: the share that is right, and the rest by cause. An interrupted
run goes on where it stopped; remove build/huggingface.jsonl to begin anew.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.model_case import Case, Inputs, batch, normal
from zoo.process_pool import run_all
from zoo.report import PAGE, counted, huggingface_section, replace_section
from zoo.tiny_transformers import HEADS, PIXELS, TOKENS, answered, causal, classified, images, masked, tiny

RESULTS = Path("build") / "huggingface.jsonl"
LIMIT = 300.0
"""Seconds that a model may take."""

MOST_PARAMETERS = 30e6
"""A model with more is not small: its configuration names its sizes in a way of its own."""

KINDS: dict[str, tuple[str, Callable[[int], Inputs]]] = {
    "CausalLM": ("CAUSAL_LM", causal),
    "MaskedLM": ("MASKED_LM", masked),
    "SequenceClassification": ("SEQUENCE_CLASSIFICATION", classified),
    "Seq2SeqLM": ("SEQ_TO_SEQ_CAUSAL_LM", answered),
    "ImageClassification": ("IMAGE_CLASSIFICATION", images),
}
"""By the end of ``AutoModelFor...``: the mapping's name, and what a model of it is called with."""


def architectures() -> Iterator[str]:
    """``CausalLM/GPT2LMHeadModel`` and so on."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for kind, (mapping, _) in KINDS.items():
        for names in getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            yield from (f"{kind}/{name}" for name in ([names] if isinstance(names, str) else names))


WINDOWS = {"depths": [1, 1], "num_heads": [2, 4], "patch_size": 4, "window_size": 4}
PYRAMID = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "patch_size": 4}
LEVELS = {
    **{"image_size": 2 * PIXELS, "patch_size": 16, "depths": [1, 1, 1]},
    **{"hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4]},
}
LOCAL = {"attention_types": [[["global", "local"], 1]]}
LATENTS = {"num_cross_attention_heads": 1, "num_self_attention_heads": 4}

WITHOUT_CACHE = ("Bamba", "GraniteMoeHybrid", "Jamba", "RecurrentGemma", "Zamba", "Zamba2", "xLSTM")
"""Their small configurations do not run with a cache in eager torch."""

SIZES: dict[str, dict[str, Any]] = {
    **{f"{name}ForCausalLM": {"use_cache": False} for name in WITHOUT_CACHE},
    "ConvNextForImageClassification": PYRAMID,
    "ConvNextV2ForImageClassification": PYRAMID,
    "DbrxForCausalLM": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "DonutSwinForImageClassification": WINDOWS,
    "EfficientNetForImageClassification": {
        **{"width_coefficient": 0.2, "depth_coefficient": 0.2, "hidden_dim": 256, "image_size": PIXELS},
    },
    "EsmcForMaskedLM": {"num_key_value_heads": HEADS},
    "EsmcForSequenceClassification": {"num_key_value_heads": HEADS},
    "GPTNeoForCausalLM": LOCAL,
    "GPTNeoForSequenceClassification": LOCAL,
    "HieraForImageClassification": {
        **{"image_size": [PIXELS, PIXELS], "depths": [1, 1], "num_heads": [1, 2]},
        **{"patch_size": [7, 7], "masked_unit_size": [2, 2], "query_stride": [2, 2], "num_query_pool": 1},
    },
    "KimiLinearForCausalLM": {"num_experts_per_tok": 2, "linear_head_dim": 8, "linear_num_heads": HEADS},
    "LayoutLMv3ForSequenceClassification": {"coordinate_size": 6, "shape_size": 4},
    "LevitForImageClassification": LEVELS,
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LiltForSequenceClassification": {"hidden_size": 48},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8},
    "MobileViTV2ForImageClassification": {"patch_size": 2, "image_size": 2 * PIXELS},
    "NeoMMEForMaskedLM": {"head_dim": 16},
    "PerceiverForImageClassificationConvProcessing": LATENTS,
    "PerceiverForImageClassificationFourier": LATENTS,
    "PerceiverForMaskedLM": {"max_position_embeddings": TOKENS},
    "SwinForImageClassification": WINDOWS,
    "Swinv2ForImageClassification": WINDOWS,
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "XmodForSequenceClassification": {"default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
"""What the small configuration of an architecture has in a way of its own."""


def labels(rows: int) -> Tensor:
    return images(rows)["labels"]


larger_images = batch(pixel_values=normal(3, 2 * PIXELS, 2 * PIXELS), labels=labels)
patches = batch(
    pixel_values=normal(16, 3 * 8 * 8),
    pixel_attention_mask=lambda rows: torch.ones(rows, 16, dtype=torch.long),
    spatial_shapes=lambda rows: torch.full((rows, 2), 4),
    labels=labels,
)
"""Images that were cut into four by four patches."""


def captioned(rows: int) -> Inputs:
    return {**causal(rows), "pixel_values": images(rows)["pixel_values"]}


INPUTS: dict[str, Callable[[int], Inputs]] = {
    "GitForCausalLM": captioned,
    "ImageGPTForImageClassification": classified,
    "LevitForImageClassification": larger_images,
    "MobileViTV2ForImageClassification": larger_images,
    "Siglip2ForImageClassification": patches,
}
"""What an architecture is called with that takes other arguments than most of its kind."""

BATCHED = {"GitForCausalLM": {"pixel_values": 0}}
"""Arguments that are split although the model could take any number of their rows."""


def find(name: str) -> Case:
    kind, _, class_name = name.partition("/")
    sizes = {"is_decoder": True} if kind == "CausalLM" else {}
    sizes |= SIZES.get(class_name, {})
    make_batch, batched = INPUTS.get(class_name, KINDS[kind][1]), BATCHED.get(class_name)
    return Case(name, lambda: _small(class_name, sizes), make_batch, batched=batched)


def _small(class_name: str, sizes: Mapping[str, Any]) -> nn.Module:
    make = tiny(class_name, pad_token_id=0, decoder_start_token_id=0, **sizes)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in make().parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"the small configuration has {num_parameters / 1e6:.0f} million parameters")
    return make()


def main(wanted: tuple[str, ...]) -> None:
    names = [name for name in dict.fromkeys(architectures()) if name.startswith(wanted or ("",))]
    results = run_all(names, find, RESULTS, LIMIT)
    print(counted(result.outcome for result in results.values()))
    if not wanted:
        replace_section(PAGE, "Hugging Face", huggingface_section(results))


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
