"""Schedules that are searched for given costs and memory.

Read ``workload``, the costs and memory; ``ordering_problem``, the same in numbers by task; ``greedy``, which
makes orders; ``order_timing``, which times them; ``anneal`` and ``reorder``, which improve them; and
``zero_bubble`` and ``auto``, which combine all of these.
"""
