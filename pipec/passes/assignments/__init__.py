"""Functions from a graph to an ``Assignment`` of operators to stages, with their options as fields.

They do not change the graph: ``AssignStages`` writes the assignment into it. Every stage is a range of
forward operators in program order. Read ``operator_blocks`` first: the costs of operators, and which of them
must share a stage.
"""
