//! Indicators that a program or a configuration declares beside those of the [table](super::table): one number for each instance,
//! which its producers report.
//!
//! Declarations are names for the whole process, as registered policies are, and are never taken back. Each router keeps its
//! own values.
use crate::error::CoreError;
use crate::ids::Seconds;
use parking_lot::RwLock;

/// The place of a declared indicator among all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeclaredId(u16);

impl DeclaredId {
    /// As an index.
    #[inline]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// Its declaration.
    pub fn decl(self) -> &'static DeclaredIndicator {
        TABLE.read()[self.index()]
    }
}

/// One declaration.
#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredIndicator {
    /// Its place among the declared indicators.
    pub id: DeclaredId,
    /// Name in expressions and configurations: small letters, digits and `_`.
    pub name: &'static str,
    /// Unit.
    pub unit: &'static str,
    /// Its value where none was reported, or none lately; `None`: absent (NaN).
    pub default: Option<f64>,
    /// Reported values that are older count no longer; `None`: they count until the next one.
    pub max_age_seconds: Option<Seconds>,
}

static TABLE: RwLock<Vec<&'static DeclaredIndicator>> = RwLock::new(Vec::new());

/// All declared indicators, in the order in which they were declared.
pub fn declared() -> Vec<&'static DeclaredIndicator> {
    TABLE.read().clone()
}

/// The declared indicator of that name, in any case.
pub fn find(name: &str) -> Option<&'static DeclaredIndicator> {
    TABLE.read().iter().find(|decl| decl.name.eq_ignore_ascii_case(name)).copied()
}

/// Adds a declaration, or returns the one that is there with the same attributes. The name must be
/// free of other meanings: see [`crate::registry::declare_indicator`].
pub(crate) fn add(
    name: &str,
    unit: &str,
    default: Option<f64>,
    max_age_seconds: Option<Seconds>,
) -> Result<&'static DeclaredIndicator, CoreError> {
    let bad = |what: &str, got: String, expected: &str| {
        Err(CoreError::BadValue {
            what: format!("{what} of indicator {name}"),
            got,
            expected: expected.into(),
        })
    };
    if let Some(value) = default.filter(|value| !value.is_finite()) {
        return bad("default", value.to_string(), "a finite number, or none for an absent value");
    }
    if let Some(age) = max_age_seconds.filter(|age| !(age.is_finite() && *age > 0.0)) {
        return bad("max_age_seconds", age.to_string(), "seconds above 0, or none for values that stay");
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
