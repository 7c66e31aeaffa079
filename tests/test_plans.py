"""Plans of two segments from Python: roles, the decode policy, the handoff."""

import pytest

import lmetric as lm


def fleet(**settings: object) -> lm.Router:
    router = lm.Router("least_requests", **settings)  # type: ignore[arg-type]
    router.add_instance("p", role="prefill")
    for name in ("d0", "d1"):
        router.add_instance(name, role="decode")
    return router


def test_a_request_goes_from_prefill_to_decode() -> None:
    """Bound at the decision; transferred at the prefill's end; shown in the decision record."""
    router = fleet(decode_policy="sibyl")
    decision, ticket = router.route(lm.Request(prompt_tokens=500), now=0.0)
    bound = decision.decode_instance
    assert decision.instance == "p"
    assert bound in ("d0", "d1")
    assert ticket.has_next
    stats = router.stats()
    assert stats["decode_policy"] == "sibyl"
    assert stats["instances"]["p"]["role"] == "prefill"
    assert stats["instances"][bound]["bound_bs"] == 1
    assert stats["instances"][bound]["decode_bs"] == 0
    ticket.sent(0.0)
    assert ticket.segment_done(prompt_tokens=500, cached_tokens=0, now=0.2) == bound
    assert (ticket.instance, ticket.from_token, ticket.has_next) == (bound, 500, False)
    ticket.sent(0.2)
    ticket.first_token(0.3)
    assert ticket.segment_done(output_tokens=1, now=0.4) is None
    assert not ticket.open
    assert router.in_flight() == 0
    record = router.explain(decision.id)
    assert record is not None
    assert (record["instance"], record["decode_instance"]) == ("p", bound)
    assert record["handoff_seconds"] == pytest.approx(0.2)


def test_late_binding_and_an_expression() -> None:
    """Any policy serves for decode, and the instance may be chosen late."""
    router = fleet(decode_policy=lm.DECODE_BS + lm.BOUND_BS, binding="late")
    decision, ticket = router.route(lm.Request(prompt_tokens=500))
    assert decision.decode_instance is None
    assert ticket.has_next
    assert ticket.segment_done() in ("d0", "d1")
    ticket.failed("cancelled")


def test_roles_change_and_nobody_left_is_told() -> None:
    """An instance may change its role; where each keeps to it, a missing one is an error."""
    router = fleet(colocate=False)
    router.update_instance("d0", role="prefill")
    router.update_instance("d1", role="prefill")
    with pytest.raises(lm.NoInstanceError, match="role decode"):
        router.route(lm.Request(prompt_tokens=5))
    router.update_instance("d1", role="decode")
    _, ticket = router.route(lm.Request(prompt_tokens=5))
    router.update_instance("d1", healthy=False)
    with pytest.raises(lm.NoInstanceError, match="role decode"):
        ticket.segment_done()
    assert not ticket.open
    assert router.in_flight() == 0


def test_bad_settings_say_what_would_be_right() -> None:
    """Names are checked."""
    with pytest.raises(lm.BadValueError, match='"early" or "late"'):
        lm.Router(binding="soon")
    with pytest.raises(lm.UnknownNameError, match="sibyl"):
        lm.Router(decode_policy="sybil")
    with pytest.raises(lm.BadValueError, match='"both", "prefill" or "decode"'):
        lm.Router().add_instance("a", role="both of them")
