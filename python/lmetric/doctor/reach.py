"""Is it there, what is it, and does it do what it should: reachable, model, role, priority, clock."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime

from lmetric.doctor.subject import Subject
from lmetric.engines.http import Unanswered
from lmetric.engines.identify import identify

CLOCK_SECONDS = 2.0
"""The clocks may differ by this much: `Date` has whole seconds, and servers keep it for one."""
PROMPT = "Say something."


async def check_reachable(subject: Subject) -> None:
    """It answers, and its clock can be read off the answer."""
    before = time.time()
    try:
        answer = await subject.client.get("/health", seconds=5)
    except Unanswered as error:
        subject.failed("reachable", str(error), f"start the engine, or correct its URL {subject.client.url}")
        return
    after = time.time()
    if answer.status >= 400:
        cause = f"GET /health: {answer.error()}"
        subject.failed(
            "reachable", cause, "see the engine's log: its core may be dead" if answer.status >= 500 else None
        )
        return
    subject.passed("reachable", f"GET /health {answer.status} in {(after - before) * 1e3:.0f} ms")
    _check_clock(subject, answer.headers.get("Date"), (before + after) / 2)


def _check_clock(subject: Subject, date: str | None, now: float) -> None:
    try:
        skew = parsedate_to_datetime(date or "").timestamp() + 0.5 - now
    except ValueError:
        subject.not_offered("clock", "its answers carry no Date")
        return
    if abs(skew) > CLOCK_SECONDS:
        way = "ahead of" if skew > 0 else "behind"
        cause = f"its clock is {abs(skew):.0f} s {way} this machine's: ages of its reports would be wrong"
        subject.failed("clock", cause, "synchronise the clocks of both machines (NTP)")
    else:
        subject.passed("clock", f"within {CLOCK_SECONDS:g} s of this machine's, by its Date")


async def check_model(subject: Subject) -> None:
    """It is asked what it is, and answers a completion."""
    try:
        subject.adapter, subject.capabilities = await identify(subject.client.page)
    except (Unanswered, ValueError) as error:
        key = "give the engine's key (api_key in the configuration)" if "status 401" in str(error) else None
        subject.failed("model", str(error), key)
        return
    capabilities = subject.capabilities
    wanted, base = subject.target.model, capabilities.base()
    served = [model.name for model in capabilities.models]
    if wanted is not None and wanted not in served:
        cause = f"{wanted!r} is configured, and it serves {', '.join(map(repr, served)) or 'nothing'}"
        subject.failed(
            "model", cause, f"--served-model-name {wanted}, or the served name in the configuration"
        )
        return
    assert base is not None  # identify() raises where no model is served
    subject.model = wanted or base.name
    engine = " ".join(filter(None, (capabilities.engine, capabilities.version)))
    if subject.halves:
        subject.passed("model", f"{subject.model} on {engine}")
        subject.passed("role", f"{subject.role}: it serves halves of requests, which `handover` tries")
        return
    body = {"model": subject.model, "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    try:
        answer = await subject.client.post("/v1/completions", body)
    except Unanswered as error:
        subject.failed("model", str(error))
        return
    if answer.status != 200:
        subject.failed("model", f"a completion of two tokens: {answer.error()}")
        return
    length = f", {subject.max_tokens} tokens" if base.max_model_len else ""
    subject.passed("model", f"{subject.model} on {engine}{length}")
    _check_role(subject, answer.usage("completion_tokens"))


def _check_role(subject: Subject, produced: int | None) -> None:
    """One that prefills and decodes gives the tokens asked for."""
    if produced is None:
        subject.failed("role", "its answer has no usage: the router could not count what it did")
    elif produced < 2:
        cause = f"asked for 2 tokens, it gave {produced}: it seems to serve prefill only"
        subject.failed("role", cause, "give it the role prefill in the configuration")
    else:
        subject.passed("role", "both: prefills and decodes")


async def check_priority(subject: Subject) -> None:
    """A request with the most urgent of priorities is taken."""
    priority = subject.capabilities.priority
    if priority is None:
        subject.not_offered("priority", "no field of a request is known to carry one")
        return
    value = 1 if priority.order == "higher_first" else -1
    body = {"model": subject.model, "prompt": PROMPT, "max_tokens": 1, "priority": value}
    try:
        answer = await subject.client.post("/v1/completions", body)
    except Unanswered as error:
        subject.failed("priority", str(error))
        return
    order = f"{priority.order.replace('_', ' values ')}"
    if priority.honoured is False:
        subject.not_offered("priority", "its queue is not ordered by it", subject.flag("priority"))
    elif answer.status != 200:
        subject.failed("priority", f"priority {value}: {answer.error()}", subject.flag("priority"))
    else:
        told = (
            ""
            if priority.honoured
            else f"; whether its queue heeds it, it does not tell ({subject.flag('priority')})"
        )
        subject.passed("priority", f"accepted, {order}{told}")
