"""Indicators that a program declares: names, values, their age, and the places that read them."""

import math

import numpy as np
import pytest

import lmetric as lm

POWER = lm.indicator("test_gpu_power", unit="W")
HEAT = lm.indicator("test_heat", unit="C", default=20.0, max_age_seconds=10.0)


def fleet(policy: object, count: int = 3) -> lm.Router:
    router = lm.Router(policy)
    for number in range(count):
        router.add_instance(f"gpu-{number}")
    return router


def test_a_declared_indicator_is_a_symbol() -> None:
    assert str(POWER) == "test_gpu_power"
    assert str(lm.TEST_GPU_POWER * (lm.BS + 1)) == "test_gpu_power * (bs + 1)"
    again = lm.indicator("test_gpu_power", unit="W")
    assert str(again) == str(POWER)
    row = next(row for row in lm.indicator_table() if row["name"] == "test_gpu_power")
    assert (row["unit"], row["owner"], row["scope"]) == ("W", "declared", "instance")
    with pytest.raises(AttributeError, match=r"no attribute 'TEST_NO_POWER'"):
        lm.TEST_NO_POWER  # noqa: B018


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bs", "the name of a built-in indicator"),
        ("lmetric", "the name of a policy"),
        ("lam", "the name of a policy's parameter"),
        ("norm", "the name of a function"),
        ("GPU", "lowercase letters"),
        ("2nd", "a letter first"),
        ("", "lowercase letters"),
    ],
)
def test_names_that_mean_something_else_are_refused(name: str, message: str) -> None:
    with pytest.raises(lm.BadValueError, match=message):
        lm.indicator(name)


def test_other_attributes_are_refused() -> None:
    with pytest.raises(lm.BadValueError, match=r'unit "kW".*expected unit "W"'):
        lm.indicator("test_gpu_power", unit="kW")
    for default, age in [(math.nan, None), (math.inf, None), (None, 0.0), (None, math.nan)]:
        with pytest.raises(lm.BadValueError, match="of indicator test_new"):
            lm.indicator("test_new", default=default, max_age_seconds=age)


def test_an_unknown_name_in_an_expression_has_a_hint() -> None:
    with pytest.raises(lm.ExpressionError, match="did you mean `test_gpu_power`"):
        lm.check_expression("test_gpu_powr + 1")
    with pytest.raises(lm.ExpressionError, match="rename the constant"):
        lm.check_expression("test_gpu_power + 1", "score", {"test_gpu_power": 1.0})
    assert lm.check_expression("TEST_GPU_POWER + bs") == ["bs", "test_gpu_power"]
    assert lm.Policy("test_gpu_power + bs").reads == ["bs", "test_gpu_power"]


@pytest.mark.parametrize("as_text", [True, False])
def test_a_policy_decides_by_reported_values(as_text: bool) -> None:
    router = fleet("test_gpu_power" if as_text else lm.TEST_GPU_POWER)
    for number, watts in enumerate([300.0, 100.0, 200.0]):
        router.report_load(f"gpu-{number}", extra={"test_gpu_power": watts})
    decision, ticket = router.route(lm.Request(range(32)))
    with ticket:
        assert decision.instance == "gpu-1"
        terms = router.explain(decision.id)["best"][0]["terms"]
        assert terms == {"test_gpu_power": 100.0}
    np.testing.assert_array_equal(router.indicators()["test_gpu_power"], [300.0, 100.0, 200.0])


def test_an_indicator_without_a_producer_is_nan() -> None:
    router = fleet(lm.TEST_GPU_POWER + lm.BS)
    assert np.isnan(router.indicators()["test_gpu_power"]).all()
    assert np.isnan(router.score(lm.Request(range(32)))).all()
    (warning,) = router.policy_warnings()
    assert "test_gpu_power is absent until it is reported" in warning
    # An instance with a value is the only candidate.
    router.report_load("gpu-2", extra={"test_gpu_power": 1e6})
    assert router.route(lm.Request(range(32)))[0].instance == "gpu-2"
    # Values go with their instance: its slot starts anew.
    router.remove_instance("gpu-2")
    router.add_instance("gpu-3")
    assert np.isnan(router.indicators()["test_gpu_power"]).all()


