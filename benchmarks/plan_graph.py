"""Plan a published graph: which operators form a stage, on how many devices; and simulate its step.

    python benchmarks/plan_graph.py graph.txt --devices 4x4 --bandwidth 12e9,1.25e9
    python benchmarks/plan_graph.py graph.txt --topology hosts.toml --schedule gpipe -o step.html
    python benchmarks/plan_graph.py graph.json --json

``graph.txt`` is a profile of PipeDream. ``graph.json`` is a graph of dnn-partitioning: it has devices, links
and a cost model of its own. The planner minimises the slowest stage under the cost model. The table shows
that plan under the schedule, as the simulator plays it: messages travel beside operators. A stage on r
devices is one rank there, r times as fast, and does not sum its gradients over them.

JSON keys: those of ``pipec plan``; and of the planner, seconds of the slowest stage; stages, each with
replicas, operators, seconds, communication_seconds, devices; planning_seconds; lower_bound_seconds, which no
plan is below; cost_model.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dnn_partitioning import read_dnn_partitioning
from from_graph import PublishedGraph, plan_from_operator_graph
from pipedream_graph import read_pipedream_graph

from pipec.cli.output import plan_summary
from pipec.errors import InputError, PipecError
from pipec.hardware.topology import Topology, read_topology, uniform_topology
from pipec.ir import Plan, Program, Schedule
from pipec.ir.text_format import format_seconds
from pipec.plan.plan_table import plan_table
from pipec.plan.predictions import simulate_plan
from pipec.planner.cost_model import MAX_LOAD, PIPEC, PIPEDREAM
from pipec.planner.partition import Partition, PartitionStage, partition_graph
from pipec.programs.lower import lower
from pipec.programs.verify import verify_step
from pipec.schedules import custom_schedule, make_schedule
from pipec.viz import DrawnStep, check_drawing, draw_steps

COST_MODELS = {"pipec": PIPEC, "pipedream": PIPEDREAM, "max-load": MAX_LOAD}


@dataclass(frozen=True)
class Problem:
    """``nodes[k]`` are the names that the file gives to what is operator k of the graph.

    ``unknown`` says what the file does not tell, for the reader of the plan's table.
    """

    graph: PublishedGraph
    topology: Topology
    cost_model: str
    max_replicas: int | None
    nodes: Sequence[Sequence[str]]
    unknown: str = ""


@dataclass(frozen=True)
class Planned:
    """The planner's partition of a problem, and the plan made of it with its programs."""

    problem: Problem
    partition: Partition
    planning_seconds: float
    plan: Plan
    programs: tuple[Program, ...]

    @property
    def step(self) -> DrawnStep:
        """The simulated step."""
        return DrawnStep.of_plan(self.plan, self.programs, simulate_plan(self.plan, self.programs))


def main(arguments: Sequence[str] | None = None) -> None:
    args = _arguments(arguments)
    try:
        if args.output is not None:
            check_drawing(args.output)
        planned = planned_of(_problem(args), args.schedule, args.microbatches)
        if args.output is not None:
            draw_steps(args.output, [planned.step])
    except PipecError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(facts(planned), indent=1) if args.json else "\n".join(lines(planned)))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file", type=Path, help="graph.txt of PipeDream, or a .json graph of dnn-partitioning"
    )
    parser.add_argument("--devices", help="how many, or by level, innermost first, such as 4x4")
    parser.add_argument("--bandwidth", help="bytes per second of each level, such as 12e9,1.25e9")
    parser.add_argument("--topology", type=Path, help="devices and links, as a TOML or JSON file")
    parser.add_argument("--cost-model", choices=COST_MODELS, help="of a profile; default: pipedream")
    parser.add_argument("--schedule", default="1f1b", help="a name, or a .txt file of compute orders")
    parser.add_argument("--microbatches", type=int, help="of a step; default: four a stage")
    parser.add_argument("-o", "--output", type=Path, help="draw the step: .html, .svg, .txt or .json")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def _problem(args: argparse.Namespace) -> Problem:
    if args.file.suffix != ".json":
        graph = read_pipedream_graph(args.file)
        return Problem(
            graph, _topology(args), args.cost_model or "pipedream", None, [(name,) for name in graph.names]
        )
    if any([args.devices, args.bandwidth, args.topology, args.cost_model]):
        raise InputError(
            f"{args.file.name} is a graph of dnn-partitioning, with devices and a cost model: leave out "
            "--devices, --bandwidth, --topology and --cost-model"
        )
    given = read_dnn_partitioning(args.file)
    unknown = (
        "the file gives the seconds of a message and all memory of an operator as one sum: sends and saves "
        "are shown as 0, all memory as weights"
    )
    return Problem(given.graph, given.topology, "max-load", 1, given.nodes, unknown)


