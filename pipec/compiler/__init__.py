"""From a model and a call to an artifact.

Read ``pass_list``, the passes from top to bottom; ``compiler``, what was compiled for which call; ``staged``,
a cut graph and all that is known of it; ``policy``, which schedules a model may run; and ``autotuner``, which
tries them. ``alternatives`` turns what was tried into data.
"""
