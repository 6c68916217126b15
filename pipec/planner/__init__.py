"""Where to cut and on how many replicas: optimisation over plain numbers, without torch.

Read ``operator_graph``, what is distributed; ``cost_model``, what a stage takes; ``placement``, the entry
point. Then follow its steps: ``merge``, ``downsets`` (with ``linear_orders`` and ``windows`` if wide),
``bounds`` (with ``chain``, ``pairs`` and ``containment``), ``stage_costs``, ``groups``, ``hierarchy`` and
``solver``, which brings them together.
"""
