"""Dataclasses as JSON: what was written is read, and what was not is refused where it is."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest
from bare_programs import plan_of

from pipec.ir.json_form import dump_json, parse_json, read_plain
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Leaf:
    size: int
    weight: float = 0


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...]
    pair: tuple[int, str] = (1, "x")
    dims: tuple[int | str, ...] = ()
    colours: Mapping[Colour, float] = field(default_factory=dict)
    best: Leaf | None = None
    other: Leaf | str = ""
    extra: Any = None
    is_tall: bool = False


TREE = Tree(
    (Leaf(1), Leaf(2, 0.1)), (3, "y"), ("b", 4), {Colour.RED: math.inf}, Leaf(5), Leaf(6), {"any": [1]}, True
)


@pytest.mark.parametrize("value", [TREE, plan_of(make_schedule("1f1b", 3, 4), chain_links(3), [1])])
def test_what_was_written_is_read(value: Any) -> None:
    found = parse_json(type(value), dump_json(value))
    assert found == value
    assert dump_json(found) == dump_json(value)


def test_types_are_those_of_the_annotations() -> None:
    found = parse_json(Tree, dump_json(TREE))
    assert [type(each) for each in found.dims] == [str, int]
    assert [type(key) for key in found.colours] == [Colour]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"leaves": None}, "leaves: expected a list, found None"),
        ({"leaves": [{"size": 1}, {}]}, "leaves.1.size: the field is missing"),
        ({"leaves": [{"size": True}]}, "leaves.0.size: expected int, found True"),
        ({"leaves": [{"size": 1.0}]}, "leaves.0.size: expected int, found 1.0"),
        ({"leaves": [{"size": 1, "weight": "2"}]}, "leaves.0.weight: expected float, found '2'"),
        ({"leaves": [{"size": 1, "weight": 10**400}]}, "leaves.0.weight: expected a float"),
        ({"leaves": [], "colour": "red"}, "the file: Tree has no field 'colour'"),
        ({"leaves": [], "pair": [1]}, "pair: expected 2 items"),
        ({"leaves": [], "dims": [None]}, r"dims.0: expected int \| str, found None"),
        ({"leaves": [], "colours": {"blue": 1}}, r"colours: expected one of \['red'\], found 'blue'"),
        ({"leaves": [], "colours": []}, "colours: expected an object"),
        ({"leaves": [], "best": {"size": "1"}}, "best.size: expected int, found '1'"),
        ({"leaves": [], "other": {"size": "1"}}, "other.size: expected int, found '1'"),
        ({"leaves": [], "is_tall": 1}, "is_tall: expected bool, found 1"),
        ([], r"the file: expected an object, found \[\]"),
    ],
)
def test_damage_is_refused_where_it_is(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        read_plain(Tree, json.loads(json.dumps(change)))


def test_values_without_a_form_are_refused() -> None:
    with pytest.raises(TypeError, match="no form in JSON"):
        dump_json(Tree((), extra={1, 2}))
