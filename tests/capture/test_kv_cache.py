"""Hugging Face's caches of keys and values are for generating text: no pipeline makes one."""

import copy
from typing import Any

import pytest
import torch
from huggingface_models import each, gpt2, llama, t5

import pipec
from pipec.errors import InputError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("factory", each(gpt2, llama, t5))
def test_the_output_of_a_model_that_would_make_a_cache(factory: Any) -> None:
    made, inputs = factory()
    unsplit = copy.deepcopy(made).eval()
    assert unsplit.config.use_cache
    pipe = pipec.compile(made.eval(), devices=2, microbatches=2)
    found = pipe(**inputs)
    with torch.no_grad():
        expected = unsplit(**inputs, use_cache=False)
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    assert torch.allclose(found.logits, expected.logits, atol=1e-6)
    assert made.config.use_cache
    with pytest.raises(InputError, match="use_cache=True asks for a cache"):
        pipe(**inputs, use_cache=True)


def test_training_copies_no_keys_and_values_into_a_cache() -> None:
    made, inputs = gpt2()
    pipe = pipec.compile(made, devices=2, microbatches=2).prepare(**inputs)
    for stage in range(2):
        forward = pipe.source(stage).partition("def forward(")[2].partition("def backward(")[0]
        assert "torch.cat(" not in forward
