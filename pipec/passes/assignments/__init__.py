"""Which operator runs on which stage: functions from a graph to an ``Assignment``, their options as fields.

``AssignStages`` writes what they return into the graph, which they leave as it is. All of them make a stage
of a range of forward operators in program order. Read ``operator_blocks`` first: what operators cost, and
which of them are on one stage.
"""
