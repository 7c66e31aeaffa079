//! Policies and planners by name.
//!
//! A registry is a value: the code that builds a router chooses which parts the router offers.
//! Crates can add rows; this crate contains only its own rows.
use crate::error::CoreError;
use crate::expr::is_reserved;
use crate::ids::Seconds;
use crate::indicators::{DeclaredIndicator, Indicator, declared};
use crate::maturity::Maturity;
use crate::policy::{POLICIES, Policy, PolicyRow, PolicySpec};
use crate::router::planners::{PLANNERS, PlannerSpec, Split};

/// The policies and planners of a crate.
pub struct Rows {
    /// Policies, in the order of the docs page.
    pub policies: &'static [PolicyRow],
    /// Planners, in the order of the docs page.
    pub planners: &'static [&'static PlannerSpec],
}

/// The policy that decides if none is chosen (docs/explanation/default_policy.md).
pub const DEFAULT_POLICY: &str = "total_delay";

/// The rows of this crate.
pub static CORE: Rows = Rows { policies: POLICIES, planners: PLANNERS };

/// The policies and planners that routers are built from.
#[derive(Clone, Copy)]
pub struct Registry {
    rows: &'static [&'static Rows],
    /// The least mature level on offer.
    offers: Maturity,
}

impl Registry {
    /// All parts of this crate.
    pub const CORE: Registry = Registry { rows: &[&CORE], offers: Maturity::Study };

    /// Combines the rows of several crates. Names must be unique.
    pub const fn of(rows: &'static [&'static Rows]) -> Registry {
        Registry { rows, offers: Maturity::Study }
    }

    /// Returns the registry with another least mature level on offer.
    pub const fn offering(self, offers: Maturity) -> Registry {
        Registry { offers, ..self }
    }

    /// Returns the least mature level on offer.
    pub fn offers(self) -> Maturity {
        self.offers
    }

    fn policy_rows(self) -> impl Iterator<Item = &'static PolicyRow> {
        self.rows.iter().flat_map(|rows| rows.policies)
    }

    fn planner_rows(self) -> impl Iterator<Item = &'static PlannerSpec> {
        self.rows.iter().flat_map(|rows| rows.planners.iter().copied())
    }

    /// Yields the declarations of the offered policies, in the order of the docs page.
    pub fn policies(self) -> impl Iterator<Item = &'static PolicySpec> {
        self.policy_rows().map(|row| row.spec).filter(move |spec| spec.maturity <= self.offers)
    }

    /// Yields the declarations of the offered planners, in the order of the docs page.
    pub fn planners(self) -> impl Iterator<Item = &'static PlannerSpec> {
        self.planner_rows().filter(move |spec| spec.maturity <= self.offers)
    }

    /// Builds the named policy with these parameter values, all others at their defaults.
    ///
    /// # Errors
    /// `UnknownName` with the nearest policy or parameter; `BadValue` with the parameter's range;
    /// `Immature` for a policy that the registry does not offer.
    pub fn policy(self, name: &str, knobs: &[(String, f64)]) -> Result<Box<dyn Policy>, CoreError> {
        let Some(row) = self.policy_rows().find(|row| row.spec.name == name) else {
            let known = self.policies().map(|spec| &*spec.name);
            return Err(CoreError::unknown_name("policy", name, known));
        };
        self.check("policy", name, row.spec.maturity)?;
        row.build(knobs)
    }

    /// Builds the named planner with these settings, all others at their defaults.
    ///
    /// `UnknownName` with the nearest planner or setting; `BadValue` with the setting's range;
    /// `Immature` for a planner that the registry does not offer.
    pub fn split(self, name: &str, settings: &[(&str, f64)]) -> Result<Split, CoreError> {
        let Some(spec) = self.planner_rows().find(|spec| spec.name == name) else {
            return Err(CoreError::unknown_name("split", name, self.planners().map(|spec| spec.name)));
        };
        self.check("split", name, spec.maturity)?;
        let settings: Vec<_> = settings.iter().map(|(name, value)| (name.to_string(), *value)).collect();
        Split::by(spec, &settings)
    }

    fn check(self, kind: &str, name: &str, maturity: Maturity) -> Result<(), CoreError> {
        if maturity <= self.offers {
            return Ok(());
        }
        Err(CoreError::Immature { kind: kind.into(), name: name.into(), maturity })
    }
}

