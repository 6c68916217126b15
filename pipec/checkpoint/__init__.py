"""Checkpoints: folders with all that is needed to resume a training, in any layout. See docs/checkpoints.md.

* ``training_state`` is the content of a checkpoint; ``optimizer_state`` an optimizer's state by parameter.
* ``shards`` says which process holds and writes which part of each tensor; ``safetensors_files`` writes and
  reads the files of tensors, and ``file_layout`` says which tensor is in which file.
* ``metadata`` is ``checkpoint.pt``, and ``plain_values`` are what it may hold. ``torch_checkpoint`` and
  ``convert`` read and write the folders of ``torch.distributed.checkpoint``, ``hugging_face`` the folders of
  transformers and diffusers.
* ``pretrained_weights`` reads the weights of ``from_pretrained``, each rank those of its stages, and
  ``save_pretrained`` writes them.
* ``manifest`` has the checksums of the files, ``staging_directory`` replaces a folder in one step, and
  ``all_ranks`` makes all processes succeed or fail together.
* ``async_save`` writes a checkpoint while the training goes on.
* ``write`` and ``read`` combine these.
"""

from pipec.checkpoint.async_save import AsyncSave
from pipec.checkpoint.metadata import replica_position
from pipec.checkpoint.pretrained_weights import PretrainedWeights, read_pretrained, weights_for
from pipec.checkpoint.read import load, load_saved_profile, load_weights
from pipec.checkpoint.safetensors_files import tensor_spec
from pipec.checkpoint.save_pretrained import save_pretrained
from pipec.checkpoint.shards import TensorShard, unsharded
from pipec.checkpoint.training_state import TrainingState
from pipec.checkpoint.write import begin_checkpoint
