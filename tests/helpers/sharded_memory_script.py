"""Started on several ranks by a test: what each holds in a step at each level of sharding, beside plans."""

import functools
import json
from typing import Any

import torch
import torch.distributed as dist
from memory_meter import measure_memory
from torch import nn

import pipec

ROWS, MICROBATCHES = 8, 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.Tanh())))


def facts(shard: str | None, offload: str | None = None) -> dict[str, Any]:
    x = torch.ones(ROWS, 128)
    adam = functools.partial(torch.optim.AdamW, lr=1e-3, foreach=False)
    pipe = pipec.compile(
        model(),
        dist.get_world_size(),
        loss_fn=nn.functional.mse_loss,
        microbatches=MICROBATCHES,
        stages=1,
        optimizer=adam,
        shard=shard,
        offload=offload,
    )
    pipe.step(x, target=x)
    rank, measured = dist.get_rank(), measure_memory(pipe, x, target=x)
    return {
        "first": measured[rank].bytes_by_category,
        "most": measured[rank].peak_bytes,
        "said": pipe.memory()[rank].peak_bytes,
        "all": [each.peak_bytes for each in measured],
        "host": [measured[rank].host_bytes, pipe.memory()[rank].host_bytes],
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    levels = (None, "optimizer", "gradients", "parameters")
    away = {"away": facts("optimizer", "optimizer"), "weights": facts("parameters", "weights")}
    print(json.dumps({str(level): facts(level) for level in levels} | away))
