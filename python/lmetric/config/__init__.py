"""The server's configuration: one schema for YAML file, environment and flags.

Flags override the environment, the environment overrides the file, and the file overrides the
defaults. Errors name the source of the value, its key path, the value, and the nearest valid key.
"""

from lmetric.config.files import ConfigError, UniqueKeys, read_secret, read_yaml_mapping, reading
from lmetric.config.kinds import EngineUrl, Port, Positive, Role, Seconds, Strict, ZmqEndpoint, unix_path
from lmetric.config.load import ENV_PREFIX, json_schema, load_config, render, render_changed
from lmetric.config.network import EngineTls, Forwarded, ListenerTls
from lmetric.config.problems import explain
from lmetric.config.reload import effective, needs_restart, reloads
from lmetric.config.schema import (
    ADMIN,
    CONFIGURED,
    POLICY_KNOBS,
    Admin,
    Auth,
    DiscoverySource,
    DnsSource,
    EngineConfig,
    Health,
    KubernetesSource,
    KvEvents,
    KvEventsSetting,
    Limits,
    Load,
    Log,
    ModelConfig,
    PolicyChange,
    PoolSettings,
    ReplicasConfig,
    Retries,
    ServerConfig,
    TenantConfig,
    Timeouts,
)

__all__ = [
    "ADMIN",
    "CONFIGURED",
    "ENV_PREFIX",
    "POLICY_KNOBS",
    "Admin",
    "Auth",
    "ConfigError",
    "DiscoverySource",
    "DnsSource",
    "EngineConfig",
    "EngineTls",
    "EngineUrl",
    "Forwarded",
    "Health",
    "KubernetesSource",
    "KvEvents",
    "KvEventsSetting",
    "Limits",
    "ListenerTls",
    "Load",
    "Log",
    "ModelConfig",
    "PolicyChange",
    "PoolSettings",
    "Port",
    "Positive",
    "ReplicasConfig",
    "Retries",
    "Role",
    "Seconds",
    "ServerConfig",
    "Strict",
    "TenantConfig",
    "Timeouts",
    "UniqueKeys",
    "ZmqEndpoint",
    "effective",
    "explain",
    "json_schema",
    "load_config",
    "needs_restart",
    "read_secret",
    "read_yaml_mapping",
    "reading",
    "reloads",
    "render",
    "render_changed",
    "unix_path",
]
