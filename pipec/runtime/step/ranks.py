"""The ranks that run in this process, and their communication with the others."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from pipec.console import speak_for_group
from pipec.runtime.messages.distributed_transport import DistributedTransport
from pipec.runtime.messages.exchange import Exchange
from pipec.runtime.messages.transport import InProcessTransport, Transport
from pipec.runtime.processes.launch import Devices, World, resolve_devices, world
from pipec.runtime.processes.star import PacketKind
from pipec.runtime.step.timestamps import RecordedStep

T = TypeVar("T")


class Ranks:
    """The ranks that run in this process, their devices, and the transport to the other ranks.

    ``kernels`` says how they load the code of their stages. ``here`` is this process among those of the
    pipeline; None: among all that were started together.

    Raises:
        InputError: ``devices`` contradicts the number of these processes.
    """

    def __init__(
        self, devices: Devices, timeout: float, kernels: str = "source", here: World | None = None
    ) -> None:
        self.world = world() if here is None else here
        if self.world.global_ranks and self.world.rank == 0:
            speak_for_group()
        self.devices = resolve_devices(devices, self.world)
        self.count = devices if isinstance(devices, int) else len(devices)
        self._timeout, self.kernels = timeout, kernels
        self._elsewhere: Callable[[], str] = str
        if self.has_gpu_messages:  # before the first CUDA call, which would take memory of GPU 0
            torch.cuda.set_device(self.devices[self.world.rank])

    @functools.cached_property
    def in_process(self) -> InProcessTransport:
        return InProcessTransport([self.devices[rank] for rank in range(self.count)])

    @functools.cached_property
    def distributed(self) -> DistributedTransport:
        transport = DistributedTransport(self.devices[self.world.rank], self._timeout, self.world)
        transport.star.elsewhere = self._elsewhere
        return transport

    def tell_elsewhere(self, elsewhere: Callable[[], str]) -> None:
        """Let the other ranks know what this process does, by a text, while it does not come to them."""
        self._elsewhere = elsewhere
        if "distributed" in vars(self):
            self.distributed.star.elsewhere = elsewhere

    @functools.cached_property
    def exchange(self) -> Exchange:
        """Where processes compare what they were given. All of them make theirs in the same order."""
        return Exchange(self.distributed)

    @property
    def has_gpu_messages(self) -> bool:
        """Whether GPUs wait for messages, and not their hosts."""
        return self.world.is_distributed and self.devices[self.world.rank].type == "cuda"

    def call_on_rank_0(self, request: str, make: Callable[[], T]) -> T:
        """Call ``make`` in one process; every process returns its result, or raises its error."""
        return self.distributed.call_on_rank_0(request, make) if self.world.is_distributed else make()

    def gathered(self, steps: Sequence[RecordedStep]) -> list[RecordedStep]:
        """The recorded steps with the timestamps of all ranks, on every rank."""
        if not self.world.is_distributed:
            return list(steps)
        parts = self.distributed.star.all_gather([x.timestamps for x in steps], "comparing recorded steps")
        return [
            replace(step, timestamps={rank: own for each in found for rank, own in each.items()})
            for step, *found in zip(steps, *parts, strict=True)
        ]

    def barrier(self) -> None:
        """Wait for the other processes, however long they take while all of them live."""
        self.all_gather(None, "waiting for what other ranks do before their first step")

    def all_gather(self, own: T, activity: str, limited: bool = False) -> list[T]:
        """The value of each process, in every process.

        Unless the wait is ``limited``, they may take as long as they want while all of them live.
        """
        is_distributed = self.world.is_distributed
        return self.distributed.star.all_gather(own, activity, limited) if is_distributed else [own]

    def exchange_final_status(self, text: str) -> list[str | None]:
        """The text of each other process that lives when the pipeline cannot go on; None if it tells none."""
        return (
            list(self.distributed.star.exchange_final_status(text).values())
            if self.world.is_distributed
            else []
        )

    def in_background(self) -> "BackgroundRanks":
        """These processes, for a thread beside the one that steps."""
        if not self.world.is_distributed:
            return BackgroundRanks(self.world, self.all_gather, lambda: None)
        star = self.distributed.star
        all_gather = functools.partial(star.all_gather, kind=PacketKind.BACKGROUND_TEXT)
        return BackgroundRanks(self.world, all_gather, star.check_processes)

    def transport(self, rank: int) -> Transport:
        return self.distributed if self.world.is_distributed else self.in_process.endpoint(rank)


@dataclass(frozen=True)
class BackgroundRanks:
    """Communication of background threads, one of each process, separate from that of steps.

    ``all_gather`` takes a value and the activity of this process; it returns the values of all processes.
    ``check`` raises TransportError if the process of another rank has ended.
    """

    world: World
    all_gather: Callable[[Any, str], list[Any]]
    check: Callable[[], None]
