"""The outline of a model: read off code as codegen writes it."""

from pipec.viz.model_outline import OutlinedOperator, outline

STAGE_0 = """\
import torch


def forward(frame):
    (wte_weight, h_0_weight) = frame["w"]
    # wte · Embedding                                             # model.py:17
    x = torch.embedding(wte_weight, tokens)                       # f32[b, 8]
    # h.0 · Linear                                                # model.py:9
    y, mean = torch.native_layer_norm(
        x, h_0_weight
    )                                                             # f32[b, 8], f32[b]
    del x
    return (y,), ()


def backward(frame):
    # h.0 · Linear                                                # model.py:9
    grad_x = torch.relu(grad_y)
    return grad_x
"""

STAGE_1 = """\
def forward(frame):
    y = frame.pop("y")
    (wte_weight,) = frame["w"]
    # loss
    z = torch.ops.aten._log_softmax.out(y, wte_weight, out=y)     # f32[]
    return z * 2
"""


def test_operators_have_modules_lines_inputs_and_weights() -> None:
    found = outline([STAGE_0, STAGE_1], [["wte.weight", "h.0.weight"], ["wte.weight"]])
    assert found == [
        OutlinedOperator(
            0, 7, "wte", "Embedding", "model.py:17", "embedding", "x", "f32[b, 8]", (), ("wte.weight",)
        ),
        OutlinedOperator(
            *(0, 9, "h.0", "Linear", "model.py:9", "native_layer_norm", "y", "f32[b, 8], f32[b]"),
            *((0,), ("h.0.weight",)),
        ),
        OutlinedOperator(1, 5, "loss", "", "", "_log_softmax", "z", "f32[]", (1,), ("wte.weight",)),
    ]