def test_old_values_give_way_to_the_default() -> None:
    router = fleet("test_heat", 2)
    router.report_load("gpu-0", extra={"test_heat": 80.0}, now=100.0)
    request = lm.Request(range(32))
    np.testing.assert_array_equal(router.score(request, now=110.0), [80.0, 20.0])
    np.testing.assert_array_equal(router.score(request, now=110.5), [20.0, 20.0])


def test_reports_are_checked_before_anything_changes() -> None:
    router = fleet("bs")
    with pytest.raises(
        lm.UnknownNameError, match='unknown declared indicator "test_het"; did you mean "test_heat"'
    ):
        router.report_load("gpu-0", waiting=1, extra={"test_gpu_power": 1.0, "test_het": 2.0})
    for bad in (math.nan, math.inf, "hot", True):
        with pytest.raises(lm.BadValueError, match="test_heat in the load report of gpu-0"):
            router.report_load("gpu-0", waiting=1, extra={"test_gpu_power": 1.0, "test_heat": bad})
    with pytest.raises(lm.UnknownNameError, match="gpu-9"):
        router.report_load("gpu-9", extra={"test_heat": 1.0})
    columns = router.indicators()
    assert np.isnan(columns["test_gpu_power"]).all()
    assert np.isnan(columns["reported_waiting"]).all()


def test_a_value_can_be_withdrawn() -> None:
    router = fleet("bs", 2)
    for name in ("gpu-0", "gpu-1"):
        router.report_load(name, extra={"test_gpu_power": 1.0, "test_heat": 50.0}, now=100.0)
    router.report_load("gpu-0", extra={"test_gpu_power": None, "test_heat": None}, now=101.0)
    columns = router.indicators(now=101.0)
    np.testing.assert_array_equal(columns["test_gpu_power"], [math.nan, 1.0])
    np.testing.assert_array_equal(columns["test_heat"], [20.0, 50.0])


def test_extra_values_alone_are_no_report_of_the_engine() -> None:
    router = fleet("bs", 1)
    router.report_load("gpu-0", waiting=1, now=100.0)
    router.report_load("gpu-0", extra={"test_heat": 30.0}, now=105.0)
    assert router.indicators(now=107.0)["report_age_seconds"] == [7.0]
    router.report_load("gpu-0", running=1, extra={"test_heat": 31.0}, now=108.0)
    columns = router.indicators(now=109.0)
    assert columns["report_age_seconds"] == [1.0]
    assert columns["test_heat"] == [31.0]


def test_python_policies_read_declared_indicators() -> None:
    def score(test_gpu_power, bs):  # type: ignore[no-untyped-def]
        return test_gpu_power * (bs + 1)

    named = lm.policy_function(lambda c: c["test_gpu_power"], reads=[lm.TEST_GPU_POWER])
    for policy in (lm.policy_function(score, fallback="test_heat"), named):
        router = fleet(policy)
        for number, watts in enumerate([300.0, 100.0, 200.0]):
            router.report_load(f"gpu-{number}", extra={"test_gpu_power": watts})
        np.testing.assert_array_equal(router.score(lm.Request(range(32))), [300.0, 100.0, 200.0])


def test_evaluate_takes_declared_columns() -> None:
    power, heat = np.array([1.0, 2.0, 3.0]), np.array([[10.0, 20.0, 30.0], [0.0, 0.0, 1.0]])
    columns = {"bs": [0, 1, 2], "test_heat": heat, "test_gpu_power": power}
    for text in ("test_gpu_power * 10 - test_heat + bs", "bs - test_heat + 10 * test_gpu_power"):
        np.testing.assert_allclose(lm.evaluate(text, columns), 10 * power - heat + [0, 1, 2])
    np.testing.assert_allclose(lm.evaluate("test_heat", columns), heat)
    with pytest.raises(lm.BadValueError, match='"test_heat" is missing'):
        lm.evaluate("test_heat + bs", {"bs": [1.0]})


