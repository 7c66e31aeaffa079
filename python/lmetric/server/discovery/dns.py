"""Engines behind a DNS name: an engine for each address, or for each SRV record.

Names are resolved with the system's name servers and search list (`/etc/resolv.conf`), because
these give the time to live of the answers. `/etc/hosts` is not read.
"""

import asyncio
import ipaddress
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.rdatatype
import dns.resolver

from lmetric.config import DiscoverySource, DnsSource, EngineConfig
from lmetric.server.discovery.members import Found
from lmetric.server.discovery.source import Sink, SourceError

T = TypeVar("T")

LOOK_UP_SECONDS = 5.0  # time limit of one query, over all name servers and retries
SHORTEST_SECONDS = 1.0  # shortest time between two look-ups
# Of that time, for a query about a target of SRV records. Both kinds of addresses of a target that
# gets no answer take less than the first look-up may wait.
TARGET_SHARE = 0.4
# Targets of SRV records are asked for in bursts, with pauses between them. A query takes up to
# 0.5 ms of CPU time, and name servers drop long bursts.
BURST, PAUSE_SECONDS = 16, 0.01


class _Host(NamedTuple):
    """The address of an SRV record's target.

    ``address``: None: it has none. ``good_until``: on the monotonic clock; until then, the address
    stays if the name servers give no answer. ``problem``: None: the name servers answered.
    """

    address: str | None
    good_until: float = 0.0
    problem: str | None = None


