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


def default_microbatches(batch: int, num_ranks: int) -> int:
    """Four a rank where the batch has that many rows: the bubble is then below a fifth of the step.

    Of the counts from ``num_ranks`` to that, the largest that splits the batch evenly is taken.
    """
    most = max(1, min(batch, 4 * num_ranks))
    even = [count for count in range(min(num_ranks, most), most + 1) if batch % count == 0]
    return even[-1] if even else most
