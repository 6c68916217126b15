"""Libraries that save, clip and update over two processes: the whole model's, or an error with its remedy."""

import json
from pathlib import Path

import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "helpers" / "libraries_script.py"
NOT_HERE = "and this process has none of its values"
CALLED = "Call pipe(...), pipe.eval_step(...) or pipe.step(...), not the model"
WRAPPED = "cannot take a pipeline, nor the model of one"

EXPECTED = {
    "transformers": {
        "model.save_pretrained(folder)": NOT_HERE,
        "model.save_pretrained(folder, state_dict=pipe.state_dict())": "right",
        "model.generate(ids)": CALLED,
        "model(ids)": CALLED,
        "model.generate(ids) after pipe.gather_into(model)": "right",
    },
    "accelerate": {
        "accelerator.prepare(pipe)": WRAPPED,
        "accelerator.prepare(model)": WRAPPED,
        "accelerator.prepare(pipe.as_module())": "Use PipecAccelerator",
        "accelerator.get_state_dict(pipe)": "right",
        "accelerator.clip_grad_norm_": "right",
        "optimizer.state_dict() of accelerator.prepare(optimizer)": "right",
        "accelerator.prepare(scheduler)": "Leave the scheduler out of prepare(...)",
        "accelerator.save_model(model)": NOT_HERE,
    },
}
"""By library and what is done with it: "right", or what the error says on every rank."""


@pytest.mark.parametrize("library", EXPECTED)
def test_each_is_right_or_refused(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    for printed in run_ranks(SCRIPT, 2, tmp_path, [library]):
        found = json.loads(printed.splitlines()[-1])
        assert found.keys() == EXPECTED[library].keys()
        for name, said in EXPECTED[library].items():
            assert said in found[name], (name, found[name])
