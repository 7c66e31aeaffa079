//! Policies by name.
use super::*;
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
