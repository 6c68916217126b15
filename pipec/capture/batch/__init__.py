"""Proves how every value of a captured forward and loss depends on the batch: closed by default.

``dependence`` has what can be known of a value. ``analyse_batch`` runs the graph on tensors without memory,
node by node, while a ``dependence_tracker`` looks up each operator that torch dispatches in ``rules``:
``pointwise`` arithmetic, ``movement`` of elements, ``reductions`` and products, ``indexing``. What no rule
covers is unproven: ``compiler/check`` decides it by a run. ``branch_conditions`` asks whether a branch goes
the same way for every microbatch as for the batch. ``tail`` finds what must see all rows at once.
"""

from pipec.capture.batch.analyse_batch import BatchFindings, analyse_batch, batch_symbol_of

__all__ = ["BatchFindings", "analyse_batch", "batch_symbol_of"]
