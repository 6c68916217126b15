"""Static verification: the programs compute everything once, in order and without deadlock.

The verifier is data: ``RULES`` lists one small function per rule, which yields the faults that it finds. A
rule may rely on the rules before it. The rules know the meaning of programs, but not how they were made. They
work on whole columns of instructions, and describe only faulty ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pipec.errors import VerifyError
from pipec.ir import Plan, Program, StepPart, plan_part, program_part, replica_counts
from pipec.ir.columns import InstructionColumns
from pipec.ir.periodic_program import microbatch_window, unroll
from pipec.ir.text_format import instruction_lines
from pipec.programs.counterexample import counterexample
from pipec.programs.lower_periodic import num_microbatches_to_lower
from pipec.programs.program_index import ProgramIndex, Violation
from pipec.programs.rules import (
    cell_rules,
    deadlock_rules,
    field_rules,
    order_rules,
    sync_spec_rules,
)

_CONTEXT_LINES = 3


def verify(plan: Plan, programs: Sequence[Program]) -> None:
    """Prove that ``programs`` are one correct step of a plan, or the period of a correct stream.

    Raises:
        VerifyError: a rule is broken; the message shows the lines of the program around the fault, and the
            computes of the ranks around it with the faulty one marked.
    """
    for misfit in sync_spec_rules.stage_violations(plan):
        raise VerifyError(misfit)
    if plan.sync_spec.stream is not None and plan.mode.trains:
        verify_periodic(plan, programs)
    else:
        verify_step(plan, programs)


def verify_parts(plan: Plan, programs: Sequence[Program]) -> None:
    """Prove that a step that accumulates is correct, and an update alone, if the plan's steps have one.

    Raises VerifyError as ``verify``.
    """
    if plan.sync_spec.updates and plan.sync_spec.stream is None:
        for part in (StepPart.ACCUMULATE, StepPart.UPDATE):
            own = [program_part(program, plan.sync_spec, part) for program in programs]
            verify_step(plan_part(plan, part), own)


def verify_step(plan: Plan, programs: Sequence[Program]) -> None:
    """Prove that ``programs`` are one correct step of the plan's microbatches.

    Time and memory are linear in the number of instructions. Raises VerifyError as ``verify``.
    """
    index = ProgramIndex(plan, programs)
    for rule in RULES:
        for fault in rule(index):
            raise VerifyError(_explain(index, fault))


def verify_periodic(plan: Plan, programs: Sequence[Program]) -> None:
    """Prove that rounds are right for any number of mini-batches.

    A rank finishes a microbatch before it begins the one that is a window later. So instructions that a rule
    compares are less than a window of microbatches apart, and what holds for two windows and a period holds
    for more. The program of fewer mini-batches is the same without the instructions of later microbatches:
    each cell of an earlier one keeps its events in their order, and waits are left out with what they wait
    for. Only the last round may be another: it has fewer gradients. So all numbers of mini-batches in the
    last period are tried, and the smallest, which begins and ends at once.

    Raises:
        VerifyError: as ``verify``, or the programs do not repeat with the mini-batches.
    """
    stream, replicas = plan.sync_spec.stream, replica_counts(plan.placement)
    assert stream is not None, "periodic programs have mini-batches"
    period, size = stream.period(replicas), stream.microbatches
    last = num_microbatches_to_lower(stream, replicas)
    for program in programs:
        named = {each.microbatch for each in program.instructions}
        if program.period != period or not named or not 0 <= min(named) <= max(named) <= last:
            raise VerifyError(
                f"rank {program.rank} does not repeat instructions for microbatches 0 to {last} every "
                f"{period} mb, as expected, but those for {sorted(named)[:9]} every {program.period} mb"
            )
    most = -(-(2 * max(map(microbatch_window, programs)) + period) // size) * size
    written = [unroll(each, most, plan.links) for each in programs]
    for count in sorted({size, *range(max(most - period, 0) + size, most + size, size)}):
        shorter = [
            Program(each.rank, own.where(own.microbatches < count))
            for each in written
            for own in [InstructionColumns.of(each.instructions, plan.links)]
        ]
        verify_step(replace(plan, num_microbatches=count), shorter)


def _explain(step: ProgramIndex, fault: Violation) -> str:
    if fault.site is None:
        return fault.message
    rank, number = fault.site
    lines = instruction_lines(step.programs[rank])
    first, last = max(number - _CONTEXT_LINES, 0), number + _CONTEXT_LINES + 1
    marked_lines = [
        f"{'>' if k == number else ' '} {line}" for k, line in enumerate(lines[first:last], start=first)
    ]
    orders = [columns.computes for columns in step.columns]
    marked = {where: _place(step.columns[where], at) for where, at in (fault.site, *fault.others)}
    drawn = counterexample(orders, step.plan.placement, marked) if any(map(len, orders)) else ""
    return "\n".join([f"rank {rank}, instruction {number}: {fault.message}", *marked_lines, drawn]).rstrip(
        "\n"
    )


def _place(columns: InstructionColumns, number: int) -> int:
    """The place of the compute that an instruction belongs to: itself, else the next one, else the last."""
    computes = columns.is_compute_start
    return max(min(int(computes[:number].sum()), int(computes.sum()) - 1), 0)


RULES: tuple[Callable[[ProgramIndex], Iterator[Violation]], ...] = (
    sync_spec_rules.asynchronous_supported,
    field_rules.fits_plan,
    order_rules.segments_in_order,
    cell_rules.lives_are_complete,
    order_rules.collectives_meet,
    order_rules.channels_in_order,
    deadlock_rules.finishes,
    order_rules.receives_after_dependencies,
)
