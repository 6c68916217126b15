"""Where to cut and on how many replicas: optimisation over plain numbers, without torch.

Read ``operator_graph``, the input; ``cost_model``, the seconds of a stage; ``partition``, the entry point.
Then follow its steps: ``merge``, ``downsets`` (with ``linear_orders`` and ``work_windows`` if wide),
``bounds`` (with ``chain_bound``, ``pair_bound`` and ``containment_bound``), ``stage_cost_matrices``,
``device_groups``, ``hierarchy`` and ``solver``, which brings them together.
"""
