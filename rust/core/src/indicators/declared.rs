//! Indicators that a program or a configuration declares in addition to the built-in
//! [table](super::table). Each has one number per instance, which its producers report.
//!
//! Declarations are process-wide, like registered policies, and permanent. Each router keeps its
//! own values.
use crate::error::CoreError;
use crate::ids::Seconds;
use parking_lot::RwLock;

/// Index of a declared indicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeclaredId(u16);

impl DeclaredId {
    /// Returns the declared indicator with an index that [`DeclaredId::index`] gave.
    #[inline]
    pub(super) fn new(index: usize) -> DeclaredId {
        DeclaredId(index as u16)
    }

    /// Returns the index as a `usize`.
    #[inline]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// Returns the declaration.
    pub fn decl(self) -> &'static DeclaredIndicator {
        TABLE.read()[self.index()]
    }
}

/// Declaration of one indicator.
#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredIndicator {
    /// Index among the declared indicators.
    pub id: DeclaredId,
    /// Name in expressions and configurations: lower-case letters, digits and `_`.
    pub name: &'static str,
    /// Unit.
    pub unit: &'static str,
    /// Value if no value was reported within `max_age_seconds`; `None`: absent (NaN).
    pub default: Option<f64>,
    /// Age in seconds after which a reported value expires; `None`: it stays until the next report.
    pub max_age_seconds: Option<Seconds>,
}

static TABLE: RwLock<Vec<&'static DeclaredIndicator>> = RwLock::new(Vec::new());

/// Returns all declared indicators, in order of declaration.
pub fn declared() -> Vec<&'static DeclaredIndicator> {
    TABLE.read().clone()
}

/// Finds a declared indicator by name, ignoring case.
pub fn find(name: &str) -> Option<&'static DeclaredIndicator> {
    TABLE.read().iter().find(|decl| decl.name.eq_ignore_ascii_case(name)).copied()
}

/// Adds a declaration, or returns the existing declaration if all attributes are equal. The name
/// must not have another meaning: see [`crate::registry::declare_indicator`].
pub(crate) fn add(
    name: &str,
    unit: &str,
    default: Option<f64>,
    max_age_seconds: Option<Seconds>,
) -> Result<&'static DeclaredIndicator, CoreError> {
    let bad = |what: &str, got: String, expected: &str| {
        Err(CoreError::bad_value(format!("{what} of indicator {name}"), got, expected))
    };
    if let Some(value) = default.filter(|value| !value.is_finite()) {
        return bad("default", value.to_string(), "a finite number, or none for an absent value");
    }
    if let Some(age) = max_age_seconds.filter(|age| !(age.is_finite() && *age > 0.0)) {
        return bad("max_age_seconds", age.to_string(), "seconds above 0, or none to never expire");
    }
    let mut table = TABLE.write();
    if let Some(known) = table.iter().find(|decl| decl.name == name) {
        if (known.unit, known.default, known.max_age_seconds) == (unit, default, max_age_seconds) {
            return Ok(known);
        }
        let number = |value: Option<f64>| value.map_or("none".into(), |value| value.to_string());
        let shown = |unit: &str, default, age| {
            format!("unit {unit:?}, default {}, max_age_seconds {}", number(default), number(age))
        };
        let expected =
            format!("{}, as it was declared before", shown(known.unit, known.default, known.max_age_seconds));
        return bad("declaration", shown(unit, default, max_age_seconds), &expected);
    }
    let Ok(id) = u16::try_from(table.len()) else {
        return bad("number", table.len().to_string(), "at most 65,536 declared indicators");
    };
    let (name, unit) = (String::leak(name.into()), String::leak(unit.into()));
    let decl: &'static _ =
        Box::leak(Box::new(DeclaredIndicator { id: DeclaredId(id), name, unit, default, max_age_seconds }));
    table.push(decl);
    Ok(decl)
}
