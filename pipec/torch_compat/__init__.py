"""The only package that uses private parts of torch. ``private_symbols`` lists them, and the tested versions.

A rank that runs a saved artifact needs ``run_time`` and ``pytree``. What a later call is compared with is
read by ``compared_values`` and ``foreign_classes`` (what a script defines that changes operators).
``symbolic_numbers`` has the formulas of sizes.

Capture needs the others, most of which load torch._dynamo, which takes seconds: only a process that captures
imports them. ``dynamo_front_end`` traces a module, and ``dynamo_branches`` decides branches on values for it;
``make_fx_front_end`` is the fallback, in which ``lost_effects`` refuses what a graph would lose. To the graph
of either, ``differentiation`` adds the backward, and ``guards`` check later whether it is still valid.
Meanwhile ``module_state`` restores the module, and ``operator_patches`` keeps some operators whole.
"""

import pipec.torch_compat.private_symbols  # it names what is missing, before anything is imported
