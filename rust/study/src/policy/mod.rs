//! Policies for studies. Each is one file (formula, source, parameters, tests) and one row of
//! `policies!`.
use lmetric_core::CoreError;
use lmetric_core::policy::{Knob, Knobs, Policy, PolicySpec, highest, lowest};

lmetric_core::policies! {
    dynamo_reference,
    simulation,
    ils,
    ils_requests,
    sibyl_parts,
    sibyl_known,
    always_worst,
}
