"""Stage 0 of 2, rank 0: 0 to 1 (operators 0 to 1).

sends     input_2: f32[b, 2] to stage 1
saves     16 B a microbatch (b = 2)
"""

import torch

PARAMETERS = (
    '0.weight',                                                                       # _0_weight  f32[2, 2]
    '0.bias',                                                                         # _0_bias  f32[2]
)
BUFFERS = ()
UPDATED_BUFFERS = ()
INPUTS = ('args_0',)


def forward(frame):
    args_0 = frame["args_0"]
    _0_weight, _0_bias = frame["w"]
    # 0 · Linear
    input_1 = torch.addmm(_0_bias, args_0, _0_weight.t())                             # f32[b, 2]
    # 1 · ReLU
    input_2 = input_1.relu_()                                                         # f32[b, 2]
    return {"input_2": input_2}, [input_2], ()


def backward(frame):
    args_0 = frame["args_0"]
    grad_input_2 = frame.pop("grad_input_2")
    (input_2,) = frame.pop("saved")
    # 1 · ReLU
    grad_input_1 = torch.ops.aten.threshold_backward.default(grad_input_2, input_2, 0)  # f32[b, 2]
    del input_2
    # 0 · Linear
    grad__0_weight = torch.mm(grad_input_1.t(), args_0)                               # f32[2, 2]
    grad__0_bias = torch.sum(grad_input_1, [0])                                       # f32[2]
    del grad_input_1
    return {}, (grad__0_weight, grad__0_bias)
