"""Priority levels of the requests that wait for a model."""

from __future__ import annotations

from collections.abc import Mapping

from lmetric.config import AdmissionConfig, TenantConfig


class Levels:
    """The levels of tenants and classes. ``on``: whether there are any.

    ``holds``: whether requests wait in a queue of the router.
    """

    def __init__(
        self, admission: AdmissionConfig | None, tenants: Mapping[str, TenantConfig], *, holds: bool
    ) -> None:
        classes = {} if admission is None else admission.classes
        given = tenants if holds else {}
        self._classes = {name: each.level for name, each in classes.items() if each.level is not None}
        self._tenants = {name: each.level for name, each in given.items() if each.level is not None}
        self.on = bool(self._tenants or self._classes)

    def of(self, tenant: str, slo_class: str) -> int:
        """Returns the level of a request; 0: neither its tenant nor its class has one.

        If both have one, the lower level holds: clients name their class, and must not raise
        themselves above their tenant.
        """
        own, of_class = self._tenants.get(tenant), self._classes.get(slo_class)
        if own is None or of_class is None:
            return own or of_class or 0
        return min(own, of_class)
