"""Watches the server's log in its tests: it must contain no client's key or prompt."""

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

import orjson
import structlog

from lmetric.config import Log
from lmetric.server.api import request as client_request
from lmetric.server.api.caller import Caller
from lmetric.server.api.identity import Identity
from lmetric.server.observe.logs import processors

# The default key and prompt of the tests' clients.
MARKED_KEY = "sk-MARKED-KEY-0001"
MARKED_PROMPT = "MARKED-PROMPT-0001"

# Shorter texts may be in a log by chance. Larger bodies are in tests of their cost.
SHORTEST = 12
LARGEST = 100_000
_PROMPT_FIELDS = frozenset(("prompt", "content", "text", "input", "instructions", "system", "user"))


class Secrets:
    """Keys and prompts of clients, and the log, as text and as JSON."""

    def __init__(self) -> None:
        self.texts: set[str] = {MARKED_KEY, MARKED_PROMPT}
        self.log = io.StringIO()
        self._as_text = processors(Log())
        self._as_json = processors(Log(json=True))

    def record(self, logger: Any, name: str, event: Any) -> str:
        """The last processor of structlog: writes an event in both formats."""
        for chain in (self._as_json, self._as_text):
            line: Any = dict(event)
            for processor in chain:
                line = processor(logger, name, line)
            self.log.write(f"{line}\n")
        return str(line)

    def add(self, value: Any, inside: bool = False) -> None:
        """Adds the texts of a request's prompt."""
        if isinstance(value, dict):
            for name, below in value.items():
                self.add(below, inside or name in _PROMPT_FIELDS)
        elif isinstance(value, list):
            for below in value:
                self.add(below, inside)
        elif inside and isinstance(value, str) and len(value) >= SHORTEST:
            self.texts.add(value)

    def add_key(self, authorization: str | None, api_key: str | None) -> None:
        """Adds a client's key."""
        for value in (api_key, (authorization or "").partition(" ")[2]):
            if value and len(value) >= SHORTEST:
                self.texts.add(value)

    def found(self) -> list[str]:
        """Returns the keys and prompts in the log."""
        log = self.log.getvalue()
        return [text for text in self.texts if text in log or orjson.dumps(text).decode()[1:-1] in log]


@contextlib.contextmanager
def watched_log() -> Iterator[Secrets]:
    """Renders logs of all levels like `serve`.

    Fails at the end if they contain a key or a prompt.
    """
    secrets = Secrets()
    read, identify = client_request.read_object, Identity.identify

    def read_object(body: bytes) -> dict[str, Any]:
        request = read(body)
        if len(body) <= LARGEST:
            secrets.add(request)
        return request

    def identified(
        identity: Identity, authorization: str | None, *api_keys: str | None, client: Any = None
    ) -> Caller:
        for key in api_keys or (None,):
            secrets.add_key(authorization, key)
        return identify(identity, authorization, *api_keys, client=client)

    handler = logging.StreamHandler(secrets.log)
    before = structlog.get_config()
    structlog.configure(
        processors=[secrets.record],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.PrintLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    logging.getLogger().addHandler(handler)
    client_request.read_object, Identity.identify = read_object, identified  # type: ignore[method-assign]
    try:
        yield secrets
    finally:
        client_request.read_object, Identity.identify = read, identify  # type: ignore[method-assign]
        logging.getLogger().removeHandler(handler)
        structlog.configure(**before)
    assert not secrets.found(), "keys or prompts in the log"
