"""Schedules beyond those that ship, written by hand: split backwards, and several stages on a rank."""

from pipec.ir import Compute, Link, Payload, Phase, Schedule, Value

FORWARD, BACKWARD, INPUT, WEIGHT = (
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.BACKWARD_INPUT,
    Phase.BACKWARD_WEIGHT,
)


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with a split backward: on rank s, W(j) runs directly after B(j+s), and the rest at the end."""

    def order(rank: int) -> tuple[Compute, ...]:
        warmup = min(num_ranks - rank - 1, num_microbatches)
        cells = [Compute(FORWARD, rank, mb) for mb in range(warmup)]
        for mb in range(num_microbatches):
            if mb + warmup < num_microbatches:
                cells.append(Compute(FORWARD, rank, mb + warmup))
            cells.append(Compute(INPUT, rank, mb))
            if mb >= rank:
                cells.append(Compute(WEIGHT, rank, mb - rank))
        done = max(num_microbatches - rank, 0)
        return (*cells, *(Compute(WEIGHT, rank, mb) for mb in range(done, num_microbatches)))

    placement = tuple(range(num_ranks))
    return Schedule("zb-h1", num_microbatches, placement, tuple(order(rank) for rank in placement))


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: rank s holds stages s and 2p-1-s, and F, B and W of both alternate."""
    padded = max(num_microbatches, 2 * num_ranks - 1)

    def order(rank: int) -> tuple[Compute, ...]:
        first, second = rank, 2 * num_ranks - 1 - rank
        done: dict[tuple[Phase, int], int] = {}
        cells = []

        def run(times: int, *kinds: tuple[Phase, int]) -> None:
            for _ in range(times):
                for kind in kinds:
                    mb = done.get(kind, 0)
                    if mb < padded:
                        cells.append(Compute(*kind, mb))
                        done[kind] = mb + 1

        below = num_ranks - rank
        run(2 * below - 1, (FORWARD, first))
        run(rank, (FORWARD, second), (FORWARD, first))
        run(below, (FORWARD, second), (INPUT, second), (WEIGHT, second))
        steady = [(phase, stage) for stage in (first, second) for phase in (FORWARD, INPUT, WEIGHT)]
        run(padded - num_ranks, *steady)
        run(rank, (INPUT, first), (INPUT, second))
        run(below, (INPUT, first), (WEIGHT, first))
        run(padded, (WEIGHT, second))
        run(padded, (WEIGHT, first))
        return tuple(cell for cell in cells if cell.microbatch < num_microbatches)

    return _v_schedule("zb-v", num_ranks, num_microbatches, [order(rank) for rank in range(num_ranks)])


def v_gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe on the V placement: a rank runs the forwards of its two stages, then their fused backwards."""

    def order(rank: int) -> tuple[Compute, ...]:
        stages = (rank, 2 * num_ranks - 1 - rank)
        forwards = [Compute(FORWARD, stage, mb) for stage in stages for mb in range(num_microbatches)]
        backwards = [
            Compute(BACKWARD, stage, mb) for stage in reversed(stages) for mb in range(num_microbatches)
        ]
        return (*forwards, *backwards)

    return _v_schedule("v-gpipe", num_ranks, num_microbatches, [order(rank) for rank in range(num_ranks)])


def _v_schedule(
    name: str, num_ranks: int, num_microbatches: int, orders: list[tuple[Compute, ...]]
) -> Schedule:
    placement = (*range(num_ranks), *reversed(range(num_ranks)))
    return Schedule(name, num_microbatches, placement, tuple(orders))


def value(name: str, *shape: int | str) -> Value:
    return Value(name, "float32", shape or ("b",))


def skip_links(source: int, target: int, training: bool = True) -> tuple[Link, ...]:
    """A skip connection of two values, with the gradient of the first."""
    name = f"skip_{source}_{target}"
    forward = Link(source, target, Payload.ACTIVATION, (value(name), value(f"mask_{name}")))
    backward = Link(target, source, Payload.GRADIENT, (value(f"grad_{name}"),))
    return (forward, backward) if training else (forward,)


def tied_links(owner: int, borrower: int) -> tuple[Link, ...]:
    """A parameter that ``borrower`` uses and ``owner`` updates."""
    name = f"tied_{owner}_{borrower}"
    return (
        Link(owner, borrower, Payload.WEIGHT, (value(name, 8),)),
        Link(borrower, owner, Payload.WEIGHT_GRADIENT, (value(f"grad_{name}", 8),)),
    )


def result_link(source: int) -> Link:
    return Link(source, -1, Payload.RESULT, (Value("loss", "float32", ()),))
