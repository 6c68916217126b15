"""Timelines: the model of time that all parts of pipec share.

Read ``events``, the timeline itself; ``step_events``, the events and waits of programs; ``simulate``, which
predicts a timeline from programs and costs; ``trace``, which makes one from recorded times; ``attribution``
and ``rank_times``, which explain the time of a step; and ``report``, a timeline as plain data.
"""
