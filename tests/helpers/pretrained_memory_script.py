"""Prints by how many bytes loading a model of 1 GB raises the memory of a rank: ``... FOLDER``."""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pipec


def write(folder: Path) -> None:
    """Write a model of about 1 GB."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=19,
        num_attention_heads=16,
        vocab_size=8000,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def memory(kind: str) -> int:
    """The bytes that the kernel counts of this process, of a kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(each for each in lines if each.startswith(kind))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    ids = torch.zeros(4, 16, dtype=torch.int64)
    before, _ = memory("VmRSS"), Path("/proc/self/clear_refs").write_text("5")
    pipe = pipec.from_pretrained(sys.argv[1], 4, microbatches=4, timeout=240.0, check="off")
    print(memory("VmHWM") - before, end=" ")
    pipe.prepare(input_ids=ids, labels=ids)
    held = sum(x.nbytes for x in pipe.local_state_dict().values())
    print(memory("VmHWM") - before, held)
