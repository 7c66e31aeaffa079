"""The reason of a failed connection in the system's words, whatever event loop reports it."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl

import aiohttp

# Reasons of OpenSSL if the server has no TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
_UNKNOWN_ISSUER = (18, 19, 20, 21)  # verify codes of OpenSSL
_EXPIRED, _NOT_YET_VALID, _OTHER_NAMES = 10, 9, (62, 64)
_ERRNO = re.compile(r"\[Errno (\d+)\]")


def error_numbers(error: OSError) -> set[int]:
    """Returns the error numbers of a failed connection.

    If all addresses of a host fail, asyncio reports the numbers only in its message.
    """
    return {error.errno} if error.errno else set(map(int, _ERRNO.findall(str(error))))


def no_router(url: str, error: BaseException, otherwise: str) -> str:
    """Returns the message that no router answers at a URL: the reason, and what to check.

    otherwise: the reason, if the error has none.
    """
    inner = system_error(error) or error
    check = "check its URL, and that it runs"
    if isinstance(inner, ssl.SSLCertVerificationError):
        check = "check its certificate"
        if inner.verify_code in _UNKNOWN_ISSUER:
            check = "if a private CA signed its certificate, set SSL_CERT_FILE to the file of the CA"
        elif inner.verify_code == _EXPIRED:
            check = (
                f"renew the files of its `tls`, which it reads again; until then: curl -k {url}/debug/live"
            )
        elif inner.verify_code == _NOT_YET_VALID:
            check = "check the clocks of both machines"
        elif inner.verify_code in _OTHER_NAMES:
            check = "use a host name of its certificate in the URL"
    elif isinstance(inner, ssl.SSLError) and inner.reason in _NO_TLS:
        check = f"if it has no TLS, use http{url.removeprefix('https')}"
    elif url.startswith("http:") and (
        isinstance(error, aiohttp.ServerDisconnectedError)
        or (isinstance(error, OSError) and errno.ECONNRESET in error_numbers(error))
    ):
        check = f"if it has TLS, use https{url.removeprefix('http')}"
    return f"{url}: no answer from a router ({reason_of(error) or otherwise}); {check}"


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failed connection, such as "Connection refused"; "": none."""
    if (inner := system_error(error)) is not None:
        return reason_of(inner)
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror | ssl.SSLError):
        numbers = sorted(error_numbers(error))
        if numbers and min(numbers) > 0:
            return ", ".join(map(os.strerror, numbers))
    return getattr(error, "strerror", None) or str(error)


def system_error(error: BaseException) -> OSError | None:
    """Returns the system's error within an error of aiohttp or urllib; None: it has none."""
    for name in ("certificate_error", "os_error", "reason"):
        if isinstance(inner := getattr(error, name, None), OSError):
            return inner
    return None
