"""The connections to rank 0 of ranks that are threads of one process: texts, ends, failures, strangers."""

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from torch.distributed import HashStore, Store

from pipec.errors import TransportError
from pipec.runtime.processes import rendezvous, star
from pipec.runtime.processes.judge import NOT_WAITING, Judge, WaitStatus
from pipec.runtime.processes.star import PacketKind, Star

T = TypeVar("T")
LONG = 600.0
"""A timeout that no test reaches."""

TEXT = PacketKind.TEXT


@pytest.fixture
def three() -> Iterator[list[Star]]:
    yield from connected(3)


def connected(num_ranks: int) -> Iterator[list[Star]]:
    stars = [Star(rank, num_ranks, LONG) for rank in range(num_ranks)]
    store = HashStore()
    together([partial(rendezvous.connect, each, store, LONG) for each in stars])
    yield stars
    for each in stars:
        each.close()


def together(calls: list[Callable[[], T]]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def gathered(each: Star, own: bytes) -> list[bytes]:
    return each.all_gather(own, "comparing")


def cut(each: Star) -> None:
    """End a rank's connections as the death of its process does."""
    each._loop.call_soon_threadsafe(lambda: [writer.close() for writer in each._writers.values()])


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(TransportError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("victim", range(3))
def test_a_rank_that_dies_is_named_by_all_others(three: list[Star], victim: int) -> None:
    """Rank 0 too: all others see their own connection end."""
    failed = [threading.Event() for _ in three]
    for each, event in zip(three, failed, strict=True):
        each.on_failure = event.set
    cut(three[victim])
    for each in three:
        if each.rank != victim:
            error = error_of(lambda: each.receive(0 if each.rank else 1, TEXT))  # noqa: B023
            assert error.endswith(f"failed:\n  rank {victim}: its process died; its own output may say why")
            assert failed[each.rank].wait(LONG)


def test_what_was_sent_before_the_end_still_arrives(three: list[Star]) -> None:
    three[1].send(0, TEXT, b"last")
    three[1].close()
    assert three[0].receive(1, TEXT) == b"last"
    three[0].send(2, TEXT, b"last")
    three[0].close()
    assert three[2].receive(0, TEXT) == b"last"


@pytest.mark.parametrize("leaver", range(3))
def test_a_script_that_ends_is_a_failure_only_for_who_needs_it(three: list[Star], leaver: int) -> None:
    three[leaver].close()
    left = [each for each in three if each.rank != leaver]
    reason = f"rank {leaver}: its script ended, or freed its pipeline, before this call"
    assert [each.reason(within=LONG) for each in left] == [reason] * 2
    assert [each._failure for each in left] == [None, None]
    assert reason in error_of(lambda: left[1].receive(0, TEXT))


def test_scripts_that_end_at_the_same_time_take_nobody_for_dead() -> None:
    for _ in range(20):
        for three in connected(3):
            together([each.close for each in three])
            assert [each._failure for each in three] == [None] * 3


def test_the_first_failure_is_everybodys(three: list[Star]) -> None:
    three[1].fail("the backward is broken")
    expected = "rank 1: the backward is broken"
    assert [each.reason(within=LONG) for each in three] == [expected] * 3
    three[2].fail("another rank failed")
    three[0].fail("a third")
    assert [each.reason() for each in three] == [expected] * 3
    assert error_of(three[1].check) == "the backward is broken"
    assert error_of(three[2].check) == f"another rank failed:\n  {expected}"


def test_two_ranks_that_fail_at_once_end_all_with_the_error_of_one(three: list[Star]) -> None:
    together([partial(each.fail, "broken") for each in three[1:]])
    found = {str(three[0].reason(within=LONG)), *(str(each.reason(within=LONG)) for each in three[1:])}
    assert found <= {"rank 1: broken", "rank 2: broken"}


def test_a_failure_is_sent_before_connections_are_closed(three: list[Star]) -> None:
    """Even if closing them fails, or takes long."""
    closing = threading.Event()

    def close() -> None:
        closing.wait(LONG)
        raise RuntimeError("the device is gone")

    three[1].on_failure = close
    thread = threading.Thread(target=three[1].fail, args=("broken",))
    thread.start()
    assert three[2].reason(within=LONG) == "rank 1: broken"
    closing.set()
    thread.join()


def test_life_signs_go_on_whatever_a_heartbeat_finds(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(star, "_LONGEST_INTERVAL", 0.01)
    monkeypatch.setattr(Judge, "report", lambda _: exec("raise KeyError('x')"))
    for three in connected(3):
        heard = three[0]._judge._states[1]
        for _ in range(3):
            heard.wait_number = -1
            while heard.wait_number < 0:
                time.sleep(0.01)


def test_the_timeout_counts_for_each_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or waits for the same message, step after step, would be told on the console as one that lasts."""
    monkeypatch.setattr(star, "_LONGEST_INTERVAL", 0.01)
    for three in connected(3):
        heard, numbers = three[0]._judge._states[1], set[int]()
        waiting = three[1].waiting("receiving x", 0, limited=True)
        for _ in range(3):
            with waiting:
                while heard.wait.activity != "receiving x" or heard.wait_number in numbers:
                    time.sleep(0.01)
                numbers.add(heard.wait_number)
            assert (three[1].wait_status, three[1].last_activity) == (NOT_WAITING, "receiving x")


def test_a_failed_rank_is_still_there_for_the_background(three: list[Star]) -> None:
    three[1].fail("broken")
    kind = PacketKind.BACKGROUND_TEXT
    gather = [partial(each.all_gather, b"x", "", kind=kind) for each in three]
    assert together(gather) == [[b"x"] * 3] * 3
    cut(three[2])
    for call in gather[:2]:
        assert "its process died" in error_of(call)


def test_final_statuses_are_those_of_the_ranks_that_live(three: list[Star]) -> None:
    found = together([partial(each.exchange_final_status, str(each.rank)) for each in three])
    assert found == [{1: "1", 2: "2"}, {0: "0", 2: "2"}, {0: "0", 1: "1"}]
    found = together([partial(each.exchange_final_status, "x") for each in three[:2]])
    assert found == [{1: "x", 2: None}, {0: "x", 2: None}], "rank 2 says nothing"
    cut(three[2])
    three[0].reason(within=LONG)
    assert together([partial(each.exchange_final_status, "x") for each in three[:2]]) == [{1: "x"}, {0: "x"}]
    cut(three[0])
    assert three[1].exchange_final_status("1") == {0: None, 2: None}


STRANGE = [
    b"",
    b"GET / HTTP/1.1\r\nHost: here\r\nAccept: */*\r\n\r\n" * 3,
    bytes(star._GREETING.size),
    star._GREETING.pack(1, bytes(16)),
    star._GREETING.pack(2**32 - 1, bytes(16)),
    star.encode_packet(PacketKind.FAILURE, b"rank 1: never") * 10,
]


def test_strangers_are_not_let_in(three: list[Star]) -> None:
    """Nor does one who sends nothing, or garbage, end anything. A rank with the token cannot be replaced."""
    assert three[0]._server is not None
    port = three[0]._server.getsockname()[1]
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
    for sent in STRANGE:
        stranger = socket.create_connection(("127.0.0.1", port))
        with stranger, contextlib.suppress(OSError):  # rank 0 may have closed it already
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    with pytest.raises(OSError, match="another process listens"):
        rendezvous._connection(["127.0.0.1"], port, 1, three[0]._token)
    assert together([partial(gathered, each, b"x") for each in three]) == [[b"x"] * 3] * 3
    for each in silent:
        each.close()


def test_a_listener_without_the_token_is_not_taken_for_rank_0(three: list[Star]) -> None:
    """So nothing that it sends is ever read as a packet."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            connection, _ = server.accept()
            greeting = connection.recv(1000)
            connection.sendall(greeting[-16:])
            connection.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(OSError, match="another process listens"):
            rendezvous._connection(["127.0.0.1"], server.getsockname()[1], 1, star.new_token())
        thread.join()


def test_a_failure_ends_what_the_main_thread_does(three: list[Star]) -> None:
    def compile_slowly() -> None:
        with three[0].interrupted_by_failures():
            threading.Timer(0.05, three[1].fail, ("broken",)).start()
            while True:
                time.sleep(0.01)

    assert "rank 1: broken" in error_of(compile_slowly)


def test_a_forked_child_does_not_keep_connections_open(three: list[Star]) -> None:
    """As the workers of a data loader, which outlive a rank that dies."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.close(writing)
        os.read(reading, 1)  # until this process has ended
        os._exit(0)
    try:
        cut(three[2])
        assert "rank 2: its process died" in error_of(lambda: three[1].receive(0, TEXT))
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        os.close(reading)


# How ranks find each other.


def test_a_rank_0_that_does_not_come_is_named() -> None:
    each = Star(2, 3, 0.3)
    error = error_of(lambda: rendezvous.connect(each, HashStore(), 0.3))
    assert error.startswith("rank 2 waited 0.3 s for rank 0, which did not connect: that process was not")
    each.close()


def test_a_rank_0_that_died_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store, each = HashStore(), Star(1, 2, LONG)
    store.set("address", json.dumps([["127.0.0.1"], port, star.new_token().hex()]))
    error = error_of(lambda: rendezvous.connect(each, store, LONG))
    assert f"rank 1 cannot reach rank 0 at port {port} of 127.0.0.1: its process died" in error
    each.close()


def test_what_never_returns_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError):
        rendezvous.call_with_timeout(never.wait, 0.2)
    assert rendezvous.call_with_timeout(lambda: 7, LONG) == 7
    with pytest.raises(ZeroDivisionError):
        rendezvous.call_with_timeout(lambda: 1 // 0, LONG)
    never.set()


@pytest.mark.parametrize(("host", "port"), [(None, "1"), ("127.0.0.1", None), ("127.0.0.1", "http")])
def test_an_environment_without_a_meeting_place_is_refused(
    host: str | None, port: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"2 processes were started, but MASTER_ADDR is .* start them"):
        rendezvous.connect_ranks(rendezvous.World(1, 2), 0, LONG)


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(TransportError, match=f"rank 0 cannot listen at 127.0.0.1:{port}.*MASTER_PORT"):
            rendezvous.connect_ranks(rendezvous.World(0, 2), 0, LONG)


def test_ranks_that_were_started_again_do_not_meet_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of ``torchrun`` outlives the ranks, and with it what they wrote."""
    store = HashStore()
    monkeypatch.setattr(rendezvous.dist, "is_initialized", lambda: True)
    world = SimpleNamespace(WORLD=SimpleNamespace(get_group_store=lambda: store))
    monkeypatch.setattr(rendezvous.dist, "group", world)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for _ in range(2):
        found = together([partial(meet_late, rank) for rank in (0, 1)])
        for each, part in found:
            each.close()
            assert part.add("members", 1) <= 2  # as torch counts those of a process group
    with socket.create_server(("127.0.0.1", 0)) as server:
        of_the_dead = json.dumps([["127.0.0.1"], server.getsockname()[1], star.new_token().hex()])
    store.set("pipec//0/address", of_the_dead)
    for each, _ in together([partial(meet_late, rank) for rank in (0, 1)]):
        each.close()


def meet_late(rank: int) -> tuple[Star, Store]:
    """Rank 0 comes after rank 1 has asked for its address."""
    time.sleep(0.5 * (1 - rank))
    return rendezvous.connect_ranks(rendezvous.World(rank, 2), 0, LONG)


# What rank 0 makes of heartbeats, which tests count instead of seconds.


class Ranks:
    """The judge of ``rank`` of three, and the waits of all, which it hears of at each beat."""

    def __init__(self, timeout: float = 20.0, rank: int = 0) -> None:
        self.judge = Judge(rank, 3, timeout, 1.0)
        self.waits, self.last, self.lines, self._numbers = [NOT_WAITING] * 3, [""] * 3, [""] * 3, [0] * 3
        self.silent = set[int]()
        for each in (1, 2) if rank == 0 else (0,):
            self.judge.join(each)

    def wait(self, rank: int, *wait: Any, **options: bool) -> None:
        self.last[rank], self.waits[rank] = self.waits[rank].activity, WaitStatus(*wait, **options)
        self._numbers[rank] += 1

    def progress(self, rank: int) -> None:
        self._numbers[rank] += 1

    def beat(self, count: int = 1) -> list[str]:
        """Reports of so many beats."""
        reports = []
        for _ in range(count):
            self.judge.beat()
            for rank in {0, 1, 2} - self.silent:
                self.judge.heard(rank)
                line = "" if self.waits[rank].activity else self.lines[rank]
                self.judge.note(rank, self._numbers[rank], self.waits[rank], self.last[rank], line)
            reports.append(self.judge.report() or "")
        return [each for each in reports if each]


def test_a_silent_rank_is_lost_after_the_timeout() -> None:
    ranks = Ranks()
    ranks.wait(0, "receiving x", 1, limited=True)
    ranks.beat()
    ranks.silent = {1}
    ranks.beat(19)
    assert ranks.judge.lost() is None
    ranks.beat(5)
    assert ranks.judge.overdue() is None, "the wait is that rank's fault"
    assert str(ranks.judge.lost()).startswith("rank 1: no sign of life for 24 s; the process is stopped, or")
    ranks.silent = {1, 2}
    ranks.beat(20)
    assert str(ranks.judge.lost()).startswith("ranks 1, 2: no sign of life for 44 s")


def test_other_ranks_judge_rank_0_alone_and_their_own_waits_once_it_has_ended() -> None:
    ranks = Ranks(rank=2)
    ranks.silent = {0, 1}
    ranks.wait(2, "receiving y", 1, limited=True)
    assert ranks.beat(20)[0].startswith("rank 2 has waited 5 s, receiving y; rank 0 has not arrived: it g")
    assert str(ranks.judge.lost()).startswith("rank 0: no sign of life for 20 s")
    ranks.silent = {1}
    ranks.beat(30)
    assert ranks.judge.overdue() is None, "rank 0 would say so"
    ranks.judge.close(0)
    assert ranks.judge.end(0)
    expected = "receiving y, took more than 20 s; rank 0, which knows what other ranks do, has ended"
    assert ranks.judge.overdue() == f"rank 2: {expected}"


def test_a_limited_wait_is_overdue_after_the_timeout_and_names_the_end_of_the_chain() -> None:
    """What arrives begins it anew."""
    ranks = Ranks()
    ranks.wait(1, "receiving x from rank 2", 2)
    ranks.wait(0, "receiving y", 1, limited=True)
    for _ in range(8):
        ranks.beat(15)
        ranks.progress(0)
        assert ranks.judge.overdue() is None
    ranks.beat(22)
    assert ranks.judge.overdue() is None
    ranks.beat()
    chain = "rank 1 is receiving x from rank 2; rank 2 is alive, but waits for no other rank"
    assert str(ranks.judge.overdue()).startswith(f"rank 0: receiving y, took more than 20 s; {chain}")


@pytest.mark.parametrize("peer", [1, None], ids=["in_a_chain", "in_a_collective"])
def test_a_limited_wait_lasts_while_a_rank_at_its_end_is_between_two_calls(peer: int | None) -> None:
    """And afterwards as long as if it had just begun."""
    ranks = Ranks()
    ranks.wait(1, "receiving x from rank 2", 2)
    ranks.wait(0, "receiving y", peer, limited=True)
    ranks.lines[2] = "script.py:3 in save"
    for _ in range(50):
        ranks.beat()
        assert ranks.judge.overdue() is None
    ranks.wait(2, "computing")
    for _ in range(21):
        ranks.beat()
        assert ranks.judge.overdue() is None
    ranks.beat()
    assert ranks.judge.overdue()


def test_a_wait_that_takes_long_is_reported() -> None:
    """At ever longer intervals: who has not arrived, and what that one did last."""
    ranks = Ranks(timeout=300.0)
    ranks.wait(1, "comparing")
    ranks.wait(1)
    ranks.lines[1] = "train.py:31 in save"
    ranks.wait(0, "calling step", 1)
    ranks.wait(2, "calling step", 1)
    reports = ranks.beat(45)
    assert [re.search(r"waited (\d+) s", each)[1] for each in reports] == ["10", "20", "40"]  # type: ignore[index]
    assert reports[0] == (
        "rank 0 has waited 10 s, calling step; rank 1 has not arrived: it is alive and elsewhere in its "
        "script, at train.py:31 in save, and its last wait was comparing"
    )
    for rank in range(3):
        ranks.wait(rank)
    assert ranks.beat(45) == []
    ranks.wait(1, "waiting for rank 0 to compile", 0, expected=True)
    assert ranks.beat(100) == []


def test_a_rank_that_is_stopped_while_it_waits_or_not_connected_is_late() -> None:
    """Although it said last that it waits."""
    ranks = Ranks(timeout=300.0)
    for rank in range(3):
        ranks.wait(rank, "calling step")
    assert ranks.beat(30) == [], "all wait for each other"
    ranks.silent = {2}
    (report,) = ranks.beat(5)
    assert report.endswith("rank 2 has not arrived: it gives no sign of life, and its last wait was none")
    ranks.judge._states[2].has_joined = False
    assert ranks.beat(60)[0].endswith("; rank 2 has not connected")
