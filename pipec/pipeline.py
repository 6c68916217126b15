"""A module that trains across stages and is compiled at its first step: what ``pipec.compile`` returns."""

import contextlib
import functools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipec.artifact.directory import write
from pipec.capture.call import Call
from pipec.capture.splitting import Batched, divide, refuse_own_batches
from pipec.compiler.compiler import Compiled, Compiler
from pipec.console import log
from pipec.errors import InputError, PipecError
from pipec.ir import Mode, Plan
from pipec.plan.predictions import simulate_plan
from pipec.plan.tables import ReadablePlan
from pipec.runtime.batch import dense
from pipec.runtime.execution import Ranks
from pipec.runtime.facts import Facts, leaf_fact
from pipec.runtime.handle import Handle, holders, homes
from pipec.runtime.holder import Emptied, ModelTensors, fill, forget, hold, put_back
from pipec.runtime.results import merge
from pipec.runtime.updates import Updates
from pipec.runtime.weights import MicrobatchWeight, loss_shares
from pipec.timeline.events import Timeline
from pipec.timeline.trace import Trace, measured_timeline
from pipec.torch_compat import pytree
from pipec.viz import Step, draw_steps, steps_text

Groups = list[tuple[Compiled, list[int]]]
"""What runs each group of consecutive microbatches of a batch, and their rows."""


