"""Cuts between modules: where they may be, and what they leave whole."""

from hypothesis import given
from hypothesis import strategies as st

from pipec.graph.module_cuts import module_parts, undivided_ranges
from pipec.graph.training_graph import Operator

CALLERS = (
    (),
    ("a",),
    ("a", "a.x"),
    ("b",),
    ("layers.0",),
    ("layers.0", "layers.0.mlp"),
    ("layers.1", "layers.1.mlp"),
    ("head", "head.0"),
    ("head", "head.1"),
)
"""``layers`` is never called, and ``head`` and ``layers.1`` compute nothing themselves."""


def operators(*callers: tuple[str, ...]) -> list[Operator]:
    return [
        Operator(f"op_{k}", path[-1] if path else "", "", f"model.py:{k}", callers=path)
        for k, path in enumerate(callers)
    ]


def test_whole_modules_are_the_outermost_that_are_called() -> None:
    ops = operators(("a",), ("a", "a.x"), ("layers.0",), (), ("layers.1", "layers.1.mlp"), ("head", "head.0"))
    parts = module_parts(ops, [0, 0, 0, 0, 1, 1], 2)
    assert [each.modules for each in parts] == [("a", "layers.0"), ("layers.1", "head")]
    assert [each.divided for each in parts] == ["", ""]


def test_a_module_that_only_calls_others_may_be_divided() -> None:
    parts = module_parts(operators(("a",), ("head", "head.0"), ("head", "head.1")), [0, 0, 1], 2)
    assert [(each.modules, each.divided) for each in parts] == [(("a", "head.0"), ""), (("head.1",), "")]


def test_a_module_that_is_called_again_later_is_divided() -> None:
    _, part = module_parts(operators(("a",), ("b",), ("a",)), [0, 1, 1], 2)
    assert part.divided == "a (model.py:1)"
    assert part.modules == ("b",)


@given(st.lists(st.sampled_from(CALLERS), min_size=1, max_size=12), st.data())
def test_a_cut_divides_nothing_exactly_where_it_may_be(
    paths: list[tuple[str, ...]], data: st.DataObject
) -> None:
    ops = operators(*paths)
    cuts = data.draw(st.lists(st.integers(1, len(ops)), unique=True, max_size=3).map(sorted))
    cuts = [cut for cut in cuts if cut < len(ops)]
    stages = [sum(cut <= number for cut in cuts) for number in range(len(ops))]
    parts = module_parts(ops, stages, len(cuts) + 1)
    for part, cut in zip(parts[1:], cuts, strict=True):
        assert bool(part.divided) == any(first < cut <= last for first, last in undivided_ranges(ops))
    named = [name for part in parts for name in part.modules]
    assert len({*named}) == len(named)
    for each, stage in zip(ops, stages, strict=True):
        if each.callers and not any(part.divided for part in parts):
            assert any(name in parts[stage].modules for name in each.callers)
