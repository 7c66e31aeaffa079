"""Score expressions: Python renders them, the core reads them back, and both agree with numpy."""

import doctest
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lmetric as lm
from lmetric import expr as symbols
from lmetric import policies

COLUMNS = {
    "bs": np.array([1.0, 3.0, 4.0, 9.0]),
    "q_bs": np.array([0.0, 1.0, 2.0, 0.0]),
    "r_bs": np.array([1.0, 2.0, 2.0, 9.0]),
    "kv_hit": np.array([0.0, 0.5, 1.0, 1.0]),
    "p_token": np.array([100.0, 50.0, 10.0, 1.0]),
}


# Rendering


@pytest.mark.parametrize("name", ["lmetric", "random", "preble"])
def test_the_name_of_a_built_in_policy_is_refused(name: str) -> None:
    """`why` explains a decision by the policy's name: such a sentence was false."""

    def scored(bs: Any) -> Any:
        return bs

    scored.__name__ = name
    for make in [
        lambda: lm.Policy("bs", name=name),
        lambda: lm.Policy.from_config({"score": "bs", "name": name}),
        lambda: lm.policy_function(lambda bs: bs, name=name),
        lambda: lm.policy_function(scored),
    ]:
        with pytest.raises(
            lm.BadValueError, match=f"name of a policy: '{name}' is not valid; expected a name"
        ):
            make()
    assert lm.policy_function(scored, name="scored").name == "scored"


def test_one_symbol_for_each_indicator() -> None:
    table = [row["name"] for row in lm.indicator_table() if row["owner"] != "declared"]
    static = [str(v) for k, v in vars(symbols).items() if k.isupper() and isinstance(v, lm.Expr)]
    assert static == table
    for name in table:
        assert str(getattr(lm, name.upper())) == name
        assert name.upper() in lm.__all__


def test_everything_public_is_there_and_explained() -> None:
    for name in lm.__all__:
        assert getattr(lm, name).__doc__, name
    for row in lm.indicator_table():
        keys = ("name", "scope", "owner", "freshness", "absent", "about")
        assert all(row[key] for key in keys), row
        # Declared indicators may have no unit, and `priority` is a plain number.
        assert row["unit"] or row["owner"] == "declared" or row["name"] == "priority"


def test_the_papers_expressions_render_as_written() -> None:
    lam = 0.7
    for expr, text, expected in [
        (lm.P_TOKEN * (lm.BS + 1), "p_token * (bs + 1)", [200, 200, 50, 10]),
        (4 * lm.Q_BS + lm.R_BS, "(4 * q_bs) + r_bs", [1, 6, 10, 9]),
        (
            lam * (1 - lm.KV_HIT) + (1 - lam) * lm.norm(lm.BS),
            "(0.7 * (1 - kv_hit)) + (0.30000000000000004 * norm(bs))",
            [0.7 + 0.3 / 9, 0.35 + 0.1, 0.4 / 3, 0.3],
        ),
        (lm.BS - lm.min(lm.BS) <= 8, "(bs - min(bs)) <= 8", [True, True, True, True]),
    ]:
        assert str(expr) == text
        np.testing.assert_allclose(lm.evaluate(expr, COLUMNS), expected, rtol=1e-15)
    assert lm.evaluate(lm.BS - lm.min(lm.BS) < 8, COLUMNS).tolist() == [True, True, True, False]


def test_operators_and_functions_render_with_all_brackets() -> None:
    a, b = lm.BS, lm.Q_BS
    for expr, text in [
        (-a, "-bs"),
        (-(a + 1), "-(bs + 1)"),
        (a - (b - 1), "bs - (q_bs - 1)"),
        (2**-a, "2 ** (-bs)"),
        ((-2.5) * a, "(-2.5) * bs"),
        (1 / a, "1 / bs"),
        (a**2 / b, "(bs ** 2) / q_bs"),
        (~((a < 1) | (b >= 2)) & (a != b), "(~((bs < 1) | (q_bs >= 2))) & (bs != q_bs)"),
        (a == 3, "bs == 3"),
        (a > 3, "bs > 3"),
        (abs(a), "abs(bs)"),
        (lm.where(a > 1, a, 1e-7), "where(bs > 1, bs, 1e-07)"),
        (lm.clip(a, -1, lm.maximum(b, 2)), "clip(bs, -1, maximum(q_bs, 2))"),
        (np.float64(2) * a + np.int64(3) - np.float32(0.5), "((2.0 * bs) + 3) - 0.5"),
        (lm.knob("lam") * a, "lam * bs"),
        (lm.Expr("bs + 1") * 2, "(bs + 1) * 2"),
    ]:
        assert str(expr) == text
        assert lm.check_expression(text, "any", {"lam": 0.5})
    assert repr(a + 1) == "Expr('bs + 1')"
    assert {a: "x", b: "y"}[lm.Q_BS] == "y"


