"""``python -m zoo.huggingface [--sample N]``: every architecture of transformers, made small.

It tries the models of five mappings of ``AutoModelFor...`` that a small configuration can be made of, and
writes the share that is right, and the rest by cause, into docs/models.md. An interrupted run goes on where
it stopped; remove build/huggingface.jsonl to begin anew.
"""

import argparse
import importlib
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.case import Case, Inputs
from zoo.processes import results_in, run_all
from zoo.report import PAGE, counted, huggingface_section, replace_section
from zoo.tiny import answered, causal, classified, images, masked, tiny

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


def find(name: str) -> Case:
    kind, _, class_name = name.partition("/")
    sizes = {"is_decoder": True} if kind == "CausalLM" else {}
    return Case(name, lambda: _small(class_name, sizes), KINDS[kind][1])


def _small(class_name: str, sizes: Mapping[str, Any]) -> nn.Module:
    make = tiny(class_name, pad_token_id=0, decoder_start_token_id=0, **sizes)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in make().parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"the small configuration has {num_parameters / 1e6:.0f} million parameters")
    return make()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="try so many of them, drawn with a fixed seed")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    names = list(dict.fromkeys(architectures()))
    if options.sample is not None:
        names = random.Random(0).sample(names, options.sample)
    for result in run_all(names, find, RESULTS, LIMIT, options.processes):
        print(
            f"{result.outcome:18} {result.name}  {result.cause or result.message.split(chr(10))[0][:150]}",
            flush=True,
        )
    results = results_in(RESULTS)
    print(counted(result.outcome for result in results.values()))
    if options.sample is None:
        replace_section(PAGE, "Hugging Face", huggingface_section(results))


if __name__ == "__main__":
    main()
