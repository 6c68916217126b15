"""What can be looked at of a pipeline: its plan, its timelines, and the memory of its ranks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pipec.ir import Plan
from pipec.ir.argument_checks import check_arguments
from pipec.pipeline.checkpointing import CheckpointModule
from pipec.pipeline.method_arguments import METHOD_ARGUMENTS
from pipec.plan.memory_needs import plan_memory
from pipec.plan.plan_table import PrintablePlan
from pipec.plan.predictions import simulate_plan
from pipec.plan.step_memory import StepMemory
from pipec.programs.lower_periodic import steady_excerpt
from pipec.timeline.events import Timeline
from pipec.timeline.trace import Trace, measured_timeline
from pipec.viz import DrawnStep, draw_steps, steps_text


class InspectableModule(CheckpointModule):
    """Shows what was compiled for training, and what a recorded step took."""

    @property
    def plan(self) -> Plan:
        """What the compiler decided. It prints as a table."""
        return PrintablePlan.of(self._artifact.plan, self._artifact.programs)

    def simulate(self) -> Timeline:
        """The timeline of one step, predicted from the programs and the plan's costs."""
        return simulate_plan(self.plan, self.programs)

    def memory(self) -> StepMemory:
        """What each rank holds in a step that begins with ``.grad`` None, predicted from the programs.

        It prints as a table. A step that adds to gradients which were kept, as when it accumulates or after
        ``zero_grad(set_to_none=False)``, holds these from its start, and its own sums beside them where these
        travel between replicas, or with ``on_nan`` and without ``optimizer``.
        """
        programs = steady_excerpt(self.programs, self.plan.sync_spec.stream, self.plan.placement)
        return StepMemory(plan_memory(self.plan, self.programs), programs)

    def visualize(self, path: str | Path | None = None, trace: Trace | None = None) -> str:
        """The timelines as text: the simulated one, or those of a ``trace``, planned and measured.

        If ``path`` is given, rank 0 also draws them there: .html is a page to explore, .svg and .txt are
        pictures, and .json is for Perfetto and chrome://tracing. Another ending raises InputError.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        timelines = trace.timelines() if trace else {"planned": self.simulate()}
        steps = [
            DrawnStep.of_plan(self.plan, self.programs, timeline, name)
            for name, timeline in timelines.items()
        ]
        if path is not None and self._ranks.world.rank == 0:
            draw_steps(Path(path), steps)
        return steps_text(steps)

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record the steps that are made inside a ``with``. After it, the trace has their timelines.

        Every rank records, or none; each then has the times of all. They are times of the host: work that a
        GPU still has to do is not in them.
        """
        trace = Trace()
        with self.record() as recorded:
            yield trace
        if recorded:
            trace.simulated = self.simulate()
            sync_spec = self.plan.sync_spec
            trace.steps += [measured_timeline(step.programs, step.timestamps, sync_spec) for step in recorded]
