"""When things happen: the one model of time.

Read ``events``, what a timeline is; ``simulate``, which predicts one from programs and costs; ``trace``,
which makes one from recorded times; ``attribution`` and ``rank_times``, which tell why a step takes as long
as it does; and ``report``, a timeline as plain data.
"""
