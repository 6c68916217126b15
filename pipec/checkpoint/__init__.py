"""Checkpoints: folders with all that is needed to resume a training, in any layout. See docs/checkpoints.md.

* ``training_state`` is the content of a checkpoint; ``optimizer_state`` an optimizer's state by parameter,
  ``metadata`` the file ``checkpoint.pt``, and ``plain_values`` what it may hold.
* ``shards`` says which process holds and writes which part of each tensor, and in which file.
* ``write`` and ``read`` do so. ``all_ranks`` makes all processes succeed or fail together.
  ``pipec.saved_folders`` replaces a folder in one step.
* ``convert`` reads and writes folders of ``torch.distributed.checkpoint``, ``hugging_face`` those of
  transformers and diffusers; ``pretrained_weights`` reads the weights of ``from_pretrained``, each rank those
  of its stages.
"""

from pipec.checkpoint.hugging_face import save_pretrained
from pipec.checkpoint.metadata import replica_position
from pipec.checkpoint.pretrained_weights import PretrainedWeights, read_pretrained, weights_for
from pipec.checkpoint.read import load, load_weights
from pipec.checkpoint.shards import TensorShard, tensor_spec, unsharded
from pipec.checkpoint.training_state import TrainingState
from pipec.checkpoint.write import begin_checkpoint
