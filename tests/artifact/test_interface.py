"""The interface of a stage's code: what an edit may not change."""

import pytest

from pipec.artifact.interface import interface_of, require_interface
from pipec.errors import VerifyError

CODE = """
PARAMETERS = ('a', 'b')


def backward_0(frame):
    x = frame["x"]
    return {"grad_x": frame.pop("saved")}, (x, None)
"""


def test_the_inside_may_change_and_functions_may_be_added() -> None:
    edited = CODE.replace("    return", "    print(x)\n    return") + "\n\ndef helper(x):\n    return x\n"
    require_interface(edited, interface_of(CODE, "it"), "it")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(x, None)", "(x, x)", r"returns \({'grad_x'}, \(…, …\)\); expected .* \({'grad_x'}, \(…, None\)\)"),
        ('["x"]', '["y"]', r"takes 'saved', 'y' and .*; expected \(frame\) takes 'saved', 'x'"),
        ("backward_0", "backward_1", "it has no backward_0"),
        ("'b'", "'c'", r"PARAMETERS is \('a', 'c'\); expected is"),
        ("return", "retrun", "does not compile: line 7"),
    ],
)
def test_an_edit_of_the_interface_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        require_interface(CODE.replace(old, new), interface_of(CODE, "it"), "it")
