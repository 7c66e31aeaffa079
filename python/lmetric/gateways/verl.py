"""A load balancer for verl: the core chooses the server of each turn of a rollout.

verl 0.9.1 loads any class that has the methods of its ``RequestLoadBalancer`` and runs it as a Ray
actor. Set ``actor_rollout_ref.rollout.router_config_path`` to a YAML file:

    router_class: lmetric.gateways.verl.LmetricLoadBalancer
    policy: lmetric
    block_size: 16
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmetric._core import NoInstanceError, Router
from lmetric.defaults import DEFAULT_POLICY
from lmetric.gateways.placements import Placement

__all__ = ["LmetricLoadBalancer"]

_SETTINGS = ("policy", "knobs", "guard", "cache_blocks", "block_size", "seed")


class LmetricLoadBalancer:
    """Chooses servers by a policy of lmetric-router, for verl's ``LLMServerClient``.

    The router follows the servers' prefix caches by the prompts that it placed: verl reports
    neither KV events nor the tokens of answers.

    Args:
        servers: handles of Ray actors by the servers' names.
        router_kwargs: verl's YAML file. Its keys, beside ``router_class``: ``policy``, a built-in
            policy or an expression; ``knobs``, its parameters; ``guard``, the hot-spot guard;
            ``cache_blocks``, KV blocks of a server. Without ``cache_blocks``, the index forgets no
            prefix. ``block_size``: tokens per block, 16. ``seed``: of random choices, 0.

    Raises:
        ValueError: an unknown key.
        LmetricError: an unknown policy or parameter.
    """

    def __init__(self, servers: Mapping[str, Any], router_kwargs: Mapping[str, Any] | None = None) -> None:
        given = {name: value for name, value in (router_kwargs or {}).items() if name != "router_class"}
        if unknown := given.keys() - set(_SETTINGS):
            raise ValueError(
                f"unknown keys in verl's router file: {', '.join(sorted(unknown))}; "
                f"known: router_class, {', '.join(_SETTINGS)}"
            )
        self._cache_blocks = given.pop("cache_blocks", None)
        self._router = Router(given.pop("policy", DEFAULT_POLICY), **given)
        self._servers: dict[str, Any] = {}
        # Open requests of each server, oldest first, with the IDs that verl gave.
        self._open: dict[str, list[tuple[str, Placement]]] = {}
        self.add_servers(servers)

    def require_acquire_fields(self) -> list[str]:
        """Returns the arguments of verl's ``generate`` that `acquire_server` needs."""
        return ["prompt_ids", "sampling_params"]

    def require_release_fields(self) -> list[str]:
        """Returns the fields that `release_server` needs."""
        return ["request_id"]

    def acquire_server(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> tuple[str, Any]:
        """Places a turn, and returns its server: name and handle.

        Args:
            request_id: the trajectory; turns of one trajectory have the same.
            prompt_ids: tokens of the prompt.
            sampling_params: of the engine; ``max_tokens`` or ``max_new_tokens`` is read.

        Raises:
            RuntimeError: there are no servers; verl's clients know this text and retry.
        """
        sampling = sampling_params or {}
        most = sampling.get("max_tokens", sampling.get("max_new_tokens"))
        fields: dict[str, Any] = {"session": request_id, "request_id": request_id}
        if prompt_ids:
            fields["token_ids"] = list(prompt_ids)
        else:
            fields["prompt_tokens"] = 1
        if isinstance(most, int) and most > 0:
            fields["max_tokens"] = most
        try:
            placement = Placement(self._router, fields)
            placement.send()
        except NoInstanceError:
            raise RuntimeError("No available servers in load balancer") from None
        server = placement.decision.instance
        self._open[server].append((request_id, placement))
        return server, self._servers[server]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Ends a turn: the oldest one of ``request_id`` on a server; None: of any trajectory.

        Does nothing if there is none, for example because the server was removed.
        """
        turns = self._open.get(server_id, [])
        for number, (known, placement) in enumerate(turns):
            if request_id is None or known == request_id:
                del turns[number]
                placement.done()
                return

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Adds servers. A known name gets the new handle and an empty cache."""
        for name, handle in servers.items():
            self.remove_servers([name])
            self._router.add_instance(name, cache_blocks=self._cache_blocks)
            self._servers[name], self._open[name] = handle, []

    def remove_servers(self, server_ids: Iterable[str]) -> None:
        """Removes servers with their turns. Unknown names do nothing."""
        for name in server_ids:
            if self._servers.pop(name, None) is not None:
                for _, placement in self._open.pop(name):
                    placement.fail("reset")
                self._router.remove_instance(name)

    def get_all_servers(self) -> list[str]:
        """Returns the names of all servers."""
        return list(self._servers)

    def get_inflight_count(self, server_id: str) -> int:
        """Returns the number of open turns of a server; 0 for an unknown one."""
        return len(self._open.get(server_id, ()))

    def get_total_inflight(self) -> int:
        """Returns the number of open turns of all servers."""
        return sum(map(len, self._open.values()))

    def get_status(self) -> dict[str, Any]:
        """Returns the state for verl's logs."""
        return {
            "servers": self._loads(),
            "total_inflight": self.get_total_inflight(),
            "active_servers": len(self._servers),
            "registered_handles": list(self._servers),
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forgets what the servers have cached: the next turns go where load is least.

        verl calls it between the phases of a step, when the weights change, and after changes of
        the servers. ``cleared_entries``: the servers whose caches were forgotten.
        """
        for name in self._servers:
            self._router.blocks_cleared(name)
        return {"cleared_entries": len(self._servers), "server_loads": self._loads()}

    def _loads(self) -> dict[str, int]:
        return {name: len(turns) for name, turns in self._open.items()}
