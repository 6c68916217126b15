"""CUDA graphs without a GPU: what a graph would launch again is computed again, into the memory of then."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipec.runtime.storage import tensors_in


class ReplayedGraphs:
    """A recorder as ``runtime.cuda.CudaGraphs`` is. It counts what was recorded and replayed."""

    num_recorded = num_replayed = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def try_out(self, call: Callable[[], object]) -> None:
        call()

    def record(self, call: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Any, Any]:
        made = call()
        ReplayedGraphs.num_recorded += 1

        def replay() -> None:
            ReplayedGraphs.num_replayed += 1
            for old, new in zip(tensors_in(made), tensors_in(call()), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.untyped_storage().copy_(new.untyped_storage())

        return made, replay
