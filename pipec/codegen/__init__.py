"""Writes the functions of a stage as Python that a person can read.

Read ``stage_source``, which writes a module. It asks ``expressions`` for the source of a node, ``names`` for
the name of a value and ``stage_header`` for the docstring.
"""
