"""The check of the first step finds rules of the batch that are broken on purpose: it shares none with them.

A rule is *widened* if it takes what mixes rows, or what it does not know, for rows or for a mean; *turned* if
it takes sums for means, means for sums, and selected rows for rows or a mean; *deaf* if it takes what is
summed over rows for what all microbatches have.
"""

from collections.abc import Callable, Mapping
from unittest import mock

import pytest
from batch_cases import CASES
from batch_comparison import ComparisonStatus, compare_with_eager

from pipec.capture.batch import dependence_tracker
from pipec.capture.batch.dependence import (
    MEAN,
    Dependence,
    MixedRows,
    PerRow,
    SelectedRows,
    SumOverRows,
    Unproven,
    Whole,
)
from pipec.capture.batch.operator_call import NeedsMeanError, OperatorCall, Rule, tensors_in
from pipec.capture.batch.rules import rule_of

WIDENED = """
_softmax            mixing: softmax without dim
add                 mixing: scaled by the sum
arange              mixing: sorted experts, other rows
cat                 loss: stacked
convolution         mixing: convolution over rows and features
cumsum              mixing: cumulative sums of rows
div                 loss that mixes: mean by own weights
flip                output that mixes: reversed
gather              mixing: rows by gather
index               mixing: rows by an index
index_put           mixing: rows by index_put
linalg_vector_norm  loss of the batch: norm
log                 loss of the batch: entropy of the mean
logsumexp           loss of the batch: logsumexp
max                 loss of the batch: largest
maximum             loss of the batch: the larger of two means
mean                loss that mixes: mean of masked elements
mm                  mixing: tensordot over rows
mul                 mixing: rows that are not masked
pow                 loss that mixes: barlow
prod                loss of the batch: product
roll                output that mixes: rolled
scatter_add         mixing: rows by scatter
select              mixing: a select_scatter
slice               mixing: gradient of rows
sort                mixing: searchsorted
sqrt                loss of the batch: root of the mean
std                 mixing: minibatch standard deviation
sub                 loss that mixes: concordance
tanh                mixing: the number of rows as a tensor
tril                mixing: tril
unbind              output that mixes: unbind
var                 loss of the batch: variance
view                mixing: states of a bidirectional GRU viewed
pipec::recurrent_layer  mixing: RNN, given rows first
"""

TURNED = """
add                 loss that mixes: dice of the batch
div                 loss that mixes: load balancing
histc               output that mixes: histogram
index               mixing: masked rows alone
index_put           mixing: mean of each group
masked_select       loss that mixes: mean by masked_select
mean                remedy: mixup, permutation drawn outside
mm                  loss that mixes: centres
neg                 loss: policy gradient
sum                 loss: logs
view                mixing: tensordot over rows
"""

DEAF = """
bincount            output that mixes: a mean for each group
mul                 loss: evidence
scatter_add         loss that mixes: mean of the means of classes
sum                 loss that mixes: centres
unsqueeze           loss: stacked
"""

Values = Dependence | tuple[Dependence, ...]


def widened(call: OperatorCall, rule: Rule) -> Values:
    try:
        found = rule(call)
    except NeedsMeanError:
        return MEAN
    each = found if isinstance(found, tuple) else (found,)
    if not any(isinstance(value, MixedRows | Unproven) for value in each):
        return found
    made = tuple(_rows_or_mean(call, list(x.shape)) for x in tensors_in(call.result))
    return made if isinstance(call.result, tuple | list) else made[0]


def _rows_or_mean(call: OperatorCall, shape: list[int]) -> Dependence:
    dim = next((dim for dim, size in enumerate(shape) if call.is_row_multiple(size)), None)
    return MEAN if dim is None else PerRow(dim, inner=shape[dim] // call.rows)


def turned(call: OperatorCall, rule: Rule) -> Values:
    def turn(value: Dependence) -> Dependence:
        if isinstance(value, SelectedRows):
            return _rows_or_mean(call, list(call.shape[:1]))
        return SumOverRows(-1 - value.degree) if isinstance(value, SumOverRows) else value

    found = rule(call)
    return tuple(map(turn, found)) if isinstance(found, tuple) else turn(found)


def deaf(call: OperatorCall, rule: Rule) -> Values:
    found = rule(call)
    return Whole() if isinstance(found, SumOverRows) else found


BROKEN: Mapping[Callable[[OperatorCall, Rule], Values], str] = {widened: WIDENED, turned: TURNED, deaf: DEAF}
QUICK = ("_softmax", "cumsum", "flip", "index", "mean", "roll", "sum")


@pytest.mark.parametrize(
    ("broken", "name", "case"),
    [
        pytest.param(broken, name, case, marks=() if name in QUICK else pytest.mark.slow)
        for broken, lines in BROKEN.items()
        for name, case in (line.split(maxsplit=1) for line in lines.strip().splitlines())
    ],
)
def test_a_broken_rule_is_found(broken: Callable[[OperatorCall, Rule], Values], name: str, case: str) -> None:
    def rules(called: str, is_elementwise: bool) -> Rule | None:
        rule = rule_of(called, is_elementwise)
        return rule if rule is None or called != name else lambda call: broken(call, rule)

    with mock.patch.object(dependence_tracker, "rule_of", rules):
        result = compare_with_eager(CASES[case])
    assert result.verdict is ComparisonStatus.REFUSED, result.message
    assert result.message.startswith("UnequalStepError"), result.message
