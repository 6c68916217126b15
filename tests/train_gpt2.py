"""A training script as a user writes one, for ``torchrun``: prints the loss of each step, exactly."""

import sys

import torch
from models import gpt2

import pipec

torch.set_num_threads(1)
model, inputs = gpt2()
pipe = pipec.compile(model, devices=4, microbatches=3)
pipe.prepare(**inputs)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
for _ in range(int(sys.argv[1])):
    loss = pipe.step(**inputs)
    optimizer.step()
    optimizer.zero_grad()
    pipec.log(f"loss {float(loss).hex()}")
