//! What a policy declares of itself: one source for validation, `lmetric-router policies`, the docs page and the
//! conformance tests.
use super::Policy;
use crate::error::CoreError;
use crate::maturity::Maturity;
use crate::suggest::nearest;
use std::borrow::Cow;

/// Type and range of a knob.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KnobKind {
    /// A real number within `[min, max]`.
    Float {
        /// Least value.
        min: f64,
        /// Greatest value.
        max: f64,
    },
    /// A whole number within `[min, max]`.
    Int {
        /// Least value.
        min: i64,
        /// Greatest value.
        max: i64,
    },
    /// 0 or 1.
    Bool,
}

/// One setting of a policy.
#[derive(Clone, Copy, Debug)]
pub struct Knob {
    /// Its name.
    pub name: &'static str,
    /// Type and range.
    pub kind: KnobKind,
    /// Default.
    pub default: f64,
    /// What it does, with its unit.
    pub about: &'static str,
    /// Whether only studies can set it: an oracle or an ablation.
    pub study: bool,
}

impl Knob {
    /// A real number within `[min, max]`.
    pub const fn float(name: &'static str, min: f64, max: f64, default: f64, about: &'static str) -> Knob {
        Knob { name, kind: KnobKind::Float { min, max }, default, about, study: false }
    }

    /// A whole number within `[min, max]`.
    pub const fn int(name: &'static str, min: i64, max: i64, default: i64, about: &'static str) -> Knob {
        Knob { name, kind: KnobKind::Int { min, max }, default: default as f64, about, study: false }
    }

    /// 0 or 1.
    pub const fn flag(name: &'static str, default: bool, about: &'static str) -> Knob {
        let default = if default { 1.0 } else { 0.0 };
        Knob { name, kind: KnobKind::Bool, default, about, study: false }
    }

    /// The same knob, for studies only.
    pub const fn for_studies(mut self) -> Knob {
        self.study = true;
        self
    }
}

/// The declaration of a policy: a `const` for those that come with the router, made at run time for those that users
/// write as expressions.
#[derive(Clone, Debug)]
pub struct PolicySpec {
    /// Name in configuration.
    pub name: Cow<'static, str>,
    /// The rule in one line.
    pub formula: Cow<'static, str>,
    /// Where the rule was read: paper and section, or project and version.
    pub source: Cow<'static, str>,
    /// Who should use it.
    pub maturity: Maturity,
    /// Settings.
    pub knobs: &'static [Knob],
    /// Whether decisions differ between instances only by their indicators: relabelling the instances permutes the
    /// scores. `false` for those that go by name or turn (round robin, consistent hashing).
    pub symmetric: bool,
    /// Whether it uses randomness beyond breaking ties.
    pub random: bool,
    /// Whether the hot-spot guard filters its candidates. `None`: if it reads prefix hits.
    pub guard: Option<bool>,
}

impl PolicySpec {
    /// A declaration of an experimental policy that goes by indicators alone and draws only to
    /// break ties.
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
            guard: Some(false),
        }
    }

    /// The same, of a stable policy.
    pub const fn stable(mut self) -> PolicySpec {
        self.maturity = Maturity::Stable;
        self
    }

    /// The same, of a policy for studies.
    pub const fn for_studies(mut self) -> PolicySpec {
        self.maturity = Maturity::Study;
        self
    }

    /// A declaration of a policy whose candidates the hot-spot guard filters. Policies of other
    /// routers run as published, without it.
    pub const fn guarded(mut self) -> PolicySpec {
        self.guard = Some(true);
        self
    }

    /// The same, of a policy that draws.
    pub const fn random(mut self) -> PolicySpec {
        self.random = true;
        self
    }

    /// The same, of a policy that goes by name or turn.
    pub const fn asymmetric(mut self) -> PolicySpec {
        self.symmetric = false;
        self
    }
}

/// Makes a policy of the values of its knobs.
pub type Build = fn(&Knobs) -> Result<Box<dyn Policy>, CoreError>;

/// A policy of a [`crate::Registry`].
pub struct PolicyRow {
    /// Its declaration.
    pub spec: &'static PolicySpec,
    /// Makes it.
    pub build: Build,
}

impl PolicyRow {
    /// The policy with these knobs, the others at their defaults.
    ///
    /// # Errors
    /// `UnknownName` with the nearest knob, `BadValue` with the knob's range.
    pub fn build(&self, knobs: &[(String, f64)]) -> Result<Box<dyn Policy>, CoreError> {
        (self.build)(&Knobs::resolve(&format!("policy {}", self.spec.name), self.spec.knobs, knobs)?)
    }
}

/// Checked values of a policy's knobs, in the order of its declaration.
#[derive(Clone, Debug, PartialEq)]
pub struct Knobs {
    values: Vec<f64>,
    names: Vec<&'static str>,
}

impl Knobs {
    /// The defaults of `knobs`, overlaid with `given`, each checked against its declaration; errors
    /// name the `owner`: `policy linear`.
    ///
    /// # Errors
    /// `UnknownName` with the nearest knob, or `BadValue` with the range.
    pub fn resolve(owner: &str, knobs: &'static [Knob], given: &[(String, f64)]) -> Result<Knobs, CoreError> {
        let mut values: Vec<f64> = knobs.iter().map(|k| k.default).collect();
        for (name, value) in given {
            let Some(i) = knobs.iter().position(|k| k.name == name) else {
                return Err(CoreError::UnknownName {
                    kind: format!("knob of {owner}"),
                    name: name.clone(),
                    nearest: nearest(name, knobs.iter().map(|k| k.name)),
                });
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
                return Err(CoreError::BadValue {
                    what: format!("knob {name} of {owner}"),
                    got: value.to_string(),
                    expected,
                });
            }
            values[i] = *value;
        }
        Ok(Knobs { values, names: knobs.iter().map(|k| k.name).collect() })
    }

    /// The value of a declared knob.
    ///
    /// # Panics
    /// If the policy asks for a knob that it did not declare (a bug, found by its first test).
    pub fn get(&self, name: &str) -> f64 {
        let i = self.names.iter().position(|n| *n == name).expect("a declared knob");
        self.values[i]
    }

    /// Names and values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, f64)> + '_ {
        self.names.iter().copied().zip(self.values.iter().copied())
    }
}
