//! External load: requests that an engine reports beyond those of this router and its peers.
use crate::ids::Seconds;
use crate::indicators::{Columns, Indicator};

/// An engine's load report.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Time at which the report arrived.
    pub at: Seconds,
    /// Waiting requests.
    pub waiting: Option<f64>,
    /// Running requests.
    pub running: Option<f64>,
    /// Fraction of the KV cache in use, 0 to 1.
    pub kv_usage: Option<f64>,
    /// Prompt tokens still to compute, of waiting and running requests, without cached tokens.
    pub prefill_tokens: Option<f64>,
}

impl Report {
    /// Writes the reported values.
    pub(super) fn write(&self, slot: usize, columns: &mut Columns) {
        for (id, value) in [
            (Indicator::ReportedWaiting, self.waiting),
            (Indicator::ReportedRunning, self.running),
            (Indicator::KvUsage, self.kv_usage),
        ] {
            columns.get_mut(id)[slot] = value.unwrap_or(f64::NAN);
        }
    }
}

/// Minimum and maximum number of own and peer requests on an instance since the last report with
/// new values. The sample time of a report within this period is unknown.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    least: f64,
    most: f64,
}

/// An instance's external load, from its reports.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct External {
    /// External requests that wait and that run, from the last report.
    pub waiting: f64,
    pub running: f64,
    /// External prompt tokens still to compute, from the last report.
    pub prefill_tokens: f64,
    /// Own and peer requests since the last report.
    known: Span,
    /// Values of the last compared report: waiting, running, and KV cache usage, which
    /// distinguishes two samples.
    compared: Option<(f64, f64, Option<f64>)>,
    /// The last report; missing values come from earlier reports.
    pub report: Option<Report>,
}

impl External {
    /// Extends the span by the current number of own and peer requests.
    pub fn note(&mut self, known: f64) {
        self.known = Span { least: self.known.least.min(known), most: self.known.most.max(known) };
    }

    /// Updates the external load from a report: its requests beyond the `known` requests, of which
    /// `known_queued` wait. The number of known requests in the report depends on its sample time.
    /// Of the possible values, the one closest to the previous value is used.
    pub fn compare(&mut self, report: &Report, known: f64, known_queued: f64) {
        let (Some(waiting), Some(running)) = (report.waiting, report.running) else { return };
        // Identical numbers mean the same sample, for example a cached page without new
        // information.
        let told = Some((waiting, running, report.kv_usage));
        if self.compared == told {
            return;
        }
        // Only totals can be compared: the own part of the engine's running requests depends on the
        // engine's progress.
        let (all, before) = (waiting + running, self.waiting + self.running);
        let external = before.min(all - self.known.least).max(all - self.known.most).max(0.0);
        self.waiting = external.min((waiting - known_queued).max(0.0));
        self.running = external - self.waiting;
        (self.compared, self.known) = (told, Span { least: known, most: known });
        self.prefill_tokens = 0.0; // unknown in a new sample
    }

    /// Updates the external prompt tokens from a report: its tokens beyond the `known` tokens.
    pub fn compare_tokens(&mut self, report: &Report, known: f64) {
        if let Some(tokens) = report.prefill_tokens {
            self.prefill_tokens = (tokens - known).max(0.0);
        }
    }

    /// Stores a report; missing values come from earlier reports. Returns the stored report.
    pub fn keep(&mut self, report: Report) -> Report {
        let last = self.report.get_or_insert(report);
        last.at = report.at;
        for (kept, new) in [
            (&mut last.waiting, report.waiting),
            (&mut last.running, report.running),
            (&mut last.kv_usage, report.kv_usage),
            (&mut last.prefill_tokens, report.prefill_tokens),
        ] {
            *kept = new.or(*kept);
        }
        *last
    }
}
