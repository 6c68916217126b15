"""A module that trains across stages and is compiled at its first step: what ``pipec.compile`` returns."""

import contextlib
import functools
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from pipec.artifact.directory import write
from pipec.capture.call import Call
from pipec.compiler.compiler import Compiled, Compiler
from pipec.errors import InputError
from pipec.ir import Mode, Plan
from pipec.plan.predictions import simulate_plan
from pipec.plan.tables import ReadablePlan
from pipec.runtime.batch import dense
from pipec.runtime.execution import Ranks
from pipec.runtime.handle import Handle, homes
from pipec.runtime.holder import ModelTensors, drop, hold
from pipec.runtime.results import merge
from pipec.timeline.events import Timeline
from pipec.timeline.trace import Trace, measured_timeline
from pipec.torch_compat import pytree
from pipec.viz import Step, draw_steps, steps_text


class Pipeline(Handle):
    """A model cut into stages. Make one with :func:`pipec.compile`.

    It holds the parameters and buffers under the model's own names. In one process these are all of them;
    under ``torchrun``, once it is compiled, they are those of this rank's stages. A tensor that was on its
    stage's device from the start is shared with the model, which therefore sees what was trained.
    """

    def __init__(self, compiler: Compiler, tensors: ModelTensors, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._compiler = compiler
        self._tensors = tensors
        self._groups: dict[Hashable, list[tuple[Compiled, list[int]]]] = {}
        self._mode_override: bool | None = None
        self._placed = False
        self.training = compiler.model.training
        hold(self, tensors, copies=ranks.count > 1 and (ranks.world.distributed or ranks.num_devices > 1))

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Run forward and backward of one mini-batch. Gradients are added to ``.grad``.

        The arguments are those of the model for the whole mini-batch, and ``target`` goes to the loss
        function. Every rank passes all of them. Tensors whose dimension 0 equals that of the first tensor are
        split into microbatches; others are passed whole.

        Returns:
            The loss, on every rank: the mean over microbatches, each weighted by its size.

        Raises:
            CaptureError, InputError, PlanError: the step cannot be run. Nothing was sent then.
            ExecutionError, TransportError: a rank failed.
        """
        call = self._checked(args, kwargs, target)
        loss = self._run(Mode.TRAIN, call)["loss"]
        self._num_steps += 1
        return loss

    def eval_step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """The loss that ``step`` would return, without gradients.

        Dropout and the like run in the mode that ``train()`` or ``eval()`` set last.
        """
        return self._run(Mode.LOSS, self._checked(args, kwargs, target))["loss"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the whole batch, on every rank, without gradients."""
        call = _call(args, kwargs)
        results = self._run(Mode.FORWARD, call)
        compiled = self._compiled(Mode.FORWARD, call)[0][0]
        leaves = [results.get(name) for name in compiled.artifact.plan.outputs]
        assert compiled.output_spec is not None
        return pytree.tree_unflatten(leaves, compiled.output_spec)

    def prepare(self, *args: Any, target: Any = None, **kwargs: Any) -> "Pipeline":
        """Compile what ``step`` with these arguments would run, and run nothing. Returns the pipeline."""
        call = self._checked(args, kwargs, target)
        self._compiled(Mode.TRAIN, call)
        return self

    def train(self, mode: bool = True) -> "Pipeline":
        """Set every module of the model to training or evaluation mode, as ``nn.Module.train`` does."""
        self._mode_override = mode
        return super().train(mode)

    @property
    def plan(self) -> Plan:
        """What the compiler decided. It prints as a table."""
        return ReadablePlan.of(self._artifact.plan, self._artifact.programs)

    def simulate(self) -> Timeline:
        """The timeline of one step, predicted from the programs and the plan's costs."""
        return simulate_plan(self.plan, self.programs)

    def visualize(self, path: str | Path | None = None, trace: Trace | None = None) -> str:
        """The timelines as text: the simulated one, or those of a ``trace``, planned and measured.

        If ``path`` is given, rank 0 also draws them there: .html is a page to explore, .svg and .txt are
        pictures, and .json is for Perfetto and chrome://tracing. Another ending raises InputError.
        """
        timelines = trace.timelines() if trace else {"planned": self.simulate()}
        steps = [Step.of_plan(self.plan, timeline, name) for name, timeline in timelines.items()]
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
            trace.planned = self.simulate()
            trace.steps += [measured_timeline(step.programs, step.stamps) for step in recorded]

    def save(self, directory: str | Path, tensors: bool = False) -> None:
        """Write plan, code and programs to a directory that ``pipec.load`` and ``pipec run`` read.

        With ``tensors``, the parameters and buffers are written too, as safetensors. Under ``torchrun``
        rank 0 writes, and it has the tensors of its own stages alone.
        """
        held = self._tensors_by_fqn() if tensors else None
        if self._ranks.world.rank == 0:
            write(self._artifact, Path(directory), held)

    @property
    def compile_seconds(self) -> dict[str, float]:
        """How long each step of compilation took, summed over all compilations."""
        return dict(self._compiler.seconds)

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Call:
        call = _call(args, kwargs, target)
        if self._compiler.loss_fn is not None and call.target is None:
            raise InputError(
                "target is missing: this pipeline has a loss_fn(output, target); pass target=..."
            )
        size, target = call.batch_size, call.target
        if isinstance(target, Tensor) and target.ndim and target.shape[0] != size:
            raise InputError(
                f"target has {target.shape[0]} rows but the batch has {size}; both have the batch first"
            )
        return call

    def _compiled(self, mode: Mode, call: Call) -> list[tuple[Compiled, list[int]]]:
        """What runs each group of consecutive microbatches, and their sizes.

        A batch that does not divide evenly has microbatches of two sizes. If one compiled graph cannot serve
        both, there are two groups. One process compiles for all.
        """
        with self._modules_in_mode():
            key = (mode, call.signature(), self._compiler.training_flags(), call.batch_size)
            if key not in self._groups:
                compile = functools.partial(self._compiler.compile, mode, call)
                self._groups[key] = self._ranks.once(repr(key), compile)
        groups = self._groups[key]
        if mode is Mode.TRAIN:
            self._trained = groups[0][0].artifact
        self._keep_own_tensors(groups[0][0].artifact.plan)
        return groups

    @contextlib.contextmanager
    def _modules_in_mode(self) -> Iterator[None]:
        """Put the model into the mode that ``train`` or ``eval`` set last, and afterwards back."""
        model = self._compiler.model
        before = {module: module.training for module in model.modules()}
        if self._mode_override is not None:
            model.train(self._mode_override)
        try:
            yield
        finally:
            for module, training in before.items():
                module.training = training

    def _run(self, mode: Mode, call: Call) -> dict[str, Tensor]:
        groups = self._compiled(mode, call)
        executions = [self._execution(compiled.artifact) for compiled, _ in groups]
        batch, start, parts = call.batch_size, 0, []
        for execution, (_, sizes) in zip(executions, groups, strict=True):
            rows = call if len(groups) == 1 else call.rows(start, start + sum(sizes))
            recorded = self._recorded if mode is Mode.TRAIN else None
            parts.append(
                execution.run(rows.leaves, sizes, batch, self._seed + start, self._num_steps, recorded)
            )
            start += sum(sizes)
        return parts[0] if len(parts) == 1 else self._joined(groups, parts)

    def _joined(
        self, groups: list[tuple[Compiled, list[int]]], parts: list[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Join the results of groups of microbatches into those of the batch."""
        counts = [sum(sizes) for _, sizes in groups]
        values = {v.name: v for x in groups[0][0].artifact.plan.links if x.target == -1 for v in x.values}
        return {name: merge(value, [part[name] for part in parts], counts) for name, value in values.items()}

    def _keep_own_tensors(self, plan: Plan) -> None:
        """Move each tensor to the device of the stage that owns it, and drop those of other processes."""
        if self._placed:
            return
        self._placed = True
        home_of = homes(plan, self._ranks.devices)
        canonical = self._tensors.canonical
        elsewhere = {fqn for fqn, home in home_of.items() if home is None}
        drop(self, [fqn for fqn, first in canonical.items() if first in elsewhere])
        for fqn, tensor in self._tensors_by_fqn().items():
            home = home_of.get(fqn)
            if home is not None and tensor.device != home and not tensor.is_meta:
                tensor.data = tensor.data.to(home)


def _call(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None) -> Call:
    return Call(*pytree.tree_map(dense, (args, kwargs, target)))