/// Maximum length of an indicator's name and of its unit, in characters.
const MAX_LETTERS: usize = 64;

/// Declares an indicator for the whole process: one number per instance, reported by its producers.
/// Expressions and policies built later can read it. A second declaration with equal attributes
/// returns the existing indicator.
///
/// # Errors
/// `BadValue` if the name has characters other than lowercase letters, digits and `_`. `BadValue`
/// if a built-in indicator, an offered policy, its parameter or a function has the name. `BadValue`
/// if the indicator exists with other attributes, or if an attribute is not finite.
pub fn declare_indicator(
    registry: Registry,
    name: &str,
    unit: &str,
    default: Option<f64>,
    max_age_seconds: Option<Seconds>,
) -> Result<&'static DeclaredIndicator, CoreError> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if !(name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(plain))
        || name.len() > MAX_LETTERS
    {
        let expected = "at most 64 lowercase letters, digits and `_`, a letter first";
        return Err(CoreError::bad_value("name of an indicator", format!("{name:?}"), expected));
    }
    if unit.chars().count() > MAX_LETTERS {
        let what = format!("unit of indicator {name}");
        return Err(CoreError::bad_value(what, format!("{unit:?}"), "at most 64 characters"));
    }
    let taken = match () {
        () if Indicator::from_name(name).is_some() => "a built-in indicator",
        () if is_reserved(name) => "a function or an operator of expressions",
        () if registry.policies().any(|spec| spec.name == name) => "a policy",
        () if registry.policies().any(|spec| spec.knobs.iter().any(|knob| knob.name == name)) => {
            "a policy's parameter"
        }
        () => return declared::add(name, unit, default, max_age_seconds),
    };
    let expected = format!("another name; this is the name of {taken}");
    Err(CoreError::bad_value("name of an indicator", format!("{name:?}"), expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(registry: Registry, name: &str, knobs: &[(&str, f64)]) -> String {
        let knobs: Vec<_> = knobs.iter().map(|(name, value)| (name.to_string(), *value)).collect();
        registry.policy(name, &knobs).err().expect("a wrong name or parameter").to_string()
    }

    #[test]
    fn names_are_unique_and_slips_are_named() {
        let names: Vec<_> = Registry::CORE.policies().map(|spec| &*spec.name).collect();
        assert!(names.iter().all(|name| names.iter().filter(|n| *n == name).count() == 1));
        let told = |name, knobs: &[(&str, f64)]| error(Registry::CORE, name, knobs);
        assert_eq!(told("lmetrik", &[]), "unknown policy \"lmetrik\"; did you mean \"lmetric\"?");
        assert_eq!(
            told("linear", &[("lan", 0.5)]),
            "unknown parameter of policy linear \"lan\"; did you mean \"lam\"?"
        );
        assert_eq!(
            told("linear", &[("lam", 1.5)]),
            "parameter lam of policy linear: 1.5 is not valid; expected a number from 0 to 1"
        );
    }

    #[test]
    fn a_server_offers_experimental_parts_only_when_asked() {
        let stable = Registry::CORE.offering(Maturity::Stable);
        let experimental = Registry::CORE.offering(Maturity::Experimental);
        let told = error(stable, "dynamo", &[]);
        assert!(told.starts_with("policy \"dynamo\" is experimental"), "{told}");
        assert!(experimental.policy("dynamo", &[]).is_ok());
        let told = stable.split("libra", &[]).expect_err("experimental").to_string();
        assert!(told.starts_with("split \"libra\" is experimental"), "{told}");
        assert!(stable.policies().all(|spec| spec.maturity == Maturity::Stable));
        assert!(stable.policies().any(|spec| spec.name == "lmetric"));
        let names = |registry: Registry| registry.planners().map(|spec| spec.name).collect::<Vec<_>>();
        assert_eq!(names(stable), [""; 0]);
        assert_eq!(names(experimental), ["libra", "apart"]);
    }
}
