"""Stage 1 of 2, rank 1: 2 (operators 2 to 3).

receives  input_2: f32[b, 2] from stage 0
saves     8 B a microbatch (b = 2)
"""

import torch

PARAMETERS = (
    '2.weight',                                                                       # _2_weight  f32[1, 2]
    '2.bias',                                                                         # _2_bias  f32[1]
)
BUFFERS = ()
UPDATED_BUFFERS = ()
INPUTS = ('target',)


def forward(frame):
    target = frame["target"]
    input_2 = frame.pop("input_2")
    _2_weight, _2_bias = frame["w"]
    # 2 · Linear
    input_3 = torch.addmm(_2_bias, input_2, _2_weight.t())                            # f32[b, 1]
    # loss
    loss = torch.ops.aten.mse_loss.default(input_3, target)                           # f32[]
    return {"loss": loss}, [input_2, input_3], ()


def backward(frame):
    target, grad_loss = frame["target"], frame["grad_loss"]
    _2_weight, *_ = frame["w"]
    input_2, input_3 = frame.pop("saved")
    # loss
    grad_input_3 = torch.ops.aten.mse_loss_backward.default(grad_loss, input_3, target, 1)  # f32[b, 1]
    del input_3
    # 2 · Linear
    grad_input_2 = torch.mm(grad_input_3, _2_weight)                                  # f32[b, 2]
    grad__2_weight = torch.mm(grad_input_3.t(), input_2)                              # f32[1, 2]
    grad__2_bias = torch.sum(grad_input_3, [0])                                       # f32[1]
    del grad_input_3
    return {"grad_input_2": grad_input_2}, (grad__2_weight, grad__2_bias)
