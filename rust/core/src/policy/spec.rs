//! Policy declarations: the single source for validation, `lmetric-router policies`, the docs page
//! and the conformance tests.
use super::Policy;
use crate::error::CoreError;
use crate::maturity::Maturity;
use std::borrow::Cow;

/// Type and range of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KnobKind {
    /// A real number within `[min, max]`.
    Float {
        /// Minimum.
        min: f64,
        /// Maximum.
        max: f64,
    },
    /// A whole number within `[min, max]`.
    Int {
        /// Minimum.
        min: i64,
        /// Maximum.
        max: i64,
    },
    /// 0 or 1.
    Bool,
}

/// A tunable parameter of a policy.
#[derive(Clone, Copy, Debug)]
pub struct Knob {
    /// Name in the configuration.
    pub name: &'static str,
    /// Type and range.
    pub kind: KnobKind,
    /// Default.
    pub default: f64,
    /// Effect of the parameter, with its unit.
    pub about: &'static str,
}

impl Knob {
    /// Declares a real number within `[min, max]`.
    pub const fn float(name: &'static str, min: f64, max: f64, default: f64, about: &'static str) -> Knob {
        Knob { name, kind: KnobKind::Float { min, max }, default, about }
    }

    /// Declares a whole number within `[min, max]`.
    pub const fn int(name: &'static str, min: i64, max: i64, default: i64, about: &'static str) -> Knob {
        Knob { name, kind: KnobKind::Int { min, max }, default: default as f64, about }
    }

    /// Declares a Boolean: 0 or 1.
    pub const fn flag(name: &'static str, default: bool, about: &'static str) -> Knob {
        let default = if default { 1.0 } else { 0.0 };
        Knob { name, kind: KnobKind::Bool, default, about }
    }
}

/// Declaration of a policy. Built-in policies have a `const`; users' expressions get one at run
/// time.
#[derive(Clone, Debug)]
pub struct PolicySpec {
    /// Name in the configuration.
    pub name: Cow<'static, str>,
    /// The rule, in one line.
    pub formula: Cow<'static, str>,
    /// Source of the rule: paper and section, or project and version.
    pub source: Cow<'static, str>,
    /// Audience of the policy.
    pub maturity: Maturity,
    /// Parameters.
    pub knobs: &'static [Knob],
    /// Whether relabeling the instances permutes the scores, because instances differ only by their
    /// indicators. `false` for policies that use names or turns (round robin, consistent hashing).
    pub symmetric: bool,
    /// Whether the policy uses randomness beyond tie-breaks.
    pub random: bool,
    /// Whether the hot-spot guard filters the candidates. `None`: the policy declares nothing, and
    /// the guard is off.
    pub guard: Option<bool>,
}

impl PolicySpec {
    /// Declares an experimental, symmetric policy that draws only to break ties.
    pub const fn new(
        name: &'static str,
        formula: &'static str,
        source: &'static str,
        knobs: &'static [Knob],
    ) -> PolicySpec {
        PolicySpec {
            name: Cow::Borrowed(name),
            formula: Cow::Borrowed(formula),
            source: Cow::Borrowed(source),
            maturity: Maturity::Experimental,
            knobs,
            symmetric: true,
            random: false,
            guard: None,
        }
    }

    /// Marks the policy as stable.
    pub const fn stable(mut self) -> PolicySpec {
        self.maturity = Maturity::Stable;
        self
    }

    /// Marks the policy as available only in studies.
    pub const fn for_studies(mut self) -> PolicySpec {
        self.maturity = Maturity::Study;
        self
    }

    /// Marks the policy as random.
    pub const fn random(mut self) -> PolicySpec {
        self.random = true;
        self
    }

    /// Turns the hot-spot guard on, unless a setting decides.
    pub const fn guarded(mut self) -> PolicySpec {
        self.guard = Some(true);
        self
    }

    /// Marks the policy as dependent on names or turns.
    pub const fn asymmetric(mut self) -> PolicySpec {
        self.symmetric = false;
        self
    }
}

/// Builds a policy from parameter values.
pub type Build = fn(&Knobs) -> Result<Box<dyn Policy>, CoreError>;

/// A policy of a [`crate::Registry`].
pub struct PolicyRow {
    /// Declaration.
    pub spec: &'static PolicySpec,
    /// Builder.
    pub build: Build,
}

impl PolicyRow {
    /// Builds the policy with these parameter values, all others at their defaults.
    ///
    /// # Errors
    /// `UnknownName` with the nearest parameter name; `BadValue` with the parameter's range.
    pub fn build(&self, knobs: &[(String, f64)]) -> Result<Box<dyn Policy>, CoreError> {
        (self.build)(&Knobs::resolve(&format!("policy {}", self.spec.name), self.spec.knobs, knobs)?)
    }
}

/// Validated parameter values of a policy, in the order of its declaration.
#[derive(Clone, Debug, PartialEq)]
pub struct Knobs {
    values: Vec<f64>,
    names: Vec<&'static str>,
}

impl Knobs {
    /// Returns the defaults of `knobs`, replaced by the values in `given`, each checked against its
    /// declaration. Errors name the `owner`, for example `policy linear`.
    ///
    /// # Errors
    /// `UnknownName` with the nearest parameter name; `BadValue` with the range.
    pub fn resolve(owner: &str, knobs: &'static [Knob], given: &[(String, f64)]) -> Result<Knobs, CoreError> {
        let mut values: Vec<f64> = knobs.iter().map(|k| k.default).collect();
        for (name, value) in given {
            let Some(i) = knobs.iter().position(|k| k.name == name) else {
                let kind = format!("parameter of {owner}");
                return Err(CoreError::unknown_name(kind, name, knobs.iter().map(|k| k.name)));
            };
            let (valid, expected) = match knobs[i].kind {
                KnobKind::Float { min, max } => {
                    ((min..=max).contains(value), format!("a number from {min} to {max}"))
                }
                KnobKind::Int { min, max } => (
                    value.fract() == 0.0 && (min as f64..=max as f64).contains(value),
                    format!("a whole number from {min} to {max}"),
                ),
                KnobKind::Bool => (*value == 0.0 || *value == 1.0, "true or false".to_string()),
            };
            if !valid {
                let what = format!("parameter {name} of {owner}");
                return Err(CoreError::bad_value(what, value, expected));
            }
            values[i] = *value;
        }
        Ok(Knobs { values, names: knobs.iter().map(|k| k.name).collect() })
    }

    /// Returns the value of a declared parameter.
    ///
    /// # Panics
    /// If the policy did not declare the parameter. This is a bug; the first test of the policy
    /// finds it.
    pub fn get(&self, name: &str) -> f64 {
        let i = self.names.iter().position(|n| *n == name).expect("a declared parameter");
        self.values[i]
    }

    /// Yields names and values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, f64)> + '_ {
        self.names.iter().copied().zip(self.values.iter().copied())
    }
}
