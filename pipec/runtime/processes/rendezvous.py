"""Connects the processes of a pipeline, which find rank 0 through torch's store."""

import contextlib
import functools
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from pipec.errors import InputError, TransportError
from pipec.runtime.processes.launch import World
from pipec.runtime.processes.star import Star, close_in_forks, greet, new_token

T = TypeVar("T")


def connect_ranks(world: World, number: int, timeout: float) -> tuple[Star, Store]:
    """The connection of this rank, and a store to make process groups with.

    The store is a new prefix in the store of the default process group. Without one, it is made from the
    environment that ``torchrun`` sets, as torch would. The prefix has the members of ``world``, and the
    ``number`` that the pipeline has among those of the same members, on all of them.

    Raises:
        TransportError: a rank did not connect within ``timeout`` seconds, or died; the message names it.
        InputError: the environment has no address of the store.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    store = _store_of_environment(world, timeout) if group is None else group.get_group_store()
    star = Star(world.rank, world.size, timeout, world.note)
    try:
        token = connect(star, PrefixStore(f"pipec/{world.name}/{number}", store), timeout)
    except TransportError as error:
        star.fail(str(error))
        star.close()
        raise error if world.note in str(error) else TransportError(f"{error}{world.note}") from None
    # torchrun keeps its store for ranks that it restarts, with everything that earlier ones wrote there
    return star, PrefixStore(f"pipec/{token.hex()}", store)


def connect(star: Star, store: Store, timeout: float) -> bytes:
    """Publish the address of rank 0, to which all other ranks connect; returns the token of this start.

    It is deleted in the end: no restart count identifies a start on all hosts, since each host counts its own
    restarts. If ranks of an earlier start died while they connected, the store still has rank 0's address,
    until rank 0 of this start replaces it.
    """
    query = functools.partial(_query_store, star=star, timeout=timeout)
    if star.rank == 0:
        server, token = _listen(star.num_ranks), new_token()
        star.accept(server, token)
        here = dict.fromkeys([os.environ.get("MASTER_ADDR") or "127.0.0.1", _default_host()])
        address = json.dumps([[*here], server.getsockname()[1], token.hex()])
        query(lambda: store.set(_ADDRESS, address))
        star.wait_for_all()
        query(lambda: store.delete_key(_ADDRESS))
        return token
    error: OSError | None = None
    deadline, where = time.monotonic() + timeout, ""
    while time.monotonic() < deadline:
        if found := query(lambda: store.get(_ADDRESS).decode() if store.check([_ADDRESS]) else ""):
            hosts, port, token = json.loads(found)
            try:
                star.follow(_connection(hosts, port, star.rank, bytes.fromhex(token)))
                return bytes.fromhex(token)
            except OSError as failed:
                if error is None:
                    deadline = min(deadline, time.monotonic() + _RESTART_SECONDS * _agent_has_store())
                error, where = failed, f"port {port} of {' or '.join(hosts)}"
        time.sleep(_POLL_SECONDS)
    if error is None:
        raise TransportError(
            f"rank {star.rank} waited {timeout:g} s for rank 0, which did not connect: that process was not "
            "started, died or hangs before it makes its pipeline"
        )
    what = "is stopped" if isinstance(error, TimeoutError) else "died"
    raise TransportError(
        f"rank {star.rank} cannot reach rank 0 at {where}: its process {what}, or the network between them "
        f"is closed ({str(error) or type(error).__name__})"
    )


def _listen(num_ranks: int) -> socket.socket:
    """A socket that the other ranks can connect to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = soft + num_ranks if hard == resource.RLIM_INFINITY else min(soft + num_ranks, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    server = socket.create_server(("", 0), family=family, backlog=max(num_ranks, 128), dualstack_ipv6=ipv6)
    server.setblocking(False)
    close_in_forks(server)
    return server


def _default_host() -> str:
    """The address from which packets leave to other networks. Connecting UDP sends nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737): it takes the default route
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _connection(hosts: list[str], port: int, rank: int, token: bytes) -> socket.socket:
    """A connection to the first host that knows the token. Raises OSError without one."""
    errors: list[OSError] = []
    for host in hosts:
        with contextlib.ExitStack() as closing:
            try:
                connection = closing.enter_context(socket.create_connection((host, port), _CONNECT_SECONDS))
                greet(connection, rank, token)
                closing.pop_all()
                return connection
            except OSError as error:
                errors.append(error)
    raise errors[-1]


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
    return _tcp_store(host, port, world, timeout)


@functools.cache
def _tcp_store(host: str, port: str, world: World, timeout: float) -> Store:
    """Torch's store, of ``torchrun`` or of rank 0. It lasts as long as the process."""
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
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if is_server:
            raise TransportError(
                f"rank 0 cannot listen at {host}:{port}: {reason}; set another MASTER_PORT"
            ) from None
        raise TransportError(
            f"rank {world.rank} waited {timeout:g} s for {_store_owner()} at {host}:{port}, which did not "
            f"connect: that process was not started, died or hangs, or the address is wrong ({reason})"
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


def _query_store(call: Callable[[], T], star: Star, timeout: float) -> T:
    """The result of a call of the store. Raises TransportError if the store does not answer."""
    try:
        return call_with_timeout(call, timeout, star.check)
    except TimeoutError:
        raise TransportError(
            f"{_store_owner()} has the ranks' store, and has not answered rank {star.rank} for "
            f"{timeout:g} s: that process is stopped, or its machine cannot be reached"
        ) from None
    except RuntimeError:
        if reason := star.reason(_REASON_SECONDS):
            raise TransportError(f"another rank failed:\n  {reason}") from None
        raise TransportError(
            f"{_store_owner()}, which had the ranks' store, ended: its own output may say why"
        ) from None


def _agent_has_store() -> bool:
    """Whether the store is in ``torchrun``'s own process; torch reads the same variable."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _store_owner() -> str:
    return "torchrun" if _agent_has_store() else "rank 0 of the job"


_ADDRESS = "address"
_POLL_SECONDS = 0.05
_CONNECT_SECONDS = 5.0
_RESTART_SECONDS = 30.0
"""Seconds in which rank 0 of this start replaces an address of an earlier start."""

_REASON_SECONDS = 0.5
