"""How the processes of a pipeline find each other, through torch's store."""

import functools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

# The store that the ranks of the process group share; the public API does not hand it out.
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from pipec.errors import InputError, TransportError
from pipec.runtime.processes.addresses import Address
from pipec.runtime.processes.heartbeat import HeartbeatConnections
from pipec.runtime.processes.launch import World

T = TypeVar("T")


def connect_ranks(world: World, number: int, timeout: float) -> tuple[HeartbeatConnections, Store]:
    """Connect with all other ranks, and give the store that process groups are made with.

    It is a new part of that of the default process group. If there is none, it is made from the environment
    that ``torchrun`` sets, as torch would. ``number`` means the same pipeline on every rank.

    Raises:
        TransportError: a rank did not come within ``timeout`` seconds, or died; it is named.
        InputError: the environment does not say where the ranks meet.
    """
    store = _get_default_store() if dist.is_initialized() else _store_of_environment(world, timeout)
    heartbeats = HeartbeatConnections(world.rank, world.size, timeout)
    try:
        _connect(heartbeats, PrefixStore(f"pipec/{number}", store), timeout)
        part = heartbeats.all_gather_text(secrets.token_bytes(8))[0].hex()
    except TransportError as error:
        heartbeats.fail(str(error))
        heartbeats.close()
        raise
    return heartbeats, PrefixStore(f"pipec/{part}", store)


def call_with_timeout(call: Callable[[], T], seconds: float, check: Callable[[], object] = lambda: None) -> T:
    """Call on another thread, and leave that thread behind after so many seconds, with a TimeoutError.

    Once the process that holds torch's store is stopped, most calls of the store, and whatever makes a
    process group, wait for ever, whatever their timeout is (torch 2.13). ``check`` is called meanwhile.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="pipec rendezvous", daemon=True).start()
    deadline = time.monotonic() + seconds
    while not wait([outcome], _LOOK_SECONDS).done:
        check()
        if time.monotonic() > deadline:
            raise TimeoutError
    return outcome.result()


def _store_of_environment(world: World, timeout: float) -> Store:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise InputError(
            f"{world.size} processes were started, but MASTER_ADDR is {host!r} and MASTER_PORT {port!r}; "
            "start them with torchrun, or set both"
        )
    holds = world.rank == 0 and not _agent_holds_store()
    make = functools.partial(
        dist.TCPStore,
        host,
        int(port),
        world.size,
        holds,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=holds,
    )
    try:
        if not holds:
            _wait_for_listener(host, int(port), timeout)
        return call_with_timeout(make, timeout)
    except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
        if holds:
            raise TransportError(
                f"rank 0 cannot listen at {host}:{port}: {_first_line(error)}; set another MASTER_PORT"
            ) from None
        raise TransportError(
            f"rank {world.rank} waited {timeout:g} s for {_holder()} at {host}:{port}, which did not come: "
            f"that process was not started, died or hangs, or the address is wrong ({_first_line(error)})"
        ) from None


def _wait_for_listener(host: str, port: int, timeout: float) -> None:
    """Wait until somebody listens there. Torch's store would fill the terminal with its attempts."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), max(deadline - time.monotonic(), _LOOK_SECONDS)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_SECONDS)


def _connect(heartbeats: HeartbeatConnections, store: Store, timeout: float) -> None:
    """Publish the own address, and connect to the ranks below; the ranks above connect to this one.

    The address is taken back in the end: ``torchrun`` may keep the store for ranks that it starts later, and
    no number of theirs tells these on all hosts, for each host counts the restarts of its own.
    """
    rank = heartbeats.rank
    addresses = _Addresses(store, functools.partial(_query_store, timeout=timeout, heartbeats=heartbeats))
    addresses.publish(rank, heartbeats.address.to_text())
    for peer in range(rank):
        _reach(peer, heartbeats, addresses, timeout)
    try:
        heartbeats.wait_for_all()
    except TransportError as error:
        heartbeats.fail(str(error))  # to those who wait a moment longer, and would else miss this rank
        raise
    addresses.take_back(rank)


def _reach(peer: int, heartbeats: HeartbeatConnections, addresses: "_Addresses", timeout: float) -> None:
    """Connect to a rank below, which comes within ``timeout`` seconds.

    Where ranks that ``torchrun`` started before died while they met, the store has their addresses until
    those of today come.
    """
    address = addresses.find(peer, within=timeout)
    if address is None:
        raise TransportError(
            f"rank {heartbeats.rank} waited {timeout:g} s for rank {peer}, which did not come: that process "
            "was not started, died or hangs before it makes its pipeline"
        )
    while True:
        try:
            return heartbeats.connect(peer, Address.parse(address))
        except TransportError:
            within = _RENEWED_WITHIN if _agent_holds_store() else 0.0
            newer = addresses.find(peer, within, other_than=address)
            if newer is None:
                raise
            address = newer


@dataclass(frozen=True)
class _Addresses:
    """The ranks' addresses in the store; ``ask`` calls the store."""

    store: Store
    ask: Callable[[Callable[[], Any]], Any]

    def publish(self, rank: int, address: str) -> None:
        self.ask(lambda: self.store.set(f"address/{rank}", address))

    def take_back(self, rank: int) -> None:
        self.ask(lambda: self.store.delete_key(f"address/{rank}"))

    def find(self, rank: int, within: float, other_than: str = "") -> str | None:
        """The address of a rank, ``other_than`` one; None if it has none after so many seconds."""
        deadline, key = time.monotonic() + within, f"address/{rank}"
        while True:
            if self.ask(lambda: self.store.check([key])):
                found = str(self.ask(lambda: self.store.get(key)).decode())
                if found != other_than:
                    return found
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_SECONDS)


def _query_store(question: Callable[[], T], timeout: float, heartbeats: HeartbeatConnections) -> T:
    """The store's answer. Raises TransportError if there is none."""
    try:
        return call_with_timeout(question, timeout, heartbeats.check)
    except TimeoutError:
        raise TransportError(
            f"{_holder()} holds the ranks' store, and has not answered rank {heartbeats.rank} for "
            f"{timeout:g} s: that process is stopped, or its machine cannot be reached"
        ) from None
    except RuntimeError:
        known = heartbeats.reason(_REASON_COMES_WITHIN)
        gone = f"{_holder()}, which held the ranks' store, is gone: its own output may say why"
        raise TransportError(f"another rank failed:\n  {known}" if known else gone) from None


def _agent_holds_store() -> bool:
    """Whether ``torchrun`` holds the store in a process of its own, as torch asks too."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _holder() -> str:
    return "torchrun" if _agent_holds_store() else "rank 0"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_LOOK_SECONDS = 0.05
_RENEWED_WITHIN = 30.0
"""Seconds in which ranks of a later start come, after the first that finds an address of an earlier one."""

_REASON_COMES_WITHIN = 0.5