class DnsNames:
    """A source: the addresses, or the SRV records, of a DNS name.

    A look-up that fails or finds no records keeps the engines for ``grace`` seconds after the last
    good look-up. Then the source has no engines. So does the engine of an SRV record's target, if
    only the addresses of this target cannot be looked up.
    """

    def __init__(self, config: DnsSource, defaults: DiscoverySource) -> None:
        self._config = config
        self._defaults = defaults
        self._good_until = 0.0
        self._hosts: dict[dns.name.Name, _Host] = {}  # of the last SRV records

    async def follow(self, sink: Sink) -> None:
        """Reports the engines to ``sink`` after each look-up, until canceled.

        Raises SourceError.
        """
        config = self._config
        resolver = _resolver(config.nameservers, LOOK_UP_SECONDS)
        of_targets = _resolver(config.nameservers, TARGET_SHARE * LOOK_UP_SECONDS)
        while True:
            wait = config.interval
            try:
                engines, seconds, wrong = await _in_thread(self._look_up(resolver, of_targets))
            except dns.exception.DNSException as error:
                sink.problem(f"{config.type} of {config.name}: {_reason(error, resolver)}")
                left = self._good_until - time.monotonic()
                if 0 < left < wait:
                    wait = left
                elif left <= 0 < self._good_until:
                    self._good_until = 0.0
                    sink.found([], f"{config.type} of {config.name}: no records for {config.grace:g} s")
            else:
                self._good_until = time.monotonic() + max(config.grace, 1e-3)
                sink.found(engines, wrong)
                wait = min(wait, max(seconds, SHORTEST_SECONDS))
            await asyncio.sleep(wait)

    async def _look_up(
        self, resolver: dns.asyncresolver.Resolver, of_targets: dns.asyncresolver.Resolver
    ) -> tuple[list[Found], float, str | None]:
        """Returns the engines, their time to live (s), and the problem of other records or None."""
        config = self._config
        answer = await resolver.resolve(config.name, config.type, search=True)
        seconds = float(answer.rrset.ttl if answer.rrset is not None else 0)
        if config.type != "SRV":
            return [self._engine(record.address, config.port) for record in answer], seconds, None
        targets = sorted(
            {(record.target, record.port) for record in answer if record.target != dns.name.root}
        )
        good_until = time.monotonic() + config.grace
        hosts = {name: _Host(address, good_until) for name, address in _additional(answer).items()}
        missing = sorted({target for target, _ in targets} - hosts.keys())
        asked = (
            self._host(of_targets, name, PAUSE_SECONDS * (number // BURST))
            for number, name in enumerate(missing)
        )
        hosts |= zip(missing, await asyncio.gather(*asked), strict=True)
        self._hosts = {target: hosts[target] for target, _ in targets}
        engines, wrong = [], None
        for target, port in targets:
            name, host = f"{target.to_text(omit_final_dot=True)}:{port}", self._hosts[target]
            if host.address is not None:
                engines.append(self._engine(host.address, port, name))
            problem = host.problem or (f"{name} has no address" if host.address is None else None)
            if problem is not None:
                wrong = f"SRV of {config.name}: {problem}"
        return engines, seconds, wrong

    async def _host(self, resolver: dns.asyncresolver.Resolver, target: dns.name.Name, pause: float) -> _Host:
        """Looks up the lowest IPv4 address of a target, or else its lowest IPv6 address.

        ``pause``: seconds before the query.
        """
        await asyncio.sleep(pause)
        problem = None
        last = self._hosts.get(target, _Host(None))
        if time.monotonic() >= last.good_until:
            last = _Host(None)
        for kind in ("A", "AAAA"):
            try:
                answer = await resolver.resolve(target, kind)
            except dns.resolver.NXDOMAIN:
                break
            except dns.resolver.NoAnswer:
                continue
            except dns.exception.DNSException as error:
                problem = f"{kind} of {target.to_text(omit_final_dot=True)}: {_reason(error, resolver)}"
                if last.address is not None and ":" not in last.address:
                    break  # no change to another kind of address
            else:
                good_until = time.monotonic() + self._config.grace
                return _Host(_lowest(record.address for record in answer), good_until)
        return _Host(None) if problem is None else last._replace(problem=problem)

    def _engine(self, address: str, port: int | None, name: str | None = None) -> Found:
        host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
        place = f"{host}:{port}"
        config = EngineConfig(url=f"{self._defaults.scheme}://{place}", name=name or place)
        return Found(config, self._defaults.model)


async def _in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` on an event loop in a thread of its own.

    To read a record takes 0.1 ms of CPU time, so long answers would stop the router's loop. The
    thread is a daemon: a router that stops does not wait for name servers.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # a canceled caller ignores the result

    def run() -> None:
        try:
            result.set_result(asyncio.run(work))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="lmetric-dns", daemon=True).start()
    return await asyncio.wrap_future(result)


def _additional(answer: dns.resolver.Answer) -> dict[dns.name.Name, str]:
    """Returns the IPv4 address of each name in the additional section of an answer."""
    found: dict[dns.name.Name, list[str]] = {}
    for records in answer.response.additional:
        # The section may be cut: an IPv6 address alone does not tell that there is no IPv4 address.
        if records.rdtype == dns.rdatatype.A:
            found.setdefault(records.name, []).extend(record.address for record in records)
    return {name: _lowest(addresses) for name, addresses in found.items()}


def _lowest(addresses: Iterable[str]) -> str:
    """Returns the lowest IPv4 address, or else the lowest IPv6 address."""
    return min(addresses, key=lambda address: (":" in address, address))


def _resolver(nameservers: Sequence[str], seconds: float) -> dns.asyncresolver.Resolver:
    try:
        resolver = dns.asyncresolver.Resolver(configure=not nameservers)
    except dns.resolver.NoResolverConfiguration as error:
        raise SourceError(f"cannot find the system's name servers ({error})") from None
    resolver.lifetime = seconds
    if nameservers:
        resolver.nameservers = [_nameserver(text) for text in nameservers]
    return resolver


def _nameserver(text: str) -> dns.nameserver.Nameserver:
    """Parses ``IP`` or ``IP:PORT``, which the configuration has checked."""
    try:
        return dns.nameserver.Do53Nameserver(str(ipaddress.ip_address(text)))
    except ValueError:
        host, _, port = text.rpartition(":")
        return dns.nameserver.Do53Nameserver(host.strip("[]"), int(port))


def _reason(error: dns.exception.DNSException, resolver: dns.asyncresolver.Resolver) -> str:
    # The text of a timeout holds measured times, so each one would be logged as a new problem.
    if isinstance(error, dns.exception.Timeout):
        return f"no answer within {resolver.lifetime:g} s"
    return str(error)
