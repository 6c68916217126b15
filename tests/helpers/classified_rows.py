"""A BERT classifier and a Llama in float64, and rows of ragged lengths, for the loops of libraries."""

import ast
import sys
from typing import Any

import huggingface_models
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

NUM_ROWS, BATCH = 18, 4  # the last of five batches has two rows


def arguments() -> tuple[str, str, dict[str, Any]]:
    """Those of a script: a folder, "plain" or "pipec", and the options of pipec as Python.

    ``axes`` among them are names of a 2 x 2 mesh of four ranks, which trains one pipeline, or one for each
    row: all but the first in a folder of its own.
    """
    folder, kind, *rest = sys.argv[1:]
    options = ast.literal_eval(rest[0]) if rest else {}
    if axes := options.pop("axes", None):
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
        is_one = "dp" in axes
        options["group"] = mesh if is_one else mesh["pp"]
        folder += "" if is_one or mesh.get_local_rank(0) == 0 else "/other"
    return folder, kind, options


def llama() -> nn.Module:
    """Its first half is frozen, so that ranks of the first stages have no gradients."""
    llama = huggingface_models.llama()[0].double()
    for part in (llama.model.embed_tokens, llama.model.layers[0]):
        part.requires_grad_(False)
    return llama


MODELS = {"bert": huggingface_models.bert_classifier, "llama": llama}


def rows(count: int = NUM_ROWS) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 11, (count,), generator=draw).tolist()
    ids = [torch.randint(1, 48, (length,), generator=draw) for length in lengths]
    return [{"input_ids": each, "labels": each.sum() % 3} for each in ids]


def collated(batch: list[dict[str, Tensor]], length: int = 0, of_tokens: bool = False) -> dict[str, Tensor]:
    """Padded to the longest row of the batch, or to ``length``. Labels are of rows, or tokens."""
    ids = nn.utils.rnn.pad_sequence([each["input_ids"] for each in batch], batch_first=True)
    ids = nn.functional.pad(ids, (0, max(length - ids.shape[1], 0)))
    labels = torch.stack([each["labels"] for each in batch])
    if of_tokens:
        labels = ids.masked_fill(ids == 0, -100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def sums(state: dict[str, Any]) -> dict[str, float]:
    return {name: tensor.double().abs().sum().item() for name, tensor in sorted(state.items())}


def assert_close(found: Any, expected: Any, name: str) -> None:
    """Both have the same structure, and the same numbers to 1e-6."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9, msg=lambda text: f"{name}: {text}")
