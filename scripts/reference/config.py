"""docs/reference/configuration.md, from `lmetric.config` and `lmetric.options`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lmetric import options
from lmetric.config import PoolSettings, ServerConfig, reloads

HEAD = """\
# Configuration

Settings come from flags (`--set timeouts.connect=1`), the environment (`LMETRIC__TIMEOUTS__CONNECT=1`) and one
YAML file (`--config FILE`, `timeouts: {connect: 1}`). Flags override the environment, the environment overrides the
file, and the file overrides the defaults. Unknown keys are errors. `lmetric-router config` prints the resulting
configuration. [Example](../../examples/config.yaml).

Variables begin with `LMETRIC__`, with two underscores. Kubernetes adds variables such as `LMETRIC_ROUTER_PORT` to pods for the
Services of their namespace; the router ignores them. The log names other variables that begin with `LMETRIC`.

If a key has *yes* under "reload", SIGHUP and `POST /admin/reload` apply its new value without a restart. Running
requests continue under the old value. A reload with an error changes nothing. Removed engines drain, as with
[discovery](../how-to/discovery.md). The router logs changed keys that need a restart.

Set secrets in the file or the environment (`LMETRIC__REPLICAS__TOKEN`), not with flags: other users of the machine
see flags in the process list. A secret may be `${NAME}`, the value of the environment variable `NAME`: `api_key: ${ENGINE_KEY}`. If the
variable is not set, the router does not start. Other forms (`$NAME`, `os.environ/NAME`) and references outside of secrets are errors. [Deploying](../how-to/deploying.md#secrets) describes the source of secrets in each deployment.
"""


MANY = {list: "[]", dict: ".NAME"}


def inner(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """Returns the section inside an annotation, and the suffix of its key in a list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    for part in get_args(annotation):
        section, many = inner(part)
        if section is not None:
            return section, many or MANY.get(get_origin(annotation), "")
    return None, ""


def default(field: FieldInfo) -> str:
    """Returns the default as YAML; "" for none, empty values and sections."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ([], {}) or isinstance(value, BaseModel | options.Guard):
        return ""
    if isinstance(value, options.ProgramObservation):
        value = options.kind_of(value)
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def section(model: type[BaseModel], path: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    """A table of `model`'s keys under `path`, then its sections."""
    yield "| key | default | reload | |\n| --- | --- | --- | --- |\n"
    nested = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        below, many = inner(field.annotation)
        if below is not None:
            nested.append((f"{path}{key}{many}", below))
        description = (field.description or "").replace("|", "\\|")
        # A model's own settings default to those of the top level.
        shown = (
            "the top level's" if path == "models[]." and name in PoolSettings.model_fields else default(field)
        )
        reload = "yes" if reloads(f"{path}{name}") else ""
        yield f"| `{path}{key}` | {shown} | {reload} | {description} |\n"
    for where, below in nested:
        if below not in seen:
            seen.add(below)
            yield f"\n## {where}\n\n{(below.__doc__ or '').strip().splitlines()[0]}\n\n"
            yield from section(below, f"{where}.", seen)


OPTIONS = """
## Routing options

`split`, `prefix_fetch`, `rebalance`, `priority` and `guard` have the same settings in the server, in
[simulations and studies](../research/simulator.md) and in [Python](python.md#options). A value is a name or a mapping:

```yaml
split: libra
rebalance: { kind: star, threshold: 0.2, horizon_steps: 1024, half_life_steps: 256 }
guard: { window_seconds: 30 }
```

A flag or variable extends the mapping of a file (`--set rebalance.threshold=0.3`); another kind replaces it. A
model's option replaces the top level's option as a whole. On the command line: `--rebalance star
--rebalance-settings threshold=0.3,points=16`.
"""


def option_tables() -> Iterator[str]:
    """A table of the settings of each kind of each option, without those of simulations."""
    for what, selector in options.SELECTORS.items():
        for kind, cls in options.served(what).items():
            if kind == "star_current":
                continue  # `star` with one setting
            name = f"{what}: {kind}" if selector == "kind" else what
            yield f"\n### {name}\n\n{(cls.__doc__ or '').strip().splitlines()[0]}\n"
            docs = options.field_docs(cls)
            rows = [each for each in dataclasses.fields(cls) if not options.is_study(each)]
            if rows:
                yield "\n| setting | default | |\n| --- | --- | --- |\n"
            for each in rows:
                default = each.metadata.get("server", each.default)
                shown = "" if default is None else f"`{json.dumps(default)}`"
                yield f"| `{each.name}` | {shown} | {docs[each.name]} |\n"


TAIL = """
<!-- scripts/make_reference config makes this page of python/lmetric/config/schema.py and python/lmetric/options.py. -->
"""


def files() -> dict[str, str]:
    """Returns the page."""
    sections = "".join(section(ServerConfig, "", {ServerConfig}))
    page = HEAD + "\n" + sections + OPTIONS + "".join(option_tables()) + TAIL
    return {"docs/reference/configuration.md": page}
