"""Mixed precision on processes over gloo: an overflow on one rank is one of all; what ranks hold."""

import json
from pathlib import Path

import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = """
import functools, json, os, sys
sys.path.insert(0, {tests!r})
import torch, pipec
from torch import nn
from tests.helpers.memory_meter import measure_memory
from tests.pipeline.test_precision import batches, pair

def told(name, local=False, **options):
    "What training comes to with a gradient that overflows in rows of the second replica alone."
    pipe, eager = pair("fp16-mixed", timeout=240.0, **options)
    for batch in batches(8, overflowing=(1, 2, 5)):
        rows = {{key: x.chunk(2)[pipe.replica] if local else x for key, x in batch.items()}}
        pipe.step(**rows)
        eager.step(batch)
    whole = pipe.full_state_dict(all_ranks=True)
    furthest = max((whole[key] - x).abs().max().item() for key, x in eager.model.state_dict().items())
    found, counter = pipe._steps.updates.loss_scale, eager.scaler._get_growth_tracker()
    same = (found.scale, found.growth_tracker) == (eager.scaler.get_scale(), counter)
    return {{"name": name, "same": same, "skipped": pipe.num_skipped, "furthest": furthest}}

def held(shard):
    "What the plan says that this rank holds at most, over what it does."
    x, rank = torch.randn(8, 128), int(os.environ["RANK"])
    pipe = pipec.compile(
        nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.Tanh()))),
        2, stages=1, loss_fn=nn.functional.mse_loss, microbatches=8, precision="bf16-mixed", shard=shard,
        optimizer=functools.partial(torch.optim.AdamW, foreach=False), timeout=240.0,
    )
    pipe.step(x, target=x)
    found = measure_memory(pipe, x, target=x)[rank].peak_bytes
    return {{"name": f"held {{shard}}", "ratio": pipe.memory()[rank].peak_bytes / found}}

print(json.dumps([
    told("local", local=True, stages=1, batch="local"),
    told("local and sharded", local=True, stages=1, batch="local", shard="parameters"),
    told("stages"),
    held("parameters"),
]))
"""


def test_ranks_overflow_together(tmp_path: Path) -> None:
    """All leave out the same updates, and training goes on as with GradScaler; memory is as the plan says."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[2])))
    for printed in run_ranks(script, 2, tmp_path):
        *trained, held = json.loads(printed.splitlines()[-1])
        for each in trained:
            assert each["same"], each
            assert each["skipped"] == 3, each
            assert each["furthest"] < 5e-3, each
        assert held["ratio"] == pytest.approx(1, rel=0.03)
