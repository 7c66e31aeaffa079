"""Serves the application of the Ray Serve example, in the environment that has Ray.

Prints ``ready PORT`` when it serves. Each line of input is a number of replicas to scale to, and
is answered by ``scaled``. Ends at the end of the input.
"""

from __future__ import annotations

import argparse
import socket
import sys

import app
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig


def main() -> None:
    """Serves until the end of the input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--metrics-port", type=int, help="port of Ray's metrics")
    parser.add_argument("--arm", help="class of ray_arms.py; default: the example itself")
    parser.add_argument("--cache-blocks", type=int, help="KV blocks of a replica")
    flags = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(
        num_cpus=16, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1",
        _metrics_export_port=flags.metrics_port,
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": port})

    def run(replicas: int) -> None:
        if flags.arm is None:
            serve.run(app.build(app.Arguments(replicas=replicas, cache_blocks=flags.cache_blocks)))
            return
        import ray_arms

        settings = {"cache_blocks": flags.cache_blocks} if flags.arm == "Lmetric" else {}
        router = RequestRouterConfig(
            request_router_class=f"ray_arms.{flags.arm}", request_router_kwargs=settings,
            request_routing_stats_period_s=1, request_routing_stats_timeout_s=5,
        )  # fmt: skip
        chosen = ray_arms.PublishingReplica.options(num_replicas=replicas, request_router_config=router)
        serve.run(app.Gateway.bind(chosen.bind(flags.cache_blocks)))

    run(flags.replicas)
    print("ready", port, flush=True)
    for line in sys.stdin:
        run(int(line))
        print("scaled", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
