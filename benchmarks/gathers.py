"""What gathers of sharded parameters cost where a stage is gathered whole: simulated, on the meta device.

A Llama of 16 layers, 4,096 wide, in bfloat16, on 32 devices: 1F1B on four stages with eight replicas each.
The step is simulated as planned, and once more with gathers that take no time, which is the most that gathers
by layers could gain. A device is 4,000 times as fast as the model of a CPU core, about 300 teraflops.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pipec
from pipec.hardware.topology import Device, Level, Topology
from pipec.ir import Plan
from pipec.plan.predictions import simulate_plan

DEVICES, STAGES, LENGTH, SPEED = 32, 4, 4096, 4000.0
REPLICAS = DEVICES // STAGES


def planned(num_microbatches: int, per_host: int) -> pipec.Pipeline:
    """The pipeline of one microbatch of a sequence for each replica and number."""
    levels = Level(per_host, 300e9, 1e-5), Level(DEVICES // per_host, 50e9, 2e-5)
    topology = Topology((Device(speed=SPEED),) * DEVICES, levels if per_host > 1 else levels[1:])
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=16, num_key_value_heads=8)).to(torch.bfloat16)
        tokens = torch.empty(num_microbatches * REPLICAS, LENGTH, dtype=torch.int64)
    pipe = pipec.compile(
        model,
        devices=DEVICES,
        replicas=REPLICAS,
        microbatches=num_microbatches * REPLICAS,
        schedule="1f1b",
        shard="parameters",
        topology=topology,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
    )
    return pipe.prepare(input_ids=tokens, labels=tokens)


def with_free_gathers(plan: Plan) -> Plan:
    buckets = tuple(replace(bucket, unshard_seconds=0.0) for bucket in plan.sync_spec.buckets)
    return replace(plan, sync_spec=replace(plan.sync_spec, buckets=buckets))


def rows() -> Iterator[str]:
    yield "| microbatches of a replica | devices of a host | step, s | with gathers that take no time |"
    yield "|--:|--:|--:|--:|"
    for count, per_host in pipec.progress(list(product((8, 32), (8, 4, 1))), "plans"):
        pipe = planned(count, per_host)
        programs = pipe.plan.programs
        whole, free = (simulate_plan(x, programs).makespan for x in (pipe.plan, with_free_gathers(pipe.plan)))
        yield f"| {count} | {per_host} | {whole:.2f} | {free / whole:.4f} |"


if __name__ == "__main__":
    pipec.log("\n".join(rows()))
