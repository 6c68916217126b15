"""Schedules that are searched for given costs and memory.

Read ``workload``, the costs and memory; ``ordering_problem``, the same in numbers by task, and the times of
orders; ``greedy``, the list scheduler; ``reorder``, which improves orders; and ``zero_bubble`` and ``auto``,
which combine these.
"""
