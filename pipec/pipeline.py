"""A module that trains across stages and is compiled at its first step: what ``pipec.compile`` returns."""

import contextlib
import copy
import functools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipec.artifact.directory import write
from pipec.capture.call import Call
from pipec.capture.state import State, modules_of, tensors_of
from pipec.compiler.compiler import Compiler, Groups, Kind, Signature, Turn, expired
from pipec.console import log
from pipec.errors import PipecError
from pipec.graph import changed_constants
from pipec.ir import Mode, Plan
from pipec.plan.predictions import simulate_plan
from pipec.plan.tables import ReadablePlan
from pipec.runtime.batch import dense
from pipec.runtime.execution import Ranks
from pipec.runtime.facts import Facts, leaf_fact, listed
from pipec.runtime.handle import Handle, homes, owners
from pipec.runtime.holder import Emptied, ModelTensors, fill, forget, hold, put_back
from pipec.runtime.randomness import next_seed
from pipec.runtime.results import join
from pipec.timeline.events import Timeline
from pipec.timeline.trace import Trace, measured_timeline
from pipec.torch_compat import Place, pytree
from pipec.viz import Step, draw_steps, steps_text


class Pipeline(Handle):
    """A model cut into stages. Make one with :func:`pipec.compile`.

    It holds the model's own parameters and buffers, under the model's own names. In one process these are all
    of them. Under ``torchrun``, once it is compiled, they are those of this rank's stages; the model's other
    tensors are emptied where they are, so that their memory is given back and an optimizer passes them over.
    ``full_state_dict`` and ``gather_into`` bring the whole together again.
    """

    def __init__(self, compiler: Compiler, tensors: ModelTensors, ranks: Ranks, batch: str = "same") -> None:
        super().__init__(ranks)
        self._batch = batch
        self._emptied = Emptied()
        self._unsettled = False
        self._compiler = compiler
        self._tensors = tensors
        self._followed = tensors_of(modules_of(compiler.model))
        self._trains = tensors.trained()
        self._groups: dict[tuple[Signature, int], Groups] = {}
        self._read: dict[Mode, dict[Place, Any]] = {}
        self.training = compiler.model.training
        hold(self, tensors)

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Run forward and backward of one mini-batch. Gradients are added to ``.grad``.

        The arguments are those of the model for the whole mini-batch, and ``target`` goes to the loss
        function. Every rank passes the same, unless ``compile`` was told otherwise. Tensors whose
        dimension 0 equals that of the first tensor are split into microbatches; others are passed whole.
        A step that draws, as for dropout, takes one number of torch's default generator, rank 0's for all.

        Returns:
            The loss, on every rank: the mean over microbatches, each weighted by its size.

        Raises:
            CaptureError, InputError, PlanError: the step cannot be run, or the ranks passed different
                arguments. Nothing was changed, and every rank raises it.
            ExecutionError, TransportError: a rank failed.
        """
        loss = self._run(self._agreed("step", Mode.TRAIN, args, kwargs, target))["loss"]
        self._num_steps += 1
        return loss

    def eval_step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """The loss that ``step`` would return, without gradients.

        Dropout and the like run in the mode that ``train()`` or ``eval()`` set last.
        """
        return self._run(self._agreed("eval_step", Mode.LOSS, args, kwargs, target))["loss"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the whole batch, on every rank, without gradients."""
        turn = self._agreed("forward", Mode.FORWARD, args, kwargs)
        results = self._run(turn)
        compiled = self._compiled(turn)[0][0]
        leaves = [results.get(name) for name in compiled.artifact.plan.outputs]
        assert compiled.output_spec is not None
        return pytree.tree_unflatten(leaves, compiled.output_spec)

    def prepare(self, *args: Any, target: Any = None, **kwargs: Any) -> "Pipeline":
        """Compile what ``step`` with these arguments would run, and run nothing. Returns the pipeline."""
        self._compiled(self._agreed("prepare", Mode.TRAIN, args, kwargs, target))
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
            self._unsettled = True
            fill(model, {name: whole[first] for name, first in self._canonical.items()})

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the whole model's state, or that of this rank's stages, at any time and on any rank.

        What belongs to other ranks' stages is passed over, so every rank loads.
        """
        held = self._tensors_by_fqn(every_name=True)
        own = {name: x for name, x in state_dict.items() if name in held or name not in self._canonical}
        result = super().load_state_dict(own, strict, assign)
        if assign:
            self._adopt_replaced()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipeline":
        """A pipeline of a copy of the model, on the same stages. It compiles its calls itself."""
        compiler = self._compiler.of(copy.deepcopy(self._compiler.model, memo))
        made = memo[id(self)] = Pipeline(compiler, ModelTensors.of(compiler.model), self._ranks, self._batch)
        made._owners, made._emptied = dict(self._owners), Emptied(dict(self._emptied.layouts))
        forget(made, [fqn for fqn, first in self._canonical.items() if first in self._emptied.layouts])
        return made

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
        rank 0 writes; every rank then calls this, because rank 0 gathers the tensors of all.
        """
        held = self._whole("save", set(self._tensors.unique()), all_ranks=False) if tensors else None
        if self._ranks.world.rank == 0:
            write(self._artifact, Path(directory), held)

    @property
    def compile_seconds(self) -> dict[str, float]:
        """How long each step of compilation took, summed over all compilations."""
        return dict(self._compiler.seconds)

    def _agreed(
        self, kind: str, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None
    ) -> Turn:
        """The call that all ranks make: what each of them was given, or what rank 0 was.

        A rank that cannot use its arguments raises only when the others know. The seed, and the decision
        whether what was compiled is still right, are rank 0's.
        """
        seed, after = next_seed()
        if not self._ranks.world.distributed:
            self._follow_model()
            call = self._checked(kind, args, kwargs, target)
            called = mode, call.signature(), self._state(mode)
            return Turn(call, (called, self._compiler.version(called)), seed, after)
        state, call, refusal, version = self._state(mode), Call((), {}), None, 0
        facts = self._model_facts(mode, state)
        sent, is_first = self._batch == "rank0", self._ranks.world.rank == 0
        if not sent or is_first:
            try:
                call = self._checked(kind, args, kwargs, target)
                called = mode, call.signature(), state  # refuses what no stage can take
                version = self._compiler.version(called) if is_first else 0
                facts |= {} if sent else _call_facts(call, kind)
            except PipecError as error:
                refusal, facts = error, facts | {"refused": str(error)}
        every = self._require_same(kind, facts, [seed, version, hash(self._tensors.trained())])
        if refusal is not None:
            raise refusal
        if self._follow_model() or self._agree_on_trained([trained for *_, trained in every]):
            return self._agreed(kind, mode, args, kwargs, target)
        call = self._sent(kind, call) if sent else call
        seed, version, _ = every[0]
        return Turn(call, ((mode, call.signature(), state), version), seed, after)

    def _sent(self, kind: str, call: Call) -> Call:
        doing = f"sharing rank 0's batch of {kind}"
        sent, structure = self._ranks.agreement.from_rank_0(doing, *pytree.tree_flatten(call.tree))
        return Call(*pytree.tree_unflatten(sent, structure))

    def _state(self, mode: Mode) -> State:
        return State.of(self._compiler.model, mode, self._emptied.shapes(self._tensors.unique()))

    def _model_facts(self, mode: Mode, state: State) -> Facts:
        """What the ranks must have in common before a call. That is also what the compiled code once read."""
        changed = changed_constants(self._read.get(mode, {}), self._compiler.traced(mode)) or "none"
        return state.facts | {"replaced": ", ".join(self._replaced()) or "none", "changed values": changed}

    def _checked(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Call:
        call = Call(*pytree.tree_map(dense, (args, kwargs, target)))
        if kind != "forward":
            call.check_target(needed=self._compiler.loss_fn is not None)
        return call

    def _compiled(self, turn: Turn) -> Groups:
        """What runs each group of consecutive microbatches, and their sizes.

        There are two groups if one graph cannot serve both sizes of a batch that does not divide evenly.
        """
        (mode, called, state), version = turn.signature
        key = turn.signature, turn.call.batch_size
        is_new = key not in self._groups
        if is_new:
            request = repr((mode, called, state.facts, self._trains, version, turn.call.batch_size))
            made = self._ranks.once(request, functools.partial(self._compile, turn))
            self._groups[key], self._read[mode] = made
            self._forget(*expired(turn.signature))
        groups = self._groups[key]
        if mode is Mode.TRAIN:
            self._trained = groups[0][0].artifact
        if is_new or self._unsettled:
            self._keep_own_tensors(groups[0][0].artifact.plan)
            self._unsettled = False
        return groups

    def _forget(self, kind: Kind, version: int) -> None:
        """Let go of what was compiled for what the model's code read long ago."""
        for key in [key for key in self._groups if key[0] == (kind, version)]:
            for compiled, _ in self._groups.pop(key):
                self._executions.pop(compiled.artifact, None)

    def _compile(self, turn: Turn) -> tuple[Groups, dict[Place, Any]]:
        with self._emptied.shaped(self._tensors.unique()):
            return self._compiler.compile(turn.signature, turn.call), self._compiler.read(turn.signature)

    def _run(self, turn: Turn) -> dict[str, Tensor]:
        groups, call = self._compiled(turn), turn.call
        executions = [self._execution(compiled.artifact) for compiled, _ in groups]
        if any(compiled.artifact.draws for compiled, _ in groups):
            torch.default_generator.set_state(turn.random_state)
        batch, start, parts = call.batch_size, 0, []
        for execution, (_, sizes) in zip(executions, groups, strict=True):
            rows = call if len(groups) == 1 else call.rows(start, start + sum(sizes))
            recorded = self._recorded if turn.signature[0][0] is Mode.TRAIN else None
            parts.append(execution.run(rows.leaves, sizes, batch, turn.seed + start, recorded))
            start += sum(sizes)
        if len(parts) == 1:
            return parts[0]
        return join(groups[0][0].artifact.plan, parts, [sum(sizes) for _, sizes in groups])

    def _keep_own_tensors(self, plan: Plan) -> None:
        """Move each tensor to the device of the stage that owns it, and empty those of other processes."""
        unique = self._tensors.unique()
        there, first = homes(plan, self._ranks.devices), not self._owners
        if self._ranks.world.distributed and (new := there.keys() - self._owners.keys()):
            known = {fqn: x for fqn, x in unique.items() if first or fqn in new}
            for rank, names in self._ranks.agreement.start_from_rank_0(known).items():
                differed = f"{len(names)} tensors of rank {rank} differed"
                log(f"pipec: {differed}, and start with rank 0's: {listed(names)}")
        self._owners = owners(plan) | self._owners
        elsewhere = {fqn for fqn in unique if not self._is_own(fqn) and fqn in self._owners}
        if any(unique[fqn].numel() for fqn in elsewhere):
            forget(self, [fqn for fqn, first in self._canonical.items() if first in elsewhere])
            self._emptied.empty({fqn: unique[fqn] for fqn in elsewhere})
        for fqn, home in there.items():
            tensor = unique.get(fqn)
            if tensor is not None and home is not None and tensor.device != home and not tensor.is_meta:
                tensor.data = tensor.data.to(home)

    def _whole(self, kind: str, names: Collection[str], all_ranks: bool) -> dict[str, Tensor]:
        """Copies on the CPU of the tensors of all ranks, on rank 0 or on all ranks; elsewhere nothing."""
        unique = {fqn: tensor.detach() for fqn, tensor in self._tensors.unique().items() if fqn in names}
        if not self._ranks.world.distributed:
            return {fqn: tensor.to("cpu", copy=True) for fqn, tensor in unique.items()}
        self._require_same(f"{kind}(all_ranks={all_ranks})", {})
        readers = range(self._ranks.count) if all_ranks else [0]
        reads, whole = self._ranks.world.rank in readers, {}
        for fqn, tensor in unique.items():
            owner = self._owners.get(fqn, 0)
            shape = self._emptied.shape(fqn, tensor)
            given = tensor if self._is_own(fqn) else torch.empty(shape, dtype=tensor.dtype)
            to = [rank for rank in readers if rank != owner]
            found = self._ranks.agreement.sent_by(owner, f"gathering {fqn}", given, to)
            if reads:
                whole[fqn] = found.to("cpu", copy=True) if found is given else found
        return whole

    def _replaced(self) -> list[str]:
        """The names under which the model has other tensors than the pipeline, or has some no longer."""
        there = tensors_of(modules_of(self._compiler.model))
        if len(there) == len(self._followed) and all(map(operator.is_, there, self._followed)):
            return []
        return self._tensors.differing(ModelTensors.of(self._compiler.model))

    def _follow_model(self) -> bool:
        """Hold the tensors that the model has now, where it was given others. Returns whether it was."""
        names = self._replaced()
        if names:
            log(f"pipec: the model has other tensors than before, which are trained now: {listed(names)}")
            model = ModelTensors.of(self._compiler.model)
            model.refuse_shared_memory()
            forget(self, names)
            hold(self, model.only(names))
            for fqn in names:
                self._owners.pop(fqn, None)
                self._emptied.layouts.pop(fqn, None)
            self._adopt(model)
            self._trains = model.trained()
        return bool(names)

    def _agree_on_trained(self, every: Sequence[int]) -> bool:
        """Switch requires_grad where any rank has, which may be the only one to hold it; whether any has."""
        if all(found == hash(self._trains) for found in every):
            return False
        self._trains = self._ranks.agreement.switched(self._trains, self._tensors.trained())
        self._tensors.train(self._trains)
        return True

    def _adopt(self, tensors: ModelTensors) -> None:
        """Work on these tensors from now on, which the model and the pipeline have."""
        self._tensors, self._compiler.canonical = tensors, tensors.canonical
        self._followed = tensors_of(modules_of(self._compiler.model))
        self._unsettled = True
        self._executions.clear()

    def _adopt_replaced(self) -> None:
        """Where tensors were replaced by others, let the names of a tied one and the model have those too."""
        held = self._tensors_by_fqn(every_name=True)
        own = {fqn: held[first] for fqn, first in self._canonical.items() if first in held}
        for module in (self, self._compiler.model):
            put_back(module, own)
        self._adopt(self._tensors.replaced(own))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """``half`` and its kin call this. A tensor that ``to`` moves returns to its stage's device."""
        super()._apply(fn, recurse)
        self._emptied.convert(self._tensors.unique(), fn)
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
