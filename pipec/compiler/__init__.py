"""From a model and a call to an artifact.

Read ``compile``, which goes from a call to its artifacts; ``candidate``, what may vary between ways to run a
step; ``search``, which tries them; ``staged_graph``, a cut graph and all that is known of it; ``pass_list``,
the passes from top to bottom; and ``compiler``, which keeps what was decided and compiled for later calls.
"""
