//! The load that nobody here placed: what an engine reports beyond the requests of this router and
//! its peers.
use crate::ids::Seconds;

/// What an engine last said.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// When it was received.
    pub at: Seconds,
    /// Waiting requests.
    pub waiting: Option<f64>,
    /// Running requests.
    pub running: Option<f64>,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_usage: Option<f64>,
}

/// The fewest and the most requests of ours and of peer routers on an instance since its last
/// report that said anything new: when in that time a report was sampled is not known.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    least: f64,
    most: f64,
}

/// An instance's external load, from its reports.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct External {
    /// Requests of others that wait and that run, from the last report.
    pub waiting: f64,
    pub running: f64,
    /// Requests of ours and of peer routers since then.
    known: Span,
    /// What was last compared with them: waiting, running, and the KV cache's usage, which tells
    /// two samples apart.
    compared: Option<(f64, f64, Option<f64>)>,
    /// The last report, with what earlier ones said where it says nothing.
    pub report: Option<Report>,
}

impl External {
    /// The number of requests of ours and of peer routers may have changed.
    pub fn note(&mut self, known: f64) {
        self.known = Span { least: self.known.least.min(known), most: self.known.most.max(known) };
    }

    /// Others' requests are those of a report beyond the `known`, of which `known_queued` wait. How
    /// many of them the report counts depends on when it was sampled, so of the numbers that may
    /// be, the one closest to what was known counts.
    pub fn compare(&mut self, report: &Report, known: f64, known_queued: f64) {
        let (Some(waiting), Some(running)) = (report.waiting, report.running) else { return };
        // The same figures to the last digit are the same sample: a page that somebody keeps. It
        // tells nothing new.
        let told = Some((waiting, running, report.kv_usage));
        if self.compared == told {
            return;
        }
        // Only totals can be compared: what is ours of the engine's running requests depends on how
        // far it is.
        let (all, before) = (waiting + running, self.waiting + self.running);
        let external = before.min(all - self.known.least).max(all - self.known.most).max(0.0);
        self.waiting = external.min((waiting - known_queued).max(0.0));
        self.running = external - self.waiting;
        (self.compared, self.known) = (told, Span { least: known, most: known });
    }

    /// Keeps a report, and what earlier ones said of the numbers that it leaves out. Returns the
    /// report that is kept.
    pub fn keep(&mut self, report: Report) -> Report {
        let last = self.report.get_or_insert(report);
        last.at = report.at;
        for (kept, new) in [
            (&mut last.waiting, report.waiting),
            (&mut last.running, report.running),
            (&mut last.kv_usage, report.kv_usage),
        ] {
            *kept = new.or(*kept);
        }
        *last
    }
}
