"""Explains why a model could not be captured: the line at fault, what is wrong, and what to do."""

import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np
import torch

from pipec.capture.traced_step import TracedStep
from pipec.errors import CaptureError, FailingModelError, PipecError
from pipec.torch_compat.module_state import DryRun

_TRACING = (
    *(str(Path(file).parent) for file in (torch.__file__, np.__file__)),
    str(Path(__file__).parents[1]),
)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]

ADVICE = (
    (
        "backwards hooks",
        "Register the hook on a tensor inside forward(), with Tensor.register_hook: there it is captured.",
    ),
    (
        "registers on the gradient of a parameter would be lost",
        "Change the gradient between step() and the optimizer's step, or register the hook on a tensor that\n"
        "is computed from the parameter: there it is captured.",
    ),
    (
        r"\bgenerator=(?!None)",
        "A pipeline seeds every draw by step, microbatch and operator, from the seed it is compiled with.\n"
        "Leave the generator out.",
    ),
    (
        "seeds torch's random generator",
        "A pipeline seeds every draw by step, microbatch and operator. Seed before the call, with\n"
        "torch.manual_seed, or draw there and pass a tensor.",
    ),
    (
        "sets requires_grad of a parameter|the grad of a parameter|replaces a parameter",
        "Freeze or replace parameters, and change gradients, between the calls of the pipeline.",
    ),
    (
        r"pack_(padded_)?sequence",
        "The layout of a packed sequence depends on values. Call the layer with the padded sequences, whose\n"
        "outputs are the same, and take each row's last state from them with gather. Make the backward\n"
        "direction a layer of its own, on rows reversed with gather.",
    ),
    (
        "Expected bool, got FakeTensor",
        "A comparison of lists or tuples needs the value of a tensor in one of them, as of a data-dependent\n"
        "size. Decide that size outside of the model, or compare without it.",
    ),
    (
        r"(?m)^for .+ in .+:$",
        "The number of iterations of this loop depends on values. Loop over all possible items, such as all\n"
        "experts: an expert that no row chose then computes on no rows.",
    ),
    (
        "branching",
        "A Python `if` or `while` asks for the value of a tensor, which does not exist at capture.\n"
        "Compute both sides and choose with torch.where or a mask, or decide outside the model.",
    ),
    (
        r"item\(\)|tolist|[Dd]ynamic (shape|slicing)|[Dd]ata[- ]dependent",
        "The value of a tensor becomes a Python number, as with .item() and .tolist(), or a data-dependent\n"
        "size decides what is computed. Keep it a tensor, with torch.where, gather or index_select,\n"
        "and assert what holds of every such size with torch._check.",
    ),
    ("", "Replace the call on that line with tensor operations of torch, or do it outside the model."),
)
"""Patterns and what to do. The first that is found in torch's reason, or in the line at fault, decides."""

TRACES_DIFFERENTLY = (
    "It does not fail there in eager mode: it takes another way while it is traced, as code does that\n"
    "asks for torch.compiler.is_compiling(). Pass what it would make itself, such as masks, or change it."
)


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of Python. ``file`` is a full path; it is printed without its folders."""

    file: str
    number: int
    text: str

    @property
    def place(self) -> str:
        """``model.py:57``"""
        return f"{PurePath(self.file).name}:{self.number}"

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.text else self.place


def traceback_lines(text: str) -> list[SourceLine]:
    """The lines that a printed traceback names, outermost first."""
    found = re.findall(r'File "(.*?)", line (\d+)[^\n]*(?:\n {4,}([^\n]*))?', text)
    return [SourceLine(file, int(number), code.strip()) for file, number, code in found]


def innermost_model_line(lines: Iterable[SourceLine]) -> SourceLine | None:
    """The innermost line that is the model's own: not of torch, numpy, pipec or the standard library."""
    own = [line for line in lines if not is_library_file(line.file)]
    return own[-1] if own else None


