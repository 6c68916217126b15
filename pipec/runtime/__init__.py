"""Executes the programs of an artifact, one step after another.

It imports ``ir``, ``artifact``, the errors, the console and torch alone, so that a rank runs a saved artifact
without loading the compiler. Read it from the top of a step downwards:

* ``launch``: which ranks this process runs, and on which devices. ``execution``: an artifact linked on them.
* ``interpreter`` runs the program of one rank. ``linker`` resolves every name of the program beforehand.
* ``stage`` holds the state of a stage; ``compute``, ``gradients`` and ``results`` say what a phase function
  is given and where the things it returns go. ``draws`` and ``randomness`` make dropout reproducible.
* ``transport`` carries tensors between ranks of one process, on the threads of ``worker``. ``distributed``
  does so between processes, over the ``connections`` of gloo or those of ``nccl``; for these, a ``watcher``
  notices when another rank fails.
* ``agreement``: what processes tell each other beside the messages of a program. ``facts`` says what they
  compare, such as a digest of the batch that each was given.
* ``handle``, ``holder`` and ``loaded`` are what a user holds: the tensors, and a saved artifact to train.
* ``recording`` keeps the times of a step; ``storage`` tells whose memory a tensor is.
"""

from pipec.runtime.distributed import TorchDistributed
from pipec.runtime.interpreter import Interpreter
from pipec.runtime.launch import World, resolve_devices, world
from pipec.runtime.stage import StageCode
from pipec.runtime.transport import InProcess, Transport
