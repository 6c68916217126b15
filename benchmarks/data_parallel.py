"""Data parallelism on two ranks of one thread: pipec beside DistributedDataParallel and FSDP2.

    torchrun --nproc-per-node 2 benchmarks/data_parallel.py

A step is forward, backward, sum of gradients and the update by AdamW of a mini-batch of which each rank works
on half. The contestants live in the same two processes and make a step in turn, so that a change in the
machine's speed meets all of them; before each step the ranks wait for each other. Ratios are of medians, and
the loss after all steps must be the same. Peak memory is that of the storages which torch operators make and
which are alive, counted in one more step of each contestant alone.
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from common import gpt, medians, next_token_loss, resnet, row, table, text
from memory_meter import TensorMemoryMeter
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pipec

RANKS, WARMUP_STEPS = 2, 3
BUCKETS_MB = (1, 25, 400)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4, foreach=True)

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """A model of consecutive modules, whose blocks FSDP2 shards one by one, and a whole mini-batch."""

    name: str
    model: Callable[[], nn.Sequential]
    batch: Callable[[], tuple[Tensor, Tensor]]


RESNET_18 = functools.partial(
    resnet, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic"
)
CASES = [
    Case("GPT, width 64", functools.partial(gpt, 64, 256, 128), functools.partial(text, 16, 128, 256)),
    Case("GPT, width 256", functools.partial(gpt, 256, 256, 128), functools.partial(text, 16, 128, 256)),
    Case("ResNet-18", RESNET_18, lambda: (torch.randn(8, 3, 64, 64), torch.randint(2, (8,)))),
]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (
        next_token_loss(output, target) if output.ndim == 3 else nn.functional.cross_entropy(output, target)
    )


def own_half(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, target = (tensor.chunk(RANKS)[dist.get_rank()] for tensor in batch)
    return x, target


def torch_step(model: nn.Module, case: Case) -> Step:
    """What a script does with a model that torch has made parallel."""
    x, target = own_half(case.batch())
    optimizer = ADAMW(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ddp(case: Case, bucket_mb: int) -> Step:
    model = DistributedDataParallel(case.model(), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    return torch_step(model, case)


def fsdp(case: Case) -> Step:
    model = case.model()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return torch_step(fully_shard(model, mesh=mesh), case)


def pipec_step(case: Case, shards: bool) -> Step:
    model, (x, target) = case.model(), case.batch()
    stages = len(model) if shards else 1
    pipe = pipec.compile(
        model,
        devices=["cpu"] * RANKS,
        loss_fn=loss_of,
        schedule=f"looped-bfs-v{stages}" if shards else "1f1b",
        stages=stages,
        microbatches=RANKS,
        recompute="none",
        optimizer=ADAMW,
        shard="parameters" if shards else None,
    )
    return lambda: pipe.step(x, target=target)


def contestants(case: Case, shards: bool) -> dict[str, Callable[[], Step]]:
    own = functools.partial(pipec_step, case, shards)
    if shards:
        return {"FSDP2": functools.partial(fsdp, case), 'pipec, shard="parameters"': own}
    named = {f"DDP, buckets of {mb} MB": functools.partial(ddp, case, mb) for mb in BUCKETS_MB}
    return {**named, "pipec, stages=1": own}


def compare(case: Case, shards: bool, num_steps: int) -> list[str]:
    """Lines of a table: seconds and bytes of each contestant, and both relative to the best peer."""
    steps = {}
    for name, make in contestants(case, shards).items():
        torch.manual_seed(0)
        steps[name] = make()
    taken = medians(steps, num_steps, warmup=WARMUP_STEPS, before=dist.barrier)
    losses = {name: mean_over_ranks(step()) for name, step in steps.items()}
    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    if max(losses.values()) - min(losses.values()) > 1e-3 * abs(min(losses.values())):
        raise RuntimeError(f"the contestants disagree on the loss of {case.name}: {losses}")
    best = min((name for name in taken if not name.startswith("pipec")), key=taken.__getitem__)
    return [
        row(
            *(case.name, name, f"{1e3 * median:.0f}", f"{median / taken[best]:.2f}"),
            *(f"{peaks[name] / 1e6:.0f}", f"{peaks[name] / peaks[best]:.2f}"),
        )
        for name, median in taken.items()
    ]


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total / RANKS)


def peak_bytes(step: Step) -> float:
    """The most that storages made during a step hold at once."""
    dist.barrier()
    with TensorMemoryMeter() as meter:
        meter.begin({})
        step()
        meter.note()
    return meter.memory(dist.get_rank()).peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", type=int, default=[*range(len(CASES))])
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each contestant")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    headings = ("median ms", "/ best peer", "peak MB", "/ best peer")
    lines = [*table("model", "contestant", *headings, numbers_from=2)]
    for number in args.cases:
        for shards in (False, True):
            lines += compare(CASES[number], shards, args.steps)
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
