"""A Kubernetes Service in front of engine pods, whose connections kube-proxy divides."""

from __future__ import annotations

from typing import Any

from lmetric_lab.migrate.draft import OLD_RULE, Draft

KIND = "Service"


def translate(draft: Draft, service: dict[str, Any]) -> None:
    """Fills the draft from a Service."""
    meta = dict(service.get("metadata") or {})
    name = str(meta.get("name", "without a name"))
    spec = dict(service.get("spec") or {})
    labels = spec.get("selector")
    if not isinstance(labels, dict) or not labels:
        raise draft.error(f"Service {name}: spec.selector", labels, "the labels of the engine pods")
    ports = spec.get("ports")
    if not isinstance(ports, list) or not ports:
        raise draft.error(f"Service {name}: spec.ports", ports, "the port of the engines")
    port, *others = sorted(ports, key=lambda each: each.get("name") not in ("http", "https"))
    affinity = spec.get("sessionAffinity") == "ClientIP"
    draft.set("policy", "session_affinity" if affinity else "round_robin")
    draft.note("policy", f"{OLD_RULE}.")
    if affinity:
        draft.remark("sessionAffinity ClientIP", "sessions come in the header x-session-id")
    pods: dict[str, Any] = {
        "selector": ",".join(f"{key}={value}" for key, value in labels.items()),
        "port": port.get("targetPort", port["port"]),
    }
    if namespace := meta.get("namespace"):
        pods["namespace"] = namespace
    draft.set("discovery", [{"kubernetes": pods}])
    for each in others:
        draft.remark(f"port {each.get('name', each['port'])}", "engines have one port for requests")
