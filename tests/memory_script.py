"""Started on several ranks by a test: what each holds between steps and during one, beside what plans say."""

import contextlib
import functools
import gc
import json
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pipec
from pipec.plan.memory import plan_memory

ROWS, MICROBATCHES = 8, 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.Tanh())))


def alive() -> list[torch.UntypedStorage]:
    """The memory of every tensor."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu"]
    found: dict[int, torch.UntypedStorage] = {}
    for storage in (x.untyped_storage() for x in tensors):
        with contextlib.suppress(RuntimeError):  # one that has no memory, of a tensor that was traced
            found[storage.data_ptr()] = storage
    return list(found.values())


def held() -> int:
    return sum(storage.nbytes() for storage in alive())


class Meter(TorchDispatchMode):
    """The most bytes that are alive at a time, without those that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {storage._cdata for storage in alive()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor) and each.device.type == "cpu":
                self._count(each.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and storage.nbytes():
            self._known.add(key)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def facts(shard: str | None) -> dict[str, Any]:
    x = torch.ones(ROWS, 128)
    before = held()
    adam = functools.partial(torch.optim.AdamW, lr=1e-3, foreach=False)
    pipe = pipec.compile(
        model(),
        dist.get_world_size(),
        loss_fn=nn.functional.mse_loss,
        microbatches=MICROBATCHES,
        stages=1,
        optimizer=adam,
        shard=shard,
    )
    pipe.step(x, target=x)
    between = held() - before
    with Meter() as meter:
        pipe.step(x, target=x)
    memory = pipe.plan.stages[0].cost.memory
    return {
        "between": between,
        "weights": memory.weights,
        "state": memory.state,
        "most": between + meter.most,
        "said": plan_memory(pipe.plan, pipe.programs)[0].peak_bytes,
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    levels = (None, "optimizer", "gradients", "parameters")
    print(json.dumps({str(level): facts(level) for level in levels}))
