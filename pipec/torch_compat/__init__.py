"""The only package that uses private parts of torch. ``tests/torch_compat`` pins each of them.

``versions`` has the versions of torch that were tested. ``dynamo_front_end`` traces a module and, where
Dynamo cannot, ``make_fx_front_end``; ``lost_effects`` refuses what a graph would lose. ``dynamo_branches``
decides branches on values, and ``guards`` check later whether the trace is still valid.
``differentiation`` adds the backward. ``module_state`` restores a module after tracing,
``operator_patches`` keeps some operators whole, and ``size_arithmetic`` caches arithmetic on sizes.
These load torch._dynamo, which takes seconds: only a process that captures loads them, all together
(``tracing``).

``values`` evaluates again what a trace read, ``module_contents`` reads modes, hooks and tensors of modules,
``foreign_classes`` tells what a script defines that changes operators, ``lazy_code`` generates no code that
nobody calls, ``settings`` reads torch's global settings, and ``symbolic_numbers`` has the formulas of sizes.
"""

import pipec.torch_compat.private_symbols  # first: it names what is missing
