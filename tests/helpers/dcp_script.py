"""Saves or loads a pipeline with torch.distributed.checkpoint: ``dcp_script.py FOLDER save|load``.

Prints the loss of the next step as JSON, and after saving, what each file has.
"""

import json
import sys
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import pipec

FOLDER, KIND = sys.argv[1:3]


def made(seed: int) -> nn.Module:
    """Its batch norms have buffers, and its first and last weights are tied."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())]
    model = nn.Sequential(nn.Linear(6, 6, bias=False), *layers, nn.Linear(6, 6, bias=False)).double()
    model[-1].weight = model[0].weight
    return model


if __name__ == "__main__":
    if "own" in sys.argv:
        dist.init_process_group("gloo")
    group = dist.distributed_c10d._world.default_pg
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pipe = pipec.compile(made(1 if KIND == "save" else 2), loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    files = defaultdict[str, list[str]](list)
    if KIND == "save" or "after" in sys.argv:
        pipe.step(rows, target=rows)
        optimizer.step()
        optimizer.zero_grad()
    if KIND == "save":
        dcp.save({"app": pipe}, checkpoint_id=FOLDER)
        for index, place in dcp.FileSystemReader(FOLDER).read_metadata().storage_data.items():
            files[place.relative_path].append(index.fqn)
    else:
        dcp.load({"app": pipe}, checkpoint_id=FOLDER)
    assert "own" not in sys.argv or dist.distributed_c10d._world.default_pg is group
    print(json.dumps([pipe.step(rows, target=rows).item(), files]))
