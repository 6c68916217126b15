"""From a model and a call to an artifact.

Read ``compiler``, which holds the list of passes and what was compiled for which call; ``staged``, the
stages of a cut graph; ``policy``, which schedules a model may run; and ``autotuner``, which tries them.
"""
