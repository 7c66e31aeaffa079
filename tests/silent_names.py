"""Runs a server in a network of its own, whose name server answers nothing about far.test.

It needs a new network and mount namespace. Prints, as JSON, the statuses of requests to the engine
of near.test, with tokens of an issuer on localhost, and the last error of each engine.
"""

import asyncio
import json
import os
import socket
import subprocess
import tempfile
import threading
from pathlib import Path

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from issuer_world import Issuer, bearer
from lmetric.server.app import runner
from server_world import FakeEngine, world
from waiting import until

NAME_SERVER = "127.0.0.77"


def answer_names(bound: socket.socket) -> None:
    """Answers 127.0.0.1 for names in near.test, and nothing for names in far.test."""
    while True:
        data, sender = bound.recvfrom(4096)
        query = dns.message.from_wire(data)
        name, kind = query.question[0].name, query.question[0].rdtype
        if ".far.test." in name.to_text():
            continue
        made = dns.message.make_response(query)
        if ".near.test." not in name.to_text():
            made.set_rcode(dns.rcode.NXDOMAIN)
        elif kind == dns.rdatatype.A:
            made.answer.append(dns.rrset.from_text(name, 1, "IN", "A", "127.0.0.1"))
        bound.sendto(made.to_wire(), sender)


def use_name_server() -> None:
    """Starts the name server. The system's resolver waits longer for it than a test."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "resolv.conf")
        file.write_text(f"nameserver {NAME_SERVER}\noptions timeout:30 attempts:5\n")
        subprocess.run(["mount", "--bind", file, "/etc/resolv.conf"], check=True)
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.bind((NAME_SERVER, 53))
    threading.Thread(target=answer_names, args=(bound,), daemon=True).start()


async def main() -> None:
    engine = FakeEngine()
    await engine.start()
    far = [{"url": f"http://e{number}.far.test:8000", "name": f"far{number}"} for number in range(6)]
    async with Issuer().serving() as issuer:
        issuers = [issuer.settings(jwks=issuer.url.replace("127.0.0.1", "localhost"))]
        for number in range(4):
            jwks = f"https://keys{number}.far.test"
            issuers.append(issuer.settings(issuer=f"https://{number}.far.test", jwks=jwks))
        settings = {
            "engines": [{"url": f"http://e.near.test:{engine.port}", "name": "near"}, *far],
            "auth": {"jwt": issuers},
            "replicas": {"redis_url": "redis://redis.far.test", "interval": 0.02},
            "health": {"interval": 0.1},
            "timeouts": {"connect": 1},
        }
        async with world([], **settings) as w:
            engines = {each.name: each for each in w.server.fleet.engines()}
            await until(lambda: all(engines[each["name"]].last_error for each in far))
            # By now, each far name has waited for a second, and its further checks wait.
            got = await asyncio.gather(*(w.post(headers=bearer(issuer.token())) for _ in range(8)))
            errors = {name: engine.last_error for name, engine in engines.items()}
            said = {"statuses": [status for status, *_ in got], "errors": errors}
            print(json.dumps(said), flush=True)
            os._exit(0)  # the look-ups of a failed run would hold the process for minutes


if __name__ == "__main__":
    use_name_server()
    with runner() as loop:
        loop.run(main())
