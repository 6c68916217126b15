"""Optimizers whose updates a program runs. They depend on neither programs nor transports.

* ``factory`` calls the ``optimizer=`` of the user and reads its parameter groups.
* ``pipeline_optimizer`` is ``pipe.optimizer``, the optimizer of the whole model: groups, schedulers,
  checkpoints.
* ``stage_optimizer`` updates the parameters of one stage that a rank owns, with the model's groups.
* ``state_shards`` cuts the state of a parameter into pieces and merges them; ``norms`` computes norms for
  clipping.
* ``update_memory`` predicts the memory of the state, and the temporary memory of an update.
"""

from pipec.runtime.optimizers.factory import Factory, is_elementwise, parameter_on
from pipec.runtime.optimizers.norms import clip_factor, gradient_norms, stored_values, sum_of_squares
from pipec.runtime.optimizers.pipeline_optimizer import GatherStates, PipelineOptimizer
from pipec.runtime.optimizers.stage_optimizer import StageOptimizer
from pipec.runtime.optimizers.state_shards import StateShard
from pipec.runtime.optimizers.update_memory import state_bytes, update_scratch
