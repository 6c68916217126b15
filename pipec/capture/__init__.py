"""From ``nn.Module`` to a training graph: forward, loss and backward in one graph.

Read the files in the order in which they work: ``call`` holds the arguments of a step; ``tracer`` captures
and differentiates; ``branches`` decides which way code goes that asks for values, and ``conditions``
whether microbatches may; ``operators`` numbers what was captured; ``normalize`` and ``tied`` tidy the joint
graph; and ``classify`` gives every node its phase and its operator. ``diagnosis`` explains why a model cannot
be captured.
"""
