"""Engines behind a DNS name: an engine for each address, or for each SRV record.

Names are resolved with the system's name servers and search list (`/etc/resolv.conf`), because
these give the time to live of the answers. `/etc/hosts` is not read.
"""

import asyncio
import ipaddress
import time
from collections.abc import Sequence

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.resolver

from lmetric.config import DiscoverySource, DnsSource, EngineConfig
from lmetric.server.discovery.members import Found
from lmetric.server.discovery.source import Sink, SourceError

LOOK_UP_SECONDS = 5.0  # time limit of one look-up, over all name servers and retries
SHORTEST_SECONDS = 1.0  # shortest time between two look-ups


class DnsNames:
    """A source: the addresses, or the SRV records, of a DNS name.

    A look-up that fails or finds no records keeps the engines for ``grace`` seconds after the last
    good look-up. Then the source has no engines.
    """

    def __init__(self, config: DnsSource, defaults: DiscoverySource) -> None:
        self._config = config
        self._defaults = defaults
        self._good_until = 0.0

    async def follow(self, sink: Sink) -> None:
        """Reports the engines to ``sink`` after each look-up, until canceled.

        Raises SourceError.
        """
        config = self._config
        resolver = _resolver(config.nameservers)
        while True:
            wait = config.interval
            try:
                engines, seconds, wrong = await self._look_up(resolver)
            except dns.exception.DNSException as error:
                sink.problem(f"{config.type} of {config.name}: {_reason(error)}")
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

    async def _look_up(self, resolver: dns.asyncresolver.Resolver) -> tuple[list[Found], float, str | None]:
        """Returns the engines, their time to live (s), and the problem of other records or None."""
        config = self._config
        answer = await resolver.resolve(config.name, config.type, search=True)
        seconds = float(answer.rrset.ttl if answer.rrset is not None else 0)
        if config.type != "SRV":
            return [self._engine(record.address, config.port) for record in answer], seconds, None
        targets = sorted(
            {(record.target, record.port) for record in answer if record.target != dns.name.root}
        )
        hosts = await asyncio.gather(*(self._address(resolver, target) for target, _ in targets))
        engines, wrong = [], None
        for (target, port), address in zip(targets, hosts, strict=True):
            name = f"{target.to_text(omit_final_dot=True)}:{port}"
            if address is None:
                wrong = f"SRV of {config.name}: {name} has no address"
            else:
                engines.append(self._engine(address, port, name))
        return engines, seconds, wrong

    @staticmethod
    async def _address(resolver: dns.asyncresolver.Resolver, target: dns.name.Name) -> str | None:
        try:
            return min((await resolver.resolve_name(target)).addresses())
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return None

    def _engine(self, address: str, port: int | None, name: str | None = None) -> Found:
        host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
        place = f"{host}:{port}"
        config = EngineConfig(url=f"{self._defaults.scheme}://{place}", name=name or place)
        return Found(config, self._defaults.model)


def _resolver(nameservers: Sequence[str]) -> dns.asyncresolver.Resolver:
    try:
        resolver = dns.asyncresolver.Resolver(configure=not nameservers)
    except dns.resolver.NoResolverConfiguration as error:
        raise SourceError(f"cannot find the system's name servers ({error})") from None
    resolver.lifetime = LOOK_UP_SECONDS
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


def _reason(error: dns.exception.DNSException) -> str:
    # The text of a timeout holds measured times, so each one would be logged as a new problem.
    if isinstance(error, dns.exception.Timeout):
        return f"no answer within {LOOK_UP_SECONDS:g} s"
    return str(error)
