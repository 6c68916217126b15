"""Where to cut and on how many replicas: optimisation over plain numbers, without torch.

Read ``workload``, what is distributed; ``cost_model``, what a stage takes; ``placement``, the entry point;
and then ``merge``, ``downsets``, ``bounds``, ``hierarchy`` and ``search``. ``pipedream_graph`` and
``dnn_partitioning`` read published problems.
"""
