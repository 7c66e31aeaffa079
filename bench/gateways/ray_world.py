"""Runs the Ray Serve example for `ray_serve.py`, in the environment that has Ray.

Prints ``ready PORT`` when it serves. Each line of input is a number of replicas to scale to, and
is answered by ``scaled``.
"""

from __future__ import annotations

import argparse
import socket
import sys

import ray
from app import Arguments, build
from ray import serve


def main() -> None:
    """Serves until the end of the input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", required=True)
    parser.add_argument("--policy")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--metrics-port", type=int, help="for the metrics of Ray")
    flags = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(
        num_cpus=16, include_dashboard=False, log_to_driver=False, _metrics_export_port=flags.metrics_port
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})

    def run(replicas: int) -> None:
        serve.run(build(Arguments(router=flags.router, policy=flags.policy, replicas=replicas)))

    run(flags.replicas)
    print("ready", port, flush=True)
    for line in sys.stdin:
        run(int(line))
        print("scaled", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
