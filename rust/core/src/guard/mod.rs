//! The hot-spot guard. (Place holder, to be replaced.)

/// Settings.
#[derive(Clone, Debug, Default)]
pub struct GuardConfig {
    /// Whether it acts.
    pub on: bool,
    /// Window.
    pub window_seconds: f64,
}

/// What it did.
#[derive(Clone, Debug)]
pub struct GuardEvent {}
