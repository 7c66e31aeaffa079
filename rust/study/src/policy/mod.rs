//! Policies for studies. Each is one file (formula, source, knobs, tests) and one row of `policies!`.
use lmetric_core::CoreError;
use lmetric_core::policy::{Knob, Knobs, Policy, PolicyRow, PolicySpec, Prefer, highest, lowest};

/// Each row is a file with its declaration `SPEC` and a function `build`, in the order of the docs
/// page.
macro_rules! policies {
    ($($file:ident,)*) => {
        $(mod $file;)*
        pub(crate) static POLICIES: &[PolicyRow] =
            &[$(PolicyRow { spec: &$file::SPEC, build: $file::build },)*];
    };
}

policies! {
    dynamo_reference,
    simulation,
    sibyl_plus,
    ils,
    ils_requests,
    always_worst,
}
