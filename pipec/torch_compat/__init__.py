"""The only package that uses private parts of torch. ``private_symbols`` lists them; ``versions`` has the
versions of torch that were tested.

A rank that runs a saved artifact needs ``run_time``, ``operators`` and ``pytree``. What a later call is
compared with is read by ``module_contents`` (modes, hooks and tensors of modules), ``settings`` (torch's
global ones), ``foreign_classes`` (what a script defines that changes operators) and ``values`` (what a trace
read, again). ``symbolic_numbers`` has the formulas of sizes.

Capture needs the others, most of which load torch._dynamo, which takes seconds: only a process that captures
imports them. ``dynamo_front_end`` traces a module, and ``dynamo_branches`` decides branches on values for it;
``make_fx_front_end`` is the fallback, in which ``lost_effects`` refuses what a graph would lose. To the graph
of either, ``differentiation`` adds the backward, and ``guards`` check later whether it is still valid.
Meanwhile ``module_state`` restores the module, ``operator_patches`` keeps some operators whole, and
``size_arithmetic`` caches arithmetic on sizes.
"""

import pipec.torch_compat.private_symbols  # it names what is missing, before anything is imported
