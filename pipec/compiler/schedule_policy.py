"""The schedules that a compiled model may run, and their numbers of microbatches."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipec.errors import InfeasibleError, InputError, PlanError
from pipec.ir import Placement, Schedule, Stream, VersionPolicy
from pipec.programs.lower_periodic import num_microbatches_to_lower
from pipec.schedules import (
    ASYNCHRONOUS_SCHEDULES,
    SCHEDULES,
    SEARCHED_SCHEDULES,
    Workload,
    custom_schedule,
    forward_only,
    linear_placement,
    loop_placement,
    make_schedule,
    v_placement,
)
from pipec.schedules.custom import ORDERS_SUFFIX
from pipec.schedules.order_builder import looped_name
from pipec.schedules.replicated import (
    consecutive_placement,
    one_f_one_b_in_turns,
    replicate_placement,
    replicate_schedule,
    round_robin,
)

ScheduleSource = str | Path | Callable[[int, int], Schedule]
"""A name, a file of compute orders, or a function of the numbers of ranks and of microbatches."""

_MAX_MICROBATCHES_PER_RANK = 8
"""With eight microbatches a rank, warmup and cooldown take a ninth of the step. More gain little."""

_GROUPS_OF_LAYERS = (64, 32, 16, 8, 4, 2)
"""The numbers of stages of a rank that gathers or loads few layers at a time."""

Replicas = int | tuple[int, ...]
"""The replicas of every stage, or of each stage."""


@dataclass(frozen=True)
class SchedulePolicy:
    """The schedules that ``source`` allows: a named one, the user's own, or any.

    A pipeline has ``num_ranks`` ranks, and ``replicas`` copies of each of them, or ``replicas[k]`` copies of
    rank k. With ``asynchronous``, a search may find asynchronous schedules, unless it
    ``is_synchronous_only``. The search may also give ranks several stages if it ``chooses_stages``.
    """

    source: ScheduleSource
    num_ranks: int
    replicas: Replicas = 1
    asynchronous: bool = False
    is_synchronous_only: bool = False
    chooses_stages: bool = False

    @property
    def is_asynchronous(self) -> bool:
        """Whether the schedule is asynchronous, whatever a search finds."""
        return self.source in ASYNCHRONOUS_SCHEDULES

    @property
    def may_be_asynchronous(self) -> bool:
        """Whether the schedule is, or after a search may be, asynchronous. Equal on all ranks."""
        return self.is_asynchronous or self.asynchronous

    @property
    def versions(self) -> VersionPolicy | None:
        """The weight versions of an asynchronous schedule; None if synchronous, or if a search decides."""
        return ASYNCHRONOUS_SCHEDULES[str(self.source)].versions if self.is_asynchronous else None

    def for_next_steps(self, schedule: Schedule) -> "SchedulePolicy":
        """The policy of the steps after one that ran ``schedule``: all are synchronous, or none is."""
        return (
            replace(self, source=schedule.name)
            if schedule.stream
            else replace(self, is_synchronous_only=True)
        )

    @property
    def replicas_per_stage(self) -> tuple[int, ...]:
        """The replicas of each rank of a pipeline."""
        return (self.replicas,) * self.num_ranks if isinstance(self.replicas, int) else self.replicas

    @property
    def total_ranks(self) -> int:
        """The number of ranks, with all replicas."""
        return self.num_ranks * self.replicas if isinstance(self.replicas, int) else sum(self.replicas)

    def other_replica_counts(self) -> list[int]:
        """The other numbers of replicas that divide the ranks; none unless the source is a name."""
        ranks = self.total_ranks if isinstance(self.source, str) else 0
        return [n for n in range(1, ranks + 1) if ranks % n == 0 and n != self.replicas]

    def with_unequal_replicas(self) -> list["SchedulePolicy"]:
        """The policies of allowed schedules that run stages with different numbers of replicas.

        None on very many ranks: no replica can represent another there, so that trying them takes too long.
        """
        if self.total_ranks > _MAX_RANKS_UNEQUAL:
            return []
        if self.source == "auto":
            return [replace(self, source="pipedream")] if self.asynchronous else []
        return [self] if self.source in ("1f1b", "pipedream") else []

    def with_replicas(self, replicas: Replicas) -> "SchedulePolicy":
        """The policy with these replicas, on the same total of ranks."""
        num_ranks = self.total_ranks // replicas if isinstance(replicas, int) else len(replicas)
        return replace(self, num_ranks=num_ranks, replicas=replicas)

    def with_groups_of_layers(self, most: int) -> list["SchedulePolicy"]:
        """The policies that divide the stage of each rank, into ``most`` stages first.

        All microbatches go through one stage, then through the next. So what a stage needs is needed twice.
        """
        looped = [looped_name("looped-bfs", number) for number in _GROUPS_OF_LAYERS if number <= most]
        return [replace(self, source=name) for name in looped] if self.chooses_stages else []

    def microbatch_counts(self, batch: int) -> list[int]:
        """The numbers of microbatches to try for ``batch`` rows, the usual one first.

        Raises:
            InputError: the schedule supports none of them.
        """
        if self.is_asynchronous:
            least = ASYNCHRONOUS_SCHEDULES[str(self.source)].min_microbatches(self.replicas_per_stage)
            more = filter(self._supports, microbatch_counts_to_try(batch, self.total_ranks))
            return [least, *(count for count in more if count != least)]
        share = self.replicas if isinstance(self.replicas, int) else 1
        rows, ranks = max(1, batch // share), self.total_ranks // share
        worthwhile = [default_num_microbatches(rows, ranks), *microbatch_counts_to_try(rows, ranks)]
        possible = [share * count for count in dict.fromkeys(worthwhile) if self._supports(share * count)]
        return possible or [self._make(self.source, share * worthwhile[0]).num_microbatches]

    def least_count(self, num_microbatches: int) -> int:
        """The least number of microbatches, of these or more, that the schedule supports.

        A replica that a schedule is searched for has one at least.
        """
        least = num_microbatches
        if self.source in SEARCHED_SCHEDULES and isinstance(self.replicas, int):
            least = max(num_microbatches, self.replicas)
        counts = range(least, least + _MAX_MICROBATCHES_PER_RANK * self.total_ranks)
        return next(filter(self._supports, counts), num_microbatches)

    def placements(self, num_microbatches: int) -> list[Placement]:
        """The placements of the allowed schedules. Raises InputError as making a schedule does."""
        p = self.num_ranks
        if self.source == "auto":
            simple = [*dict.fromkeys([linear_placement(p), v_placement(p), loop_placement(p, 2)])]
        elif self.source in SEARCHED_SCHEDULES:
            simple = [linear_placement(p)]
        else:
            return [self._make(self.source, num_microbatches).placement]
        if isinstance(self.replicas, int):
            return [replicate_placement(placement, self.replicas) for placement in simple]
        return [consecutive_placement(self.replicas) for _ in simple]

    def candidate_schedules(
        self, num_microbatches: int, placement: Placement, work: Callable[[Schedule], Workload]
    ) -> list[Schedule]:
        """The schedules to try with ``num_microbatches``. ``work`` has the costs of a schedule's stages.

        Raises:
            InputError: the schedule does not support this number of microbatches.
            PlanError: with this number of microbatches, the schedule places stages on other ranks.
        """
        if self.source == "auto":
            return self._named_schedules(num_microbatches, placement)
        if self.source in SEARCHED_SCHEDULES:
            costs = work(self._make("zb-h1", num_microbatches))
            try:
                return [self._make(self.source, num_microbatches, costs)]
            except InfeasibleError:  # less may be saved than by these stages
                return [self._make(self.source, num_microbatches, replace(costs, memory_limit=math.inf))]
        schedule = self._make(self.source, num_microbatches)
        if schedule.placement != placement:
            raise PlanError(
                f"schedule {schedule.name!r} puts stages on ranks {schedule.placement} for "
                f"{num_microbatches} microbatches, but the parameters are placed by {placement}; compile "
                "another pipeline for this number of microbatches"
            )
        return [schedule]

    def forward_schedule(self, num_microbatches: int, placement: Placement) -> Schedule:
        """The schedule of evaluations. A searched schedule is about backwards: a simple one replaces it."""
        if self.is_asynchronous:
            return forward_only(one_f_one_b_in_turns("1f1b", self.replicas_per_stage, num_microbatches))
        if self.source not in SEARCHED_SCHEDULES:
            return forward_only(self._make(self.source, num_microbatches))
        simple = (self._make(name, num_microbatches) for name in ("gpipe", "zb-v", "looped-bfs"))
        return forward_only(next(schedule for schedule in simple if schedule.placement == placement))

    def _named_schedules(self, num_microbatches: int, placement: Placement) -> list[Schedule]:
        """The named schedules that support ``num_microbatches`` and have this placement."""
        found, streams = [], self.asynchronous and not self.is_synchronous_only
        for name in (*SCHEDULES, *(ASYNCHRONOUS_SCHEDULES if streams else ())):
            with suppress(InputError):
                found.append(self._make(name, num_microbatches))
        return [schedule for schedule in found if schedule.placement == placement]

    def _supports(self, num_microbatches: int) -> bool:
        try:
            return self.source in SEARCHED_SCHEDULES or bool(self._make(self.source, num_microbatches))
        except InputError:
            return False

    def _make(self, source: ScheduleSource, num_microbatches: int, work: Workload | None = None) -> Schedule:
        """The schedule on all ranks. An asynchronous one has as many mini-batches as are lowered."""
        if source in ASYNCHRONOUS_SCHEDULES:
            make, replicas = ASYNCHRONOUS_SCHEDULES[str(source)], self.replicas_per_stage
            count = num_microbatches_to_lower(Stream(make.versions, num_microbatches), replicas)
            return make.for_batches(replicas, num_microbatches, -(-count // num_microbatches))
        if not isinstance(self.replicas, int):
            return round_robin(num_microbatches, self.replicas)

        def of_one(count: int) -> Schedule:
            if isinstance(source, str):
                return make_schedule(source, self.num_ranks, count, work)
            return custom_schedule(source, self.num_ranks, count)

        if self.replicas == 1:
            return of_one(num_microbatches)
        return replicate_schedule(of_one, num_microbatches, self.replicas)


_MAX_RANKS_UNEQUAL = 256
"""With more ranks, different numbers of replicas are not tried."""


def default_num_microbatches(batch: int, num_ranks: int) -> int:
    """About four microbatches a rank, which keep the bubble below a fifth of the step.

    The largest number from one to four a rank that divides the batch, or four a rank if none does. A batch of
    fewer rows has a microbatch for each row.
    """
    most = max(1, min(batch, 4 * num_ranks))
    even = [count for count in range(min(num_ranks, most), most + 1) if batch % count == 0]
    return even[-1] if even else most


def microbatch_counts_to_try(batch: int, num_ranks: int) -> list[int]:
    """The numbers of microbatches to try, up to eight a rank, ascending.

    Between each power of two and the next, this is the largest number that divides ``batch``, or else the
    power of two. The number of ranks and its doubles are included, because every schedule supports them. Each
    number is less than four times the one before.
    """
    most = min(batch, _MAX_MICROBATCHES_PER_RANK * num_ranks)
    even = (
        max((n for n in range(1 << k, min(2 << k, most + 1)) if batch % n == 0), default=1 << k)
        for k in range(most.bit_length())
    )
    multiples = (num_ranks << k for k in range(_MAX_MICROBATCHES_PER_RANK.bit_length()))
    return sorted({*even, *(count for count in multiples if count <= most)})


def make_schedule_policy(
    source: ScheduleSource,
    num_ranks: int,
    stages: int | None = None,
    replicas: Replicas | str = 1,
) -> SchedulePolicy:
    """The policy of pipelines on ``num_ranks`` ranks, with this number of ``stages`` or of ``replicas``.

    ``"auto-async"`` is ``"auto"`` among asynchronous schedules, too. A name that ends in ``.csv`` is that of
    a file of orders. ``replicas="auto"`` starts with one.

    Raises:
        InputError: the source is no schedule, or does not support these stages or replicas on these ranks.
    """
    asynchronous = source == "auto-async"
    if isinstance(source, str) and source.endswith(ORDERS_SUFFIX):
        source = Path(source)
    one = SchedulePolicy(
        "auto" if asynchronous else source,
        num_ranks,
        asynchronous=asynchronous,
        chooses_stages=source in ("1f1b", "auto") and stages is None,
    )
    if stages is not None:
        policy = _with_stages(one, stages)
        if replicas not in (1, policy.replicas):
            raise InputError(
                f"stages={stages} makes {policy.replicas} replicas of each stage on {num_ranks} ranks, but "
                f"replicas is {replicas!r}; give one of them"
            )
        return policy
    if replicas == "auto" or replicas == 1:
        return one
    if isinstance(replicas, int) and replicas > 1 and num_ranks % replicas == 0:
        return one.with_replicas(replicas)
    if isinstance(replicas, tuple) and replicas and all(isinstance(n, int) and n > 0 for n in replicas):
        return _with_numbers(one, replicas)
    raise InputError(
        f"replicas is {replicas!r}; expected a number that divides the {num_ranks} ranks, a tuple with the "
        "number of each stage, or 'auto'"
    )


def _with_numbers(one: SchedulePolicy, replicas: tuple[int, ...]) -> SchedulePolicy:
    if sum(replicas) != one.num_ranks:
        raise InputError(
            f"replicas={replicas} take {sum(replicas)} ranks, but there are {one.num_ranks}; pass "
            f"devices={sum(replicas)}, or numbers that add up to {one.num_ranks}"
        )
    if len({*replicas}) == 1:
        return one.with_replicas(replicas[0])
    if one.source not in ("1f1b", *ASYNCHRONOUS_SCHEDULES):
        raise InputError(
            f"schedule {one.source!r} needs the same number of replicas for every stage, but replicas is "
            f"{replicas}; take schedule='1f1b' or 'pipedream', which run them round robin"
        )
    return one.with_replicas(replicas)


def _with_stages(one: SchedulePolicy, stages: int) -> SchedulePolicy:
    """The policy of pipelines with this number of stages, as many as the ranks allow."""
    found = {}
    for replicas in [1, *one.other_replica_counts()]:
        policy = one.with_replicas(replicas)
        with suppress(InputError):
            found[len(policy.placements(policy.microbatch_counts(_ROWS_FOR_ANY * replicas)[0])[0])] = policy
    if not found:
        one.placements(one.microbatch_counts(_ROWS_FOR_ANY)[0])  # raises: it is no schedule of these ranks
    if stages not in found:
        raise InputError(
            f"stages is {stages!r}; schedule {one.source!r} on {one.num_ranks} ranks can have pipelines of "
            f"{' or '.join(map(str, sorted(found)))} stages"
        )
    return found[stages]


_ROWS_FOR_ANY = 1024
"""A batch large enough for every schedule to have its usual number of microbatches."""


def resolve_num_microbatches(policy: SchedulePolicy, num_microbatches: int | None) -> int | None:
    """The requested number of microbatches, or that of a file of orders, which has those of one replica.

    Raises:
        InputError: the schedule does not support these numbers of ranks and microbatches.
    """
    source = policy.source
    if isinstance(source, Path) and num_microbatches is None:
        assert isinstance(policy.replicas, int), "unequal replicas of a file are refused"
        return custom_schedule(source, policy.num_ranks, None).num_microbatches * policy.replicas
    if policy.is_asynchronous:
        policy.placements(num_microbatches or policy.microbatch_counts(_ROWS_FOR_ANY)[0])
    elif isinstance(source, str) and source not in SEARCHED_SCHEDULES:
        policy.placements(num_microbatches or 2 * policy.total_ranks)
    return num_microbatches
