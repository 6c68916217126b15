"""From ``nn.Module`` to a training graph: forward, loss and backward in one graph.

Read ``call``, the arguments of a step; ``tracer``, which captures and differentiates; ``operators``, which
numbers what was captured; ``normalize`` and ``tied``, which tidy the joint graph; and ``classify``, which
gives every node its phase and operator. ``diagnosis`` explains why a model cannot be captured.
"""
