"""A schedule written by hand, and links between stages."""

import itertools

from pipec.ir import Compute, Link, Payload, Phase, Schedule, Value, one_rank_per_stage


def v_gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe on the V placement: a rank runs the forwards of its two stages, then their fused backwards."""
    orders, microbatches = [], range(num_microbatches)
    for rank in range(num_ranks):
        stages = (rank, 2 * num_ranks - 1 - rank)
        forwards = [Compute(Phase.FORWARD, stage, mb) for stage in stages for mb in microbatches]
        backwards = [Compute(Phase.BACKWARD, stage, mb) for stage in reversed(stages) for mb in microbatches]
        orders.append((*forwards, *backwards))
    placement = one_rank_per_stage((*range(num_ranks), *reversed(range(num_ranks))))
    return Schedule("v-gpipe", num_microbatches, placement, tuple(orders))


def value(name: str, *shape: int | str) -> Value:
    return Value(name, "float32", shape or ("b",))


def skip_links(source: int, target: int) -> tuple[Link, ...]:
    """A skip connection of two values, with the gradient of the first."""
    name = f"skip_{source}_{target}"
    forward = Link(source, target, Payload.ACTIVATION, (value(name), value(f"mask_{name}")))
    backward = Link(target, source, Payload.GRADIENT, (value(f"grad_{name}"),))
    return forward, backward


def shared_links(*stages: int) -> tuple[Link, ...]:
    """What the first stage makes for the others, each of which hands it on to the next."""
    pairs = itertools.pairwise(stages)
    return tuple(Link(source, target, Payload.ACTIVATION, (value("shared"),)) for source, target in pairs)


def tied_links(owner: int, borrower: int) -> tuple[Link, ...]:
    """A parameter that ``borrower`` uses and ``owner`` updates."""
    name = f"tied_{owner}_{borrower}"
    return (
        Link(owner, borrower, Payload.WEIGHT, (value(name, 8),)),
        Link(borrower, owner, Payload.WEIGHT_GRADIENT, (value(f"grad_{name}", 8),)),
    )


def result_link(source: int, target: int = -1) -> Link:
    return Link(source, target, Payload.RESULT, (Value("loss", "float32", ()),))
