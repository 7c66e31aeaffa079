//! Prints a page of `docs/` that is generated from declarations:
//! `scripts/make_reference PAGE` writes it. A test fails if a stored page differs.
use lmetric_core::Maturity;
use lmetric_core::indicators::{INDICATORS, Owner, Scope};
use lmetric_core::policy::{Knob, KnobKind, PolicySpec};
use lmetric_core::router::lifecycle;
use lmetric_core::router::planners::PlannerSpec;
use lmetric_sim::{Order, TOKEN_SECONDS, TokenSlo};
use lmetric_study::REGISTRY;
use std::fmt::Write;
use std::process::ExitCode;

/// Writes a page.
type Page = fn() -> String;

/// The pages, by name.
const PAGES: &[(&str, Page)] = &[
    ("policies", policies),
    ("indicators", indicators),
    ("lifecycle", lifecycle),
    ("splits", splits),
    ("local_orders", local_orders),
];

fn main() -> ExitCode {
    let asked = std::env::args().nth(1);
    let Some((_, page)) = PAGES.iter().find(|(name, _)| asked.as_deref() == Some(name)) else {
        let names: Vec<&str> = PAGES.iter().map(|(name, _)| *name).collect();
        let got = asked.as_deref().unwrap_or("nothing");
        eprintln!("docs: which page? expected {}, got {got}", names.join(", "));
        return ExitCode::from(2);
    };
    print!("{}", page());
    ExitCode::SUCCESS
}

/// `docs/reference/policies.md`: each registered policy with its rule, source and parameters.
fn policies() -> String {
    let mut page = String::from(
        "# Policies\n\n\
         `scripts/make_reference policies` generates this page from the declarations.\n\n\
         A policy gives each instance a score. The lowest or the highest score wins, as each rule states; ties are drawn at random. \
         Names in the rules are [indicators](indicators.md) and parameters. An instance whose score needs an absent indicator is \
         left out of that decision. If a policy scores no instance at all, the instance with the fewest requests gets the request, \
         and `lmetric_unscored_total` counts it. Set parameters in the configuration, or write a rule of your own as an expression.\n",
    );
    sections(&mut page, "policies", |page, maturity| {
        REGISTRY.policies().filter(|spec| spec.maturity == maturity).for_each(|spec| policy(page, spec));
    });
    page
}

/// Writes a section for each maturity, with the contents that `each` writes.
fn sections(page: &mut String, what: &str, each: impl Fn(&mut String, Maturity)) {
    for maturity in Maturity::ALL {
        let (title, about) = match maturity {
            Maturity::Stable => ("Stable", "`serve` offers them."),
            Maturity::Experimental => (
                "Experimental",
                "They work, but studies do not recommend them for all traffic, or real engines have not tested them. `serve` \
                 offers them with `experimental: true` (`--experimental`); `simulate`, `study`, `bench` and `demo` always do.",
            ),
            Maturity::Study => (
                "For studies",
                "Oracles, ablations, negative controls, and rules that gain nothing. `simulate`, `study` and `bench` offer them, \
                 `serve` never does.",
            ),
        };
        let mut section = String::new();
        each(&mut section, maturity);
        if section.is_empty() {
            section = format!("\nNo {what} yet.\n");
        }
        write!(page, "\n## {title}\n\n{about}\n{section}").expect("a string");
    }
}

fn policy(page: &mut String, spec: &PolicySpec) {
    write!(page, "\n### `{}`\n\n```\n", spec.name).expect("a string");
    for part in spec.formula.split("; ") {
        writeln!(page, "{part}").expect("a string");
    }
    write!(page, "```\n\nSource: {}.", spec.source).expect("a string");
    if spec.random {
        page.push_str(" Draws at random.");
    }
    if !spec.symmetric {
        page.push_str(" Depends on name or turn, not on indicators alone.");
    }
    page.push('\n');
    knobs(page, spec.knobs, str::to_owned);
}

/// Writes a table of settings, if there are any, each under the name that `shown` makes of its
/// name.
fn knobs(page: &mut String, knobs: &[Knob], shown: impl Fn(&str) -> String) {
    if !knobs.is_empty() {
        page.push_str("\n| parameter | range | default | |\n| --- | --- | --- | --- |\n");
    }
    for knob in knobs {
        let (range, default) = (range(knob), default(knob));
        let studies = if knob.study { " (for studies)" } else { "" };
        let (name, about) = (shown(knob.name), cell(knob.about));
        writeln!(page, "| `{name}`{studies} | {range} | {default} | {about} |").expect("a string");
    }
}

fn range(knob: &Knob) -> String {
    match knob.kind {
        KnobKind::Float { min, max } => format!("{} to {}", number(min), number(max)),
        KnobKind::Int { min, max } => format!("{min} to {max}, whole"),
        KnobKind::Bool => "true or false".into(),
    }
}

fn default(knob: &Knob) -> String {
    match knob.kind {
        KnobKind::Bool => (knob.default == 1.0).to_string(),
        _ if knob.default.is_nan() => "none".into(),
        _ => number(knob.default),
    }
}

/// Formats a number in its shortest readable form: 1000, and 1e9 for 1000000000.
fn number(x: f64) -> String {
    let (plain, scientific) = (x.to_string(), format!("{x:e}"));
    if scientific.len() + 1 < plain.len() { scientific } else { plain }
}