def test_more_than_64_indicators() -> None:
    names = [f"test_many_{number}" for number in range(100)]
    for name in names:
        lm.indicator(name)
    router = fleet(" + ".join(names), 2)
    router.report_load("gpu-0", extra=dict.fromkeys(names, 1.0))
    router.report_load("gpu-1", extra={name: float(number) for number, name in enumerate(names)})
    np.testing.assert_array_equal(router.score(lm.Request(range(32))), [100.0, 4950.0])


def place(router: lm.Router, **facts: object) -> str:
    """Routes a request that stays in flight; returns its instance."""
    decision, ticket = router.route(lm.Request(prompt_tokens=32, **facts))  # type: ignore[arg-type]
    open_tickets.append(ticket)
    return decision.instance


open_tickets: list[lm.Ticket] = []


def test_lora_affinity_is_one_line() -> None:
    router = fleet(lm.Policy(lm.BS - 10 * lm.LORA_BS, then=["bs"]))
    homes = {name: place(router, lora_name=name) for name in ("sql", "chat", "code")}
    assert len(set(homes.values())) == 3
    for name in ("code", "sql", "chat", "sql"):
        assert place(router, lora_name=name) == homes[name]
    scores = router.score(lm.Request(prompt_tokens=32))  # without an adapter: no affinity
    np.testing.assert_array_equal(np.sort(scores), [2, 2, 3])
    # Requests that are over count no longer.
    router = fleet("lora_bs")
    _, ticket = router.route(lm.Request(prompt_tokens=32, lora_name="sql"))
    assert sorted(router.score(lm.Request(prompt_tokens=32, lora_name="sql"))) == [0, 0, 1]
    ticket.done(output_tokens=1)
    assert sorted(router.score(lm.Request(prompt_tokens=32, lora_name="sql"))) == [0, 0, 0]


def test_an_adapter_is_loaded_until_max_loras_others_came() -> None:
    router = fleet("lora_loaded")

    def loaded(adapter: str | None = None) -> list[float]:
        request = lm.Request(prompt_tokens=32, lora_name=adapter)
        return [float(score) for score in router.score(request)]

    def serve(adapter: str) -> None:
        _, ticket = router.route(lm.Request(prompt_tokens=32, lora_name=adapter, instances=["gpu-1"]))
        ticket.done(output_tokens=1)

    assert (loaded(), loaded("sql")) == ([1, 1, 1], [0, 0, 0])
    serve("sql")
    assert loaded("sql") == [0, 1, 0], "also after its request"
    router.update_instance("gpu-1", max_loras=2)
    serve("chat")
    serve("sql")
    serve("code")  # the engine evicts the least recently used adapter
    assert [loaded(name)[1] for name in ("sql", "chat", "code")] == [1, 0, 1]
    router.update_instance("gpu-1", max_loras=1)
    assert [loaded(name)[1] for name in ("sql", "chat", "code")] == [0, 0, 1]
    router.blocks_cleared("gpu-1")  # the engine has restarted
    assert loaded("code") == [0, 0, 0]


def test_a_tenant_fence_is_one_line() -> None:
    fenced = lm.indicator("test_fenced", default=0.0)
    router = fleet(lm.Policy("bs", filter=(fenced == 0) | (lm.TENANT == "acme")))
    router.report_load("gpu-0", extra={"test_fenced": 1})
    assert {place(router, tenant="other") for _ in range(4)} == {"gpu-1", "gpu-2"}
    assert place(router, tenant="acme") == "gpu-0"
    # An instance serves one tenant at a time.
    router = fleet(lm.Policy("bs", filter="tenant_bs == bs"))
    homes = [place(router, tenant=name) for name in ("a", "b", "c")]
    assert len(set(homes)) == 3
    assert [place(router, tenant=name) for name in ("c", "a", "b")] == [homes[2], homes[0], homes[1]]


def test_an_adapter_and_a_tenant_of_one_name_are_apart() -> None:
    router = fleet("lora_bs - 100 * tenant_bs", 1)
    place(router, lora_name="x", tenant="y")
    place(router, lora_name="x", tenant="x")
    for facts, expected in [
        ({"lora_name": "x"}, 2),
        ({"tenant": "x"}, -100),
        ({"lora_name": "y"}, 0),
        ({}, 0),
    ]:
        assert router.score(lm.Request(prompt_tokens=32, **facts)) == [expected]


