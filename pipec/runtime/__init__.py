"""Executes the programs of an artifact, step by step.

It imports only ``ir``, ``artifact``, the errors, the console and torch, so that a rank runs a saved artifact
without loading the compiler. Each part imports only the parts above it:

* ``random_operators`` and ``branch_checks`` are imported by generated code; ``random_seeds`` seeds random
  operators.
* ``processes``: how processes find each other, which are alive, what each waits for, and signals to stop.
* ``memory``: which tensors share memory, and how much a rank uses.
* ``messages`` carry tensors: ``transport`` between the threads of one process, ``distributed_transport``
  between processes, over the ``connections`` of gloo or those of ``nccl``. By ``agreement`` processes check,
  beside the messages of a program, that they make the same calls; ``call_description`` is what they compare.
* ``stages``: the code and the state of a stage, and what its replicas do together.
* ``optimizers`` make the updates that a program asks for.
* ``step``: ``execution`` is an artifact linked on the ranks of this process, ``interpreter`` runs the program
  of one rank, a step or the periods of a stream, and ``linker`` resolves every name of it beforehand.
* ``stream``: the mini-batches of a script's stream, read ahead and announced to the other ranks.
* The parts of a pipeline: ``tensors`` says which rank holds what, ``call_agreement`` makes each call one of
  all ranks, ``executions`` links artifacts and runs calls, also those of a saved artifact, and
  ``stream_training`` makes the steps of a stream of batches.
"""

from pipec.runtime.messages.distributed_transport import DistributedTransport
from pipec.runtime.messages.transport import InProcessTransport, Transport
from pipec.runtime.processes.launch import World, resolve_devices, world
from pipec.runtime.stages.bound_stage import StageCode
from pipec.runtime.step.interpreter import Interpreter
