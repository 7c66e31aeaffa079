"""The end of a certificate's validity, which `ssl` shows only for certificates of peers."""

import calendar
import ssl
from collections.abc import Iterator
from pathlib import Path

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_SEQUENCE, _UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x30, 0x17, 0x18, 0xA0


def expiry(file: Path) -> float:
    """Returns when the first certificate of a PEM file expires, seconds since 1970.

    Raises ValueError if the file has no readable certificate, OSError if it cannot be read.
    """
    text = file.read_text(encoding="ascii", errors="replace")
    start, end = text.find(_BEGIN), text.find(_END)
    if start < 0 or end < start:
        raise ValueError("no certificate in it")
    der = ssl.PEM_cert_to_DER_cert(text[start : end + len(_END)])
    try:
        (_, certificate), *_ = _elements(der)
        (_, signed), *_ = _elements(certificate)
        # RFC 5280, 4.1: version (optional), serial number, algorithm, issuer, validity.
        fields = [field for field in _elements(signed) if field[0] != _VERSION]
        _, (kind, until) = _elements(fields[3][1])
        return _seconds(kind, until.decode("ascii"))
    except (IndexError, ValueError) as error:
        raise ValueError(f"not a certificate: {error}") from None


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields tag and content of the DER elements in ``der``. Raises IndexError, ValueError."""
    at = 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(der[at : at + size], "big")
            at += size
        if at + length > len(der):
            raise ValueError("cut off")
        yield tag, der[at : at + length]
        at += length


def _seconds(kind: int, time: str) -> float:
    """Returns a DER time (always UTC) in seconds since 1970. Raises ValueError."""
    if kind == _UTC_TIME:  # two digits of the year: 1950 to 2049
        time = ("19" if time[:2] >= "50" else "20") + time
    elif kind != _GENERALIZED_TIME:
        raise ValueError("no time of expiry")
    year, month, day, hour, minute, second = (
        int(time[:4]),
        *(int(time[at : at + 2]) for at in range(4, 14, 2)),
    )
    return float(calendar.timegm((year, month, day, hour, minute, second)))
