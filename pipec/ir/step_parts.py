"""The parts of a step that ends with an update: a step that accumulates, and the update alone.

Both are parts of one program, so that a script that makes steps without an update, and then the update, runs
what a whole step runs::

    whole                 accumulate            update
    backward mb 3         backward mb 3
    reduce_grad           reduce_grad
    grad_norm                                   grad_norm
    update                                      update
    unshard                                     unshard

If steps can be skipped, each part looks for values that are not finite, with ``grad_norm`` and ``check``.

A step whose loss the script computes is divided at its ``pause``: what accumulates has two halves::

    whole                 forwards              backwards             update
    forward mb 3          forward mb 3
    send logits           send logits
    pause
    backward mb 0                               backward mb 0
    update                                                            update
"""

from collections.abc import Sequence
from dataclasses import replace

from pipec.ir.plan import Plan
from pipec.ir.program import Instruction, Op, Program
from pipec.ir.sync_spec import StepPart, SyncSpec


def plan_part(plan: Plan, part: StepPart) -> Plan:
    """The plan of a part of a step. An update has no microbatches and sends no messages."""
    plan = replace(plan, sync_spec=replace(plan.sync_spec, part=part))
    if plan.sync_spec.runs_microbatches:
        return plan
    host = replace(plan.host, step_seconds=0.0)  # an update has no arguments to be checked
    return replace(plan, num_microbatches=0, links=(), link_seconds=(), host=host)


def program_part(program: Program, sync_spec: SyncSpec, part: StepPart) -> Program:
    """The instructions of a rank's program that belong to a part of the step."""
    if part is StepPart.WHOLE:
        return program
    numbers = instructions_of_part(program, sync_spec, part)
    return replace(program, instructions=[program.instructions[number] for number in numbers])


def instructions_of_part(program: Program, sync_spec: SyncSpec, part: StepPart) -> Sequence[int]:
    """Their numbers in the program of the whole step."""
    instructions, is_half = program.instructions, part in (StepPart.FORWARDS, StepPart.BACKWARDS)
    paused = next((n for n, x in enumerate(instructions) if x.op is Op.PAUSE), None) if is_half else None
    if paused is None:
        numbers = [] if is_half else [*range(len(instructions))]
    else:
        first, last = (0, paused) if part is StepPart.FORWARDS else (paused + 1, len(instructions))
        numbers, part = [*range(first, last)], StepPart.ACCUMULATE
    return [each for each in numbers if part in _parts_with(instructions[each], sync_spec)]


def _parts_with(instruction: Instruction, sync_spec: SyncSpec) -> Sequence[StepPart]:
    """The parts of a step that have an instruction of it."""
    match instruction.op:
        case Op.GRAD_NORM | Op.CHECK if sync_spec.may_skip_step:
            return tuple(StepPart)
        case Op.GRAD_NORM | Op.UPDATE | Op.HOST_UPDATE:
            return StepPart.WHOLE, StepPart.UPDATE
        case Op.UNSHARD | Op.WAIT_UNSHARD:
            if not sync_spec.reshards_after_use(sync_spec.buckets[instruction.bucket]):
                return StepPart.WHOLE, StepPart.UPDATE
    return StepPart.WHOLE, StepPart.ACCUMULATE
