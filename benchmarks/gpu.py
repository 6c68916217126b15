"""Step time and memory of a GPT on GPUs: eager, compiled, stages that share one, and stages with one each.

A step is the forward and backward of a mini-batch of 8 microbatches, with the zeroing of gradients and
without the optimizer. Times are those of the GPU's clock, medians of warm steps. With two GPUs or more, the
stages are also run in one process, which copies between GPUs, and by torchrun over NCCL. ``--compiled`` adds
eager torch under ``torch.compile`` and stages with ``kernels="inductor"``, which take minutes to compile.

``--offload 24`` trains a model with AdamW, weights in host memory, on one GPU that may hold 24 GB: beside the
same without offload, if that fits, and FSDP2 with its weights in host memory.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from common import gpt, in_processes, next_token_loss, row, table, text
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import pipec
from pipec.errors import InfeasibleError

MICROBATCHES, WARMUP_STEPS = 8, 3

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Row:
    """``times_eager`` is the time of eager torch on one GPU over the time of this."""

    contestant: str
    milliseconds: float
    tokens_per_second: float
    peak_gb: float
    times_eager: float = 1.0


@dataclass(frozen=True)
class Case:
    """A GPT in bfloat16, and a mini-batch for it."""

    width: int
    num_layers: int
    context: int
    batch: int
    vocabulary: int = 32768

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return gpt(self.width, self.vocabulary, self.context, self.num_layers).to(torch.bfloat16)

    def large_model(self) -> nn.Module:
        """The model in host memory, which never held it in more than 16 bits."""
        with torch.device("meta"):
            model = gpt(self.width, self.vocabulary, self.context, self.num_layers).to(torch.bfloat16)
        model = model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        return model

    @property
    def flops(self) -> float:
        """Of a step, with six for each parameter and token (Kaplan et al., 2020), without attention."""
        with torch.device("meta"):
            model = gpt(self.width, self.vocabulary, self.context, self.num_layers)
        return 6.0 * sum(each.numel() for each in model.parameters()) * self.batch * self.context

    def tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        tokens, target = text(self.batch, self.context, self.vocabulary)
        return tokens.to(device), target.to(device)


def eager_step(case: Case, device: torch.device, compiles: bool = False) -> Step:
    model = case.model().to(device)
    microbatches = list(zip(*(x.chunk(MICROBATCHES) for x in case.tokens(device)), strict=True))

    def microbatch_loss(tokens: Tensor, target: Tensor) -> Tensor:
        return next_token_loss(model(tokens), target) / MICROBATCHES

    loss_of = torch.compile(microbatch_loss, fullgraph=True) if compiles else microbatch_loss

    def step() -> Tensor:
        model.zero_grad()
        total = torch.zeros((), device=device)
        for tokens, target in microbatches:
            loss = loss_of(tokens, target)
            loss.backward()
            total += loss.detach()
        return total

    return step


def pipec_step(case: Case, devices: int | list[torch.device], schedule: str, kernels: str = "source") -> Step:
    options = {"schedule": schedule, "microbatches": MICROBATCHES, "kernels": kernels}
    pipe = pipec.compile(case.model(), devices, loss_fn=next_token_loss, **options)
    first = torch.device("cpu") if isinstance(devices, int) else devices[0]
    tokens, target = case.tokens(first)

    def step() -> Tensor:
        pipe.zero_grad()
        loss: Tensor = pipe.step(tokens, target=target)
        return loss

    return step


def trained_step(case: Case, device: torch.device, offload: str | None, gigabytes: float | None) -> Step:
    """Forward, backward and update by pipec."""
    adamw = functools.partial(torch.optim.AdamW, lr=1e-5, fused=True)
    limit = None if gigabytes is None else int(gigabytes * 1e9)
    options = {"optimizer": adamw, "offload": offload, "memory_limit": limit, "microbatches": MICROBATCHES}
    pipe = pipec.compile(case.large_model(), [device], loss_fn=next_token_loss, check="off", **options)
    tokens, target = case.tokens(torch.device("cpu"))
    return lambda: pipe.step(tokens, target=target)


def fsdp_step(case: Case, device: torch.device) -> Step:
    """Forward, backward and update by FSDP2, with weights in host memory and checkpointed blocks."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
    model, policy = case.large_model(), CPUOffloadPolicy(pin_memory=device.type == "cuda")
    assert isinstance(model, nn.Sequential)
    for block in model:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    microbatches = list(zip(*(x.chunk(MICROBATCHES) for x in case.tokens(device)), strict=True))

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for tokens, target in microbatches:
            hidden = model[0](tokens)
            for block in model[1:]:
                hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
            loss = next_token_loss(hidden, target) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def offloaded_rows(case: Case, device: torch.device, gigabytes: float, steps: int) -> list[Row]:
    contestants: dict[str, Callable[[], Step]] = {
        "FSDP2, weights in host memory": lambda: fsdp_step(case, device),
        "pipec, whole on the device": lambda: trained_step(case, device, None, None),
        f"pipec, weights in host memory, {gigabytes:g} GB": lambda: trained_step(
            case, device, "weights", gigabytes
        ),
    }
    found = []
    for name, make in contestants.items():
        try:
            found.append(measured(name, case, make(), device.type == "cuda", steps))
        except (InfeasibleError, torch.OutOfMemoryError) as error:
            print(f"{name} does not fit: {str(error).splitlines()[0]}", file=sys.stderr)
        gc.collect()
    first = found[0].milliseconds
    return [Row(**{**asdict(each), "times_eager": first / each.milliseconds}) for each in found]


