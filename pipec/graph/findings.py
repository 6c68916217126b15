"""Findings of a capture: whether microbatches reproduce the unsplit model's results."""

from dataclasses import dataclass

import sympy


@dataclass(frozen=True)
class AssumedPerRow:
    """A call of an operator without a rule, which is assumed to compute each row by itself.

    ``op`` is its name, ``dims`` the dimension of the rows of each argument, None where it has none, and
    ``dim`` that of the result. ``location`` is the call in the model, with its line.
    """

    op: str
    dims: tuple[int | None, ...]
    dim: int
    location: str


@dataclass(frozen=True)
class BatchFindings:
    """Each text names a call of the model, with its line, and says what it does.

    ``mixed_rows``: the loss depends on several rows there, in a way that is no sum or mean over rows.
    ``unproven``: it is not known whether it does. ``assumed``: calls that are checked when the first step
    runs. ``output`` is where an output, other than the loss, is neither row by row nor a sum or mean.
    ``num_batch_norms`` is how many batch norms take the statistics of a microbatch. ``unordered_random``:
    random numbers that belong to no row, dropout apart. ``branches``: conditions on sizes, true of the
    microbatch, by which Python code goes its way, each with its line.
    """

    mixed_rows: str = ""
    unproven: str = ""
    assumed: tuple[AssumedPerRow, ...] = ()
    output: str = ""
    num_batch_norms: int = 0
    unordered_random: tuple[str, ...] = ()
    branches: tuple[tuple[sympy.Basic, str], ...] = ()


NO_FINDINGS = BatchFindings()
