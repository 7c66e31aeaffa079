//! Prints a generated page of `docs/`: `cargo run -p lmetric-core --example docs -- policies|indicators|lifecycle`.
use std::process::ExitCode;

fn main() -> ExitCode {
    let page = match std::env::args().nth(1).as_deref() {
        Some("policies") => lmetric_core::docs::policy_markdown(),
        Some("indicators") => lmetric_core::docs::indicator_markdown(),
        Some("lifecycle") => lmetric_core::docs::lifecycle_markdown(),
        other => {
            eprintln!(
                "docs: which page? expected policies, indicators or lifecycle, got {}",
                other.unwrap_or("nothing")
            );
            return ExitCode::from(2);
        }
    };
    print!("{page}");
    ExitCode::SUCCESS
}
