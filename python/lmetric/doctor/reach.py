"""Checks of the engine itself: reachable, model, role."""

from __future__ import annotations

import asyncio
import contextlib
import time
from urllib.parse import urlsplit

from lmetric.config import unix_path
from lmetric.doctor.clock import judge_date
from lmetric.doctor.subject import Subject
from lmetric.engines.handover import CHAT
from lmetric.engines.http import TimedOut, Unanswered
from lmetric.engines.identify import identify

PROMPT = "Say something."
# A white PNG of 64 x 64 pixels.
IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAKUlEQVR42u3MQREAAAwCIPuX1hD77SAA6VEEAoFA"
    "IBAIBAKBQCAQfA8Gpwvw4qrwDDIAAAAASUVORK5CYII="
)


async def check_reachable(subject: Subject) -> None:
    """Checks GET of the health page as the server does, and the clock by the answer's `Date`."""
    before, path = time.time(), subject.target.health_path
    try:
        answer = await subject.client.get(path, seconds=5)
    except Unanswered as error:
        url, cause = subject.client.url, str(error)
        if isinstance(error, TimedOut) and await _accepts(url):
            cause += ", but it accepts connections: it hangs"
            remedy = "restart the engine, after a look at its log"
        else:
            remedy = f"start the engine, or correct the URL {url}"
        subject.failed("reachable", cause, remedy)
        return
    after = time.time()
    if answer.status >= 500:
        cause = f"GET {path}: {answer.error()}"
        subject.failed("reachable", cause, "restart the engine: its core may have crashed")
        return
    status = str(answer.status) if answer.status < 300 else f"({answer.error()})"
    subject.passed("reachable", f"GET {path} {status} in {(after - before) * 1e3:.0f} ms")
    judge_date(subject, answer.headers.get("Date"), before, after)


async def _accepts(url: str) -> bool:
    """Whether the engine's socket accepts a connection."""
    path, parts = unix_path(url), urlsplit(url)
    try:
        async with asyncio.timeout(3):
            _, writer = await (
                asyncio.open_unix_connection(path)
                if path is not None
                else asyncio.open_connection(
                    parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
                )
            )
    except (TimeoutError, OSError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def check_model(subject: Subject) -> None:
    """Checks that the engine serves the model and answers a completion."""
    rank = subject.target.engine.data_parallel_rank
    try:
        subject.adapter, subject.capabilities = await identify(subject.client.page, rank)
    except (Unanswered, ValueError) as error:
        key = "set the engine's api_key in the configuration" if "status 401" in str(error) else None
        subject.failed("model", str(error), key)
        return
    capabilities = subject.capabilities
    if capabilities.data_parallel_rank is not None:
        subject.client.set_rank(capabilities.rank_header(capabilities.data_parallel_rank))
    wanted, base = subject.target.model, capabilities.base()
    served = [model.name for model in capabilities.models]
    if wanted is not None and wanted not in served:
        cause = f"{wanted!r} is configured, but the engine serves {', '.join(map(repr, served)) or 'nothing'}"
        subject.failed(
            "model", cause, f"--served-model-name {wanted}, or the served name in the configuration"
        )
        return
    assert base is not None  # identify() raises if the engine serves no model
    subject.model = wanted or base.name
    engine = " ".join(filter(None, (capabilities.engine, capabilities.version)))
    if capabilities.scheduler is not None:
        engine += f" with {capabilities.scheduler}"
    if subject.halves:
        subject.passed("model", f"{subject.model} on {engine}")
        subject.passed(
            "role", f"{subject.role}: it serves parts of requests; the check `handover` tests them"
        )
        return
    if subject.role == "encode":
        subject.passed("model", f"{subject.model} on {engine}")
        await _check_encoder(subject)
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


async def _check_encoder(subject: Subject) -> None:
    """Checks that an engine of role encode stores an image for others."""
    content = [{"type": "image_url", "image_url": {"url": IMAGE}}]
    body = {"model": subject.model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    try:
        answer = await subject.client.post(CHAT, body)
    except Unanswered as error:
        subject.failed("role", str(error))
        return
    told = answer.json if answer.status == 200 else None
    if 400 <= answer.status < 500:  # perhaps its model has no images, but sound
        subject.passed("role", f"encode: not tested, as it refused an image: {answer.error()}")
    elif answer.status != 200:
        subject.failed("role", f"a chat with an image: {answer.error()}")
    elif isinstance(told, dict) and isinstance(told.get("ec_transfer_params"), dict):
        subject.passed("role", "encode: it stored an image")
    else:
        subject.failed("role", "encode, but it stored no image", "start it with an ec_role of ec_producer")


def _check_role(subject: Subject, produced: int | None) -> None:
    """Checks that an engine of role both returns the requested number of tokens."""
    if produced is None:
        subject.failed("role", "its answer has no usage, which the router needs to count tokens")
    elif produced == 0:
        cause = "it returned no token: it seems to encode only"
        subject.failed("role", cause, "set its role to encode in the configuration")
    elif produced < 2:
        cause = f"it returned {produced} of 2 requested tokens: it seems to serve prefill only"
        subject.failed("role", cause, "set its role to prefill in the configuration")
    else:
        subject.passed("role", "both: prefills and decodes")
