"""The optimizer that belongs to a program. It knows neither programs nor transports.

* ``factory`` calls what the user passed as ``optimizer=`` and reads the groups that it made.
* ``pipeline_optimizer`` is the optimizer of the whole model, ``pipe.optimizer``: groups, schedulers,
  checkpoints.
* ``stage_optimizer`` updates what one rank owns of one stage, and follows the groups of the whole model.
* ``state_shards`` cuts the state of a parameter into pieces and puts it together again; ``offloaded_state``
  keeps it in host memory; ``norms`` is for clipping.
* ``state_bytes`` says how much memory a state takes, before there is one, and ``scratch`` how much an update
  takes while it runs.
"""

from pipec.runtime.optimizers.factory import Factory, is_elementwise, parameter_on
from pipec.runtime.optimizers.norms import clip_factor, gradient_norms, stored_values, sum_of_squares
from pipec.runtime.optimizers.pipeline_optimizer import GatherStates, PipelineOptimizer
from pipec.runtime.optimizers.scratch import update_scratch
from pipec.runtime.optimizers.stage_optimizer import StageOptimizer
from pipec.runtime.optimizers.state_bytes import state_bytes
from pipec.runtime.optimizers.state_shards import StateShard
