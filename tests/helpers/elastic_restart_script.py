"""A script that a launcher starts again, and that then resumes by itself.

``elastic_restart_script.py DIRECTORY STEPS [RANK STEP]``

Rank 0 prints each step's loss exactly. The first time that ``RANK`` has made ``STEP``, it is killed.
"""

import os
import signal
import sys
from pathlib import Path

import resumable_training
import torch

import pipec


def train(directory: Path, num_steps: int, rank: int = -1, step: int = -1) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = resumable_training.Net().double()
    pipe = pipec.compile(model, microbatches=2, optimizer=resumable_training.decayed)
    checkpoints = pipec.CheckpointManager(directory, every=2, keep=2)
    checkpoints.resume(pipe)
    for words in resumable_training.batches(pipe.num_steps, num_steps):
        loss = pipe.step(words)
        pipec.log(f"step {pipe.num_steps} {float(loss).hex()}")
        checkpoints.step(pipe)
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if is_first and (int(os.environ["RANK"]), pipe.num_steps) == (rank, step):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    train(Path(sys.argv[1]), *map(int, sys.argv[2:]))
