"""Connects the processes of a pipeline, which find each other through torch's store."""

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
from torch.distributed import PrefixStore, Store

from pipec.errors import InputError, TransportError
from pipec.runtime.processes.addresses import Address
from pipec.runtime.processes.heartbeat import HeartbeatConnections
from pipec.runtime.processes.launch import World

T = TypeVar("T")


def connect_ranks(world: World, number: int, timeout: float) -> tuple[HeartbeatConnections, Store]:
    """The connections with all other ranks, and a store to make process groups with.

    The store is a new prefix in the store of the default process group. Without one, it is made from the
    environment that ``torchrun`` sets, as torch would. ``number`` names the same pipeline on every rank.

    Raises:
        TransportError: a rank did not connect within ``timeout`` seconds, or died; the message names it.
        InputError: the environment has no address of the store.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    store = _store_of_environment(world, timeout) if group is None else group.get_group_store()
    heartbeats = HeartbeatConnections(world.rank, world.size, timeout)
    try:
        _connect(heartbeats, PrefixStore(f"pipec/{number}", store), timeout)
        prefix = heartbeats.all_gather_text(secrets.token_bytes(8))[0].hex()
    except TransportError as error:
        heartbeats.fail(str(error))
        heartbeats.close()
        raise
    return heartbeats, PrefixStore(f"pipec/{prefix}", store)


def call_with_timeout(call: Callable[[], T], seconds: float, check: Callable[[], object] = lambda: None) -> T:
    """The result of ``call`` on another thread. Raises TimeoutError after so many seconds.

    The thread is then abandoned. Once the process of torch's store is stopped, most calls of the store, and
    functions that make a process group, wait for ever whatever their timeout is (torch 2.13). ``check`` is
    called meanwhile.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="pipec rendezvous", daemon=True).start()
    deadline = time.monotonic() + seconds
    while not wait([outcome], _POLL_SECONDS).done:
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
    is_server = world.rank == 0 and not _agent_has_store()
    make = functools.partial(
        dist.TCPStore,
        host,
        int(port),
        world.size,
        is_server,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=is_server,
    )
    try:
        if not is_server:
            _wait_for_listener(host, int(port), timeout)
        return call_with_timeout(make, timeout)
    except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
        if is_server:
            raise TransportError(
                f"rank 0 cannot listen at {host}:{port}: {_first_line(error)}; set another MASTER_PORT"
            ) from None
        raise TransportError(
            f"rank {world.rank} waited {timeout:g} s for {_store_owner()} at {host}:{port}, which did not "
            "connect: that process was not started, died or hangs, or the address is wrong "
            f"({_first_line(error)})"
        ) from None


def _wait_for_listener(host: str, port: int, timeout: float) -> None:
    """Wait until a process listens there. Torch's store would print each of its attempts."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), max(deadline - time.monotonic(), _POLL_SECONDS)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_SECONDS)


def _connect(heartbeats: HeartbeatConnections, store: Store, timeout: float) -> None:
    """Publish this rank's address and connect to all lower ranks; higher ranks connect to this one.

    The address is deleted in the end. ``torchrun`` may keep the store for ranks that it restarts, and no
    restart count identifies a start on all hosts, since each host counts its own restarts.
    """
    rank = heartbeats.rank
    addresses = _AddressTable(store, functools.partial(_query_store, timeout=timeout, heartbeats=heartbeats))
    addresses.publish(rank, heartbeats.address.to_text())
    for peer in range(rank):
        _connect_to(peer, heartbeats, addresses, timeout)
    try:
        heartbeats.wait_for_all()
    except TransportError as error:
        heartbeats.fail(str(error))  # to ranks that still wait, and would name this rank as missing
        raise
    addresses.delete(rank)


def _connect_to(
    peer: int, heartbeats: HeartbeatConnections, addresses: "_AddressTable", timeout: float
) -> None:
    """Connect to a lower rank, which publishes its address within ``timeout`` seconds.

    If ranks of an earlier start died while they connected, the store has their addresses until ranks of this
    start replace them.
    """
    address = addresses.find(peer, within=timeout)
    if address is None:
        raise TransportError(
            f"rank {heartbeats.rank} waited {timeout:g} s for rank {peer}, which did not connect: that "
            "process was not started, died or hangs before it makes its pipeline"
        )
    while True:
        try:
            return heartbeats.connect(peer, Address.parse(address))
        except TransportError:
            within = _RESTART_SECONDS if _agent_has_store() else 0.0
            newer = addresses.find(peer, within, other_than=address)
            if newer is None:
                raise
            address = newer


@dataclass(frozen=True)
class _AddressTable:
    """The ranks' addresses in the store; ``query`` runs a call of the store."""

    store: Store
    query: Callable[[Callable[[], Any]], Any]

    def publish(self, rank: int, address: str) -> None:
        self.query(lambda: self.store.set(f"address/{rank}", address))

    def delete(self, rank: int) -> None:
        self.query(lambda: self.store.delete_key(f"address/{rank}"))

    def find(self, rank: int, within: float, other_than: str = "") -> str | None:
        """The address of a rank, if not ``other_than``; None without one ``within`` so many seconds."""
        deadline, key = time.monotonic() + within, f"address/{rank}"
        while True:
            if self.query(lambda: self.store.check([key])):
                address = str(self.query(lambda: self.store.get(key)).decode())
                if address != other_than:
                    return address
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)


def _query_store(call: Callable[[], T], timeout: float, heartbeats: HeartbeatConnections) -> T:
    """The result of a call of the store. Raises TransportError if the store does not answer."""
    try:
        return call_with_timeout(call, timeout, heartbeats.check)
    except TimeoutError:
        raise TransportError(
            f"{_store_owner()} has the ranks' store, and has not answered rank {heartbeats.rank} for "
            f"{timeout:g} s: that process is stopped, or its machine cannot be reached"
        ) from None
    except RuntimeError:
        if reason := heartbeats.reason(_REASON_SECONDS):
            raise TransportError(f"another rank failed:\n  {reason}") from None
        raise TransportError(
            f"{_store_owner()}, which had the ranks' store, ended: its own output may say why"
        ) from None


def _agent_has_store() -> bool:
    """Whether the store is in ``torchrun``'s own process; torch reads the same variable."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _store_owner() -> str:
    return "torchrun" if _agent_has_store() else "rank 0"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_POLL_SECONDS = 0.05
_RESTART_SECONDS = 30.0
"""Seconds in which a rank of this start replaces an address of an earlier start."""

_REASON_SECONDS = 0.5
