//! How requests are split that no roles split.

/// How requests are split that no roles split: a planner by name, with its settings.
/// [`crate::router::planners`] lists them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Split {
    /// The planner; `None`: requests are not split.
    pub planner: Option<String>,
    /// Its settings by name; the others are at their defaults.
    pub settings: Vec<(String, f64)>,
}

impl Split {
    /// Requests are not split.
    pub const NONE: Split = Split { planner: None, settings: Vec::new() };

    /// The planner of this name with these settings.
    pub fn by(planner: &str, settings: &[(&str, f64)]) -> Split {
        Split {
            planner: Some(planner.into()),
            settings: settings.iter().map(|(name, value)| (name.to_string(), *value)).collect(),
        }
    }
}
