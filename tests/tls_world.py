"""Certificates for tests, made with openssl, and clients that use them."""

import asyncio
import os
import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and its key."""

    certificate: Path
    key: Path

    def replace(self, other: "Pair") -> None:
        """Puts another pair in the files, each at once."""
        for old, new in ((self.key, other.key), (self.certificate, other.certificate)):
            copy = old.with_suffix(".new")
            shutil.copy(new, copy)
            os.replace(copy, old)

    @property
    def files(self) -> dict[str, str]:
        """The keys of a section of the configuration."""
        return {"certificate_file": str(self.certificate), "key_file": str(self.key)}


class Authority:
    """A CA in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = name
        self.file = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl(
            *("req", "-x509", *_EC, "-keyout", self._key, "-out", self.file, "-days", "30"),
            *("-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign,digitalSignature"),
        )

    def issue(self, name: str, names: str = "IP:127.0.0.1,DNS:localhost", days: int = 30) -> Pair:
        """Returns a certificate for servers and clients."""
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, more = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        more.write_text(f"subjectAltName={names}\n")
        _openssl("req", *_EC, "-keyout", pair.key, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.file, "-CAkey", self._key, "-CAcreateserial"),
            *("-out", pair.certificate, "-days", str(days), "-extfile", more),
        )
        return pair

    def client(self, own: Pair | None = None) -> ssl.SSLContext:
        """Returns the context of a client that trusts this CA. ``own``: its certificate."""
        context = ssl.create_default_context(cafile=self.file)
        if own is not None:
            context.load_cert_chain(own.certificate, own.key)
        return context

    def server(self, own: Pair, *, asks_clients: bool = False) -> ssl.SSLContext:
        """Returns the context of a server.

        ``asks_clients``: it requires certificates of this CA.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(own.certificate, own.key)
        if asks_clients:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.file)
        return context


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


async def subject_of(port: int, context: ssl.SSLContext) -> str:
    """Returns the common name in the certificate of a server."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        certificate = writer.get_extra_info("peercert")
        return str(dict(field for (field,) in certificate["subject"])["commonName"])
    finally:
        writer.close()
