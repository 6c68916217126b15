"""The costs of nodes: symbolic sizes, FLOPs, bytes moved and seconds, and measured profiles.

Read ``symbolic_sizes``, then ``formulas`` with its ``operator_tables``. ``profile`` holds measured times, and
``graph_fingerprint`` tells which graph they are of.
"""
