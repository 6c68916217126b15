"""Step time and memory of a GPT on GPUs: eager, compiled, stages that share one, and stages with one each.

A step is the forward and backward of a mini-batch of 8 microbatches, with the zeroing of gradients and
without the optimizer. Times are those of the GPU's clock, medians of warm steps. With two GPUs or more, the
stages are also run in one process, which copies between GPUs, and by torchrun over NCCL. ``--compiled`` adds
eager torch under ``torch.compile`` and stages with ``kernels="inductor"``, which take minutes to compile.
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
from common import gpt, in_processes, next_token_loss, row, table
from torch import Tensor, nn

import pipec

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

    def tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        text = torch.randint(
            self.vocabulary, (self.batch, self.context + 1), generator=torch.Generator().manual_seed(0)
        )
        return text[:, :-1].contiguous().to(device), text[:, 1:].contiguous().to(device)


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
        contestants["torch.compile"] = lambda: eager_step(case, device, compiles)
    for kernels in ("inductor",) * compiles:
        for stages in (1, 4):
            plural = "s" * (stages > 1)
            contestants[f"pipec, {kernels}, {stages} stage{plural} on one device"] = functools.partial(
                pipec_step, case, [device] * stages, schedule, kernels
            )
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
    found = rows(case, device, args.schedule, args.steps, args.compiled)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print("\n".join(table("", "step ms", "tokens/s", "peak GB", "eager / this")))
    for each in found:
        rate, ratio = f"{each.tokens_per_second:,.0f}", f"{each.times_eager:.2f}"
        print(row(each.contestant, f"{each.milliseconds:.1f}", rate, f"{each.peak_gb:.1f}", ratio))
    print(f"\n{name}, torch {torch.__version__}, {case}, {args.schedule}")


if __name__ == "__main__":
    main()
