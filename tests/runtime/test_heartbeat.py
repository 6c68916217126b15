"""Heartbeat connections of ranks that are threads of one process: texts, ends, silence, and who is named."""

import asyncio
import os
import re
import signal
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
from pipec.runtime.processes import heartbeat, rendezvous
from pipec.runtime.processes.heartbeat import HeartbeatConnections
from pipec.runtime.processes.packets import PacketKind
from pipec.runtime.processes.peers import Peers
from pipec.runtime.processes.whereabouts import Whereabouts

T = TypeVar("T")
TIMEOUT = 1.0


@pytest.fixture
def three() -> Iterator[list[HeartbeatConnections]]:
    lines = [HeartbeatConnections(rank, 3, TIMEOUT) for rank in range(3)]
    store = HashStore()
    together([partial(rendezvous._connect, each, store, 10.0) for each in lines])
    yield lines
    for each in lines:
        each.close()


def together(calls: list[Callable[[], T]]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def cut(lines: HeartbeatConnections) -> None:
    """End a rank's connections as the death of its process does."""
    for peer in lines._peers.values():
        assert peer.writer is not None
        lines._loop.call_soon_threadsafe(peer.writer.transport.abort)


def hold_breath(lines: HeartbeatConnections) -> None:
    """Send no more beats, as a process that is stopped."""
    lines._loop.call_soon_threadsafe(time.sleep, 10 * TIMEOUT)


def test_texts_come_in_the_order_of_ranks_and_calls(three: list[HeartbeatConnections]) -> None:
    big = bytes(range(256)) * 40_000
    for text in (b"first", big):
        found = together([partial(each.all_gather_text, text + bytes([each.rank])) for each in three])
        assert found == [[text + bytes([rank]) for rank in range(3)]] * 3
    three[0].send_text(b"made")
    assert [each.receive_text(0, "waiting") for each in three[1:]] == [b"made"] * 2


def test_a_rank_that_dies_is_named_by_all_at_once(three: list[HeartbeatConnections]) -> None:
    started = time.monotonic()
    cut(three[0])
    for each in three[1:]:
        with pytest.raises(TransportError, match="rank 0: its process died"):
            each.receive_text(0, "waiting")
    assert time.monotonic() - started < 2.5


def test_the_others_end_by_themselves_if_no_message_is_cut_off(
    three: list[HeartbeatConnections], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a rank which waits for one that lives, and waits for the dead one, is set free."""
    monkeypatch.setattr("pipec.runtime.processes.heartbeat._DEATH_SECONDS", 0.3)
    failed = threading.Event()
    three[2].on_failure = failed.set
    cut(three[0])
    assert failed.wait(2)
    assert three[2].reason() == "rank 0: its process died; its own output may say why"


def test_a_rank_that_says_farewell_ends_no_messages(three: list[HeartbeatConnections]) -> None:
    three[0].close()
    with pytest.raises(TransportError, match="rank 0: its script ended, or freed its pipeline"):
        three[1].receive_text(0, "waiting")
    assert three[2].reason(within=2.0) == three[1].reason()  # it was told by rank 1


@pytest.mark.slow
def test_a_silent_rank_is_named_after_the_timeout(three: list[HeartbeatConnections]) -> None:
    started = time.monotonic()
    hold_breath(three[1])
    for each in (three[0], three[2]):
        with pytest.raises(TransportError, match="rank 1: no sign of life for 1"):
            each.receive_text(2 - each.rank, "waiting")
    assert TIMEOUT / 2 < time.monotonic() - started < TIMEOUT + 1


@pytest.mark.slow
def test_a_rank_that_was_stopped_itself_blames_nobody(three: list[HeartbeatConnections]) -> None:
    """Its own clock ran on, but it did not beat either."""
    three[0]._timeout = 30.0
    three[2]._timeout = 30.0
    three[1]._loop.call_soon_threadsafe(time.sleep, 2 * TIMEOUT)
    time.sleep(2.5 * TIMEOUT)
    assert three[1].silent() is None
    assert not three[1].has_failed()


def test_the_first_failure_is_everybodys(three: list[HeartbeatConnections]) -> None:
    three[1].fail("the backward is broken")
    assert three[0].reason(within=2.0) == three[2].reason(within=2.0) == "rank 1: the backward is broken"
    three[2].fail("another rank failed")
    assert three[2].reason() == "rank 1: the backward is broken"


@pytest.mark.slow
def test_who_does_not_answer_is_named_with_what_it_does(three: list[HeartbeatConnections]) -> None:
    with three[2].waiting("receiving hidden_1 from rank 1", 1):
        time.sleep(3 * three[2]._interval)
        assert (
            three[0]
            .waits_for(2)
            .startswith("rank 2 is receiving hidden_1 from rank 1; rank 1 is alive, but ")
        )
        with pytest.raises(
            TransportError, match=r"rank 0 waited 1 s for ranks 1, 2; every rank must run the"
        ):
            three[0].all_gather_text(b"here")


@pytest.mark.slow
def test_texts_and_channels_wait_for_a_rank_that_is_between_two_calls(
    three: list[HeartbeatConnections], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "whereabouts", lambda: Whereabouts("script.py:3 in save"))
    time.sleep(3 * three[0]._interval)
    with ThreadPoolExecutor(2) as pool:
        texts = [pool.submit(each.all_gather_text, b"here") for each in three[:2]]
        channels = [three[rank].channel(2 - rank, PacketKind.CALL) for rank in (0, 2)]
        time.sleep(1.5 * TIMEOUT)
        channels[1].send(b"a")
        channels[1].send(b"b")
        assert channels[0].receive(1) + channels[0].receive(1) == b"ab"
        three[2].all_gather_text(b"late")
        assert [each.result() for each in texts] == [[b"here", b"here", b"late"]] * 2


def test_a_limited_wait_fails_after_the_timeout_and_names_the_end_of_the_chain(
    three: list[HeartbeatConnections],
) -> None:
    started = time.monotonic()
    with three[1].waiting("receiving x from rank 2", 2), three[0].waiting("receiving y", 1, limited=True):
        reason = three[2].reason(within=3 * TIMEOUT)
    assert TIMEOUT < time.monotonic() - started < 2 * TIMEOUT
    chain = "rank 1 is receiving x from rank 2; rank 2 is alive, but waits for no other rank"
    assert reason is not None
    assert reason.startswith(f"rank 0: receiving y, took more than 1 s; {chain}")
    assert three[0].overdue == ("receiving y", reason.partition("1 s; ")[2])
    assert three[1].overdue is None


@pytest.mark.parametrize("peer", [1, None], ids=["in_a_chain", "in_a_collective"])
def test_a_limited_wait_lasts_while_a_rank_at_its_end_is_between_two_calls(
    three: list[HeartbeatConnections], monkeypatch: pytest.MonkeyPatch, peer: int | None
) -> None:
    """And afterwards as long as if it had just begun."""
    monkeypatch.setattr(heartbeat, "whereabouts", lambda: Whereabouts("script.py:3 in save"))
    with three[1].waiting("receiving x from rank 2", 2), three[0].waiting("receiving y", peer, limited=True):
        time.sleep(2 * TIMEOUT)
        with three[2].waiting("computing"):
            time.sleep(0.6 * TIMEOUT)
            assert not three[0].has_failed()
            assert three[0].reason(within=2 * TIMEOUT)


@pytest.mark.slow
@pytest.mark.slow
def test_what_arrives_in_a_limited_wait_begins_it_anew(three: list[HeartbeatConnections]) -> None:
    with three[0].waiting("finishing the step", limited=True):
        for _ in range(8):
            time.sleep(TIMEOUT / 4)
            three[0].note_progress()
        assert not three[0].has_failed()
        assert three[0].reason(within=2 * TIMEOUT)


def test_a_rank_that_does_not_come_is_named() -> None:
    store, lines = HashStore(), [HeartbeatConnections(rank, 3, TIMEOUT) for rank in (0, 2)]
    started = time.monotonic()
    found = together([partial(error_of, each, store) for each in lines])
    assert all("waited 1 s for rank 1, which did not connect" in text for text in found)
    assert time.monotonic() - started < TIMEOUT + 1


def error_of(lines: HeartbeatConnections, store: HashStore) -> str:
    with pytest.raises(TransportError) as caught:
        rendezvous._connect(lines, store, TIMEOUT)
    lines.close()
    return str(caught.value)


def test_a_stranger_is_not_let_in(three: list[HeartbeatConnections]) -> None:
    """Nor does one who sends nothing, or garbage, end anything."""
    port = three[0].address.port
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" + (20).to_bytes(8) + bytes(20)):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    assert together([partial(each.all_gather_text, b"x") for each in three]) == [[b"x"] * 3] * 3


def test_an_address_with_another_listener_is_passed_over(three: list[HeartbeatConnections]) -> None:
    address = three[0].address
    with pytest.raises(OSError, match="another process listens"):
        asyncio.run(address.connect(b"\x00" + (20).to_bytes(8) + bytes(20), b"welcome"))


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_a_failure_ends_what_the_main_thread_does(three: list[HeartbeatConnections], handler: Any) -> None:
    """Also where Ctrl-C is ignored, as in a shell's jobs in the background. It stays ignored there."""

    def compile_slowly() -> None:
        with three[0].interrupted_by_failures():
            if handler is signal.SIG_IGN:
                signal.raise_signal(signal.SIGINT)
            time.sleep(5)

    threading.Timer(0.2, three[1].fail, ("broken",)).start()
    before, started = signal.signal(signal.SIGINT, handler), time.monotonic()
    try:
        with pytest.raises(TransportError, match="rank 1: broken"):
            compile_slowly()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 2


def test_a_forked_child_does_not_keep_connections_open(three: list[HeartbeatConnections]) -> None:
    """As the workers of a data loader, which outlive a rank that dies."""
    child = os.fork()
    if child == 0:
        time.sleep(3)
        os._exit(0)
    cut_after = time.monotonic()
    cut(three[0])
    with pytest.raises(TransportError, match="rank 0: its process died"):
        three[1].receive_text(0, "waiting")
    assert time.monotonic() - cut_after < 2.5
    os.kill(child, 9)
    os.waitpid(child, 0)
    with pytest.raises(TransportError):
        three[2].receive_text(0, "waiting")


def test_what_never_returns_is_left_behind() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        rendezvous.call_with_timeout(lambda: time.sleep(5), 0.2)
    assert time.monotonic() - started < 2
    assert rendezvous.call_with_timeout(lambda: 7, 5.0) == 7
    with pytest.raises(ZeroDivisionError):
        rendezvous.call_with_timeout(lambda: 1 // 0, 5.0)


@pytest.mark.parametrize(("host", "port"), [(None, "1"), ("127.0.0.1", None), ("127.0.0.1", "http")])
def test_an_environment_without_a_meeting_place_is_refused(
    host: str | None, port: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"2 processes were started, but MASTER_ADDR is .* start them"):
        rendezvous.connect_ranks(rendezvous.World(1, 2), 0, 1.0)


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(TransportError, match=f"rank 0 cannot listen at 127.0.0.1:{port}.*MASTER_PORT"):
            rendezvous.connect_ranks(rendezvous.World(0, 2), 0, 1.0)


def test_ranks_that_were_started_again_do_not_meet_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of ``torchrun`` outlives the ranks, and with it what they wrote."""
    store = HashStore()
    monkeypatch.setattr(rendezvous.dist, "is_initialized", lambda: True)
    world = SimpleNamespace(WORLD=SimpleNamespace(get_group_store=lambda: store))
    monkeypatch.setattr(rendezvous.dist, "group", world)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for _ in range(2):
        found = together([partial(meet_late, rank) for rank in (0, 1)])
        for lines, part in found:
            lines.close()
            assert part.add("members", 1) <= 2  # as torch counts those of a process group
    of_the_dead = found[0][0].address.to_text()
    store.set("pipec/0/address/0", of_the_dead)
    for lines, _ in together([partial(meet_late, rank) for rank in (0, 1)]):
        lines.close()


def meet_late(rank: int) -> tuple[HeartbeatConnections, Store]:
    """Rank 0 comes after rank 1 has asked for its address."""
    time.sleep(0.5 * (1 - rank))
    return rendezvous.connect_ranks(rendezvous.World(rank, 2), 0, 10.0)


def test_a_wait_that_takes_long_is_told_and_so_is_its_end(
    three: list[HeartbeatConnections], said: list[str]
) -> None:
    """By the lowest rank that waits: who has not come, and what that one did last. Then who goes on."""
    together([partial(each.all_gather_text, b"first") for each in three])
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(three[rank].all_gather_text, b"second") for rank in (0, 2)]
        time.sleep(0.8 * TIMEOUT)
        three[1].all_gather_text(b"second")
        for each in waiting:
            each.result()
    time.sleep(0.4)
    first, *others = said
    assert re.fullmatch(
        r"rank 0 has waited \d s, comparing calls with all ranks; rank 1 has not arrived: it is alive "
        r"and elsewhere in its script, at .*, and its last wait was comparing calls with all ranks",
        first,
    )
    assert re.fullmatch(r"rank 0 goes on after \d s: all have arrived", others[-1])
    assert len(others) <= 2


def test_nothing_is_said_of_a_wait_that_is_expected_to_take_long(
    three: list[HeartbeatConnections], said: list[str]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(three[1].receive_text, 0, "waiting for rank 0 to compile", True)
        time.sleep(0.6 * TIMEOUT)
        three[0].send_text(b"made")
        assert compiled.result() == b"made"
    assert not said


def test_a_rank_that_is_stopped_while_it_waits_has_not_arrived() -> None:
    """Although it said last that it waits, and is the lowest of those that do."""
    peers = Peers(1, 3, timeout=20.0, interval=1.0)
    peers[0].activity = peers[2].activity = "calling step"
    assert peers.late() is None  # rank 0 tells it, if anybody is late
    peers[0].missed_heartbeats = 5
    assert str(peers.late()).startswith("rank 0 has not arrived: it gives no sign of life")
    peers[2].activity, peers[2].last_activity = "", "calling step, after 6 steps"
    assert str(peers.late()).endswith(
        "it is alive and elsewhere in its script, and its last wait was " + peers[2].last_activity
    )


def test_last_words_are_those_of_the_ranks_that_live(three: list[HeartbeatConnections]) -> None:
    """One that died is not waited for; one that lives and says nothing is told apart."""
    three[1].exchange_final_status("one", 0.0)
    began = time.monotonic()
    assert three[0].exchange_final_status("zero", 0.3) == {1: "one", 2: None}
    assert time.monotonic() - began > 0.3
    cut(three[2])
    assert three[1].exchange_final_status("one", 10.0) == {0: "zero"}
    assert time.monotonic() - began < 8