class Pipeline(Handle):
    """A model cut into stages. Make one with :func:`pipec.compile`.

    It holds the model's own parameters and buffers, under the model's own names. In one process these are all
    of them. Under ``torchrun``, once it is compiled, they are those of this rank's stages; the model's other
    tensors are emptied where they are, so that their memory is given back and an optimizer passes them over.
    ``full_state_dict`` and ``gather_into`` bring the whole together again.
    """

    def __init__(
        self,
        compiler: Compiler,
        tensors: ModelTensors,
        ranks: Ranks,
        batch: str = "same",
        updates: Updates | None = None,
        batched: Batched | None = None,
        microbatch_weight: MicrobatchWeight | None = None,
    ) -> None:
        super().__init__(ranks, updates=updates)
        self._batched = batched
        self._weight = microbatch_weight
        self._batch = batch
        self._emptied = Emptied()
        self._refilled = False
        self._compiler = compiler
        self._tensors = tensors
        self._groups: dict[Hashable, Groups] = {}
        self.training = compiler.model.training
        hold(self, tensors)

    def step(self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any) -> Any:
        """Run forward and backward of one mini-batch. Gradients are added to ``.grad``.

        If the pipeline was compiled with an optimizer, the step ends with its update, which clears them.

        The arguments are those of the model for the whole mini-batch, and ``target`` goes to the loss
        function. Every rank passes the same, unless ``compile`` was told otherwise. Tensors with the rows of
        the batch are split into microbatches, others are passed whole; see ``batched`` of ``compile``.

        Returns:
            The loss of the batch, on every rank; with ``outputs``, a tuple of that and the model's output.
            What ``loss_fn`` returned besides the loss is in ``logs`` then.

        Raises:
            CaptureError, InputError, PlanError: the step cannot be run, or the ranks passed different
                arguments. Nothing was changed, and every rank raises it.
            ExecutionError, TransportError: a rank failed.
        """
        call = self._agreed("step with outputs" if outputs else "step", args, kwargs, target)
        loss = self._loss(Mode.TRAIN, call, outputs)
        self._num_steps += 1
        self._count_update()
        return loss

    def eval_step(self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any) -> Any:
        """What ``step`` would return, without gradients.

        Dropout and the like run in the mode that ``train()`` or ``eval()`` set last.
        """
        call = self._agreed("eval_step with outputs" if outputs else "eval_step", args, kwargs, target)
        return self._loss(Mode.LOSS, call, outputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the whole batch, on every rank, without gradients."""
        call = self._agreed("forward", args, kwargs)
        compiled = self._compiled(Mode.FORWARD, call)[0][0]
        results = self._run(Mode.FORWARD, call)
        return _output(compiled, results, compiled.artifact.plan.outputs)

    def _loss(self, mode: Mode, call: Call, outputs: bool) -> Any:
        """The loss of a step, and with ``outputs`` the model's output. The logs are kept."""
        compiled = self._compiled(mode, call, outputs)[0][0]
        results, plan = self._run(mode, call, outputs), compiled.artifact.plan
        self.logs = {name: results[kept] for name, kept in zip(plan.logs, plan.outputs[1:], strict=False)}
        loss = results["loss"]
        return (loss, _output(compiled, results, plan.outputs[1 + len(plan.logs) :])) if outputs else loss

    def prepare(self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any) -> "Pipeline":
        """Compile what ``step`` with these arguments would run, and run nothing. Returns the pipeline."""
        self._compiled(Mode.TRAIN, self._agreed("prepare", args, kwargs, target), outputs)
        return self

    def train(self, mode: bool = True) -> "Pipeline":
        """Set every module of the model to training or evaluation mode, as ``nn.Module.train`` does."""
        self._compiler.model.train(mode)
        return super().train(mode)

    def full_state_dict(self, all_ranks: bool = False) -> dict[str, Tensor]:
        """A copy of the whole model's state on the CPU, under its own names. Every rank calls this.

        Under ``torchrun`` rank 0 gets it, and the others get an empty dict; with ``all_ranks``, all get it.
        """
        names = [name for name in self._compiler.model.state_dict(keep_vars=True) if name in self._canonical]
        whole = self._whole("full_state_dict", {self._canonical[name] for name in names}, all_ranks)
        return {name: whole[self._canonical[name]] for name in names if whole}

    def gather_into(self, model: nn.Module, all_ranks: bool = False) -> None:
        """Write the whole model's parameters and buffers into ``model``, on rank 0 or on all ranks.

        Every rank calls this. ``model`` is the one that was compiled, or one of the same structure. The one
        that was compiled has its memory again until the next step, which empties it anew.
        """
        whole = self._whole("gather_into", set(self._tensors.unique()), all_ranks)
        if whole:
            self._refilled = True
            fill(model, {name: whole[first] for name, first in self._canonical.items()})

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the whole model's state, or that of this rank's stages, at any time and on any rank.

        What belongs to other ranks' stages is passed over, so every rank loads.
        """
        held = self._tensors_by_fqn(every_name=True)
        own = {name: x for name, x in state_dict.items() if name in held or name not in self._canonical}
        if assign:
            self._release_shares()
        with self._gathered():
            result = super().load_state_dict(own, strict, assign)
        if assign:
            self._adopt_replaced()
        return result

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of this rank's stages, under the model's names.

        Where parameters are kept in shares, they are gathered and copied: every rank then calls this.
        """
        with self._gathered():
            state = super().state_dict(*args, **kwargs)
            shared = self._updates is not None and self._updates.keeps_shares
            return {name: x.detach().clone() for name, x in state.items()} if shared else state

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
            ending = self.plan.ending
            trace.steps += [measured_timeline(step.programs, step.stamps, ending) for step in recorded]

    def save(self, directory: str | Path, tensors: bool = False) -> None:
        """Write plan, code and programs to a directory that ``pipec.load`` and ``pipec run`` read.

        With ``tensors``, the parameters and buffers are written too, as safetensors. Under ``torchrun``
        rank 0 writes; every rank then calls this, because rank 0 gathers the tensors of all.
        """
        held = self._tensors_by_fqn() if tensors else None
        if tensors and self._ranks.world.distributed:
            held = self._whole("save", set(self._tensors.unique()), all_ranks=False)
        if self._ranks.world.rank == 0:
            write(self._artifact, Path(directory), held)

    @property
    def compile_seconds(self) -> dict[str, float]:
        """How long each step of compilation took, summed over all compilations."""
        return dict(self._compiler.seconds)

    def _agreed(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None) -> Call:
        """The call that all ranks make: what each of them was given, or what rank 0 was.

        A rank that cannot use its arguments raises only when the others know, so that all raise.
        """
        if not self._ranks.world.distributed:
            return self._checked(kind, args, kwargs, target)
        facts, call, refusal = self._mode_facts(kind), Call((), {}), None
        sent = self._batch == "rank0"
        if not sent or self._ranks.world.rank == 0:
            try:
                call = self._checked(kind, args, kwargs, target)
                call.signature()  # refuses what no stage can take
                facts |= {} if sent else _call_facts(call, kind)
            except PipecError as error:
                refusal, facts = error, facts | {"refused": str(error)}
        self._require_same(kind, facts)
        if refusal is not None:
            raise refusal
        return self._sent(kind, call) if sent else call

    def _sent(self, kind: str, call: Call) -> Call:
        leaves, structure = pytree.tree_flatten(call.tree)
        doing = f"sharing rank 0's batch of {kind}"
        sent, structure = self._ranks.agreement.from_rank(0, doing, leaves, structure)
        return self._divided(Call(*pytree.tree_unflatten(sent, structure)))

    def _mode_facts(self, kind: str) -> Facts:
        flags = self._compiler.training_flags()
        facts = {"modules in training mode": f"{sum(flags)} of {len(flags)} ({hash(flags) & 0xFFFF:x})"}
        return facts | (self._update_facts() if kind == "step" else {})

    def _checked(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Call:
        refuse_own_batches((args, kwargs, target))
        call = self._divided(Call(*pytree.tree_map(dense, (args, kwargs, target))))
        if kind == "forward":
            return call
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

    def _divided(self, call: Call) -> Call:
        return divide(call, self._batched, self._compiler.positional_names())

    def _compiled(self, mode: Mode, call: Call, outputs: bool = False) -> Groups:
        """What runs each group of consecutive microbatches, and their sizes.

        A batch that does not divide evenly has microbatches of two sizes. If one compiled graph cannot serve
        both, there are two groups. One process compiles for all.
        """
        key = (mode, call.signature(), self._compiler.training_flags(), call.batch_size, outputs)
        is_new = key not in self._groups
        if is_new:
            compile = functools.partial(self._compile, mode, call, outputs)
            self._groups[key] = self._ranks.once(repr(key), compile)
        groups = self._groups[key]
        if mode is Mode.TRAIN:
            self._trained = groups[0][0].artifact
        if is_new or self._refilled:
            self._keep_own_tensors(groups[0][0].artifact.plan)
            self._refilled = False
        return groups

    def _compile(self, mode: Mode, call: Call, outputs: bool) -> Groups:
        with self._emptied.shaped(self._tensors.unique()):
            return self._compiler.compile(mode, call, outputs)

    def _run(self, mode: Mode, call: Call, outputs: bool = False) -> dict[str, Tensor]:
        groups = self._compiled(mode, call, outputs)
        if mode is Mode.TRAIN:
            return self._run_groups(mode, call, groups)
        with self._gathered():
            return self._run_groups(mode, call, groups)

    def _run_groups(self, mode: Mode, call: Call, groups: Groups) -> dict[str, Tensor]:
        executions = [self._execution(compiled.artifact) for compiled, _ in groups]
        batch, start, parts = call.batch_size, 0, []
        shares = self._loss_shares(mode, call, [size for _, sizes in groups for size in sizes])
        recorded = self._recorded if mode is Mode.TRAIN else None
        for execution, (_, sizes) in zip(executions, groups, strict=True):
            own = None if shares is None else [shares.pop(0) for _ in sizes]
            seed, step = self._seed + start, self._num_steps
            update = execution is executions[-1] and not self._accumulates
            parts.append(execution.run(call.leaves, sizes, batch, seed, step, recorded, start, own, update))
            start += sum(sizes)
        return parts[0] if len(parts) == 1 else self._joined(groups, parts, shares is not None)

    def _loss_shares(self, mode: Mode, call: Call, sizes: Sequence[int]) -> list[float] | None:
        if mode is Mode.FORWARD:
            return None
        structure = pytree.tree_structure(call.tree)
        call_of = functools.partial(pytree.tree_unflatten, treespec=structure)
        return loss_shares(self._weight, call.leaves, call_of, call.batched(), sizes)

    def _joined(self, groups: Groups, parts: list[dict[str, Tensor]], has_shares: bool) -> dict[str, Tensor]:
        """Join the results of groups of microbatches into those of the batch."""
        counts = [sum(sizes) for _, sizes in groups]
        plan = groups[0][0].artifact.plan
        sums = {*plan.sums, "loss"} if has_shares else plan.sums
        values = [value for link in plan.links if link.target == -1 for value in link.values]
        rows = sum(counts)
        return {
            value.name: merge(value, [part[value.name] for part in parts], counts, rows, value.name in sums)
            for value in values
        }

    def _empty(self, fqns: Sequence[str]) -> None:
        unique = self._tensors.unique()
        self._emptied.empty({fqn: unique[fqn] for fqn in fqns})

    def _keep_own_tensors(self, plan: Plan) -> None:
        """Move each tensor to the device of the stage that owns it, and empty those of other processes."""
        unique = self._tensors.unique()
        found = homes(plan, self._ranks.devices)
        new = {fqn: home for fqn, home in found.items() if fqn not in self._holders}
        if new and self._ranks.world.distributed:
            first = not self._holders
            self._start_from_rank_0({fqn: x for fqn, x in unique.items() if first or fqn in new})
        self._holders = holders(plan) | self._holders
        elsewhere = {fqn for fqn in unique if fqn in self._holders and not self._is_here(fqn)}
        if any(unique[fqn].numel() for fqn in elsewhere):
            forget(self, [fqn for fqn, first in self._canonical.items() if first in elsewhere])
            self._emptied.empty({fqn: unique[fqn] for fqn in elsewhere})
        for fqn, home in new.items():
            tensor = unique.get(fqn)
            if tensor is not None and home is not None and tensor.device != home and not tensor.is_meta:
                tensor.data = tensor.data.to(home)

    def _start_from_rank_0(self, tensors: Mapping[str, Tensor]) -> None:
        """Let training start with the values that rank 0 has, and say where others were."""
        for rank, names in self._ranks.agreement.start_from_rank_0(tensors).items():
            some = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
            log(f"pipec: {len(names)} tensors of rank {rank} differed, and start with rank 0's: {some}")

    def _whole(self, kind: str, names: Collection[str], all_ranks: bool) -> dict[str, Tensor]:
        """Copies on the CPU of the tensors of all ranks, on rank 0 or on all ranks; elsewhere nothing."""
        if self._ranks.world.distributed:
            self._require_same(f"{kind}(all_ranks={all_ranks})", {})
        with self._gathered():
            return self._collected(names, all_ranks)

    def _collected(self, names: Collection[str], all_ranks: bool) -> dict[str, Tensor]:
        unique = {fqn: tensor.detach() for fqn, tensor in self._tensors.unique().items() if fqn in names}
        if not self._ranks.world.distributed:
            return {fqn: tensor.to("cpu", copy=True) for fqn, tensor in unique.items()}
        readers = range(self._ranks.count) if all_ranks else [0]
        reads, whole = self._ranks.world.rank in readers, {}
        for fqn, tensor in unique.items():
            owner = self._speaker(fqn)
            shape = self._emptied.shape(fqn, tensor)
            given = tensor if self._is_own(fqn) else torch.empty(shape, dtype=tensor.dtype)
            to = [rank for rank in readers if rank != owner]
            found = self._ranks.agreement.sent_by(owner, f"gathering {fqn}", given, to)
            if reads:
                whole[fqn] = found.to("cpu", copy=True) if found is given else found
        return whole

    def _adopt_replaced(self) -> None:
        """Where tensors were replaced by others, let the names of a tied one and the model have those too."""
        held = self._tensors_by_fqn(every_name=True)
        own = {fqn: held[first] for fqn, first in self._canonical.items() if first in held}
        for module in (self, self._compiler.model):
            put_back(module, own)
        self._tensors = self._tensors.replaced(own)
        self._executions.clear()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._adopt_replaced()
        return self

    @property
    def _canonical(self) -> dict[str, str]:
        return self._tensors.canonical

    def _parameter_kinds(self) -> dict[str, torch.dtype]:
        parameters = self._tensors.parameters.items()
        return {fqn: x.dtype.to_real() for fqn, x in parameters if self._canonical[fqn] == fqn}


def _call_facts(call: Call, kind: str) -> Facts:
    """What the ranks must have in common; where nothing is run, that does not include values."""
    facts = [leaf_fact(leaf, values=kind != "prepare") for leaf in call.leaves]
    return {"rows": str(call.batch_size), **dict(zip(call.paths, facts, strict=True))}


def _output(compiled: Compiled, results: Mapping[str, Tensor], names: Sequence[str]) -> Any:
    assert compiled.output_spec is not None
    return pytree.tree_unflatten([results.get(name) for name in names], compiled.output_spec)
