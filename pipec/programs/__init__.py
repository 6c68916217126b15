"""The program of each rank: lowering, and the proof that it is complete, in order and free of deadlock.

Read ``lower``, which builds on ``schedule_index``, ``task_times`` and ``buffer_slots``; then ``verify``,
which builds on ``cell_accesses``, ``lives``, ``messages`` and ``program_index``. ``rank_memory`` counts the
memory of a rank, and ``representative_replicas`` chooses a few replicas that represent all.
"""
