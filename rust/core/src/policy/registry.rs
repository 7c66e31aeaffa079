//! Policies by name.
use super::*;
use crate::expr::is_reserved;
use crate::ids::Seconds;
use crate::indicators::{DeclaredIndicator, Indicator, declared};
use crate::suggest::nearest;

pub(super) type Build = fn(&Knobs) -> Result<Box<dyn Policy>, CoreError>;

/// Names of all policies, in the order of the docs page.
pub fn names() -> Vec<&'static str> {
    specs().into_iter().map(|spec| &*spec.name).collect()
}

/// Declarations of all policies, in the order of the docs page.
pub fn specs() -> Vec<&'static PolicySpec> {
    POLICIES.iter().map(|(spec, _)| *spec).collect()
}

/// The policy of that name with these knobs, the others at their defaults.
///
/// # Errors
/// `UnknownName` with the nearest policy or knob, `BadValue` with the knob's range.
pub fn build(name: &str, knobs: &[(String, f64)]) -> Result<Box<dyn Policy>, CoreError> {
    let Some((spec, build)) = POLICIES.iter().find(|(spec, _)| spec.name == name) else {
        return Err(CoreError::UnknownName {
            kind: "policy".into(),
            name: name.into(),
            nearest: nearest(name, names()),
        });
    };
    build(&Knobs::resolve(&format!("policy {name}"), spec.knobs, knobs)?)
}

/// Most letters of an indicator's name, and of its unit.
const MOST_LETTERS: usize = 64;

/// Declares an indicator for the whole process: one number for each instance, which its producers report. Expressions and policies
/// built from now on can read it. Declared again with the same attributes, it is the same indicator.
///
/// # Errors
/// `BadValue` for a name with other characters than small letters, digits and `_`, one that an indicator of the table, a policy,
/// a knob of a policy or a function has, other attributes than before, and for attributes that are not finite.
pub fn declare_indicator(
    name: &str,
    unit: &str,
    default: Option<f64>,
    max_age_seconds: Option<Seconds>,
) -> Result<&'static DeclaredIndicator, CoreError> {
    let bad = |what: &str, got: String, expected: &str| {
        Err(CoreError::BadValue { what: what.into(), got, expected: expected.into() })
    };
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if !(name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(plain))
        || name.len() > MOST_LETTERS
    {
        let expected = "at most 64 small letters, digits and `_`, a letter first";
        return bad("name of an indicator", format!("{name:?}"), expected);
    }
    if unit.chars().count() > MOST_LETTERS {
        return bad(&format!("unit of indicator {name}"), format!("{unit:?}"), "at most 64 characters");
    }
    let policies = specs();
    let taken = match () {
        () if Indicator::from_name(name).is_some() => "a built-in indicator",
        () if is_reserved(name) => "a function or an operator of expressions",
        () if policies.iter().any(|spec| spec.name == name) => "a policy",
        () if policies.iter().any(|spec| spec.knobs.iter().any(|knob| knob.name == name)) => {
            "a policy's knob"
        }
        () => return declared::add(name, unit, default, max_age_seconds),
    };
    bad("name of an indicator", format!("{name:?}"), &format!("another name; this is the name of {taken}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_slips_are_named() {
        let names = names();
        assert!(names.iter().all(|name| names.iter().filter(|n| *n == name).count() == 1));
        assert!(names.contains(&"lmetric") && names.contains(&"always_worst"));
        let error = |name, knobs: &[(String, f64)]| build(name, knobs).err().unwrap().to_string();
        assert_eq!(error("lmetrik", &[]), "unknown policy \"lmetrik\"; did you mean \"lmetric\"?");
        assert_eq!(
            error("linear", &[("lan".into(), 0.5)]),
            "unknown knob of policy linear \"lan\"; did you mean \"lam\"?"
        );
        assert_eq!(
            error("linear", &[("lam".into(), 1.5)]),
            "knob lam of policy linear: 1.5 is not valid; expected a number from 0 to 1"
        );
    }
}
