"""Checkpoints: a folder with all that a training needs to go on, in any layout. See docs/checkpoints.md.

* ``training`` is what a checkpoint is of; ``optimizers`` describes their state by parameter.
* ``parts`` says which process has and writes which part of each tensor; ``tensors`` are the files of them.
* ``document`` is all the rest; ``values`` brings plain values through JSON, ``positions`` those of streams;
  ``hugging_face`` is for others.
* ``manifest`` has the sums of the files, ``directory`` lets a folder come to its place, and ``together`` lets
  all processes succeed or fail.
* ``background`` lets a checkpoint be written while the training goes on.
* ``write`` and ``read`` are what these serve.
"""

from pipec.checkpoint.background import Saving
from pipec.checkpoint.parts import Part, whole
from pipec.checkpoint.positions import position_of
from pipec.checkpoint.read import load, load_weights
from pipec.checkpoint.tensors import kind_of
from pipec.checkpoint.training import Training
from pipec.checkpoint.write import draft
