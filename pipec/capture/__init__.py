"""From ``nn.Module`` to a training graph: forward, loss and backward in one graph.

Read the files in the order in which they work: ``model_call`` holds the arguments of a step; ``tracer``
captures and differentiates; ``branch_decisions`` decides which way code goes that asks for values, and
``batch/branch_conditions`` whether microbatches may; ``operators`` numbers what was captured, and later gives
every node its phase and operator; ``normalize`` tidies the joint graph. ``diagnosis`` explains why a model
cannot be captured.
"""
