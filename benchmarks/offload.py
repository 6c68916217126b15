"""What host memory saves: steps within limits by replays alone, by copies alone, and by both.

    python benchmarks/offload.py --schedule 1f1b     # 32 layers on 8 GPUs, simulated
    python benchmarks/offload.py --short             # a model of two narrow layers

Limits are shares of what a step needs that keeps everything on the device.
"""

import argparse
import math
from collections.abc import Sequence

from recompute import GPU, SHORT, SIMULATED, Sizes, captured, table

from pipec.compiler.candidate import Candidate
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.schedule_policy import make_schedule_policy
from pipec.compiler.search import CapturedStep, search
from pipec.compiler.staged_graph import EvaluatedPlan
from pipec.hardware.devices import DEVICES
from pipec.hardware.topology import equal_devices
from pipec.ir.text_format import format_bytes, format_seconds

WAYS = {"replays": ("auto", False), "copies": ("none", True), "both": ("auto", True)}


def step(sizes: Sizes, schedule: str, num_ranks: int, limit: float, way: str) -> EvaluatedPlan:
    """The best step within a limit, as the search finds it on GPUs."""
    device, (recompute, offloads) = DEVICES[GPU], WAYS[way]
    topology = equal_devices(num_ranks, device.link, limit)
    options = CompilerOptions(device, topology, recompute, offloads)
    candidate = Candidate(make_schedule_policy(schedule, num_ranks), options, sizes.microbatches)
    return search(CapturedStep(captured(sizes), sizes.rows), candidate).best


def limits(sizes: Sizes, schedule: str, num_ranks: int, shares: Sequence[float]) -> None:
    free = step(sizes, schedule, num_ranks, math.inf, "replays")
    row = table("limit", "share of none", *WAYS, "on the host, of both")
    row(format_bytes(free.peak_bytes), "100%", *[format_seconds(free.seconds)] * len(WAYS), "0 B")
    for share in shares:
        limit = share * free.peak_bytes
        trials = {way: step(sizes, schedule, num_ranks, limit, way) for way in WAYS}
        shown = ("" if any(each.excess_bytes) else format_seconds(each.seconds) for each in trials.values())
        host = max(need.host_bytes for need in trials["both"].memory)
        row(format_bytes(limit), f"{share:.0%}", *shown, format_bytes(host))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--shares", type=float, nargs="+", default=(0.8, 0.6, 0.5, 0.4, 0.3))
    parser.add_argument("--short", action="store_true")
    args = parser.parse_args()
    sizes, ranks = (SHORT, 1) if args.short else (SIMULATED, args.ranks)
    limits(sizes, args.schedule, ranks, args.shares)


if __name__ == "__main__":
    main()
