"""Users' own schedules: read, registered, chosen automatically, and refused where they are broken."""

import re
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from bare_programs import verified
from equality_rows import Row, difference
from worker_processes import run_lines

from pipec.errors import InfeasibleError, InputError, VerifyError
from pipec.ir import Compute, Phase, one_rank_per_stage
from pipec.schedules import (
    Workload,
    custom_schedule,
    format_orders,
    make_schedule,
    one_f_one_b,
    parse_orders,
)
from pipec.schedules.chain_simulation import simulate_schedule
from tests.pipeline.test_ranks import ON_TWO_HOSTS

V_ORDERS = """\
0F0,3F0,3I0,3W0,0I0,0W0
1F0,2F0,2B0,1B0
"""


def test_orders_are_read_and_written() -> None:
    spaced = parse_orders("0F0, 0F1,,0I0,0W0,0B1\r\n1F0,1B0,1F1,1B1,,", "mine")
    assert format_orders(spaced) == "0F0,0F1,0I0,0W0,0B1\n1F0,1B0,1F1,1B1\n"
    assert (spaced.name, spaced.num_microbatches) == ("mine", 2)
    assert spaced.placement == one_rank_per_stage((0, 1))
    phases = [Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT, Phase.BACKWARD]
    assert [cell.phase for cell in spaced.orders[0]][2:] == phases
    several = parse_orders(V_ORDERS, "v")
    assert several.orders[1][2] == Compute(Phase.BACKWARD, 2, 0)
    assert several.placement == one_rank_per_stage((0, 1, 1, 0))
    assert format_orders(several) == V_ORDERS
    assert verified(spaced)
    assert verified(several)
    pairs = parse_orders("0F0,1F0,1B0,(0F1;0B0)OVERLAP_F_B,1F1,1B1,0B1", "pairs")
    assert format_orders(pairs) == "0F0,1F0,1B0,0F1,0B0,1F1,1B1,0B1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n0: F0 B0", r"mine, line 2: found '0: F0 B0'; expected a stage"),
        ("0F0,0B0\n1F0,0B1", r"mine, line 2: stage 0 is on rank 1, and in line 1 on rank 0"),
        ("0F0,0B0\n2F0,2B0", r"mine: stage 2 is in a row, but stage 1 in none"),
        ("0F0,0SEND_F0", r"mine, line 1: found 0SEND_F0, which computes nothing"),
        ("0UNSHARD,0F0", r"mine, line 1: found 0UNSHARD, which computes nothing"),
        ("0F0,0BACKWARD0", r"mine, line 1: found '0BACKWARD0'; expected a stage"),
        (",,\n", r"mine: no rank computes anything"),
    ],
)
def test_a_text_that_is_none_of_orders_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_orders(text, "mine")


def test_a_function_or_a_file_is_asked_for_the_right_numbers(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(format_orders(one_f_one_b(2, 3)))
    assert custom_schedule(path, 2, 3).orders == custom_schedule(one_f_one_b, 2, 3).orders
    with pytest.raises(
        InputError, match=r"'mine' is for 2 ranks and 3 microbatches, but 2 ranks and 4 micro"
    ):
        custom_schedule(path, 2, 4)
    path.write_text("0F0,0B0\n\n1F0,1B0\n")
    with pytest.raises(InputError, match=r"orders of 3 ranks .* each rank with a stage"):
        custom_schedule(path, 3, 1)


def test_packages_register_schedules_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", "pipec.schedules:gpipe", "pipec.schedules")
    monkeypatch.setattr(
        "pipec.schedules.entry_points", lambda group: EntryPoints([point]).select(group=group)
    )
    assert make_schedule("theirs", 2, 3) == make_schedule("gpipe", 2, 3)
    with pytest.raises(InputError, match=r"unknown schedule 'their'; did you mean 'theirs'\?"):
        make_schedule("their", 2, 3)


@pytest.mark.parametrize(("chunks", "optimum"), [(4, 59), (6, 53), (8, 51)])
def test_auto_finds_the_proven_optimum_of_a_v(chunks: int, optimum: int) -> None:
    """Proved by constraint programming for p = 4, m = 8 and a V of stages whose phases take 1 each."""
    work = Workload.uniform(4, forward=2, backward_input=2, backward_weight=2, memory_limit=chunks / 2)
    assert simulate_schedule(make_schedule("auto", 4, 8, work), work)[0].makespan == optimum


def test_auto_says_when_nothing_fits() -> None:
    with pytest.raises(InfeasibleError, match=r"no schedule of 4 ranks and 8 microbatches .* limit of 0.5;"):
        make_schedule("auto", 4, 8, Workload.uniform(4, memory_limit=0.5))


@pytest.mark.parametrize(
    ("text", "changes", "told"),
    [
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1", {}, "never runs backward or backward_input of stage 1, mic"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1", {}, "rank 1      F0  B0 [F1]"),
        ("0B0,0F0\n1F0,1B0", {}, "wait for each other: rank 0 at backward 0 of mb 0; rank 1 at forward"),
        ("0B0,0F0\n1F0,1B0", {}, "rank 0     [B0] F0\n  rank 1     [F0] B0"),
        ("0F0,0F0,0B0\n1F0,1B0", {}, "runs forward of stage 0, microbatch 0 on rank 0; and once more"),
        ("0F0,0F1,0B0,0B1", {"num_microbatches": 1}, "microbatch 1 on rank 0; expected stages 0 to 0 and"),
        ("0F0,0B0\n1F0,1B0", {"placement": ((1,), (0,))}, "on rank 0; expected it on rank 1"),
        ("0F0,0B0\n1F0,1B0", {"placement": ((1,), (0,))}, "rank 0     [F0"),
    ],
)
def test_orders_that_cannot_run_are_drawn_with_the_fault_marked(
    text: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(VerifyError, match=re.escape(told)):
        verified(replace(parse_orders(text, "mine"), **changes))


ORDERS = (
    "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F1,1F0,1F2,1F3,1B0,1B1,1B2,1B3",
    "0F0,0F1,0F2,0F3,0B1,0B0,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3",
    "0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n1F3,1F2,1F1,1B1,1F0,1B0,1B3,1B2",
)
"""Orders in which a rank reads messages of a link in another order than the other one sends them."""


@pytest.mark.parametrize("orders", ORDERS)
def test_ranks_may_have_microbatches_in_different_orders(orders: str, tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"
    path.write_text(orders)
    assert not difference(Row(schedule=str(path)))


DIFFERENCES = """
from equality_rows import Path, Row, difference
for path in sorted(Path(__file__).parent.glob("*.csv")):
    print(difference(Row(schedule=str(path))) or "none")
"""


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["", ON_TWO_HOSTS], ids=["shared memory", "gloo"])
def test_processes_may_have_microbatches_in_different_orders(hosts: str, tmp_path: Path) -> None:
    for number, text in enumerate(ORDERS):
        (tmp_path / f"{number}.csv").write_text(text)
    assert run_lines(hosts + DIFFERENCES, 2, tmp_path) == [["none"] * len(ORDERS)] * 2
