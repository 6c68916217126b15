"""The data of a page: what is packed is what the page, and Python, read."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from page_views import Open, in_browser, one_f_one_b, unpack

from pipec.viz.packed_data import Column, pack

numbers = st.lists(st.integers(-(2**46), 2**46) | st.integers(-300, 300), max_size=40)


@given(numbers, st.sampled_from([1, 10.0, 1e7]))
def test_columns_come_back(values: list[int], divisor: float) -> None:
    packed = pack({"name": "a <b>", "deep": [{"column": "no"}, Column(np.array(values, np.int64), divisor)]})
    name, column = unpack(packed)["name"], unpack(packed)["deep"][1]
    assert name == "a <b>"
    assert column == [value / divisor for value in values]


@in_browser
def test_the_page_reads_what_python_packed(open_page: Open, tmp_path: Path) -> None:
    page = open_page({"1f1b": one_f_one_b()})
    rows = [[0, 1, -1, 127, -128], [300, -300, 0, 40_000], [2**40, 2**40 - 1, -5, 2**46], [], [7] * 9]
    packed = pack(
        {"rows": [Column.of(row) for row in rows], "times": Column(np.array([3333, 10013330]), 1e4)}
    )
    read = page.evaluate(
        """async (text) => {
            const { rows, times } = await unpack(text);
            return [rows.map((row) => [...row]), [...times]];
        }""",
        packed,
    )
    assert read == [rows, [0.3333, 1001.333]]
