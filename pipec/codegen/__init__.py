"""From stage functions to Python that a person can read.

Read ``stage``, which writes a module; it stands on ``expressions``, ``names`` and ``title``.
"""
