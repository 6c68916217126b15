"""The program of each rank: lowering, and the proof that it is complete, in order and free of deadlock.

Read ``lower``, which builds on ``schedule_index``, ``task_times`` and ``buffer_slots``; then ``verify``,
which builds on ``program_index``, ``deadlock`` and ``counterexample``. ``message_readers`` tells which
compute reads a message, ``rank_memory`` what a rank holds, and ``representative_replicas`` which few replicas
stand for all.
"""
