"""Static verification of an artifact: its programs, and the code of the stages that they call."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from torch import Tensor

from pipec.artifact.artifact import Artifact, read_artifact
from pipec.errors import DAMAGED_DATA_ERRORS, VerifyError
from pipec.ir import GRADIENT_PHASES, Phase, Plan, Program, Stage, Tail
from pipec.programs.verify import verify, verify_parts


def read_verified(directory: Path) -> tuple[Artifact, dict[str, Tensor]]:
    """Read and verify an artifact; returns it with the tensors saved with it, by FQN.

    Raises:
        ArtifactError, VerifyError: see ``read_artifact`` and ``verify_artifact``.
    """
    artifact, tensors = read_artifact(directory)
    verify_artifact(artifact)
    return artifact, tensors


def verify_artifact(artifact: Artifact) -> None:
    """Check all that can be checked without running code of the artifact.

    Raises:
        VerifyError: a program breaks a rule, or the code of a stage does not compile, lacks a function that
            the program calls, or names other tensors than the plan.
    """
    plan = artifact.plan
    num_computes = sum(bool(each.op.phase) for each in chain(*(p.instructions for p in artifact.programs)))
    if num_computes < plan.num_microbatches * len(plan.stages):  # the verifier's tables need them
        raise VerifyError(
            f"the programs run {num_computes} phases of stages, fewer than {plan.num_microbatches} "
            f"microbatches on {len(plan.stages)} stages need; save the pipeline again"
        )
    verify(plan, artifact.programs)
    verify_parts(plan, artifact.programs)
    for stage, source in zip(plan.stages, artifact.sources, strict=True):
        programs = [artifact.programs[rank] for rank in plan.placement[stage.index]]
        for fault in _faults(plan, stage, source, programs):
            raise VerifyError(f"stage_{stage.index}.py {fault}; save the pipeline again")


def _faults(plan: Plan, stage: Stage, source: str, programs: Sequence[Program]) -> Iterator[str]:
    try:
        body = ast.parse(source).body
        compile(source, f"stage_{stage.index}.py", "exec", dont_inherit=True)
        tables = dict(_tables(body))
    except SyntaxError as error:
        yield f"does not compile: line {error.lineno}: {error.msg}"
        return
    except DAMAGED_DATA_ERRORS as error:
        yield f"cannot be read: {type(error).__name__} {error}"
        return
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    for program in programs:
        instructions = (each for each in program.instructions if each.stage == stage.index)
        called = {name for each in instructions if each.op.phase for name in stage.functions(each.op.phase)}
        if missing := sorted(called - functions.keys()):
            yield f"has no function {' or '.join(missing)}, which the program of rank {program.rank} calls"
    if stage.batch_counts and "batch_counts" not in functions:
        yield f"has no function batch_counts, which computes {', '.join(stage.batch_counts)}"
    if stage.tail:
        yield from _missing_tail_values(stage, stage.tail, functions)
    yield from _gradients_after_reduction(plan, stage, functions)
    yield from _missing_collective_values(stage, functions)
    yield from _unknown_values(plan, stage, functions, tables.get("INPUTS"))
    planned = (stage.parameters, stage.buffers, stage.updated_buffers)
    for name, expected in zip(("PARAMETERS", "BUFFERS", "UPDATED_BUFFERS"), planned, strict=True):
        if tables.get(name) != expected:
            yield f"has {name} = {tables.get(name)}, but the plan has {expected}"


def _gradients_after_reduction(
    plan: Plan, stage: Stage, functions: Mapping[str, ast.FunctionDef]
) -> Iterator[str]:
    """Gradients that a segment computes after the one behind which the plan reduces their bucket."""
    buckets = [plan.sync_spec.buckets[number] for number in plan.sync_spec.buckets_of(stage.index)]
    for phase in GRADIENT_PHASES:
        names = stage.functions(phase)
        for segment, name in enumerate(names):
            summed = {
                fqn
                for bucket in buckets
                if bucket.segment < segment and not bucket.is_tied
                for fqn in bucket.names
            }
            if not summed or name not in functions:
                continue
            gradients = _gradients(
                functions[name], phase is Phase.BACKWARD_WEIGHT and segment + 1 == len(names)
            )
            if gradients is None or len(gradients) != len(stage.parameters):
                yield f"has no tuple of {len(stage.parameters)} gradients at the end of {name}"
                return
            for fqn, gradient in zip(stage.parameters, gradients, strict=True):
                if fqn in summed and not (isinstance(gradient, ast.Constant) and gradient.value is None):
                    yield f"computes a gradient of {fqn} in {name}, after it was reduced"


def _missing_tail_values(stage: Stage, tail: Tail, functions: Mapping[str, ast.FunctionDef]) -> Iterator[str]:
    """A tail without a function, or values that it reads or returns and no function returns."""
    returned = {
        stage.functions(Phase.FORWARD): [value.name for value in tail.inputs],
        ("tail",): [*tail.results, *(value.name for value in tail.gradients)],
    }
    for names, values in returned.items():
        found = {key for name in names if name in functions for key in _sent_names(functions[name])}
        if missing := [value for value in values if value not in found]:
            yield f"has no function {' or '.join(names)} that returns {', '.join(missing)}, for the tail"


def _missing_collective_values(stage: Stage, functions: Mapping[str, ast.FunctionDef]) -> Iterator[str]:
    """Model collectives without a function that returns the input, or without one that takes the result."""
    for collective in stage.model_collectives:
        name, (makes, reads) = (
            collective.value.name,
            stage.functions(collective.phase)[collective.segment - 1 : collective.segment + 1],
        )
        if makes in functions and name not in _sent_names(functions[makes]):
            yield f"has no {name!r} among what {makes} returns, the input of a model collective"
        if reads in functions and name not in _taken_names(functions[reads]):
            yield f"has no {name!r} among what {reads} takes, the result of a model collective"


def _unknown_values(
    plan: Plan, stage: Stage, functions: Mapping[str, ast.FunctionDef], inputs: object
) -> Iterator[str]:
    """Values that functions of phases take out of their frame, and that nothing puts there."""
    known = {"w", "precomputed", "buffers", "constants", "b", "rng", "saved", "device"}
    known |= {"grad_loss", *(variable.name for variable in plan.variables)}
    known |= {name for link in plan.links if link.target == stage.index for name in link.names}
    known |= {each.value.name for each in stage.model_collectives}
    known |= {value.name for value in (*stage.tail.inputs, *stage.tail.gradients)} if stage.tail else set()
    known |= {*inputs} if isinstance(inputs, tuple) else set()
    for name, function in functions.items():
        if unknown := sorted(map(str, _taken_names(function) - known)):
            yield f"takes {', '.join(unknown)} in {name}, which nothing puts into the frame"


def _taken_names(function: ast.FunctionDef) -> set[object]:
    """The names of the values that a function takes: ``frame["x"]`` and ``frame.pop("x")``."""
    found = set[object]()
    for node in ast.walk(function):
        match node:
            case ast.Subscript(value=ast.Name(id="frame"), slice=ast.Constant(value=name)):
                found.add(name)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="frame"), attr="pop"), args=[ast.Constant(value=name)]
            ):
                found.add(name)
    return found


def _sent_names(function: ast.FunctionDef) -> set[object]:
    """The keys of the dict that a function returns alone or first."""
    match function.body[-1]:
        case ast.Return(value=ast.Dict(keys=keys) | ast.Tuple(elts=[ast.Dict(keys=keys), *_])):
            return {key.value for key in keys if isinstance(key, ast.Constant)}
    return set()


def _gradients(function: ast.FunctionDef, alone: bool) -> list[ast.expr] | None:
    """The gradients that a function returns, ``alone`` or as the last of several values."""
    match function.body[-1]:
        case ast.Return(value=ast.Tuple(elts=gradients)) if alone:
            return gradients
        case ast.Return(value=ast.Tuple(elts=[*_, ast.Tuple(elts=gradients)])) if not alone:
            return gradients
    return None


def _tables(body: list[ast.stmt]) -> Iterator[tuple[str, object]]:
    """The names and values of the tuples that the code assigns at its top level."""
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Tuple() as value):
                yield name, ast.literal_eval(value)
