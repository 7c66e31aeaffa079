"""The message that no router answers, for commands that call one."""

from __future__ import annotations

import errno
import ssl

import aiohttp

from lmetric.connection_errors import error_numbers, reason_of, system_error

# Reasons of OpenSSL if the server has no TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
_UNKNOWN_ISSUER = (18, 19, 20, 21)  # verify codes of OpenSSL
_EXPIRED, _NOT_YET_VALID, _OTHER_NAMES = 10, 9, (62, 64)


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
