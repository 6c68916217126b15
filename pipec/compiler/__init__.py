"""From a model and a call to an artifact.

Read ``pass_list``, the passes from top to bottom; ``compiler``, which compiles calls and caches what it made;
``staged_graph``, a cut graph and all that is known of it; ``schedule_policy``, which schedules a model may
run; and ``autotuner``, which tries them. ``alternatives`` turns what was tried into data.
"""
