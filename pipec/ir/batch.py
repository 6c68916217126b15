"""How a mini-batch is split into microbatches."""

from pipec.errors import InputError


def split_sizes(batch: int, num_microbatches: int) -> list[int]:
    """Rows of each microbatch, as equal as can be, larger ones first.

    Raises InputError when there are fewer rows than microbatches.
    """
    if batch < num_microbatches:
        raise InputError(
            f"a batch of {batch} rows cannot be split into {num_microbatches} microbatches; "
            f"pass at least {num_microbatches} rows, or compile with microbatches={max(batch, 1)} or fewer"
        )
    return [batch // num_microbatches + (i < batch % num_microbatches) for i in range(num_microbatches)]