def _topology(args: argparse.Namespace) -> Topology:
    if args.topology and not (args.devices or args.bandwidth):
        return read_topology(args.topology)
    if args.topology or not (args.devices and args.bandwidth):
        raise InputError("a profile of PipeDream needs --devices and --bandwidth, or --topology alone")
    try:
        sizes = [int(size) for size in args.devices.split("x")]
        rates = [float(rate) for rate in args.bandwidth.split(",")]
    except ValueError as error:
        raise InputError(
            f"--devices is {args.devices!r} and --bandwidth {args.bandwidth!r}; expected numbers such as 16 "
            "and 1e9, or one of each a level, innermost first, such as 4x4 and 12e9,1.25e9"
        ) from error
    return uniform_topology(sizes, rates)


def planned_of(problem: Problem, schedule: str = "1f1b", num_microbatches: int | None = None) -> Planned:
    """The best plan of a problem under a schedule, verified. Default: four microbatches a stage."""
    started = time.perf_counter()
    partition = partition_graph(
        problem.graph, problem.topology, COST_MODELS[problem.cost_model], problem.max_replicas
    )
    seconds = time.perf_counter() - started
    num_stages = len(partition.stages)
    cells = _schedule(schedule, num_stages, num_microbatches or 4 * num_stages)
    plan = plan_from_operator_graph(problem.graph, problem.topology, partition, cells)
    programs = lower(cells, plan)
    verify_step(plan, programs)
    return Planned(problem, partition, seconds, plan, programs)


def _schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    if name.endswith(".txt"):
        return custom_schedule(Path(name), num_ranks, num_microbatches)
    return make_schedule(name, num_ranks, num_microbatches)


def facts(planned: Planned) -> dict[str, object]:
    """For JSON."""
    problem, partition = planned.problem, planned.partition
    stages = [
        {
            "replicas": stage.replicas,
            "operators": [name for operator in stage.operators for name in problem.nodes[operator]],
            "seconds": stage.seconds,
            "communication_seconds": stage.communication_seconds,
            "devices": stage.devices,
        }
        for stage in partition.stages
    ]
    return {
        "seconds": partition.seconds,
        "stages": stages,
        "planning_seconds": planned.planning_seconds,
        "lower_bound_seconds": partition.lower_bound_seconds,
        "cost_model": problem.cost_model,
        **plan_summary(planned.plan, planned.programs),
    }


def lines(planned: Planned) -> Iterator[str]:
    """The plan's table, and the planner's own figure beside the simulator's."""
    problem, partition, plan = planned.problem, planned.partition, planned.plan
    yield plan_table(plan, planned.programs)
    yield ""
    yield (
        f"planner, cost model {problem.cost_model}: {format_seconds(partition.seconds)} a microbatch in the "
        f"slowest stage, planned in {format_seconds(planned.planning_seconds)}"
    )
    yield _bottleneck(partition.stages[partition.bottleneck_stage], partition.bottleneck_stage)
    if not partition.is_optimal:
        yield f"not proved optimal: no plan takes less than {format_seconds(partition.lower_bound_seconds)}"
    yield (
        f"simulator: {format_seconds(planned.step.timeline.makespan / plan.num_microbatches)} a microbatch, "
        f"the step divided by {plan.num_microbatches}; messages travel beside operators"
    )
    if problem.unknown:
        yield problem.unknown
    replicas = [stage.replicas for stage in partition.stages]
    if max(replicas) > 1:
        yield (
            f"devices of each stage: {'-'.join(map(str, replicas))}; a stage on r devices is simulated as "
            "one rank, r times as fast and without its all-reduce; bubble and memory count it once"
        )


def _bottleneck(stage: PartitionStage, index: int) -> str:
    """Why the step is not faster: links and all-reduce, an operator that cannot be divided, or the work."""
    spent = format_seconds(stage.communication_seconds)
    if 2 * stage.communication_seconds > stage.seconds:
        return f"stage {index} bounds the step, most of all by {spent} of links and all-reduce"
    alone = ", all in one operator" if len(stage.operators) == 1 else ""
    return f"stage {index} bounds the step by its operators{alone}; links and all-reduce take {spent}"


if __name__ == "__main__":
    main()