def measured(name: str, case: Case, step: Step, on_gpu: bool, steps: int) -> Row:
    for _ in range(WARMUP_STEPS):
        step()
    gc.collect()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(_seconds(step, on_gpu) for _ in range(steps))
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0
    measured_row = Row(name, 1e3 * seconds, case.batch * case.context / seconds, peak)
    print(measured_row, file=sys.stderr, flush=True)
    return measured_row


def _seconds(step: Step, on_gpu: bool) -> float:
    if not on_gpu:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def rows(case: Case, device: torch.device, schedule: str, steps: int, compiles: bool) -> list[Row]:
    on_gpu = device.type == "cuda"
    count = torch.cuda.device_count() if on_gpu else 1
    contestants: dict[str, Callable[[], Step]] = {
        "eager": lambda: eager_step(case, device),
        "pipec, 1 stage": lambda: pipec_step(case, [device], schedule),
        "pipec, 4 stages on one device": lambda: pipec_step(case, [device] * 4, schedule),
    }
    if compiles:
        inductor = functools.partial(pipec_step, case, schedule=schedule, kernels="inductor")
        contestants["torch.compile"] = lambda: eager_step(case, device, compiles)
        contestants["pipec, inductor, 1 stage"] = lambda: inductor([device])
        contestants["pipec, inductor, 4 stages on one device"] = lambda: inductor([device] * 4)
    if count > 1:
        gpus = [torch.device("cuda", index) for index in range(count)]
        contestants[f"pipec, {count} GPUs of a process"] = lambda: pipec_step(case, gpus, schedule)
    found = [measured(name, case, make(), on_gpu, steps) for name, make in contestants.items()]
    if count > 1:
        found.append(over_nccl(count))
    eager = found[0].milliseconds
    return [Row(**{**asdict(each), "times_eager": eager / each.milliseconds}) for each in found]


def over_nccl(count: int) -> Row:
    """The row that rank 0 prints when torchrun starts this script on all GPUs."""
    return Row(**json.loads(in_processes(sys.argv[0], count, [*sys.argv[1:], "--rank"]).splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compiled", action="store_true", help="time torch.compile, too")
    parser.add_argument("--offload", type=float, metavar="GB", help="train with weights in host memory")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    case = Case(args.width, args.layers, args.context, args.batch)

    if args.rank:
        count = int(os.environ["WORLD_SIZE"])
        step = pipec_step(case, count, args.schedule)
        own = measured(f"pipec, {count} GPUs over NCCL", case, step, on_gpu=True, steps=args.steps)
        pipec.log(json.dumps(asdict(own)))
        return
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    if args.offload:
        found, ratio_of = offloaded_rows(case, device, args.offload, args.steps), "first / this"
    else:
        found, ratio_of = rows(case, device, args.schedule, args.steps, args.compiled), "eager / this"
    print("\n".join(table("", "step ms", "tokens/s", "peak GB", ratio_of)))
    for each in found:
        rate, ratio = f"{each.tokens_per_second:,.0f}", f"{each.times_eager:.2f}"
        print(row(each.contestant, f"{each.milliseconds:.1f}", rate, f"{each.peak_gb:.1f}", ratio))
    print(f"\n{name}, torch {torch.__version__}, {case}, {args.schedule}")
    if args.offload:
        rates = [1e-9 * case.flops / each.milliseconds for each in found]
        print(f"TFLOPS of the model: {', '.join(f'{rate:.1f}' for rate in rates)}")


if __name__ == "__main__":
    main()
