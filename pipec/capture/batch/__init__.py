"""What every value of a captured forward and loss is to the batch: closed by default.

``values`` has what there is to know of a value. ``analysis`` runs the graph on tensors without memory, node
by node, while a ``tracker`` looks up each operator that torch dispatches in ``rules``: ``pointwise``
arithmetic, ``movement`` of elements, ``reductions`` and products, ``indexing``. What no rule covers is
unproven. ``fixed`` tells which numbers come from the rows in a graph without a symbol for them.
``conditions`` asks whether a branch goes the same way for every microbatch as for the batch.
"""

from pipec.capture.batch.analysis import Findings, analyse, symbol_of_rows

__all__ = ["Findings", "analyse", "symbol_of_rows"]
