"""Findings of a capture: whether microbatches reproduce the unsplit model's results."""

from dataclasses import dataclass

import sympy


@dataclass(frozen=True)
class BatchFindings:
    """Findings about the batch. Each text names a call of the model, with its line, and says what it does.

    * ``mixed_rows``: a call through which the loss depends on several rows, other than as a sum or mean.
    * ``unproven``: a call for which this could not be decided.
    * ``assumed``: calls without a rule, with what they are taken to do.
    * ``output``: a call that makes an output, other than the loss, neither row by row nor a sum or mean.
    * ``num_batch_norms``: the number of batch norms that take the statistics of a microbatch.
    * ``has_norm_over_rows_alone``: one of them has a single value per channel and row, and so needs two rows.
    * ``unordered_random``: calls, other than dropout, whose random numbers belong to no row.
    * ``tail``: the first call that needs the rows of all microbatches, and so runs once a step; empty if none
      does.
    * ``branches``: conditions on sizes that Python code branches on, true of the microbatch, each with its
      line.
    """

    mixed_rows: str = ""
    unproven: str = ""
    assumed: tuple[str, ...] = ()
    output: str = ""
    num_batch_norms: int = 0
    has_norm_over_rows_alone: bool = False
    unordered_random: tuple[str, ...] = ()
    tail: str = ""
    branches: tuple[tuple[sympy.Basic, str], ...] = ()

    @property
    def is_proved(self) -> bool:
        """Whether nothing is left to a check."""
        return not (self.unproven or self.assumed)


NO_FINDINGS = BatchFindings()
