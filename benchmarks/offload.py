"""Models larger than their device, planned: seconds of a step, and what the host link and the host do
meanwhile.

Weights are on the meta device: nothing runs. Each model is in bfloat16, with AdamW, one layer a stage
(``looped-bfs-vN``) and everything recomputed. LoRA trains adapters of rank 16 of all linear layers. ``link``
and ``host`` are the shares of a step in which the busier direction of the host link copies, and in which the
host updates; memory is that of the rank that needs most. Where replicas divide the weights, ``link`` includes
the collectives.
"""

import argparse
import functools
from collections import defaultdict
from dataclasses import dataclass

import peft
import torch
from common import row, table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import pipec
from pipec.hardware.devices import DEVICES
from pipec.ir import Op
from pipec.ir.text_format import format_bytes

SIZES = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "vocab_size": 152064},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256},
}
"""Shapes of Llama 2 7B, Qwen2.5 32B and Llama 3 70B."""

HEADS = {"7B": (32, 32), "32B": (40, 8), "70B": (64, 8)}


@dataclass(frozen=True)
class Case:
    """A model, and a mini-batch of ``rows`` of ``tokens`` tokens in up to eight microbatches a device."""

    size: str
    device: str
    lora: bool
    rows: int
    tokens: int = 2048
    devices: int = 1
    replicas: int = 1


CASES = (
    Case("7B", "rtx-4090", False, 16),
    Case("7B", "rtx-4090", False, 64, devices=4),
    Case("7B", "rtx-4090", False, 64, devices=4, replicas=4),
    Case("7B", "h100-pcie", False, 64),
    Case("32B", "rtx-4090", True, 8),
    Case("32B", "h100-pcie", True, 32),
    Case("70B", "rtx-4090", True, 4),
    Case("70B", "h100-pcie", True, 16),
)


def made(case: Case) -> nn.Module:
    heads, groups = HEADS[case.size]
    config = LlamaConfig(**SIZES[case.size], num_attention_heads=heads, num_key_value_heads=groups)
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
        if case.lora:
            adapters = peft.LoraConfig(r=16, target_modules="all-linear")
            model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
        return model.to(torch.bfloat16)


def planned(case: Case) -> str:
    model, device = made(case), DEVICES[case.device]
    layers = SIZES[case.size]["num_hidden_layers"]
    pipe = pipec.compile(
        model,
        devices=case.devices,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-5),
        replicas=case.replicas,
        shard="parameters" if case.replicas > 1 else None,
        schedule=f"looped-bfs-v{layers * case.replicas // case.devices}",
        microbatches=min(8 * case.devices, case.rows),
        recompute="full",
        offload="weights",
        memory_limit=device.memory_bytes,
        costs=device,
        check="off",
    )
    ids = torch.zeros(case.rows, case.tokens, dtype=torch.long, device="meta")
    pipe.prepare(input_ids=ids, labels=ids)
    step, busy = pipe.simulate(), defaultdict[Op, float](float)
    for event in step.events:
        busy[event.instruction.op] += (event.end - event.start) / case.devices
    seconds, needs = step.makespan, pipe.memory()
    size = sum(each.numel() for each in model.parameters())
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    flops = (4 * size + 2 * trained) * case.rows * case.tokens  # frozen weights have no gradient of their own
    return row(
        f"{case.size}, {'LoRA' if case.lora else 'full'}, {case.rows} x {case.tokens:,} tokens",
        _devices(case),
        f"{seconds:.1f}",
        f"{case.rows * case.tokens / seconds:,.0f}",
        f"{1e-12 * flops / seconds:.0f}",
        f"{max(busy[Op.LOAD] + busy[Op.UNSHARD], busy[Op.STORE] + busy[Op.REDUCE_GRAD]) / seconds:.0%}",
        f"{busy[Op.HOST_UPDATE] / seconds:.0%}",
        format_bytes(max(need.peak_bytes for need in needs)),
        format_bytes(max(need.host_bytes for need in needs)),
    )


def _devices(case: Case) -> str:
    several = case.device if case.devices == 1 else f"{case.devices} x {case.device}"
    return f"{several}, replicas" if case.replicas > 1 else several


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only models whose size contains this, such as 7B")
    args = parser.parse_args()
    headings = ("seconds", "tokens/s", "TFLOPS", "link", "host", "device memory", "host memory")
    pipec.log("\n".join(table("model", "device", *headings, numbers_from=2)))
    for case in CASES:
        if args.only in case.size:
            pipec.log(planned(case))


if __name__ == "__main__":
    main()
