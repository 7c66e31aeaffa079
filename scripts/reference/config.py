"""docs/reference/configuration.md and settings.md, from `lmetric.config` and `lmetric.options`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lmetric import option_values, options
from lmetric.config import PoolSettings, ServerConfig
from lmetric.config.kinds import Strict
from lmetric.config.reload import reloads
from lmetric.config.tuning import KEY as TUNING
from lmetric.config.tuning import is_tuning, tuning_fields
from lmetric.descriptions import descriptions

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
[discovery](../how-to/deploying.md#engines). The router logs changed keys that need a restart.

Set secrets in the file or the environment (`LMETRIC__REPLICAS__TOKEN`), not with flags: other users of the machine
see flags in the process list. A secret may be `${NAME}`, the value of the environment variable `NAME`: `api_key: ${ENGINE_KEY}`. If the
variable is not set, the router does not start. Other forms (`$NAME`, `os.environ/NAME`) and references outside of secrets are errors. [Deploying](../how-to/deploying.md#secrets) describes the source of secrets in each deployment.
"""


MANY = {list: "[]", dict: ".NAME"}


def inner(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """Returns the section inside an annotation, and the suffix of its key in a list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
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
    if value is None or value in ([], {}) or isinstance(value, Strict | options.Guard):
        return ""
    if isinstance(value, options.ProgramObservation):
        value = option_values.kind_of(value)
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def when(field: FieldInfo) -> str:
    """Returns when to change a setting, as the end of a sentence with "if"."""
    extra = field.json_schema_extra
    return str(extra.get("when", "")) if isinstance(extra, dict) else ""


def rows(fields: Iterable[tuple[str, FieldInfo, str]]) -> str:
    """Returns a table of settings: key, field and description."""
    lines = ["| key | default | reload | | change it if |\n| --- | --- | --- | --- | --- |\n"]
    for key, field, about in fields:
        description = about.replace("|", "\\|")
        reload = "yes" if reloads(key.removeprefix(f"{TUNING}.")) else ""
        lines.append(f"| `{key}` | {default(field)} | {reload} | {description} | {when(field)} |\n")
    return "".join(lines)


def is_section(field: FieldInfo) -> bool:
    """Whether a setting has no value of its own, only the settings of its section."""
    below, _ = inner(field.annotation)
    words = [part for part in get_args(field.annotation) if get_origin(part) is Annotated]
    return below is not None and not words


def sections(model: type[BaseModel], path: str, seen: dict[type[BaseModel], str]) -> Iterator[str]:
    """Yields a table of `model`'s keys under `path`, then its sections. `seen`: those so far, with
    their keys."""
    # A model has the settings of the first section, too.
    general = PoolSettings.model_fields if path == "models[]." else {}
    fields = {name: field for name, field in model.model_fields.items() if name not in general}

    described = descriptions(model)

    def listed() -> Iterator[tuple[str, FieldInfo, str]]:
        for name, field in fields.items():
            key, (below, _) = f"{path}{field.alias or name}", inner(field.annotation)
            if is_section(field) and below in seen and below is not ServerConfig:
                yield key, field, f"{described[name]}. Keys as in `{seen[below]}`"
            elif not is_section(field) and not is_tuning(field):
                yield key, field, described[name]

    yield rows(listed())
    for name, field in fields.items():
        below, many = inner(field.annotation)
        if below is not None and below not in seen:
            where = f"{path}{field.alias or name}{many}"
            seen[below] = where
            about = described[name]
            change = f" Change it if {when(field)}." if is_section(field) and when(field) else ""
            yield f"\n## {where}\n\n{about[:1].upper()}{about[1:]}.{change}\n"
            yield MODELS if where == "models[]" else ""
            yield "\n"
            yield from sections(below, f"{where}.", seen)


MODELS = """
A model also has the settings from `{first}` to `{last}` of the [first table](configuration.md), and the sections
{sections}. Their default is the value of the top level.
"""

TUNING_HEAD = """
## tuning

Unstable: a new version can change or remove these settings without notice. Their defaults were measured. The keys
have the path of the section that they belong to.

"""


OPTIONS = """
## Routing options

A value is a name or a mapping, such as `rebalance: { kind: star, forecast: predictor.npz }`. A flag or variable extends
the mapping of a file (`--set programs.theta=0.9`); another kind replaces it. A model's option replaces the top level's
option as a whole. [Simulations and studies](../research/simulator.md) and [Python](python.md#options) accept more
settings of the same options: servers have the defaults.
"""


def option_tables() -> Iterator[str]:
    """Yields the kinds of each option, and a table of their settings for servers."""
    for what, selector in options.SELECTORS.items():
        yield f"\n### {what}\n\n"
        found: dict[str, tuple[FieldInfo, str]] = {}
        for kind, cls in option_values.served(what).items():
            if selector == "kind":
                yield f"- `{kind}`: {(cls.__doc__ or '').strip().splitlines()[0]}\n"
            described = descriptions(cls)
            for name, field in option_values.offered(cls, server=True).items():
                if name != selector:
                    found.setdefault(name, (field, described[name]))
        if selector != "kind":
            yield f"{(cls.__doc__ or '').strip().splitlines()[0]}\n"
        if found:
            yield "\n| key | default | | change it if |\n| --- | --- | --- | --- |\n"
        for name, (field, about) in found.items():
            shown = "" if field.default is None else f"`{json.dumps(field.default)}`"
            yield f"| `{what}.{name}` | {shown} | {about} | {option_values.when(field)} |\n"


TAIL = """
<!-- scripts/make_reference config makes this page of python/lmetric/config/schema.py and python/lmetric/options.py. -->
"""

SECTIONS_HEAD = """
## Sections

The page [Settings of sections](settings.md) has the keys of two parts and more. At its end are
[routing options](settings.md#routing-options) and settings for [tuning](settings.md#tuning).

"""

SECTIONS_PAGE = """\
# Settings of sections

Settings whose keys have two parts or more. [Configuration](configuration.md) describes how to set them, and has the keys of one part.
"""


def about(path: tuple[str, ...]) -> str:
    """Returns the description of a tuning setting."""
    section: Any = ServerConfig
    for key in path[:-1]:
        section, _ = inner(section.model_fields[key].annotation)
    return descriptions(section)[path[-1]]


def anchor(title: str) -> str:
    """Returns the anchor of a heading, as the site makes it."""
    return re.sub("[^a-z_ -]", "", title.lower()).replace(" ", "-")


def links(page: str) -> str:
    """Returns a table of the sections of `page` whose keys have one part."""
    lines = ["| section | |\n| --- | --- |\n"]
    for title, about in re.findall(r"^## (.+)\n\n([^|#].*)", page, re.MULTILINE):
        name = title.removesuffix("[]").removesuffix(".NAME")
        if "." not in name:
            lines.append(
                f"| [{name}](settings.md#{anchor(title)}) | {re.split('[.;:(]', about)[0].strip()} |\n"
            )
    return "".join(lines)


def of_models() -> str:
    """Returns the paragraph about the settings of the top level that models have, too."""
    one_part = [name for name, field in ServerConfig.model_fields.items() if not is_section(field)]
    own = [name for name in one_part if name in PoolSettings.model_fields]
    first, last = one_part.index(own[0]), one_part.index(own[-1])
    assert one_part[first : last + 1] == own, "the table has them one after the other"
    links = []
    for name, field in PoolSettings.model_fields.items():
        if is_section(field):
            links.append(f"[{name}](#{anchor(name + inner(field.annotation)[1])})")
    return MODELS.format(first=own[0], last=own[-1], sections=f"{', '.join(links[:-1])} and {links[-1]}")


def files() -> dict[str, str]:
    """Returns the page of the first section, and the page of the other sections."""
    made = "".join(sections(ServerConfig, "", {ServerConfig: ""})).replace(MODELS, of_models())
    tuning = rows(
        (".".join((TUNING, *path)), field, about(path)) for path, field in tuning_fields(ServerConfig).items()
    )
    first, mark, below = made.partition("\n\n## ")
    sections_below = mark + below
    page = sections_below + OPTIONS + "".join(option_tables()) + TUNING_HEAD + tuning
    return {
        "docs/reference/configuration.md": f"{HEAD}\n{first}\n{SECTIONS_HEAD}{links(sections_below)}{TAIL}",
        "docs/reference/settings.md": f"{SECTIONS_PAGE}{page[1:]}{TAIL}",
    }
