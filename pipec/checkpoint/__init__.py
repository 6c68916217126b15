"""Checkpoints: a folder with all that a training needs to go on, in any layout. See docs/checkpoints.md.

* ``training`` is what a checkpoint is of; ``optimizers`` describes their state by parameter.
* ``parts`` says which process has and writes which part of each tensor; ``tensors`` are the files of them.
* ``metadata`` is all the rest; ``values`` brings plain values through JSON, ``positions`` those of streams;
  ``hugging_face`` is for others.
* ``manifest`` has the sums of the files, ``directory`` lets a folder come to its place, and ``together`` lets
  all processes succeed or fail.
* ``background`` lets a checkpoint be written while the training goes on.
* ``write`` and ``read`` are what these serve.
"""

from pipec.checkpoint.async_save import AsyncSave
from pipec.checkpoint.read import load, load_saved_profile, load_weights
from pipec.checkpoint.safetensors_files import tensor_spec
from pipec.checkpoint.shards import TensorShard, unsharded
from pipec.checkpoint.stream_positions import replica_position
from pipec.checkpoint.training_state import TrainingState
from pipec.checkpoint.write import begin_checkpoint
