"""Checks a compiled call by a run: a few rows in microbatches, against the user's model in eager torch.

``check`` compares the two. ``unsplit_run`` runs the model itself and knows nothing of graphs; ``split_run``
runs the graph of a microbatch, and finds the operator where a difference begins; ``draws`` makes random
operators equal on both sides; ``compare`` measures the difference.
"""

from pipec.compiler.check.check import CheckResult, check_graph, check_microbatches

__all__ = ["CheckResult", "check_graph", "check_microbatches"]
