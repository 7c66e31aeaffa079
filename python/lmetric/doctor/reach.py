"""Is it there, what is it, and does it do what it should: reachable, model, role."""

from __future__ import annotations

import time

from lmetric.doctor.clock import judge_date
from lmetric.doctor.subject import Subject
from lmetric.engines.http import Unanswered
from lmetric.engines.identify import identify

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
    judge_date(subject, answer.headers.get("Date"), before, after)


async def check_model(subject: Subject) -> None:
    """It is asked what it is, and answers a completion."""
    rank = subject.target.engine.data_parallel_rank
    try:
        subject.adapter, subject.capabilities = await identify(subject.client.page, rank)
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
