"""Where to cut and on how many replicas: optimisation over plain numbers, without torch.

Read ``operator_chain``, the input; ``cost_model``, the seconds of a stage; ``placements``, where stages may
run; then ``partition``, the entry point, with ``structure`` and ``cuts``. ``recompute_solver`` chooses what a
stage recomputes and offloads.
"""
