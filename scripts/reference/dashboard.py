"""deploy/grafana/lmetric-router.json: the Grafana dashboard, from the panels below."""

from __future__ import annotations

import json
from typing import Any

from reference._panels import (
    ADVISED,
    E2E,
    ENGINE,
    MODEL,
    ROUTER,
    TPOT,
    TTFT,
    WIDTH,
    latency,
    of_engines,
    panel,
    quantile,
    rate,
    stat,
    variable,
    wanted,
)

ROWS: dict[str, list[dict[str, Any]]] = {
    "Overview": [
        stat(
            "Requests",
            "reqps",
            f"sum(rate(lmetric_requests_total{{{MODEL}}}[$__rate_interval]))",
            "Requests per second.",
        ),
        stat(
            "Errors",
            "percentunit",
            f'(sum(rate(lmetric_requests_total{{{MODEL},code=~"5.."}}[$__rate_interval])) '
            f"or 0 * sum(rate(lmetric_requests_total{{{MODEL}}}[$__rate_interval]))) / "
            f"sum(rate(lmetric_requests_total{{{MODEL}}}[$__rate_interval]))",
            "Share of requests with a 5xx.",
        ),
        stat(
            "TTFT p95",
            "s",
            f"histogram_quantile(0.95, sum by (le) (rate({TTFT}_bucket{{{MODEL}}}[$__rate_interval])))",
            "95th percentile of the time to first token.",
        ),
        stat(
            "Cache hits",
            "percentunit",
            f"sum(rate(lmetric_cached_tokens_total{{{MODEL}}}[$__rate_interval])) / "
            f"sum(rate(lmetric_reported_prompt_tokens_total{{{MODEL}}}[$__rate_interval]))",
            "Prompt tokens that engines found in their caches, of requests whose engines report them.",
        ),
        stat(
            "Healthy engines",
            "short",
            f"sum(min by (model, exported_instance) (lmetric_instance_healthy{{{ENGINE}}}))",
            "Engines that every router finds healthy.",
        ),
        stat(
            "Routers",
            "short",
            f"count(lmetric_build_info{{{ROUTER}}})",
            "Routers that answer Prometheus.",
        ),
    ],
    "Latency and traffic": [
        latency("Time to first token", TTFT),
        latency("Time per output token", TPOT),
        latency("Request time", E2E),
        panel(
            "Requests by status",
            "reqps",
            {"{{code}}": rate("lmetric_requests_total", MODEL, "code")},
            stacked=True,
        ),
        panel(
            "Requests by tenant",
            "reqps",
            {"{{tenant}}": rate("lmetric_requests_total", MODEL, "tenant")},
            stacked=True,
        ),
        panel(
            "Tokens",
            "short",
            {
                "prompt": rate("lmetric_prompt_tokens_total", MODEL),
                "output": rate("lmetric_output_tokens_total", MODEL),
            },
            about="Tokens per second.",
        ),
    ],
    "Router": [
        panel(
            "Router overhead",
            "s",
            {
                "p50 {{instance}}": quantile(0.5, "lmetric_router_overhead_seconds", MODEL, "instance"),
                "p99 {{instance}}": quantile(0.99, "lmetric_router_overhead_seconds", MODEL, "instance"),
            },
            about="Time from a whole request to its sending to an engine.",
        ),
        panel(
            "Decision time",
            "s",
            {
                "p50 {{instance}}": quantile(0.5, "lmetric_decision_seconds", MODEL, "instance"),
                "p99 {{instance}}": quantile(0.99, "lmetric_decision_seconds", MODEL, "instance"),
            },
        ),
        panel(
            "Event loop lag",
            "s",
            {"p99 {{instance}}": quantile(0.99, "lmetric_event_loop_lag_seconds", ROUTER, "instance")},
        ),
        panel(
            "CPU",
            "percentunit",
            {"{{instance}}": f"rate(process_cpu_seconds_total{{{ROUTER}}}[$__rate_interval])"},
            about="1 is one CPU core. A router uses at most about one.",
        ),
        panel(
            "Memory",
            "bytes",
            {
                "process {{instance}}": f"process_resident_memory_bytes{{{ROUTER}}}",
                "KV index {{instance}}": f"sum by (instance) (lmetric_index_bytes{{{MODEL}}})",
            },
        ),
        panel(
            "Spans",
            "short",
            {"{{outcome}}": rate("lmetric_trace_spans_total", ROUTER, "outcome")},
            about="Spans per second for the trace collector.",
        ),
        panel(
            "Peer routers",
            "short",
            {"{{instance}}": f"lmetric_replicas{{{ROUTER}}}"},
            about="Routers whose load counts.",
        ),
    ],
    "Engines": [
        panel("Batch size", "short", {"{{exported_instance}}": of_engines("lmetric_instance_bs")}),
        panel(
            "Queued prefill tokens",
            "short",
            {"{{exported_instance}}": of_engines("lmetric_instance_queued_prefill_tokens")},
        ),
        panel(
            "KV cache in use",
            "percentunit",
            {"{{exported_instance}}": of_engines("lmetric_instance_kv_usage")},
            most=1,
        ),
        panel(
            "Time to first token, p95",
            "s",
            {
                "{{exported_instance}}": quantile(
                    0.95, "lmetric_instance_time_to_first_token_seconds", ENGINE, "exported_instance"
                )
            },
        ),
        panel(
            "Time per output token, p95",
            "s",
            {
                "{{exported_instance}}": quantile(
                    0.95, "lmetric_instance_time_per_output_token_seconds", ENGINE, "exported_instance"
                )
            },
        ),
        panel(
            "Decisions",
            "reqps",
            {"{{exported_instance}}": rate("lmetric_instance_decisions_total", ENGINE, "exported_instance")},
        ),
        panel(
            "Age of load reports",
            "s",
            {"{{exported_instance}}": of_engines("lmetric_instance_report_age_seconds")},
        ),
        panel(
            "Engines by state",
            "short",
            {
                "{{state}}": f"count by (state) (group by (model, exported_instance, state) (lmetric_engine_state{{{ENGINE}}}))"
            },
            stacked=True,
        ),
        panel(
            "Engines by KV index mode",
            "short",
            {
                "{{mode}}": f"count by (mode) (group by (model, exported_instance, mode) (lmetric_engine_mode{{{ENGINE}}}))"
            },
            stacked=True,
        ),
    ],
    "Cache and plans": [
        panel(
            "Cached tokens",
            "percentunit",
            {
                "reported": f"{rate('lmetric_cached_tokens_total', MODEL)} / {rate('lmetric_reported_prompt_tokens_total', MODEL)}",
                "predicted": f"{rate('lmetric_predicted_cached_tokens_total', MODEL)} / {rate('lmetric_prompt_tokens_total', MODEL)}",
            },
            about="Share of the prompt tokens of finished requests. Reported: only of requests whose engines "
            "report cached tokens.",
            most=1,
        ),
        panel(
            "Index accuracy",
            "percentunit",
            {
                "{{exported_instance}}": "1 - ("
                + rate("lmetric_instance_overpredicted_tokens_total", ENGINE, "exported_instance")
                + " + "
                + rate("lmetric_instance_underpredicted_tokens_total", ENGINE, "exported_instance")
                + ") / "
                + rate("lmetric_instance_compared_prompt_tokens_total", ENGINE, "exported_instance")
            },
            about="1: each prediction of cached tokens was right.",
            most=1,
        ),
        panel(
            "Splits, fetches and migrations",
            "reqps",
            {
                "splits": rate("lmetric_split_requests_total", MODEL),
                "prefix fetches: {{outcome}}": rate("lmetric_prefix_fetches_total", MODEL, "outcome"),
                "KV transfers: {{outcome}}": rate("lmetric_kv_transfers_total", MODEL, "outcome"),
                "migrations: {{outcome}}": rate("lmetric_migrations_total", MODEL, "outcome"),
                "may not: {{plan}}": rate("lmetric_ineligible_requests_total", MODEL, "plan"),
            },
        ),
        panel(
            "Hot-spot guard",
            "short",
            {
                "suspected": f"sum(lmetric_guard_suspected{{{MODEL}}})",
                "filtering": f"sum(lmetric_guard_filtering{{{MODEL}}})",
            },
            about="Prefixes.",
        ),
        panel(
            "Priorities",
            "reqps",
            {"with a priority": rate("lmetric_prioritized_requests_total", MODEL)},
        ),
        panel(
            "Decisions without a score",
            "reqps",
            {
                "unscored": rate("lmetric_unscored_total", MODEL),
                "filter waived": rate("lmetric_filter_waived_total", MODEL),
                "policy fallback: {{cause}}": rate("lmetric_policy_fallbacks_total", MODEL, "cause"),
            },
        ),
    ],
    "Reliability": [
        panel(
            "Failed attempts",
            "reqps",
            {"{{kind}}": rate("lmetric_failures_total", MODEL, "kind")},
            stacked=True,
        ),
        panel("Retries", "reqps", {"{{outcome}}": rate("lmetric_retry_budget_total", MODEL, "outcome")}),
        panel(
            "Hedges",
            "reqps",
            {
                "{{outcome}}": rate("lmetric_hedges_total", MODEL, "outcome"),
                "not sent: {{reason}}": rate("lmetric_hedges_not_sent_total", MODEL, "reason"),
            },
        ),
        panel(
            "Budgets",
            "short",
            {"{{budget}}": f"min by (budget) (lmetric_budget_available{{{MODEL}}})"},
            about="Further retries and hedges that the budgets allow now.",
        ),
        panel(
            "Ejections",
            "short",
            {
                "{{rule}}": f"sum by (rule) (increase(lmetric_ejections_total{{{MODEL}}}[$__rate_interval]))",
                "not made: {{limit}}": "sum by (limit) "
                f"(increase(lmetric_ejections_prevented_total{{{MODEL}}}[$__rate_interval]))",
            },
        ),
        panel(
            "Streams whose engine failed",
            "reqps",
            {"{{outcome}}": rate("lmetric_stream_failovers_total", MODEL, "outcome")},
        ),
    ],
    "Admission": [
        panel(
            "Waiting requests",
            "short",
            {"{{tenant}}": f"sum by (tenant) (lmetric_waiting_requests{{{MODEL}}})"},
            stacked=True,
        ),
        panel(
            "Refused requests",
            "reqps",
            {"{{reason}}": rate("lmetric_refused_requests_total", MODEL, "reason")},
            stacked=True,
        ),
        panel(
            "Expected wait",
            "s",
            {"{{model}}": f"max by (model) (lmetric_admission_expected_wait_seconds{{{MODEL}}})"},
        ),
    ],
    "Records, canary and capacity": [
        panel(
            "Records",
            "short",
            {
                "{{outcome}}": rate("lmetric_records_total", ROUTER, "outcome"),
                "waiting {{instance}}": f"lmetric_records_waiting{{{ROUTER}}}",
            },
            about="Records per second by outcome, and records that wait for the writer.",
        ),
        panel(
            "Shadow: choices",
            "reqps",
            {"{{outcome}}": rate("lmetric_shadow_requests_total", MODEL, "outcome")},
            about="Whether the shadow's policy chose the engine that the router chose.",
            stacked=True,
        ),
        panel(
            "Shadow: predicted TTFT",
            "s",
            {
                "{{choice}}": f"{rate('lmetric_shadow_predicted_ttft_seconds_total', MODEL, 'choice')} "
                f"/ ignoring (choice) group_left () {rate('lmetric_shadow_predicted_ttft_requests_total', MODEL)}"
            },
            about="Mean predicted time to first token on the router's engine and on the shadow's engine.",
        ),
        panel(
            "Canary: requests",
            "short",
            {
                "{{arm}}": f"sum by (arm) (lmetric_canary_requests{{{MODEL}}})",
                "{{arm}}, failed": f"sum by (arm) (lmetric_canary_errors{{{MODEL}}})",
                "rollbacks: {{cause}}": "sum by (cause) "
                f"(increase(lmetric_canary_rollbacks_total{{{MODEL}}}[$__rate_interval]))",
            },
            about="Compared requests of the last canary by arm, and rollbacks.",
        ),
        panel(
            "Canary: TTFT",
            "s",
            {
                "{{model}}, {{arm}}": f'avg by (model, arm) (lmetric_canary_value{{{MODEL},metric="ttft_seconds"}})'
            },
            about="Mean time to first token by arm.",
        ),
        panel(
            "Canary: TTFT difference",
            "s",
            {
                "{{model}}, {{bound}}": "avg by (model, bound) "
                f'(lmetric_canary_difference{{{MODEL},metric="ttft_seconds"}})'
            },
            about="Canary minus stable arm, with the bounds of the 95% interval. Above zero: the canary is slower.",
            least=None,
        ),
        panel(
            "Wanted engines",
            "short",
            {
                "{{role}} {{type}}": wanted("lmetric_wanted_replicas"),
                "{{role}} {{type}}, low": wanted("lmetric_wanted_replicas_low"),
                "{{role}} {{type}}, high": wanted("lmetric_wanted_replicas_high"),
                "healthy": f"sum(min by (model, exported_instance) (lmetric_instance_healthy{{{ENGINE}}}))",
            },
            about="Engines that meet the SLO, with their interval, and the healthy engines. Without fresh advice, "
            "no line is shown.",
        ),
        panel(
            "Rounds of capacity advice",
            "short",
            {
                "{{outcome}}": "sum by (outcome) "
                f"(increase(lmetric_capacity_rounds_total{{{ADVISED}}}[$__rate_interval]))",
            },
        ),
        panel(
            "Age of the capacity advice",
            "s",
            {"{{model}}": f"max by (model) (lmetric_capacity_advice_age_seconds{{{ADVISED}}})"},
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Returns the dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            }
        )
        y, x, tallest = y + 1, 0, 0
        for each in row:
            place = each["gridPos"]
            if x + place["w"] > WIDTH:
                y, x, tallest = y + tallest, 0, 0
            panels.append({**each, "gridPos": {"x": x, "y": y, **place}})
            x, tallest = x + place["w"], max(tallest, place["h"])
        y += tallest
    for number, each in enumerate(panels, 1):
        each["id"] = number
    return {
        "title": "lmetric-router",
        "uid": "lmetric-router",
        "description": "Requests, engines and caches of lmetric-router.",
        "tags": ["lmetric-router", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                    "hide": 0,
                },
                variable("job", "Job", "label_values(lmetric_build_info, job)"),
                variable("router", "Router", 'label_values(lmetric_build_info{job=~"$job"}, instance)'),
                variable("model", "Model", 'label_values(lmetric_policy_info{job=~"$job"}, model)'),
                variable(
                    "engine",
                    "Engine",
                    'label_values(lmetric_engine_state{job=~"$job",model=~"$model"}, exported_instance)',
                ),
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def files() -> dict[str, str]:
    """Returns the dashboard as JSON."""
    return {"deploy/grafana/lmetric-router.json": json.dumps(dashboard(), indent=2) + "\n"}
