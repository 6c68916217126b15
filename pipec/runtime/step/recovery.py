"""Recovery of a failed stream: restores the newest version of the weights that every stage still has.

Stages are ahead of each other, so that no stage may stop at once and leave the model whole. But a stage keeps
the versions that mini-batches in flight read. If there is a version that every stage holds whose rank lives,
the newest such is put into the parameters, with the buffers of that moment.
"""

import json
from collections.abc import Sequence

from pipec.runtime.step.interpreter import Interpreter
from pipec.runtime.step.ranks import Ranks


def restore_common_version(interpreters: Sequence[Interpreter], ranks: Ranks) -> str:
    """Put a consistent version into the parameters, if there is one; returns what was found, in words.

    The ranks that live all call this after a failure.
    """
    held = [(stage, found) for each in interpreters for stage, found in each.held_versions.items()]
    every = ranks.exchange_final_status(json.dumps([(stage, sorted(found)) for stage, found in held]))
    held += [(stage, {*found}) for reply in every for stage, found in json.loads(reply or "[]")]
    common = max(set.intersection(*(found for _, found in held)), default=None) if None not in every else None
    for each in interpreters:
        each.restore(common)
    if common is not None:
        return (
            f"the parameters and buffers are those after {common} mini-batches since the pipeline was last "
            "empty, the newest that all stages held, and can be saved. The optimizer's state may be some "
            "updates further; load a checkpoint to train on as if nothing had happened"
        )
    return (
        "no version of the weights is held by all stages, so that their parameters do not fit together: "
        f"{_as_text(held)}, in mini-batches since the pipeline was last empty. Load a checkpoint to train on"
    )


def _as_text(held: Sequence[tuple[int, set[int]]]) -> str:
    return "; ".join(
        f"stage {stage} holds {', '.join(map(str, sorted(found))) or 'none, for its update was cut off'}"
        for stage, found in sorted(held)
    )
