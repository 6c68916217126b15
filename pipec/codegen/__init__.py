"""Writes the functions of a stage as readable Python.

``stage_source`` writes a module, with ``expressions`` for the source of a node, ``names`` for the name of a
value and ``stage_header`` for the docstring.
"""
