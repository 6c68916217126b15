"""A training script as a user writes one.

``train_script.py MODEL RANKS STEPS`` prints each step's loss exactly.
"""

import sys

import huggingface_models
import torch

import pipec

torch.set_num_threads(1)
name, num_ranks, num_steps = sys.argv[1:]
model, inputs = getattr(huggingface_models, name)()
pipe = pipec.compile(model, devices=int(num_ranks), microbatches=3)
pipe.prepare(**inputs)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
for _ in range(int(num_steps)):
    loss = pipe.step(**inputs)
    optimizer.step()
    optimizer.zero_grad()
    pipec.log(f"loss {float(loss).hex()}")
