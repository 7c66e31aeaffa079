"""Where an issuer's key set comes from: a file or an address, read again while the router serves.

The last good set stays in use while a newer one cannot be read. A request whose key is not known
waits for a read that begins after its arrival (`KeySource.wait_for`), so a rotation refuses no
token.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import aiohttp
import structlog

from lmetric.connection_errors import reason_of
from lmetric.host_resolver import Resolver
from lmetric.server.api.jwks import MAX_BYTES, KeyName, KeySet, KeySetError, parse

ADDRESS_SECONDS = 300.0  # between two reads of an address
RETRY_SECONDS = 30.0  # after a failed one
FILE_SECONDS = 1.0  # between two looks whether a file has changed
PAUSE_SECONDS = 5.0  # least time between two reads of an address that requests cause
READ_SECONDS = 5.0  # longest read of an address
MAX_WAITING = 256  # key IDs that requests wait for

log = structlog.get_logger("lmetric.identity")


class KeySource:
    """The key set of one issuer, and the task that follows it.

    Args:
        place: a file, or an http or https address.
        clock: returns seconds on the monotonic clock.
    """

    def __init__(self, place: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.place = place
        self.keys: KeySet | None = None  # None: not read yet
        self.problem: str | None = None  # why the last read failed
        self.problem_since: float | None = None  # monotonic
        self.reads: Counter[bool] = Counter()  # by whether they were good
        self._file = None if "://" in place else Path(place)
        # Of the file in use. None: read it again, so that each failure counts.
        self._stamp: tuple[int, int, int] | None = None
        self._clock = clock
        self._began = -PAUSE_SECONDS  # the last read; monotonic
        self.next_read_at = clock()  # monotonic
        self._waiting: dict[KeyName, tuple[float, asyncio.Future[None]]] = {}  # since, end of the wait
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def load_file(self) -> None:
        """Reads the key set now if it is in a file. Raises KeySetError."""
        if self._file is not None:
            self._stamp = None
            stamp, data = _read(self._file)
            self._use(parse(data))
            self._stamp = stamp

    async def load(self) -> None:
        """Reads the key set now, from its file or address. Raises KeySetError."""
        if self._file is not None:
            await asyncio.to_thread(self.load_file)
        else:
            self._use(await asyncio.to_thread(parse, await _fetch(self.place)))

    async def begin(self) -> None:
        """Reads the key set, before `start` follows it. Raises KeySetError."""
        self._began = self._clock()
        await self.load()
        self.next_read_at = self._clock() + ADDRESS_SECONDS

    async def reload(self) -> None:
        """Reads a file now, and an address soon. Raises KeySetError."""
        if self._file is not None:
            await self.load()
        self.next_read_at = self._clock()
        self._wake.set()

    def start(self) -> None:
        """Follows the key set from now on."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name=f"keys of {self.place}")

    async def stop(self) -> None:
        """Stops. Requests that wait for a key get their errors."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self.problem = self.problem or "the router stops"
        self._release(self._clock(), all_of_them=True)

    def wait_for(self, key: KeyName) -> asyncio.Future[None] | None:
        """Returns the end of the wait for an unknown key: it is known, or a later read lacks it.

        None: too many other keys are waited for.
        """
        known = self._waiting.get(key)
        if known is None:
            if len(self._waiting) >= MAX_WAITING:
                return None
            known = self._waiting[key] = self._clock(), asyncio.get_running_loop().create_future()
            self._wake.set()
        return known[1]

    # -- the task

    async def _follow(self) -> None:
        while True:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._wake.wait()
            await asyncio.sleep(self._pause())
            await self.step()

    def _pause(self) -> float:
        """Returns the seconds until the next read."""
        now = self._clock()
        until_due = self.next_read_at - now
        if self._waiting:
            least = FILE_SECONDS if self._file is not None else PAUSE_SECONDS
            until_due = min(until_due, self._began + least - now)
        return max(until_due, 0.0)

    async def step(self) -> None:
        """Reads the key set once. A failure leaves the last good one."""
        began = self._began = self._clock()
        self.next_read_at = math.inf
        try:
            if self._file is None or self._stamp != await asyncio.to_thread(_stamp, self._file):
                await self.load()
            problem = None
        except KeySetError as error:
            problem, self._stamp = str(error), None
            self.reads[False] += 1
        except Exception as error:
            log.exception("reading a key set failed unexpectedly", place=self.place)
            problem = f"{type(error).__name__}; see the log"
            self.reads[False] += 1
        self._say(problem)
        seconds = FILE_SECONDS
        if self._file is None:  # it varies, so that the routers of a fleet do not all read at once
            seconds = (ADDRESS_SECONDS if problem is None else RETRY_SECONDS) * random.uniform(0.9, 1.1)
        self.next_read_at = min(
            self.next_read_at, self._clock() + seconds
        )  # `reload` may have set it meanwhile
        self._release(began)

    def _use(self, keys: KeySet) -> None:
        self.keys = keys.replaces(self.keys)
        self.reads[True] += 1

    def _say(self, problem: str | None) -> None:
        if problem is not None and problem != self.problem:
            kept = 0 if self.keys is None else len(self.keys)
            log.warning("cannot read a key set", place=self.place, reason=problem, keys_kept=kept)
        elif problem is None and self.problem is not None:
            log.info("a key set is read again", place=self.place)
        if (problem is None) is not (self.problem is None):
            self.problem_since = None if problem is None else self._clock()
        self.problem = problem

    def _release(self, began: float, *, all_of_them: bool = False) -> None:
        """Ends the waits for keys that are known now, and those that began before the read."""
        keys = self.keys
        for name, (since, end) in list(self._waiting.items()):
            if all_of_them or since <= began or (keys is not None and keys.find(*name) is not None):
                del self._waiting[name]
                if not end.done():
                    end.set_result(None)


def _stamp(file: Path) -> tuple[int, int, int]:
    """Returns what changes with the content of a file. Raises KeySetError."""
    try:
        found = file.stat()
    except OSError as error:
        raise KeySetError(error.strerror or str(error)) from None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(file: Path) -> tuple[tuple[int, int, int], bytes]:
    """Returns the stamp and the content of a file. Raises KeySetError."""
    stamp = _stamp(file)
    try:
        with file.open("rb") as opened:
            return stamp, opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise KeySetError(error.strerror or str(error)) from None


async def _fetch(address: str) -> bytes:
    """Returns the content at an address, without redirects. Raises KeySetError."""
    limit = aiohttp.ClientTimeout(total=READ_SECONDS)
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    try:
        async with (
            aiohttp.ClientSession(
                timeout=limit, headers=headers, connector=aiohttp.TCPConnector(resolver=Resolver())
            ) as session,
            session.get(address, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise KeySetError(
                    f"the issuer answered with status {answer.status}; expected 200 (redirects "
                    "are not followed)"
                )
            data = bytearray()
            async for part in answer.content.iter_chunked(64 * 1024):
                data += part
                if len(data) > MAX_BYTES:
                    break  # `parse` refuses it
            return bytes(data)
    except TimeoutError:
        raise KeySetError(f"no answer within {READ_SECONDS:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise KeySetError(f"no connection: {reason_of(error) or error}") from None
