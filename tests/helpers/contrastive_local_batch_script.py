"""One of two replicas that pass parts of a batch to a contrastive loss: equal ones, and then others."""

import pipec
from tests.test_ops import batch, contrastive, model

pipe = pipec.compile(model(), devices=2, stages=1, loss_fn=contrastive, batch="local")
(x, y), own = batch(), slice(8 * pipe.replica, 8 * pipe.replica + 8)
print(f"loss {pipe.step(x[own], target=y[own]).item():.12f}")
fewer = 4 - pipe.replica
try:
    pipe.step(x[:fewer], target=y[:fewer])
except pipec.InputError as error:
    print(error)
