"""The text forms: programs that read back to themselves, and numbers as people write them."""

import math
from collections.abc import Callable

import pytest
from bare_programs import lower
from example_schedules import result_link, skip_links, tied_links
from hypothesis import given
from hypothesis import strategies as st

from pipec.errors import ArtifactError
from pipec.ir import Instruction, Op, Program, Value
from pipec.ir.text_format import (
    evaluate_dim,
    format_bytes,
    format_program,
    format_seconds,
    format_value,
    holds,
    parse_program,
    value_bytes,
)
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule

LINKS = (*chain_links(2), *skip_links(0, 1), *tied_links(0, 1), result_link(1))
SENDER = format_program(lower(make_schedule("1f1b", 2, 1), LINKS)[0])


def test_values() -> None:
    assert format_value(Value("hidden_3", "float32", ("b", 128, 256))) == "hidden_3: f32[b, 128, 256]"
    assert format_value(Value("mask", "bool", ("2*b + 1",))) == "mask: b8[2*b + 1]"
    assert format_value(Value("loss", "bits4", ())) == "loss: bits4[]"


@pytest.mark.parametrize(
    ("form", "number", "text"),
    [
        (format_bytes, 0, "0 B"),
        (format_bytes, 999, "999 B"),
        (format_bytes, 999.7, "1 kB"),
        (format_bytes, 16 * 2**30, "17.2 GB"),
        (format_bytes, -2500, "-2.5 kB"),
        (format_bytes, 1.5e18, "1500 PB"),
        (format_seconds, 0, "0 s"),
        (format_seconds, 4.5e-6, "4.5 µs"),
        (format_seconds, 0.0123, "12.3 ms"),
        (format_seconds, 0.9999, "1 s"),
        (format_seconds, 123456, "123000 s"),
    ],
)
def test_quantities(form: Callable[[float], str], number: float, text: str) -> None:
    assert form(number) == text


numbers = st.integers(-1, 300)
instructions = st.builds(
    Instruction, st.sampled_from(Op), numbers, numbers, st.sampled_from([None, *LINKS]), *[numbers] * 4
)


@pytest.mark.slow
@given(st.lists(instructions, max_size=30), st.integers(0, 99))
def test_any_program_reads_back_to_itself(body: list[Instruction], rank: int) -> None:
    """Sensible or not."""
    program = Program(rank, tuple(body))
    assert parse_program(format_program(program), LINKS) == program


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rank 0:", "Rank 0:", "line 1: found 'Rank 0: 16 instructions', expected a line such as"),
        ("16 instr", "13 instr", "line 1: found 'rank 0: 13 instructions', expected 16 instructions"),
        ("forward  ", "forwards ", "line 3: found ' 1  forwards    stage 0  mb 0', expected 'NUMBER  OP"),
        ("hidden_1 (1", "hidden_7 (1", "or a link of the plan: hidden_1 (0 -> 1); grad_hidden_1 (1 -> 0)"),
        ("to rank 1", "from rank 1", "expected '0 send stage 0 weight tied_0_1 (0 -> 1) to rank 1'"),
        ("1  forward", "7  forward", "line 3: found ' 7  forward     stage 0  mb 0', expected '1 forward"),
        ("mb 0", "mb 00", "line 3: found ' 1  forward     stage 0  mb 00'"),
        ("slot 0", "slot 0  slot 1", "slot 0  slot 1', expected '"),
        (SENDER, "", "expected a line such as"),
        (SENDER, "\n\n", "expected a line such as"),
        (SENDER, "x" * 500, "expected a line such as"),
    ],
)
def test_what_is_wrong_in_a_program_text_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert old in SENDER
    with pytest.raises(ArtifactError) as caught:
        parse_program(SENDER.replace(old, new, 1), LINKS)
    assert message in str(caught.value)


ROUNDED = ("round", "math.ceil", "math.floor", "math.trunc")

expressions = st.recursive(
    st.integers(0, 99).map(str) | st.just("b"),
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner)
        | inner.map("-{}".format)
        | inner.map("({})**2".format)
        | st.builds("{}(0.3*float({}))".format, st.sampled_from(ROUNDED), inner)
    ),
    max_leaves=5,
)


@given(expressions, st.integers(1, 64))
def test_dims_are_evaluated_as_python_would(dim: str, b: int) -> None:
    try:
        expected = eval(dim, {"b": b, "math": math})
    except ZeroDivisionError:
        with pytest.raises(ArtifactError, match="by zero"):
            evaluate_dim(dim, {"b": b})
        return
    if abs(expected) < 2**31:
        assert evaluate_dim(dim, {"b": b}) == expected


def test_plain_dims_and_bytes() -> None:
    dims = (7, "128*b", "b//2", "2*b + 1", "b**2", "b*t + 1", "max(1, t // 2)")
    assert [evaluate_dim(dim, {"b": 4, "t": 3}) for dim in dims] == [7, 512, 2, 9, 16, 13, 1]
    assert value_bytes(Value("x", "bfloat16", ("b", 128, "2*b + 1")), {"b": 4}) == 4 * 128 * 9 * 2
    assert value_bytes(Value("loss", "float64", ()), {}) == 8


@pytest.mark.parametrize(
    ("dim", "message"),
    [
        ("__import__('os').remove('x')", "Call is not allowed; expected integers and b joined by"),
        ("b.real", "Attribute is not allowed"),
        ("(-2.5)**0.5 + b", "cannot be evaluated"),
        ("0.1*1e400", "it exceeds 64 bits"),
        ("a", "Name is not allowed"),
        ("1.5*b", "1500.0 is not an integer"),
        ("True", "Constant is not allowed"),
        ("b +", "invalid syntax"),
        ("b//0", "by zero"),
        ("9**9**9", "exponent 9 is not within 0 to 8"),
        ("b**-1", "exponent -1 is not within"),
        ("((b**8)**8)**8", "it exceeds 64 bits"),
        ("9" * 5000, "cannot be evaluated"),
        ("-" * 100_000 + "b", "cannot be evaluated"),
    ],
)
def test_a_dim_that_is_no_integer_expression_is_refused(dim: str, message: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        evaluate_dim(dim, {"b": 1000})
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


SIZES = {"b": 4, "t": 96, "temperature_value": 0.5}


def test_conditions_are_evaluated_as_python_would() -> None:
    for guard in ("t >= 3", "t % 32 == 0", "b*t > 4", "temperature_value < 0.7", "t != b"):
        assert holds(guard, SIZES)
        assert not holds(guard, {"b": 2, "t": 2, "temperature_value": 2.0})


@pytest.mark.parametrize("guard", ["t", "t < 4 < 9", "s0 < 4"])
def test_a_condition_that_is_none_is_refused(guard: str) -> None:
    with pytest.raises(ArtifactError, match=r"(Name|Compare) is not allowed"):
        holds(guard, SIZES)


def test_an_unknown_dtype_has_no_bytes() -> None:
    with pytest.raises(ArtifactError, match="x has unknown dtype 'bits4'; expected one of bool, uint8"):
        value_bytes(Value("x", "bits4", (2,)), {})
