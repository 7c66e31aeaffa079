"""``lmetric-router calibrate``: fit a profile to a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmetric.cli.help import BASIC, ENGINES
from lmetric.cli.usage import above_zero
from lmetric_lab.cli.options import check_file

if TYPE_CHECKING:
    from lmetric_lab.calibrate import Calibration, Calibrator
    from lmetric_lab.calibrate.plan import Probe

_LIMITS = "Limits"


def command(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="Engine URL, e.g. http://10.0.0.1:8000.")],
    tokens_budget: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum number of prompt and output tokens to spend.", rich_help_panel=BASIC
        ),
    ] = 200_000,
    max_batch: Annotated[
        int,
        typer.Option(min=1, max=4096, help="Maximum number of concurrent requests.", rich_help_panel=_LIMITS),
    ] = 32,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest prompt, tokens.",
            show_default="as model and budget allow",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the profile.", show_default="print it", rich_help_panel=BASIC),
    ] = None,
    token_slo_ms: Annotated[
        float | None,
        typer.Option(
            help="Also recommend --max-num-batched-tokens for this time between tokens, in milliseconds.",
            callback=above_zero,
            show_default="none",
            rich_help_panel=BASIC,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model name to request.", show_default="the only served model", rich_help_panel=BASIC
        ),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per KV block, if the engine does not report it.",
            show_default="as reported",
            rich_help_panel=ENGINES,
        ),
    ] = None,
    cache_blocks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="KV cache size in blocks, if the engine does not report it.",
            show_default="as reported",
            rich_help_panel=ENGINES,
        ),
    ] = None,
    max_sequences: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequence slots (max_num_seqs), if the engine does not report them.",
            show_default="as reported",
            rich_help_panel=ENGINES,
        ),
    ] = None,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum tokens per step, if the engine does not report it.",
            show_default="as reported",
            rich_help_panel=ENGINES,
        ),
    ] = None,
    clock_speed: Annotated[
        float,
        typer.Option(
            help="Emulated engines: the engine's clock runs N times as fast as real time.",
            callback=above_zero,
            rich_help_panel=ENGINES,
        ),
    ] = 1.0,
    timeout: Annotated[
        float,
        typer.Option(
            help="Fail after S seconds without data from the engine.",
            callback=above_zero,
            rich_help_panel=_LIMITS,
        ),
    ] = 120.0,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY", help="Bearer token.", show_default="none", rich_help_panel=BASIC
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option(help="Continue even if the engine has other traffic.", rich_help_panel=_LIMITS)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON.", rich_help_panel=BASIC)
    ] = False,
) -> None:
    """Fit a profile of step times to a running engine.

    The command probes the engine within a token budget.
    `simulate --profile FILE` and `serve --profile FILE` load the profile. The command prints the
    cost of the probes before it sends them. It refuses an engine with other traffic, unless you
    pass --force. Ctrl-C stops the probes; nothing is written.
    """
    from lmetric.cli.show import note, print_json
    from lmetric.file_errors import write_file
    from lmetric.profiles.roofline import as_yaml
    from lmetric_lab.calibrate import Calibrator

    check_file("--out", out)
    _need_scipy()
    sizes = {
        "block_tokens": block_tokens,
        "cache_blocks": cache_blocks,
        "max_sequences": max_sequences,
        "max_batch_tokens": max_batch_tokens,
    }
    calibrator = Calibrator(
        engine,
        budget_tokens=tokens_budget,
        max_batch=max_batch,
        max_prompt_tokens=max_prompt_tokens,
        model=model,
        api_key=api_key,
        force=force,
        clock_speed=clock_speed,
        timeout_seconds=timeout,
        overrides={name: size for name, size in sizes.items() if size is not None},
    )
    made = _run(calibrator, needs_sequences=token_slo_ms is not None)
    text = as_yaml(made.profile)
    if as_json:
        print_json(_as_data(made, token_slo_ms))
    else:
        _print(made)
        if token_slo_ms is not None:
            _print_budgets(made, token_slo_ms)
        if out is None:
            print(text, end="")
    if out is not None:
        write_file(out, text.encode())
        note(f"wrote {out}; use it with simulate --profile {out} or serve --profile {out}")


def _need_scipy() -> None:
    """Checks for scipy before any probe is sent."""
    from importlib.util import find_spec

    from lmetric.extras import install
    from lmetric_lab.calibrate import CalibrationError

    if find_spec("scipy") is None:
        raise CalibrationError(f"calibrate needs scipy; run: {install('calibrate')}")


def _run(calibrator: Calibrator, *, needs_sequences: bool) -> Calibration:
    import uvloop

    from lmetric.cli.show import note, progress
    from lmetric_lab.calibrate.plan import ROUNDS

    async def run() -> Calibration:
        async with calibrator:
            if needs_sequences:
                calibrator.check_sequences()
            plan, facts = calibrator.plan, calibrator.facts
            note(
                f"{facts.engine}, model {facts.model}: {len(plan.probes)} probes, {ROUNDS} times each, with "
                f"at most {plan.most_tokens:,} tokens ({calibrator.budget_tokens:,} with repetitions), "
                f"{plan.largest_batch} requests at once, prompts of up to {plan.longest_prompt:,} tokens"
            )
            with progress("probes") as bar:
                task = bar.add_task("", total=ROUNDS * len(plan.probes))

                def step(probe: Probe) -> None:
                    bar.update(task, advance=1, description=probe.label)
                    shown = bar.tasks[task]
                    if shown.total is not None and shown.completed > shown.total:  # repeated probes
                        bar.update(task, total=shown.completed)

                return await calibrator.run(step)

    return uvloop.run(run())


def _as_data(made: Calibration, token_slo_ms: float | None) -> dict[str, Any]:
    from lmetric.profiles.budget import budgets

    advice = {} if token_slo_ms is None else {"budgets": list(budgets(made.profile, token_slo_ms / 1e3))}
    return advice | {
        "profile": made.profile.model_dump(exclude_none=True),
        "standard_errors": made.fit.standard_errors,
        "request_seconds": made.fit.request_seconds,
        "median_relative_error": made.fit.median_error,
        "unidentified": made.fit.unidentified,
        "assumed": made.assumed,
        "dropped_probes": made.dropped,
        "tokens_used": made.tokens_used,
        "engine": made.facts,
        "probes": [
            {
                "kind": residual.kind,
                "probe": residual.label,
                "measured_seconds": residual.measured_seconds,
                "predicted_seconds": residual.predicted_seconds,
                "relative_error": residual.relative_error,
                "relative_spread": residual.spread,
            }
            for residual in made.fit.residuals
        ],
    }


def _print(made: Calibration) -> None:
    from lmetric.cli.show import note, print_table
    from lmetric_lab.calibrate.plan import KINDS

    fit = made.fit
    rows = [
        [
            r.kind,
            r.label,
            f"{r.measured_seconds * 1e3:.2f}",
            f"{r.predicted_seconds * 1e3:.2f}",
            f"{r.relative_error:+.1%}",
            f"{r.spread:.1%}",
        ]
        for r in sorted(fit.residuals, key=lambda r: (KINDS.index(r.kind), r.measured_seconds))
    ]
    print_table(
        ["kind", "probe", "measured, ms", "predicted, ms", "off by", "measurements apart"],
        rows,
        title="A prefill's time to first token, a decode step, or all steps beside a prompt",
        keys=2,
        spare=("measurements apart",),
    )
    by_kind = []
    for kind in KINDS:
        errors = sorted(abs(r.relative_error) for r in fit.residuals if r.kind == kind)
        if errors:
            by_kind.append([kind, str(len(errors)), f"{errors[len(errors) // 2]:.1%}", f"{errors[-1]:.1%}"])
    print_table(["kind", "probes", "median error", "worst"], by_kind)
    constants = [
        [name, f"{value:.4g}", f"{fit.standard_errors[name]:.2g}"] for name, value in fit.constants.items()
    ]
    constants.append(["(each request, not in the profile)", f"{fit.request_seconds:.4g}", ""])
    print_table(
        ["constant", "seconds", "standard error"], constants, title=f"{made.tokens_used:,} tokens used"
    )
    for text in (*fit.unidentified, *made.assumed, *(f"no result from {text}" for text in made.dropped)):
        note(f"note: {text}")


def _print_budgets(made: Calibration, token_slo_ms: float) -> None:
    from lmetric.cli.show import note, print_table
    from lmetric.profiles.budget import CONTEXT_TOKENS, budgets

    rows, present = [], made.profile.max_batch_tokens
    found = list(budgets(made.profile, token_slo_ms / 1e3))
    for budget in found:
        full, rate = budget.full_prompt_tokens_per_second, budget.prompt_tokens_per_second
        rows.append(
            [
                str(budget.decodes),
                "none" if budget.batch_tokens is None else str(budget.batch_tokens),
                f"{budget.step_seconds * 1e3:.1f}",
                f"{budget.full_step_seconds * 1e3:.1f}",
                "" if budget.batch_tokens is None else f"{rate / full - 1:+.0%}",
            ]
        )
    print_table(
        ["decodes", "--max-num-batched-tokens", "step, ms", f"step with {present}, ms", "prompt tokens/s"],
        rows,
        title=f"Budgets for {token_slo_ms:g} ms between tokens, beside decodes of {CONTEXT_TOKENS} tokens",
    )
    if any(budget.batch_tokens is None for budget in found):
        note(
            "none: the decodes alone take longer, or the budget would be below the engine's sequences; lower "
            "--max-num-seqs, or let the engine's scheduler choose: docs/how-to/engine_schedulers.md"
        )
