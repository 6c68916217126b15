"""From ``nn.Module`` to a training graph: forward, loss and backward in one graph.

Read the files in the order in which they work: ``model_call`` holds the arguments of a step; ``tracer``
captures and differentiates; ``branch_decisions`` decides which way code goes that asks for values, and
``batch/branch_conditions`` whether microbatches may; ``number_operators`` numbers what was captured;
``normalize`` and ``tied`` tidy the joint graph; and ``classify`` gives every node its phase and its operator.
``diagnosis`` explains why a model cannot be captured.
"""