/// `docs/reference/indicators.md`: each indicator with unit, owner, freshness and what its absence
/// means.
fn indicators() -> String {
    let mut page = String::from(
        "# Indicators\n\n\
         `scripts/make_reference indicators` generates this page from the declarations.\n\n\
         Use these names in score expressions, in any case; Python's symbols are the same in capitals (`lm.P_TOKEN`). \
         [How to add one](../how-to/extending.md#an-indicator-of-your-own): an engine metric is one entry in the configuration.\n",
    );
    for (scope, title) in [
        (Scope::Instance, "One value for each instance"),
        (Scope::Pair, "One value for each instance and request"),
        (Scope::Request, "One value for each request"),
    ] {
        write!(
            page,
            "\n## {title}\n\n| name | unit | whose | how fresh | absent | |\n{}\n",
            "| --- ".repeat(6) + "|"
        )
        .expect("a string");
        for decl in INDICATORS.iter().filter(|d| d.scope == scope) {
            let owner = match decl.owner {
                Owner::Router => "router",
                Owner::Engine => "engine",
                Owner::Merged => "router and engine",
                Owner::Request => "request",
            };
            let (name, unit) = (decl.name, cell(decl.unit));
            let (fresh, absent, about) = (cell(decl.freshness), cell(decl.absent), cell(decl.about));
            writeln!(page, "| `{name}` | {unit} | {owner} | {fresh} | {absent} | {about} |")
                .expect("a string");
        }
    }
    page
}

/// `docs/reference/lifecycle.md`: the effects of each event on a request.
fn lifecycle() -> String {
    format!(
        "# The life of a request in the core\n\n\
         `scripts/make_reference lifecycle` generates this page from `rust/core/src/router/lifecycle/machine.rs`.\n\n\
         A request is a chain of segments. One segment is open. The caller reports events of the open segment \
         (`Router::advance`, in Python the methods of `Ticket`). The first table shows the effects of each event, which are \
         applied in order. A *prefill segment* ends with the prompt, and the next segment makes the first token. An *other \
         segment* ends in the answer. Any event may come at any time. A closed ticket returns an error.\n\n{}",
        lifecycle::markdown()
    )
}

/// `docs/reference/splits.md`: each planner with its source and settings.
fn splits() -> String {
    let mut page = String::from(
        "# Splits\n\n\
         `scripts/make_reference splits` generates this page from the declarations.\n\n\
         A split sends the first tokens of a request to one instance and the rest to another. Instances of the role `prefill` \
         split each request at the end of its prompt. Between instances of the role `both`, a planner decides (`split: libra`, \
         or with settings `split: {kind: libra, probes: 8}`). [The architecture](../explanation/architecture.md#plans-of-several-segments) \
         describes how a plan is executed.\n",
    );
    sections(&mut page, "planners", |page, maturity| {
        REGISTRY.planners().filter(|spec| spec.maturity == maturity).for_each(|spec| planner(page, spec));
    });
    page
}

/// The field of `lmetric.options` that holds a setting of a split.
fn option_field(name: &str) -> String {
    match name.split_once('_') {
        Some(("least", rest)) => format!("min_{rest}"),
        Some(("most", rest)) => format!("max_{rest}"),
        _ => if name == "at" { "fraction" } else { name }.to_owned(),
    }
}

fn planner(page: &mut String, spec: &PlannerSpec) {
    write!(page, "\n### `{}`\n\nIt {}.\n\nSource: {}.\n", spec.name, spec.about, spec.source)
        .expect("a string");
    knobs(page, spec.settings, option_field);
}

/// `docs/research/local_orders.md`: a table of the local orders.
fn local_orders() -> String {
    let mut page = String::from(
        "# Local orders\n\n\
         `scripts/make_reference local_orders` generates this page from the declarations.\n\n\
         A local order is the order in which a simulated or emulated engine takes requests from its queue \
         (`--local-order`, `lmetric-router engine --order`). [The simulator's page](simulator.md#local-orders) explains how they \
         work. Names in parentheses are settings: `uniboost(gamma=0.2, bin_tokens=64)`.\n\n\
         | order | first comes | reads | preempts | settings | source |\n| --- | --- | --- | --- | --- | --- |\n",
    );
    for spec in Order::specs() {
        let order = Order::named(spec.name, 0, TokenSlo::same(TOKEN_SECONDS)).expect("a registered order");
        let preempts = if order.preempts() { "yes" } else { "" };
        let settings: Vec<String> = spec.settings.iter().map(|name| format!("`{name}`")).collect();
        writeln!(
            page,
            "| `{}` | {} | {} | {preempts} | {} | {} |",
            spec.name,
            cell(spec.first),
            cell(spec.reads),
            settings.join(", "),
            cell(spec.source)
        )
        .expect("a string");
    }
    page
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stored_pages_are_fresh() {
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/");
        for (name, page) in PAGES {
            let page = page();
            let folder = if name == "local_orders" { "research" } else { "reference" };
            let stored = std::fs::read_to_string(format!("{docs}{folder}/{name}.md")).unwrap_or_default();
            let first = stored.lines().zip(page.lines()).position(|(s, p)| s != p).unwrap_or(0) + 1;
            assert!(
                stored == page,
                "docs/{folder}/{name}.md is stale from line {first}: \
                 scripts/make_reference {name}"
            );
        }
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [0.7, 1000.0, 1e9, 1e-4, 4194304.0].map(number),
            ["0.7", "1000", "1e9", "1e-4", "4194304"]
        );
    }
}
