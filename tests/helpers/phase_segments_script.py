"""Started on two ranks by a test: parameters in shares, and a backward whose first part reads no weights."""

import functools

import torch
import torch.distributed as dist
from huggingface_models import perceptron

import pipec
from pipec.hardware.devices import DeviceModel, LinkModel
from pipec.hardware.topology import equal_devices

SLOW = LinkModel(1e5, 1e-7)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model, inputs = perceptron()
    plain, _ = perceptron()
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    pipe = pipec.compile(
        model,
        devices=2,
        schedule="looped-bfs-v2",
        stages=2,
        microbatches=2,
        recompute="none",
        optimizer=sgd,
        shard="parameters",
        topology=equal_devices(2, SLOW),
        costs=DeviceModel("test", {"float32": 1e6}, 1e15, 1e-6, 2**40, SLOW, "made up"),
    )
    optimizer = sgd(plain.parameters())
    for _ in range(2):
        pipe.step(**inputs)
        optimizer.zero_grad()
        plain(**inputs).backward()
        optimizer.step()
    assert pipe.plan.segments, "no backward is in parts"
    found = pipe.full_state_dict()
    wanted = plain.state_dict()
    for name, value in found.items():  # all of them, on rank 0
        torch.testing.assert_close(value, wanted[name])
    print(f"{len(found)} are equal")
