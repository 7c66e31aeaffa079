"""Serves the application of the Ray Serve example, in the environment that has Ray.

Prints ``ready PORT`` when it serves. Each line of input is a number of replicas to scale to, and
is answered by ``scaled``. Ends at the end of the input.

With ``--arms``, each class of ray_arms.py gets an application of its own below ``/CLASS``, and a
line of input is ``CLASS NUMBER``.
"""

from __future__ import annotations

import argparse
import socket
import sys

import app
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig


def run(replicas: int, arm: str = "", cache_blocks: int | None = None) -> None:
    """Deploys an application, or changes its number of replicas."""
    if not arm:
        serve.run(app.build(app.Arguments(replicas=replicas, cache_blocks=cache_blocks)))
        return
    import ray_arms

    router = RequestRouterConfig(
        request_router_class=f"ray_arms.{arm}",
        request_router_kwargs={"cache_blocks": cache_blocks} if arm == "Lmetric" else {},
        request_routing_stats_period_s=1, request_routing_stats_timeout_s=5,
    )  # fmt: skip
    # Without an equal version, serve.run replaces all replicas.
    chosen = ray_arms.PublishingReplica.options(
        num_replicas=replicas, request_router_config=router, version="1", _internal=True
    )
    gateway = app.Gateway.options(version="1", _internal=True)  # type: ignore[attr-defined]
    serve.run(gateway.bind(chosen.bind(cache_blocks)), name=arm, route_prefix=f"/{arm}")


def main() -> None:
    """Serves until the end of the input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--metrics-port", type=int, help="port of Ray's metrics")
    parser.add_argument("--arms", nargs="+", default=[""], help="classes of ray_arms.py")
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
    for arm in flags.arms:
        run(flags.replicas, arm, flags.cache_blocks)
    print("ready", port, flush=True)
    for line in sys.stdin:
        *arm, replicas = line.split()
        run(int(replicas), *arm, cache_blocks=flags.cache_blocks)
        print("scaled", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
