"""The position of a stream as JSON, and the position from which a replica resumes."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from pipec.checkpoint.json_values import decode_value, encode_value
from pipec.errors import CheckpointError, InputError
from pipec.runtime.step.stream_results import BatchResult
from pipec.runtime.stream_position import StreamPosition


def encode_position(position: StreamPosition | None) -> Any:
    """The position as JSON. Raises InputError if the state of its loader cannot be encoded."""
    if position is None:
        return None
    plain = {field.name: getattr(position, field.name) for field in fields(position)}
    plain["undelivered"] = [[loss, dict(logs)] for loss, logs in position.undelivered]
    return {name: encode_value(value, f"{name} of the stream's position") for name, value in plain.items()}


def decode_position(found: Any) -> StreamPosition | None:
    """The position that ``encode_position`` encoded. Raises CheckpointError for a damaged encoding."""
    if found is None:
        return None
    try:
        plain = {name: decode_value(value) for name, value in found.items()}
        return StreamPosition(
            **{**plain, "undelivered": [BatchResult(*each) for each in plain["undelivered"]]}
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"the position of a stream is damaged: {error!r}") from error


def replica_position(positions: Sequence[StreamPosition], replica: int, num_replicas: int) -> StreamPosition:
    """The position of a replica. Raises InputError if the number of replicas has changed."""
    if len(positions) != num_replicas:
        raise InputError(
            f"the checkpoint has the positions of {len(positions)} parts of the data, and pipe.num_replicas "
            f"is {num_replicas}: it is unknown which batches were trained on. Pass batches that "
            "continue where the data should, with resume=False"
        )
    return positions[replica]
