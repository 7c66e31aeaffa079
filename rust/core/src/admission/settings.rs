//! Settings of admission by load.
use super::limits::Limits;
use crate::error::CoreError;
use crate::ids::Seconds;
use hashbrown::HashMap;
use serde::Deserialize;

/// Share of the deadline that is room if the settings name no room.
const ROOM_OF_DEADLINE: f64 = 0.05;
/// Room without a deadline.
const ROOM_SECONDS: Seconds = 0.1;

/// Settings of admission by load.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct LoadConfig {
    /// Deadline of the first token after the arrival, for requests without their own; `None`: no
    /// deadline.
    pub ttft_seconds: Option<Seconds>,
    /// Longest time between two output tokens that an instance's batch may reach by a further
    /// request; `None`: no limit. Needs a step-time model, by a profile or learned.
    pub tpot_seconds: Option<Seconds>,
    /// Wait on an instance up to which it has room for a further request. `None`: a twentieth of
    /// the deadline, or 0.1 s. Infinite: requests wait only for limits of their tenants.
    pub room_seconds: Option<Seconds>,
    /// Maximum number of waiting requests.
    pub max_waiting: usize,
    /// Maximum number of waiting requests of a tenant, unless its limits say otherwise.
    pub max_waiting_per_tenant: usize,
    /// Wait of a request after which its level rises by one; `None`: requests have no levels.
    pub aging_seconds: Option<Seconds>,
    /// Limits by the hash of the tenant's name.
    #[serde(skip)]
    pub tenants: HashMap<u64, TenantLimits>,
}

impl Default for LoadConfig {
    fn default() -> LoadConfig {
        LoadConfig {
            ttft_seconds: None,
            tpot_seconds: None,
            room_seconds: None,
            max_waiting: 4096,
            max_waiting_per_tenant: 1024,
            aging_seconds: None,
            tenants: HashMap::new(),
        }
    }
}

/// Limits of a tenant; `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct TenantLimits {
    /// Maximum number of requests on engines; further requests wait.
    pub max_concurrent: Option<u32>,
    /// Maximum number of waiting requests.
    pub max_waiting: Option<usize>,
}

impl LoadConfig {
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn checked(self) -> Result<LoadConfig, CoreError> {
        positive("ttft_seconds", self.ttft_seconds)?;
        positive("tpot_seconds", self.tpot_seconds)?;
        positive("aging_seconds", self.aging_seconds)?;
        if let Some(room) = self.room_seconds
            && (room.is_nan() || room < 0.0)
        {
            return bad("room_seconds", room, "at least 0 seconds");
        }
        for limits in self.tenants.values() {
            if limits.max_concurrent == Some(0) {
                return bad("max_concurrent", 0, "at least 1 request");
            }
        }
        Ok(self)
    }

    /// Returns a tenant's limit of requests on engines.
    pub(super) fn max_concurrent(&self, tenant: u64) -> Option<u32> {
        self.tenants.get(&tenant)?.max_concurrent
    }

    /// Returns whether a tenant's limit allows a further request on engines.
    pub(super) fn may_run(&self, tenant: u64, limits: &Limits) -> bool {
        self.max_concurrent(tenant).is_none_or(|most| limits.running_everywhere(tenant) < most)
    }

    /// Returns the wait on an instance up to which it has room.
    pub fn room(&self) -> Seconds {
        let of_deadline = |deadline: Seconds| deadline * ROOM_OF_DEADLINE;
        self.room_seconds.unwrap_or_else(|| self.ttft_seconds.map_or(ROOM_SECONDS, of_deadline))
    }
}

fn positive(what: &str, value: Option<f64>) -> Result<(), CoreError> {
    match value {
        Some(value) if !(value > 0.0 && value <= 1e9) => bad(what, value, "more than 0, up to 1e9"),
        _ => Ok(()),
    }
}

fn bad<T>(what: &str, got: impl ToString, expected: &str) -> Result<T, CoreError> {
    let what = format!("admission: {what}");
    Err(CoreError::BadValue { what, got: got.to_string(), expected: expected.into() })
}
