"""The report of missed SLOs as one HTML page, without scripts and external requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from lmetric_lab.whatif.check import FitCheck
from lmetric_lab.whatif.slo_report import MISSES, Row, SloReport

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; --bad: #d64; --good: #3a7; }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; white-space: nowrap; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
.bar { display: inline-block; width: 8rem; height: .7rem; background: var(--bad); }
.bar i { display: block; height: 100%; background: var(--good); }
.muted { opacity: .7; } pre { overflow-x: auto; line-height: 1.2; }
"""
_COLUMNS = (
    "",
    "requests",
    "within SLO",
    "",
    "TTFT missed",
    "TPOT missed",
    "end to end missed",
    "failed",
    "TTFT p50",
    "TTFT p99",
    "TPOT",
)


def page(report: SloReport, check: FitCheck | None, title: str) -> str:
    """The page of a report. ``check``: the fit of its simulations; None: nothing was simulated."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">SLO: {escape(report.slo)}</p>',
        f"<p><strong>{escape(report.advice())}</strong></p>",
        _section("Engines", report.engines),
        _section("Tenants", report.tenants),
        _section("Prompts", report.prompts),
    ]
    if len(report.policies) > 1:
        parts.append(_section("Policies", report.policies))
    parts += [_causes(report.whole), _options(report)]
    if check is not None:
        errors = ", ".join(f"{each.name} {each.error:+.1%}" for each in check.figures)
        parts.append(
            f"<h2>Fit of the simulation</h2>\n<p>Error on {check.requests} requests that the fit did not "
            f"use: {escape(errors)}.</p>\n<pre>{escape(check.plot())}</pre>"
        )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{chr(10).join(parts)}\n</body></html>\n"
    )


def _section(title: str, rows: Sequence[Row]) -> str:
    return f"<h2>{title}</h2>\n{_table(_COLUMNS, map(_cells, rows))}"


def _cells(row: Row) -> list[str]:
    return [
        escape(row.name), f"{row.requests:,}", f"{row.met:.1%}", _bar(row.met), f"{row.ttft_missed:.1%}",
        f"{row.tpot_missed:.1%}", f"{row.e2e_missed:.1%}", f"{row.failed:,}",
        _ms(row.ttft_p50_seconds), _ms(row.ttft_p99_seconds), _ms(row.tpot_mean_seconds),
    ]  # fmt: skip


def _causes(whole: Row) -> str:
    rows = [[escape(MISSES[name]), f"{count:,}"] for name, count in whole.causes.items()]
    return f"<h2>Causes</h2>\n{_table(('main cause of a miss', 'requests'), rows)}" if rows else ""


def _options(report: SloReport) -> str:
    if not report.options:
        return ""
    rows = [
        [escape(each.label), escape(each.fleet), f"{each.met[0]:.1%}", _bar(each.met[0]),
         f"{each.met[1]:.1%} to {each.met[2]:.1%}", "yes" if each.enough else "no"]
        for each in report.options
    ]  # fmt: skip
    columns = ("policy", "fleet", "within SLO", "", "over the seeds", "meets the SLO")
    return f"<h2>Simulated changes</h2>\n{_table(columns, rows)}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in columns)
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>'


def _bar(share: float) -> str:
    return f'<span class="bar"><i style="width:{share:.1%}"></i></span>'


def _ms(seconds: float | None) -> str:
    return (
        "–"
        if seconds is None
        else f"{seconds * 1e3:,.0f} ms"
        if seconds >= 0.1
        else f"{seconds * 1e3:.1f} ms"
    )
