"""The router's own pages: path, methods, text, and who may use each.

The server answers them (`server/http/pages.py`), the page at / lists them, and the OpenAPI document
describes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

ADMIN, KEY, REPLICA, OPEN = "adminToken", "apiKey", "replicaToken", None

# The readers of a page. "record": an administrator, or the tenant of the decision. "viewer": an
# administrator, or with API keys a tenant, who sees less. "metrics": anyone, unless
# `admin.protect_metrics` is set.
Access = Literal["open", "metrics", "tenant", "admin", "record", "viewer", "replica"]
CREDENTIALS: Mapping[Access, tuple[str | None, ...]] = {
    "open": (OPEN,),
    "metrics": (OPEN, ADMIN),
    "tenant": (KEY, OPEN),
    "admin": (ADMIN, OPEN),
    "record": (KEY, ADMIN, OPEN),
    "viewer": (KEY, ADMIN, OPEN),
    "replica": (REPLICA, OPEN),
}


class OwnPage(Struct, frozen=True, eq=False, gc=False):
    """A page, with the summary of each method.

    Attributes:
        path: the path; ``{name}`` stands for a part of it.
        tag: the page's section of the OpenAPI document.
        link: the text of the link on the page at / or at /debug; "": no link.
        more: credentials that show more on an open page.
    """

    path: str
    tag: str
    access: Access
    methods: Mapping[str, str]
    link: str = ""
    more: tuple[str, ...] = ()

    @property
    def credentials(self) -> tuple[str | None, ...]:
        """The credentials of the page; `OPEN`: none, if no credential is configured."""
        return (*CREDENTIALS[self.access], *self.more)

    @property
    def allowed(self) -> tuple[str, ...]:
        """The methods for the error 405 and its header `allow`, changes first."""
        if "GET" not in self.methods:
            return tuple(self.methods)
        changes = tuple(method for method in self.methods if method != "GET")
        return (*changes, "GET") if changes else ("GET", "HEAD")


def _debug(path: str, summary: str, link: str) -> OwnPage:
    return OwnPage(path, "debug", "admin", {"GET": summary}, link)


def _admin(path: str, **methods: str) -> OwnPage:
    return OwnPage(path, "admin", "admin", methods)


OWN_PAGES: Mapping[str, OwnPage] = {
    page.path: page
    for page in (
        OwnPage("/", "health", "open", {"GET": "State of the fleet, API paths and pages"}, more=(KEY, ADMIN)),
        OwnPage(
            "/health",
            "health",
            "open",
            {"GET": "Whether the process works"},
            "200 while the process works",
        ),
        OwnPage(
            "/ready",
            "health",
            "open",
            {"GET": "Whether an engine can accept requests; engines by mode, and warnings with their fixes"},
            "200 while an engine accepts requests",
            more=(ADMIN,),
        ),
        OwnPage(
            "/metrics",
            "health",
            "metrics",
            {"GET": "Metrics in Prometheus' text format"},
            "metrics for Prometheus",
        ),
        OwnPage(
            "/ui",
            "health",
            "open",
            {"GET": "Live page; its data is at /debug/live"},
            "live page: engines, rates and requests",
        ),
        OwnPage("/ui/{file}", "health", "open", {"GET": "Scripts and styles of the live page"}),
        OwnPage("/v1/models", "models", "tenant", {"GET": "List the served models"}, "served models"),
        OwnPage("/v1/models/{model}", "models", "tenant", {"GET": "Show a model"}),
        OwnPage("/openapi.json", "health", "open", {"GET": "This document"}, "OpenAPI document of all paths"),
        _debug("/debug", "List the debug pages", "engines, indicators and decisions"),
        _debug(
            "/debug/engines",
            "Engines with modes, capabilities and load",
            "engines: health, mode of the KV index, capabilities, load reports",
        ),
        _debug(
            "/debug/indicators",
            "Indicators of each engine, by model",
            "the values that policies read, by engine",
        ),
        _debug(
            "/debug/decisions",
            "List the latest decisions",
            "recent decisions; /debug/decisions/ID explains one decision",
        ),
        _debug(
            "/debug/discovery",
            "State of the discovery sources",
            "service discovery: sources and their engines",
        ),
        _debug(
            "/debug/admission",
            "Admission by load: waiting requests and predicted waits",
            "admission: waiting requests, predicted waits and counts",
        ),
        _debug(
            "/debug/programs",
            "Agent programs and the working sets of the caches",
            "agent programs: counts, and expected tokens in each engine's cache",
        ),
        _debug(
            "/debug/replicas",
            "State of the exchange with other routers",
            "other routers and their published load",
        ),
        OwnPage(
            "/debug/live",
            "debug",
            "viewer",
            {"GET": "Rates, engines and requests of the last minutes, or as events each second"},
            "the data of the live page",
        ),
        OwnPage("/debug/decisions/{id}", "debug", "record", {"GET": "Explain a decision"}),
        _admin("/admin/engines", GET="List the engines", POST="Add an engine"),
        _admin("/admin/engines/{name}", DELETE="Remove an engine"),
        _admin("/admin/engines/{name}/drain", POST="Drain an engine"),
        _admin("/admin/engines/{name}/undrain", POST="Undrain an engine"),
        _admin("/admin/engines/{name}/role", POST="Change an engine's role"),
        _admin(
            "/admin/engines/{name}/indicators",
            POST="Push values of declared indicators; null withdraws one",
        ),
        _admin("/admin/guard", POST="Turn the hot-spot guard on or off"),
        _admin("/admin/reload", POST="Read the configuration again, like SIGHUP"),
        _admin("/admin/policy", GET="Show the policies", PUT="Replace policies"),
        _admin("/admin/canary", GET="Show canaries and shadows, with their differences"),
        _admin("/admin/canary/start", POST="Route a share of the requests under another policy"),
        _admin("/admin/canary/promote", POST="Make the canary's policy the policy of all requests"),
        _admin("/admin/canary/rollback", POST="End the canary, or undo its promotion"),
        OwnPage(
            "/replicas",
            "replicas",
            "replica",
            {"POST": "Exchange load between routers; only with `replicas.urls`"},
        ),
    )
}

DEBUG_LINKS: Mapping[str, str] = {
    path: page.link for path, page in OWN_PAGES.items() if page.link and path.startswith("/debug/")
}
HOME_LINKS: Mapping[str, OwnPage] = {
    path: page for path, page in OWN_PAGES.items() if page.link and path not in DEBUG_LINKS
}
