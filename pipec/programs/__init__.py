"""The program of each rank: lowering, and the proof that it is complete, in order and free of deadlock.

Read ``lower``, which stands on ``order_index``, ``timing`` and ``buffer_slots``; then ``verify``, which
stands on ``step_index``, ``rendezvous`` and ``counterexample``. ``consumers`` tells which compute reads a
message, ``in_flight`` what a rank holds, and ``alike`` which few replicas stand for all.
"""