def test_what_cannot_be_taken_over_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match=r"`&`, `\|`, `~`"):
        _ = 0 < lm.BS < 8
    with pytest.raises(TypeError, match="per instance"):
        _ = lm.BS > 1 and lm.BS < 3
    for bad in ("8", True, None, np.array([1.0, 2.0]), [1], 1j):
        with pytest.raises(TypeError, match="is not valid in an expression"):
            _ = lm.BS + bad  # type: ignore[operator]
    for bad in (math.nan, math.inf, 10**400):
        with pytest.raises(lm.BadValueError, match="finite"):
            _ = lm.BS * bad
    grown = lm.BS + 1
    for _ in range(10):
        grown = grown * grown
    with pytest.raises(lm.ExpressionError, match="at most 16384"):
        _ = grown * grown
    with pytest.raises(lm.BadValueError, match="name of a parameter"):
        lm.knob("bs + 1")


# Meaning: random expressions, made twice, once of symbols and once of numpy arrays.

Pair = tuple[Any, Any]


def _apply(f: Callable[..., Any], g: Callable[..., Any], *parts: Pair) -> Pair:
    return f(*(p[0] for p in parts)), g(*(p[1] for p in parts))


def _norm(x: Any) -> Any:
    return np.where(x == 0, 0.0, x / np.nanmax(x))


def _spread(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: np.full(4, f(x))


def _exact() -> st.SearchStrategy[Pair]:
    """Expressions over COLUMNS beside numpy's results, for operations that round once."""
    constants = st.one_of(st.integers(-3, 9), st.floats(-4, 4).map(lambda x: round(x, 3) + 0.0))
    leaf = st.one_of(
        st.sampled_from([(getattr(lm, name.upper()), column) for name, column in COLUMNS.items()]),
        constants.map(lambda x: (lm.BS * 0 + x, np.full(4, float(x)))),
    )
    arithmetic = [operator.add, operator.sub, operator.mul, operator.truediv]
    compare = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
    two = st.sampled_from(
        [*((f, f) for f in arithmetic), (lm.minimum, np.minimum), (lm.maximum, np.maximum)],
    )
    one = st.sampled_from(
        [
            (operator.neg, operator.neg),
            (lm.abs, np.abs),
            (lm.sqrt, np.sqrt),
            (lambda x: x**2, lambda x: x**2),
            (lm.norm, _norm),
            (lm.min, _spread(np.nanmin)),
            (lm.max, _spread(np.nanmax)),
        ]
    )

    def extend(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
        condition = st.builds(lambda f, a, b: _apply(f, f, a, b), st.sampled_from(compare), inner, inner)
        joined = st.builds(
            lambda f, a, b: _apply(f, f, a, b),
            st.sampled_from([operator.and_, operator.or_]),
            condition,
            condition,
        )
        truth = st.one_of(condition, joined, condition.map(lambda c: (~c[0], ~c[1])))
        return st.one_of(
            st.builds(lambda f, a, b: _apply(*f, a, b), two, inner, inner),
            st.builds(lambda f, a: _apply(*f, a), one, inner),
            st.builds(lambda c, a, b: _apply(lm.where, np.where, c, a, b), truth, inner, inner),
            st.builds(lambda a, b, c: _apply(lm.clip, np.clip, a, b, c), inner, inner, inner),
        )

    return st.recursive(leaf, extend, max_leaves=12)


def _evaluate(expr: lm.Expr) -> Any:
    try:
        return lm.evaluate(expr, COLUMNS)
    except lm.ExpressionError as error:
        # `min(min(bs))` and the like: what does not vary has no reduction.
        if "the same for all of them" in str(error):
            return None
        raise


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=400, deadline=None, derandomize=True)
@given(_exact())
def test_rendering_parses_back_and_evaluates_as_numpy_does(pair: Pair) -> None:
    expr, expected = pair
    if (got := _evaluate(expr)) is not None:
        # The sign of a zero, and of what it divides, is nobody's promise.
        signless = np.isinf(expected) & np.isinf(got)
        np.testing.assert_array_equal(got[~signless], expected[~signless])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.sampled_from(
        [
            (lm.exp, np.exp),
            (lm.log, np.log),
            (lm.mean, _spread(np.nanmean)),
            (lm.std, _spread(np.nanstd)),
            (lambda x: x**3, lambda x: x**3.0),
            (lambda x: x**0.7, lambda x: x**0.7),
            (lambda x: 1.5**x, lambda x: 1.5**x),
        ]
    ),
    _exact(),
)
def test_functions_without_one_rounding_are_numpys_but_for_the_last_bits(f: Pair, pair: Pair) -> None:
    expr, expected = _apply(*f, pair)
    if (got := _evaluate(expr)) is not None:
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(
                got, expected, rtol=1e-9, atol=1e-9 * np.max(np.abs(np.nan_to_num(pair[1])))
            )


