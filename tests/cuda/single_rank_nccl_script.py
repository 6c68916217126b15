"""A rank of an NCCL group that is on its own: a message goes wrong, and its connections must close soon."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from pipec.runtime.messages.nccl import NcclConnections

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))

has_failed = False
connections = NcclConnections(device, 0, 1, lambda: has_failed, bool)
connections.open_results()
number = torch.ones(4, device=device)
started = connections.collective((0,), lambda group: dist.all_reduce(number, group=group, async_op=True))
connections.wait(started)
connections.drain()
assert number.tolist() == [1.0] * 4

busy = torch.ones(8192, 8192, device=device)
for _ in range(50):
    busy = busy @ busy
connections.collective((0,), lambda group: dist.all_reduce(busy, group=group, async_op=True))
has_failed, began = True, time.monotonic()
try:
    connections.drain()
except ConnectionError:
    print("was told")
connections.close()
print("closed after", time.monotonic() - began)
dist.destroy_process_group()