def test_request_facts_are_compared_with_texts() -> None:
    router = fleet(
        "where(tenant == 'acme', 1, 0) + where(length_class != \"long\", 10, 0) + 100 * priority", 1
    )
    for facts, expected in [
        ({"tenant": "acme"}, 11),
        ({"tenant": "Acme"}, 10),
        ({"tenant": "acme", "length_class": "long"}, 1),
        ({"length_class": "long"}, 0),
    ]:
        assert router.score(lm.Request(prompt_tokens=32, priority=0, **facts)) == [expected]
    assert router.score(lm.Request(prompt_tokens=32, tenant="acme", priority=-2.0)) == [-189]
    # Without a priority the score is absent.
    assert np.isnan(router.score(lm.Request(prompt_tokens=32)))


def test_texts_in_expressions_of_python() -> None:
    assert str(lm.where(lm.TENANT == "acme", lm.BS, 0)) == 'where(tenant == "acme", bs, 0)'
    assert str(lm.LORA_NAME != 'say "hi"') == "lora_name != 'say \"hi\"'"
    for bad in ("'\"", "a\nb"):
        with pytest.raises(lm.BadValueError, match="text in an expression"):
            lm.TENANT.__eq__(bad)
    for text in ("tenant + 1", "bs == 'acme'", "tenant", "norm(lora_name)"):
        with pytest.raises(lm.ExpressionError, match="this is a text; compare it"):
            lm.check_expression(text)


def test_expressions_reduce_over_groups() -> None:
    router = lm.Router("group_max(test_heat) + bs")
    for name, group in [("a0", "a"), ("b0", "b"), ("a1", "a"), ("b1", "b"), ("c0", None)]:
        router.add_instance(name, group=group)
    heat = {"a0": 10.0, "b0": 50.0, "a1": 40.0, "b1": 30.0, "c0": 60.0}
    for name, value in heat.items():
        router.report_load(name, extra={"test_heat": value}, now=1.0)
    request = lm.Request(prompt_tokens=32)
    np.testing.assert_array_equal(router.score(request, now=1.0), [40, 50, 40, 50, 60])
    # An instance that takes no requests still steps with its group.
    router.update_instance("a1", draining=True)
    np.testing.assert_array_equal(router.score(request, now=1.0), [40, 50, np.nan, 50, 60])
    # A removed one does not, and its slot forgets the group.
    router.remove_instance("a1")
    np.testing.assert_array_equal(router.score(request, now=1.0), [10, 50, 50, 60])
    router.add_instance("d0")
    router.report_load("d0", extra={"test_heat": 99.0}, now=1.0)
    np.testing.assert_array_equal(router.score(request, now=1.0), [10, 50, 99, 50, 60])
    with pytest.raises(lm.BadValueError, match="group of e0"):
        router.add_instance("e0", group="")
    assert "e0" not in router.instances()


def test_groups_in_evaluate() -> None:
    columns = {"bs": [1.0, 2.0, 4.0, 8.0]}
    groups = ["x", "y", "x", "y"]
    for expr, expected in [
        (lm.group_max(lm.BS), [4, 8, 4, 8]),
        (lm.group_min(lm.BS), [1, 2, 1, 2]),
        (lm.group_sum(lm.BS), [5, 10, 5, 10]),
        (lm.group_mean(lm.BS) / lm.max(lm.group_sum(lm.BS)), [0.25, 0.5, 0.25, 0.5]),
    ]:
        np.testing.assert_array_equal(lm.evaluate(expr, columns, groups=groups), expected)
        own = lm.evaluate(lm.group_max(lm.BS), columns)
        np.testing.assert_array_equal(own, columns["bs"])
    with pytest.raises(lm.BadValueError, match="groups: 3 of 4 instances"):
        lm.evaluate(lm.group_max(lm.BS), columns, groups=[0, 0, 1])
