"""The seconds that copies to host memory take."""

from dataclasses import replace

from pipec.hardware.devices import LinkModel
from pipec.ir import Plan


def with_offload_seconds(plan: Plan, link: LinkModel) -> Plan:
    """The plan with the seconds of each stage's offloads and prefetches."""
    stages = []
    for stage in plan.stages:
        num_bytes = stage.cost.memory.offloaded
        seconds = len(stage.offloaded) * link.latency_seconds + num_bytes / link.bytes_per_second
        stages.append(replace(stage, cost=replace(stage.cost, copy_seconds=seconds)))
    return replace(plan, stages=tuple(stages))
