"""The interpreter: runs the program of one rank, step after step.

Everything that can be decided before a step is decided once, when ``pipec.runtime.linker`` links the program.
A step then fills the frames of its microbatches and runs the linked actions, one after the other.
"""

import functools
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipec.errors import ExecutionError, PipecError, TransportError
from pipec.ir import Instruction, Kind, Mode, Payload, Plan, Program, Value
from pipec.ir.text import instruction_lines
from pipec.runtime.compute import Action
from pipec.runtime.launch import current_device
from pipec.runtime.linker import link
from pipec.runtime.rank import Rank, Updating
from pipec.runtime.recording import Stamps, epoch_offset
from pipec.runtime.results import Results, empty_like, has_rows, join_replicas
from pipec.runtime.span import Span
from pipec.runtime.stage import BoundStage, StageCode
from pipec.runtime.transport import Transport
from pipec.runtime.updates import Updates

_NUM_LINES = 5
"""How many instructions an error shows, the failed one last."""


class Interpreter:
    """Executes ``program`` on ``device``.

    ``stages`` has at least the rank's own stages. ``parameters`` and ``buffers`` have at least the tensors of
    those stages by FQN, on ``device``. Gradients are added to ``.grad`` of the parameters. Where replicas in
    one process share tensors, ``owns_tensors`` tells whether this rank is the one to write those of a stage.
    A program that updates does so with ``updates``.

    Raises:
        VerifyError: program, plan and stage code do not fit together.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        stages: Mapping[int, StageCode],
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        transport: Transport,
        device: torch.device,
        owns_tensors: Callable[[int], bool] = lambda stage: True,
        updates: Updates | None = None,
    ) -> None:
        self.position = -1
        self._program, self._device = program, device
        self._stages = {
            stage.index: BoundStage(
                stage,
                stages[stage.index],
                parameters,
                buffers,
                device,
                plan.num_microbatches,
                plan.ending.reduced(stage.index),
                owns_tensors(stage.index),
            )
            for stage in plan.stages
            if program.rank in plan.placement[stage.index]
        }
        self._own = {stage: plan.microbatches_on(stage, program.rank) for stage in self._stages}
        self._result_links = [link for link in plan.links if link.payload is Payload.RESULT]
        made = [
            (value, self._own[link.source])
            for link in self._result_links
            if link.source in self._stages
            for value in link.values
        ]
        self._results = Results(made, plan.num_microbatches, plan.sums)
        self._updating = Updating(updates)
        loss = _loss_of(plan)
        self._rank = Rank(
            program.rank, plan, self._stages, self._results, {}, [], {}, transport, loss, [0], self._updating
        )
        self._linked = link(program, self._rank)
        self._instructions = [each.instruction for each in self._linked]
        self._collectives = [
            position
            for position, instruction in enumerate(self._instructions[: len(program.instructions)])
            if instruction.op.traits.kind is Kind.COLLECTIVE
        ]
        self._closing = [transport.finish, *(stage.end_step for stage in self._stages.values())]
        self._actions = [*(each.action for each in self._linked), *self._closing]

    def run(
        self,
        microbatches: Sequence[Mapping[str, Tensor]],
        span: Span,
        seed: int = 0,
        stamps: Stamps | None = None,
        update: bool = True,
    ) -> dict[str, Tensor]:
        """Execute one step. Returns the results of the microbatches together by name, on every rank.

        A step that fails leaves in ``.grad`` what was added until then, and the model's buffers as they were.

        Args:
            microbatches: The model's inputs by name, for each microbatch that this rank runs.
            span: What the microbatches are of the batch.
            seed: Random operators draw from streams that depend on the seed, the microbatch's number in the
                batch and the operator alone. Each step has another.
            stamps: The times of the step are appended.
            update: A program that updates does so. If not, the gradients are kept for the next update.

        Raises:
            ExecutionError: an instruction failed here or, if every rank is in this process, anywhere.
            TransportError: another rank failed, hung or is gone.
        """
        self.position = -1
        self._updating.now, self._updating.factor = update, None
        try:
            with (
                current_device(self._device),
                torch.no_grad(),
                torch.autocast(self._device.type, enabled=False),
            ):
                self._results.loss_shares, self._results.is_local = span.shares, span.is_local
                self._begin_step(microbatches, span, seed)
                actions = self._actions if all(span.sizes) else self._actions_on(span.sizes)
                if stamps is None:
                    self._execute(actions)
                else:
                    self._execute_and_stamp(actions, stamps)
                return self._merged_results(span)
        except TransportError as error:
            located = TransportError(self._describe(str(error)))
            self._rank.transport.fail(located)
            raise located from error.__cause__
        except Exception as error:
            failure = self._explained(error)
            self._rank.transport.fail(failure)
            raise failure from error
        except BaseException as interrupt:  # such as Ctrl-C
            self._rank.transport.fail(interrupt)
            raise
        finally:
            self._forget_step()

    def _begin_step(self, microbatches: Sequence[Mapping[str, Tensor]], span: Span, seed: int) -> None:
        self._rank.sizes[:] = [*span.sizes, span.num_rows]
        self._rank.values.clear()
        self._rank.values.update(span.values)
        shares = span.loss_shares
        for stage in self._stages.values():
            stage.begin_step()
            for microbatch in self._own[stage.index]:
                if not span.sizes[microbatch]:
                    continue
                inputs, sizes = microbatches[microbatch], self._rank.sizes_with(span.sizes[microbatch])
                frame = stage.fill_frame(microbatch, (seed, span.first + microbatch), sizes)
                frame.update(
                    {name: inputs[name].to(self._device, non_blocking=True) for name in stage.inputs}
                )
                if self._rank.loss:
                    weight = shares[microbatch]
                    frame["grad_loss"] = _loss_gradient(weight, self._rank.loss.dtype, self._device)

    def _actions_on(self, sizes: Sequence[int]) -> list[Action]:
        """The actions of a step in which some microbatches have no rows, and so are not computed."""
        return [*(each.on(sizes) for each in self._linked), *self._closing]

    def _execute(self, actions: Sequence[Action]) -> None:
        for position, action in enumerate(actions):
            self.position = position
            action()

    def _execute_and_stamp(self, actions: Sequence[Action], stamps: Stamps) -> None:
        offset, clock, arrival = epoch_offset(), time.perf_counter_ns, self._rank.arrival
        num_instructions = len(self._program.instructions)
        for position, action in enumerate(actions):
            self.position = position
            arrival[0] = start = clock()
            action()
            if position < num_instructions:
                stamps += (start + offset, arrival[0] + offset, clock() + offset)
        for number, over in self._rank.over.items():
            stamps[3 * self._collectives[number] + 2] = over + offset

    def _merged_results(self, span: Span) -> dict[str, Tensor]:
        """The results of the batch, from what every replica that made a part of them has.

        Where replicas were given their own parts of the batch, a result with rows has those of this one.
        """
        plan, merged = self._rank.plan, dict[str, Tensor]()
        for made in self._result_links:
            ranks = plan.placement[made.source]
            for value in made.values:
                if span.is_local and has_rows(value):
                    own = self._part(value, ranks[span.replica], made.source, span)
                    merged[value.name] = empty_like(value, span.values, self._device) if own is None else own
                else:
                    parts = [self._part(value, rank, made.source, span) for rank in ranks]
                    merged[value.name] = join_replicas(
                        value, parts, span.sizes, span.values, value.name in plan.sums
                    )
        return merged

    def _part(self, value: Value, rank: int, stage: int, span: Span) -> Tensor | None:
        """What a rank made of a result; None if its microbatches have no rows."""
        if not any(span.sizes[each] for each in self._rank.plan.microbatches_on(stage, rank)):
            return None
        if rank == self._rank.number:
            return self._results.merged(value.name, span.sizes, span.values)
        return self._rank.received[value.name, rank]

    def _forget_step(self) -> None:
        for stage in self._stages.values():
            stage.forget_step()
        self._results.forget_step()
        self._rank.received.clear()

    def _explained(self, error: Exception) -> PipecError:
        """What to raise for the error of an instruction, which may have read what was never received."""
        try:
            self._rank.transport.check()
        except TransportError as interruption:
            return TransportError(self._describe(str(interruption)))
        return ExecutionError(self._describe(_describe_error(error)))

    def _describe(self, problem: str) -> str:
        """Where it happened, what the problem is, and the instructions that led there."""
        rank = f"rank {self._program.rank}"
        if self.position < 0:
            return f"{rank}, preparing the step: {problem}"
        if self.position >= len(self._instructions):
            return f"{rank}, finishing the step: {problem}"
        instruction = self._instructions[self.position]
        where = ", ".join([rank, *_cell_of(instruction), instruction.op])
        return "\n".join([f"{where}: {problem}", *self._last_lines(instruction)])

    def _last_lines(self, instruction: Instruction) -> list[str]:
        """The program's text up to ``instruction``.

        A message that is awaited only when the program is over counts as its receive instruction.
        """
        end = self._program.instructions.index(instruction) + 1
        lines = instruction_lines(self._program)[max(0, end - _NUM_LINES) : end]
        return [f"last instructions of rank {self._program.rank}:", *(f"    {line}" for line in lines)]


def _loss_of(plan: Plan) -> Value | None:
    if plan.mode is not Mode.TRAIN:
        return None
    results = (value for link in plan.links if link.payload is Payload.RESULT for value in link.values)
    return next((value for value in results if value.name == "loss"), None)


@functools.lru_cache(maxsize=64)
def _loss_gradient(weight: float, dtype: str, device: torch.device) -> Tensor:
    """What the backward of a microbatch starts from: its share of the batch."""
    return torch.full((), weight, dtype=getattr(torch, dtype), device=device)


def _describe_error(error: Exception) -> str:
    """``ValueError: what it says (stage_1.py, line 57, in backward)``"""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"
    )


def _cell_of(instruction: Instruction) -> list[str]:
    cell = {
        "stage": instruction.stage,
        "microbatch": instruction.microbatch,
        "part": instruction.part,
    }
    return [f"{word} {number}" for word, number in cell.items() if number != -1]
