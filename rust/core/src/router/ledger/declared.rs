//! Values of declared indicators, with their times.
use crate::ids::Seconds;
use crate::indicators::DeclaredId;

/// No value: never reported, or withdrawn.
const ABSENT: (f64, Seconds) = (f64::NAN, f64::NEG_INFINITY);

/// The last reported value of each declared indicator, by slot.
#[derive(Clone, Debug, Default)]
pub struct DeclaredValues {
    /// Values and their times, by ID and slot. Indicators without any report may be missing.
    columns: Vec<Vec<(f64, Seconds)>>,
    slots: usize,
}

impl DeclaredValues {
    pub(super) fn resize(&mut self, slots: usize) {
        self.columns.iter_mut().for_each(|column| column.resize(slots, ABSENT));
        self.slots = slots;
    }

    pub(super) fn clear(&mut self, slot: usize) {
        self.columns.iter_mut().for_each(|column| column[slot] = ABSENT);
    }

    pub(super) fn set(&mut self, slot: usize, id: DeclaredId, value: Option<f64>, at: Seconds) {
        if self.columns.len() <= id.index() {
            self.columns.resize(id.index() + 1, vec![ABSENT; self.slots]);
        }
        self.columns[id.index()][slot] = value.map_or(ABSENT, |value| (value, at));
    }

    /// Writes the column of `id` at `now`, one value per slot. Missing and outdated values are
    /// replaced by the default, or by NaN.
    pub fn read(&self, id: DeclaredId, now: Seconds, out: &mut Vec<f64>) {
        let decl = id.decl();
        let absent = decl.default.unwrap_or(f64::NAN);
        let oldest = decl.max_age_seconds.map_or(f64::NEG_INFINITY, |age| now - age);
        out.clear();
        let known = self.columns.get(id.index()).map_or(&[][..], |column| column);
        let value =
            |(value, at): &(f64, Seconds)| if value.is_nan() || *at < oldest { absent } else { *value };
        out.extend(known.iter().map(value));
        out.resize(self.slots, absent);
    }
}
