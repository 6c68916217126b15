"""A rank of an NCCL group that is on its own: a message goes wrong, and its connections must close soon."""

import torch
import torch.distributed as dist

from pipec.runtime.messages.nccl import NcclConnections

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)

has_failed = False
connections = NcclConnections(device, store, 0, 1, bool)
connections.open([], has_results=True)
number = torch.ones(4, device=device)
connections.all_reduce((0,), number)()
connections.drain()
assert number.tolist() == [1.0] * 4

busy = torch.ones(8192, 8192, device=device)
for _ in range(50):
    busy = busy @ busy
connections.all_reduce((0,), busy)
has_failed = True
try:
    connections.drain()
except ConnectionError:
    print("was told")
connections.close()
print("closed")
