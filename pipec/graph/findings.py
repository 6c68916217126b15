"""What a capture proved of the batch: whether microbatches make what the unsplit model makes of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Findings:
    """Each text names a call of the model, with its line, and says what it does.

    ``mixed``: the loss depends on several rows there, in a way that is no sum or mean over rows.
    ``unproven``: it is not known whether it does. ``assumed``: calls that nobody knows, of which the loss or
    an output reads the rows as if each were computed by itself. ``output`` is where an output, other than
    the loss, is neither row by row nor a sum or mean. ``norms`` is how many batch norms take the statistics
    of a microbatch.
    """

    mixed: str = ""
    unproven: str = ""
    assumed: tuple[str, ...] = ()
    output: str = ""
    norms: int = 0


PROVED = Findings()