# Evaluation over columns


def test_evaluate_in_batches_and_over_the_eligible() -> None:
    bs = np.array([[1.0, 2.0, 4.0], [8.0, 2.0, np.nan]])
    out = lm.evaluate(lm.norm(lm.BS) * lm.PROMPT_TOKENS, {"BS": bs, "prompt_tokens": [10, 100]})
    np.testing.assert_array_equal(out, [[2.5, 5.0, 10.0], [100.0, 25.0, np.nan]])
    out = lm.evaluate("norm(bs)", {"bs": bs[0]}, eligible=[True, True, False])
    np.testing.assert_array_equal(out, [0.5, 1.0, 2.0])
    out = lm.evaluate("bs < lam", {"bs": bs.T.copy().T}, eligible=np.ones((2, 3), bool), knobs={"lam": 3})
    assert out.dtype == np.bool_
    np.testing.assert_array_equal(out, [[True, True, False], [False, True, False]])
    big = np.arange(1 << 17, dtype=np.float64)  # large enough to run without the interpreter lock
    np.testing.assert_array_equal(lm.evaluate(lm.BS * 2 + 1, {"bs": big}), big * 2 + 1)
    assert lm.evaluate("bs", {"bs": []}).shape == (0,)


def test_evaluate_names_what_does_not_fit() -> None:
    for columns, error, message in [
        ({}, lm.BadValueError, "'bs' is missing|\"bs\" is missing"),
        ({"bss": [1.0]}, lm.UnknownNameError, 'unknown indicator "bss"; did you mean "bs"'),
        ({"bs": 1.0}, lm.BadValueError, r"bs: shape \[\] is not valid"),
        ({"bs": [1.0, 2.0], "q_bs": [1.0]}, lm.BadValueError, "instances, but another column has"),
        ({"bs": [1.0], "prompt_tokens": [[1.0]]}, lm.BadValueError, r"expected \(\) or \(requests,\)"),
    ]:
        with pytest.raises(error, match=message):
            lm.evaluate("bs", columns)
    with pytest.raises(lm.BadValueError, match="number of instances is not known"):
        lm.evaluate("prompt_tokens", {"prompt_tokens": 3})
    with pytest.raises(lm.BadValueError, match="kind of expression"):
        lm.check_expression("bs", "scroe")


# Policies


def test_a_policy_is_checked_when_it_is_made_and_says_which_part() -> None:
    policy = lm.Policy(
        lm.KV_HIT,
        filter=lm.BS - lm.min(lm.BS) <= lm.knob("range"),
        prefer="max",
        then=[lm.BS, (lm.TOKENS, "max")],
        knobs={"range": 8},
        name="mine",
    )
    assert policy.reads == ["bs", "tokens", "kv_hit"]
    assert (policy.score, policy.filter, policy.prefer) == ("kv_hit", "(bs - min(bs)) <= range", "max")
    assert policy.then == [("bs", "min"), ("tokens", "max")]
    assert policy.knobs == {"range": 8.0}
    for make, part, message in [
        (lambda: lm.Policy("bs * kv_hits"), "score", "unknown name `kv_hits`; did you mean `kv_hit`?"),
        (lambda: lm.Policy(lm.BS < 1), "score", "a score is a number"),
        (lambda: lm.Policy(lm.BS, filter=lm.BS), "filter", "a filter is a truth value"),
        (lambda: lm.Policy(lm.BS, then=[lm.BS, "bs / 0"]), "then[1]", "division by zero"),
        (lambda: lm.Policy(lm.log(lm.Expr("0")) + lm.BS), "score", "logarithm of 0"),
        (lambda: lm.Policy("lam * bs"), "score", "unknown name `lam`"),
        (lambda: lm.Policy("lam * bs", knobs={"lam": math.inf}), "score", "not a finite number"),
    ]:
        with pytest.raises(lm.ExpressionError) as raised:
            make()
        assert raised.value.part == part
        assert str(raised.value).startswith(f"{part}: ")
        assert message in str(raised.value)
        assert "^" in str(raised.value)
    for make in [
        lambda: lm.Policy(3),  # type: ignore[arg-type]
        lambda: lm.Policy(lm.BS, prefer="least"),  # type: ignore[arg-type]
        lambda: lm.Policy(lm.BS, then=[(lm.BS, "up")]),  # type: ignore[list-item]
        lambda: lm.Policy(lm.BS, then=3),  # type: ignore[arg-type]
        lambda: lm.Policy(lm.BS, knobs={"lam": True}),
        lambda: lm.Policy(lm.BS, knobs={"l m": 1}),
        lambda: lm.Policy(lm.BS, name=" "),
    ]:
        with pytest.raises(lm.BadValueError):
            make()


