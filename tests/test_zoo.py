"""A sample of the zoo: cheap models that have little in common. ``make zoo`` tries all."""

import pytest

from zoo.comparison import compare_case
from zoo.families import find
from zoo.report import surprise

SAMPLE = (
    "convolutional/SENet",
    "generative/RealNVP",
    "graphs/GAT",
    "physics/FNO",
    "recurrent/ConvLSTM",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_of_the_zoo_trains_as_eager_torch_trains_it(name: str) -> None:
    case = find(name)
    result = compare_case(case)
    assert not surprise(case, result), result
