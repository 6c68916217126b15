"""Orders that are searched for given costs and memory.

Read ``workload``, what is searched for; ``ordering_problem``, the same as numbers; ``greedy``, which makes
orders; ``order_timing``, which times them; ``anneal`` and ``reorder``, which improve them; and
``zero_bubble`` and ``auto``, which bring all of it together.
"""
