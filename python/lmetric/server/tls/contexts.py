"""TLS contexts that follow their files.

A changed file replaces the context for new connections. A file that cannot be used is logged, and
the old context stays.
"""

import math
import ssl
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from lmetric.config import ConfigError, EngineTls, ListenerTls
from lmetric.server.tls.certificate import expiry

WARN_DAYS = 14  # a certificate that expires within this time is logged, once a day
_DAY_SECONDS = 86_400.0
_NO_CA = "it has no certificate in PEM format"
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}

log = structlog.get_logger("lmetric.tls")

Stamp = tuple[int, int, int]


class TlsContext:
    """A context with the files that it was made of.

    Args:
        name: its section of the configuration, for messages.
        make: makes the context. Raises ConfigError.
        files: its files. ``certificate``: the certificate for the other side, or None.

    Raises ConfigError.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], ssl.SSLContext],
        files: Iterable[Path | None],
        certificate: Path | None,
    ) -> None:
        self.name = name
        self.certificate = certificate
        self.failures = 0  # changes that could not be used
        self.refused: str | None = None  # why the present files are not in use
        self.expires_at = math.inf  # seconds since 1970
        self._make = make
        self._files = [file for file in files if file is not None]
        self._stamps = self._read_stamps()
        self._warned_at = -math.inf
        self._warned_expired = False
        self.context = self._load()

    def _load(self) -> ssl.SSLContext:
        context = self._make()
        if self.certificate is not None:
            try:
                self.expires_at = expiry(self.certificate)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{self.name}: {self.certificate}: {error}") from None
        return context

    def _read_stamps(self) -> list[Stamp | None]:
        return [_stamp(file) for file in self._files]

    def refresh(self) -> None:
        """Makes the context again if a file has changed, and warns of a certificate's expiry."""
        stamps = self._read_stamps()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self.context = self._load()
            except ConfigError as error:
                self.failures += 1
                self.refused = str(error)
                log.error("cannot use changed TLS files; the old ones stay in use", reason=str(error))
            else:
                self.refused = None
                self._warned_at = -math.inf
                log.info("TLS files read again", section=self.name, certificate=str(self.certificate))
        self._warn()

    def days_left(self) -> float:
        """Returns the days until its certificate expires; infinite without a certificate."""
        return (self.expires_at - time.time()) / _DAY_SECONDS

    @property
    def expires_soon(self) -> bool:
        """Whether its certificate expires within `WARN_DAYS`."""
        return self.days_left() < WARN_DAYS

    def expiry_text(self) -> str:
        """Returns when its certificate expires, for people."""
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.expires_at))

    def _warn(self) -> None:
        now = time.monotonic()  # the wall clock may be set back
        expired = (days := self.days_left()) <= 0
        warned = now - self._warned_at < _DAY_SECONDS and (self._warned_expired or not expired)
        if days >= WARN_DAYS or warned:
            return
        self._warned_at, self._warned_expired = now, expired
        named = {"section": self.name, "certificate": str(self.certificate)}
        if expired:
            log.error("the TLS certificate has expired", **named, expired=self.expiry_text())
        else:
            log.warning("the TLS certificate expires soon", **named, days=round(days, 1))


def engine_context(settings: EngineTls) -> ssl.SSLContext:
    """Makes a context for connections to engines. Raises ConfigError."""
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
    except OSError as error:
        raise ConfigError(f"tls.ca_file: {settings.ca_file}: {_reason(error, _NO_CA)}") from None
    if settings.certificate_file is not None and settings.key_file is not None:
        _identify(context, settings.certificate_file, settings.key_file)
    if not settings.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def outgoing_context(name: str, settings: EngineTls) -> TlsContext:
    """Returns the context for connections to engines or routers. Raises ConfigError."""
    files = (settings.ca_file, settings.certificate_file, settings.key_file)
    return TlsContext(name, lambda: engine_context(settings), files, certificate=settings.certificate_file)


def listener_context(settings: ListenerTls) -> TlsContext:
    """Returns the context for clients' connections. Raises ConfigError."""

    def make() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[settings.min_version]
        # Renegotiation costs the server more than the client, and nothing here needs it.
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        _identify(context, settings.certificate_file, settings.key_file)
        if settings.client_ca_file is not None:
            required = settings.client_certificates == "required"
            context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
            try:
                context.load_verify_locations(settings.client_ca_file)
            except OSError as error:
                raise ConfigError(
                    f"tls.client_ca_file: {settings.client_ca_file}: {_reason(error, _NO_CA)}"
                ) from None
        return context

    files = (settings.certificate_file, settings.key_file, settings.client_ca_file)
    return TlsContext("tls", make, files, certificate=settings.certificate_file)


def _identify(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Adds a certificate with its key. Raises ConfigError."""
    for name, file in (("certificate_file", certificate), ("key_file", key)):
        try:
            with file.open("rb"):
                pass
        except OSError as error:
            raise ConfigError(f"tls.{name}: {file}: {error.strerror}") from None
    try:
        # A password that is wrong for certain: OpenSSL would else ask for one at the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        wrong = "expected PEM files of a certificate and its key without a password"
        raise ConfigError(f"tls: {certificate}, {key}: {_reason(error, wrong)}") from None


def _reason(error: Exception, otherwise: str) -> str:
    if isinstance(error, ssl.SSLError):
        return "the key is not the certificate's" if error.reason == "KEY_VALUES_MISMATCH" else otherwise
    return getattr(error, "strerror", None) or otherwise


def _stamp(file: Path) -> Stamp | None:
    """Returns modification time (ns), size and inode; None if the file does not exist."""
    try:
        status = file.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size, status.st_ino)
