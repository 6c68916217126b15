"""A small Llama, a tokenizer of bytes and texts to learn: they stand in for what the Hub has."""

import sysconfig
from pathlib import Path

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

disable_progress_bars()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and one for the end of a text, which also pads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<eos>", pad_token="<eos>")


def make_model(vocabulary: int = 257) -> LlamaForCausalLM:
    """Four layers of width 64, with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 1,
    )
    return LlamaForCausalLM(config)


def load_texts(count: int = 400) -> Dataset:
    """Functions of the standard library, one in ``text`` of each row."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    functions = [f"def {function}" for source in sources for function in source.split("\ndef ")[1:]]
    return Dataset.from_list([{"text": text[:500]} for text in functions[:count]])


def tokenize(texts: Dataset, tokenizer: PreTrainedTokenizerFast, length: int) -> Dataset:
    """Rows of ``length`` tokens, in which the texts follow one another."""

    def pack(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        tokens = [
            token for text in batch["text"] for token in [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        ]
        rows = [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
        return {"input_ids": rows, "labels": rows}

    return texts.map(pack, batched=True, remove_columns=["text"])
