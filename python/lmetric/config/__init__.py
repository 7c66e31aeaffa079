"""The server's configuration: one schema for YAML file, environment and flags.

Flags override the environment, the environment overrides the file, and the file overrides the
defaults. Errors name the source of the value, its key path, the value, and the nearest valid key.
"""

from lmetric.config.budgets import BudgetConfig as BudgetConfig
from lmetric.config.files import ConfigError as ConfigError
from lmetric.config.files import UniqueKeys as UniqueKeys
from lmetric.config.files import read_secret as read_secret
from lmetric.config.files import read_yaml_lines as read_yaml_lines
from lmetric.config.files import read_yaml_mapping as read_yaml_mapping
from lmetric.config.files import reading as reading
from lmetric.config.identity import JwtIssuer as JwtIssuer
from lmetric.config.kinds import UNIX as UNIX
from lmetric.config.kinds import Role as Role
from lmetric.config.kinds import Strict as Strict
from lmetric.config.kinds import embedded_engines as embedded_engines
from lmetric.config.kinds import is_loopback as is_loopback
from lmetric.config.kinds import unix_path as unix_path
from lmetric.config.load import load_config as load_config
from lmetric.config.network import EngineTls as EngineTls
from lmetric.config.network import ListenerTls as ListenerTls
from lmetric.config.records import RecordsConfig as RecordsConfig
from lmetric.config.reload import effective as effective
from lmetric.config.reload import needs_restart as needs_restart
from lmetric.config.schema import ADMIN as ADMIN
from lmetric.config.schema import CONFIGURED as CONFIGURED
from lmetric.config.schema import POLICY_KNOBS as POLICY_KNOBS
from lmetric.config.schema import AdmissionConfig as AdmissionConfig
from lmetric.config.schema import Auth as Auth
from lmetric.config.schema import DiscoverySource as DiscoverySource
from lmetric.config.schema import DnsSource as DnsSource
from lmetric.config.schema import Ejection as Ejection
from lmetric.config.schema import EngineConfig as EngineConfig
from lmetric.config.schema import HedgingConfig as HedgingConfig
from lmetric.config.schema import KubernetesSource as KubernetesSource
from lmetric.config.schema import KvEvents as KvEvents
from lmetric.config.schema import KvEventsSetting as KvEventsSetting
from lmetric.config.schema import Limits as Limits
from lmetric.config.schema import LoadAdmission as LoadAdmission
from lmetric.config.schema import Log as Log
from lmetric.config.schema import ModelConfig as ModelConfig
from lmetric.config.schema import PolicyChange as PolicyChange
from lmetric.config.schema import PoolSettings as PoolSettings
from lmetric.config.schema import ReplicasConfig as ReplicasConfig
from lmetric.config.schema import Retries as Retries
from lmetric.config.schema import ServerConfig as ServerConfig
from lmetric.config.schema import SloClass as SloClass
from lmetric.config.schema import TenantConfig as TenantConfig
from lmetric.config.schema import Timeouts as Timeouts
from lmetric.config.schema import TracingConfig as TracingConfig
from lmetric.config.trials import CanaryConfig as CanaryConfig
from lmetric.config.trials import CanaryStart as CanaryStart
from lmetric.config.trials import ShadowConfig as ShadowConfig
