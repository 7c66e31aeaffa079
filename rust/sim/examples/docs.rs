//! Prints a page of `docs/` that is generated from declarations:
//! `scripts/make_reference PAGE` writes it. A test fails if a stored page differs.
use lmetric_sim::{Order, TOKEN_SECONDS, TokenSlo};
use std::fmt::Write;
use std::process::ExitCode;

/// Writes a page.
type Page = fn() -> String;

/// The pages, by name.
const PAGES: &[(&str, Page)] = &[("local_orders", local_orders)];

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
            let stored = std::fs::read_to_string(format!("{docs}research/{name}.md")).unwrap_or_default();
            let first = stored.lines().zip(page.lines()).position(|(s, p)| s != p).unwrap_or(0) + 1;
            assert!(
                stored == page,
                "docs/research/{name}.md is stale from line {first}: \
                 scripts/make_reference {name}"
            );
        }
    }
}