def is_library_file(file: str) -> bool:
    if file.startswith(("<eval_with_key>", "<string>", "<frozen ", *_TRACING)):
        return True
    return file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file


def capture_error(
    failures: Sequence[Exception], dry_run: DryRun, refused_branch: str = "", is_part: bool = True
) -> PipecError:
    """The error to raise when every attempt to capture has failed, with ``failures`` in order.

    It is a FailingModelError if the model or the loss function itself fails on these arguments, as it then
    does in the dry run too. Else it is a CaptureError, which explains the first error and lists the others.
    Where the model fails only for a front end that it goes another way for, it explains the first of those
    that need values, if any did. ``refused_branch`` is why a branch on values was not followed one way.
    ``is_part``: the arguments are those of a microbatch, and not the whole batch.
    """
    # loaded by now, with torch._dynamo
    from pipec.torch_compat.dynamo_front_end import is_data_dependent_error, model_raised, reason_of

    first, last, raised = failures[0], failures[-1], dry_run.error
    in_loss = raised is not None and _is_raised_in_loss(raised)
    owner = "loss_fn" if in_loss else "the model"
    is_same = model_raised(first) or (raised and error_summary(first) == error_summary(raised))
    if raised is not None and dry_run.failed and is_same:
        line = _line_of(raised) or _line_of(first)
        summary = error_summary(raised).replace("'FakeTensor'", "'Tensor'")
        return FailingModelError(
            f"{owner} fails on these arguments" + (f"\n  at {line}" if line else "") + f"\n  {summary}",
            _SIZES * is_part
            + (_CHECK_TARGET if in_loss else "Check the arguments of step() against what the model expects."),
        )
    if model_raised(first):
        first = next(filter(is_data_dependent_error, failures), first)
    known = _line_of(first) or _line_of(last)
    line = known or (_line_of(raised) if raised is not None else None)
    where = f"\n  at {line}" if line else ""
    if model_raised(first):
        return CaptureError(
            f"{owner} fails while it is traced{where}\n  {error_summary(last)}\n{TRACES_DIFFERENTLY}"
        )
    reason = reason_of(first) + (f" Here {refused_branch}." if refused_branch else "")
    lines = traceback_lines(str(first))
    at_fault = lines[-1].text if lines else line.text if line and not known else ""
    found = f"{reason}\n{at_fault}"
    advice = next(text for pattern, text in ADVICE if re.search(pattern, found))
    tried = "\n  ".join(dict.fromkeys(error_summary(failure) for failure in failures if failure is not first))
    return CaptureError(
        f"{owner} cannot be captured as one graph{where}\n  {reason}\n{advice}"
        + (f"\nOther ways of capturing it failed too:\n  {tried}" if tried else "")
    )


_SIZES = (
    "Sizes are those of one microbatch; if the model needs all rows at once, pass microbatches=1 to "
    "pipec.compile. "
)
_CHECK_TARGET = "Check what the model returns, and the target of step(), against what loss_fn expects."


def _is_raised_in_loss(error: Exception) -> bool:
    """Whether an error of a dry run was raised by the loss function."""
    return any(
        frame.f_code is TracedStep.loss_and_logs.__code__
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _line_of(error: Exception) -> SourceLine | None:
    """The line of the model where an error arose, from its message or from its stack."""
    from pipec.torch_compat.dynamo_front_end import user_frames

    frames = [*traceback.extract_tb(error.__traceback__), *user_frames(error)]
    lines = [SourceLine(frame.filename, frame.lineno or 0, (frame.line or "").strip()) for frame in frames]
    return innermost_model_line(traceback_lines(str(error))) or innermost_model_line(lines)


def error_summary(error: Exception) -> str:
    """The class of an error and the first line of its message."""
    first = next(filter(None, map(str.strip, str(error).splitlines())), "")
    return f"{type(error).__name__}: {first}"