def test_an_expression_error_says_where() -> None:
    with pytest.raises(lm.ExpressionError) as raised:
        lm.check_expression("bs +\n p_tokn × 2")
    error = raised.value
    assert (error.text, error.start, error.end) == ("bs +  p_tokn × 2", 13, 14)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, lm.ExpressionError)
    assert again.start == 13
    assert issubclass(lm.ExpressionError, lm.LmetricError)


def test_from_config_takes_names_texts_and_mappings() -> None:
    names = {"lmetric", "vllm"}

    def read(value: Any, **kwargs: Any) -> Any:
        return lm.Policy.from_config(value, policies=names, **kwargs)

    assert read(" vllm ") == "vllm"
    assert read("bs").score == "bs"
    assert read("P_TOKEN * (BS + 1)").reads == ["bs", "p_token"]
    assert read("lam * bs", knobs={"lam": 2}).knobs == {"lam": 2.0}
    policy = read(
        {
            "score": "kv_hit",
            "prefer": "max",
            "filter": "bs < r",
            "then": ["bs", {"max": "tokens"}],
            "knobs": {"r": 8},
        },
        knobs={"r": 1, "s": 2},
    )
    assert policy.then == [("bs", "min"), ("tokens", "max")]
    assert policy.knobs == {"r": 8.0, "s": 2.0}
    assert read({"score": "kv_hit", "then": {"max": "bs"}}).then == [("bs", "max")]
    for value, message in [
        ("lmetrik", "neither a policy nor an indicator; did you mean the policy 'lmetric'?"),
        ("kv_hitt", "did you mean the indicator 'kv_hit'?"),
        ("temperature", "'temperature' is neither a policy nor an indicator"),
        ({"score": "bs", "filtre": "bs < 1"}, "unknown key 'filtre' of a policy; did you mean 'filter'?"),
    ]:
        with pytest.raises(lm.UnknownNameError) as raised:
            read(value)
        assert message in str(raised.value)
    for value in (
        3,
        {"filter": "bs < 1"},
        {"score": 1},
        {"score": "bs", "knobs": [1]},
        {"score": "bs", "then": 3},
    ):
        with pytest.raises(lm.BadValueError):
            read(value)
    with pytest.raises(lm.ExpressionError):
        read("bs +")
    registered = [row["name"] for row in lm.policy_table()]
    for name in registered:
        assert lm.Policy.from_config(name) == name


def test_a_function_over_columns_holds_what_the_router_needs() -> None:
    policy = lm.policy_function(lambda c: c["p_token"] * (c["bs"] + 1), reads=[lm.P_TOKEN, "BS"], name="mine")
    assert (policy.reads, policy.name) == (["p_token", "bs"], "mine")
    assert list(policy.fn({"p_token": np.array([2.0]), "bs": np.array([1.0])})) == [4.0]
    with pytest.raises(lm.UnknownNameError, match="did you mean 'p_token'"):
        lm.policy_function(lambda c: c["bs"], reads=["p_tokens"])
    with pytest.raises(TypeError, match="is no policy"):
        lm.policy_function(3, reads=[lm.BS])  # type: ignore[arg-type]


def test_policies_route() -> None:
    for policy in (
        lm.Policy(lm.BS * (1 - lm.KV_HIT), then=[lm.TOKENS]),
        lm.policy_function(lambda c: c["bs"], reads=[lm.BS]),
    ):
        router = lm.Router(policy)
        for name in "abc":
            router.add_instance(name)
        tokens = np.arange(64, dtype=np.uint32)
        taken = [router.route(lm.Request(token_ids=tokens + 1000 * i)) for i in range(3)]
        assert sorted(decision.instance for decision, _ in taken) == ["a", "b", "c"]
        for _, ticket in taken:
            ticket.segment_done()


def test_the_examples_in_the_docstrings_run() -> None:
    for module in (policies, symbols):
        assert doctest.testmod(module).failed == 0
    assert doctest.testmod(policies).attempted == 4
