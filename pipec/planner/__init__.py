"""Where to cut and on how many replicas: optimisation over plain numbers, without torch.

Read ``chain``, the input and the seconds of a stage; ``placements``, where stages may run; and ``partition``,
which finds the best plan. ``recompute_solver`` chooses what a stage recomputes and offloads.
"""
