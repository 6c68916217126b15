"""What is left of a stream that failed: the newest version of the weights that every stage still has.

Stages are ahead of each other, so that no stage may stop at once and leave the model whole. But a stage keeps
the versions that mini-batches in flight read. If there is a version that every stage holds whose rank lives,
the newest such is put into the parameters, with the buffers of that moment.
"""

import json
from collections.abc import Iterable, Mapping, Sequence

from pipec.runtime.execution import Ranks
from pipec.runtime.rounds import RoundInterpreter


def recover(interpreters: Sequence[RoundInterpreter], ranks: Ranks) -> str:
    """Put a consistent version into the parameters, if there is one; returns what was found, in words.

    The ranks that live all call this after a failure.
    """
    every = {stage: held for each in interpreters for stage, held in each.held.items()}
    all_told = True
    if ranks.world.distributed:
        words = json.dumps({stage: sorted(held) for stage, held in every.items()})
        for told in ranks.distributed.last_words(words).values():
            all_told &= told is not None
            every |= {int(stage): {*held} for stage, held in json.loads(told or "{}").items()}
    common = max(set.intersection(*every.values()), default=None) if all_told else None
    for each in interpreters:
        each.restore(common)
    if common is not None:
        return (
            f"the parameters and buffers are those after {common} updates since the pipeline was last empty, "
            "the newest version that all stages held, and can be saved. The state of the optimizer may be "
            "some updates further; load a checkpoint to train on as if nothing had happened"
        )
    return (
        "no version of the weights is held by all stages, so that their parameters do not fit together: "
        f"{_told(every)}. A version counts updates since the pipeline was last empty. Load a checkpoint to "
        "train on"
    )


def _told(every: Mapping[int, Iterable[int]]) -> str:
    def of(held: Iterable[int]) -> str:
        return ", ".join(map(str, sorted(held))) or "none, for its update was cut off"

    return "; ".join(f"stage {stage} holds {of(every[stage])}" for stage in sorted(every))
