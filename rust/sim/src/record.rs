//! Records of a run: one row per request, and a timeline for each instance.
use crate::gaps::Gaps;
use lmetric_core::ids::Seconds;

/// One column per quantity, one row per request, in the workload's order. Times are simulated
/// seconds.
#[derive(Clone, Debug, Default)]
pub struct Records {
    /// Arrival and placement.
    pub arrival_seconds: Vec<Seconds>,
    /// Time at which the router refused it; NaN: it did not.
    pub refused_seconds: Vec<Seconds>,
    /// Seconds from the arrival to the placement: admission may hold a request.
    pub hold_seconds: Vec<Seconds>,
    /// Prompt tokens computed for it, on all instances and again after preemptions (then output
    /// tokens, too). The last token before a boundary counts once.
    pub computed_tokens: Vec<i64>,
    /// Instance on which it first ran.
    pub instance: Vec<i64>,
    /// Cached prompt tokens that the router predicted there.
    pub predicted_hit_tokens: Vec<i64>,
    /// Cached prompt tokens at its first admission.
    pub hit_tokens: Vec<i64>,
    /// Part of these tokens that was loaded from the host tier.
    pub loaded_tokens: Vec<i64>,
    /// Holder of the prefix that it fetched before it queued; -1: no prefix fetch.
    pub fetch_instance: Vec<i64>,
    /// Fetched prompt tokens at its first admission.
    pub fetched_tokens: Vec<i64>,
    /// Seconds of the prefix fetch, including all waits.
    pub fetch_seconds: Vec<Seconds>,
    /// First admission.
    pub scheduled_seconds: Vec<Seconds>,
    /// First output token.
    pub first_token_seconds: Vec<Seconds>,
    /// Last output token.
    pub finished_seconds: Vec<Seconds>,
    /// Preemptions, for want of memory or for another request.
    pub preemptions: Vec<i64>,
    /// Last instance that decoded it after a prefill on another instance; -1: none.
    pub decode_instance: Vec<i64>,
    /// End of the segment before that.
    pub handoff_seconds: Vec<Seconds>,
    /// First admission on the instance that decoded it.
    pub decode_start_seconds: Vec<Seconds>,
    /// Load of its decode instance at the end of its prefill. 1: no decode instance held fewer
    /// context tokens. 0: another one held fewer. -1: no KV transfer.
    pub handoff_least_loaded: Vec<i64>,
    /// First segment boundary, in tokens, of a request that roles do not split; -1: not split.
    pub cut_tokens: Vec<i64>,
    /// Second segment boundary, in tokens, if it answers on another instance than it reasoned on;
    /// -1: none.
    pub answer_cut_tokens: Vec<i64>,
    /// Number of moves while it ran.
    pub moves: Vec<i64>,
    /// Number of gaps between its output tokens, as its client receives them, that exceed the SLO
    /// of the token's kind (answer or reasoning).
    pub slow_tokens: Vec<i64>,
    /// The longest of these gaps, in seconds.
    pub worst_gap_seconds: Vec<Seconds>,
}

impl PartialEq for Records {
    /// Compares bit by bit: missing times (NaN) are equal.
    fn eq(&self, other: &Records) -> bool {
        let times = |r: &Records| {
            [
                &r.arrival_seconds,
                &r.refused_seconds,
                &r.hold_seconds,
                &r.scheduled_seconds,
                &r.first_token_seconds,
                &r.finished_seconds,
                &r.handoff_seconds,
                &r.decode_start_seconds,
                &r.worst_gap_seconds,
                &r.fetch_seconds,
            ]
            .map(|column| column.iter().map(|at| at.to_bits()).collect::<Vec<_>>())
        };
        let counts = |r: &Records| {
            [
                r.instance.clone(),
                r.computed_tokens.clone(),
                r.loaded_tokens.clone(),
                r.predicted_hit_tokens.clone(),
                r.hit_tokens.clone(),
                r.preemptions.clone(),
                r.decode_instance.clone(),
                r.handoff_least_loaded.clone(),
                r.cut_tokens.clone(),
                r.answer_cut_tokens.clone(),
                r.slow_tokens.clone(),
                r.moves.clone(),
                r.fetch_instance.clone(),
                r.fetched_tokens.clone(),
            ]
        };
        times(self) == times(other) && counts(self) == counts(other)
    }
}

impl Records {
    pub(crate) fn new(requests: usize) -> Records {
        let (times, counts, none) = (vec![f64::NAN; requests], vec![0; requests], vec![-1; requests]);
        Records {
            arrival_seconds: times.clone(),
            refused_seconds: times.clone(),
            hold_seconds: vec![0.0; requests],
            computed_tokens: counts.clone(),
            loaded_tokens: counts.clone(),
            instance: none.clone(),
            predicted_hit_tokens: counts.clone(),
            hit_tokens: counts.clone(),
            scheduled_seconds: times.clone(),
            first_token_seconds: times.clone(),
            finished_seconds: times.clone(),
            preemptions: counts.clone(),
            fetch_instance: none.clone(),
            fetched_tokens: counts,
            fetch_seconds: times.clone(),
            decode_instance: none.clone(),
            handoff_seconds: times.clone(),
            decode_start_seconds: times,
            handoff_least_loaded: none.clone(),
            cut_tokens: none.clone(),
            answer_cut_tokens: none,
            moves: vec![0; requests],
            slow_tokens: vec![0; requests],
            worst_gap_seconds: vec![0.0; requests],
        }
    }

    /// Returns the prompt tokens that a request did not have to compute at its first admission.
    pub(crate) fn found_tokens(&self, request: usize) -> u32 {
        (self.hit_tokens[request] + self.fetched_tokens[request]) as u32
    }

    pub(crate) fn add_gaps(&mut self, request: usize, gaps: Gaps) {
        self.slow_tokens[request] += i64::from(gaps.slow);
        let worst = &mut self.worst_gap_seconds[request];
        *worst = worst.max(gaps.worst);
    }
}

/// Means over buckets of equal length, for each instance.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Length of a bucket, in seconds.
    pub bucket_seconds: Seconds,
    /// Number of rows of [`Timeline::column`].
    pub instances: usize,
    /// By instance, then bucket: integrals of running and of waiting requests, and computed prompt
    /// tokens.
    sums: Vec<Vec<[f64; 3]>>,
}

/// A quantity of the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// Mean number of requests in the batch.
    Running,
    /// Mean number of requests in the queue.
    Waiting,
    /// Prompt tokens computed.
    PrefillTokens,
}

impl Timeline {
    pub(crate) fn new(instances: usize, bucket_seconds: Seconds) -> Timeline {
        Timeline { bucket_seconds, instances, sums: vec![Vec::new(); instances] }
    }

    /// Spreads `rate` per second over the buckets between two times.
    pub(crate) fn add(&mut self, instance: usize, quantity: Quantity, from: Seconds, to: Seconds, rate: f64) {
        if rate == 0.0 || to <= from {
            return;
        }
        let (sums, length) = (&mut self.sums[instance], self.bucket_seconds);
        let last = (to / length) as usize;
        if sums.len() <= last {
            sums.resize(last + 1, [0.0; 3]);
        }
        let (first, mut at) = ((from / length) as usize, from);
        for (sums, bucket) in sums[first..=last].iter_mut().zip(first + 1..) {
            let end = to.min(bucket as f64 * length);
            sums[quantity as usize] += rate * (end - at).max(0.0);
            at = end;
        }
    }

    /// Returns the number of buckets up to the last event of the run.
    pub fn buckets(&self) -> usize {
        self.sums.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Returns a quantity by instance, then bucket.
    pub fn column(&self, quantity: Quantity) -> Vec<f64> {
        let scale = if quantity == Quantity::PrefillTokens { 1.0 } else { 1.0 / self.bucket_seconds };
        let buckets = self.buckets();
        let row = |sums: &Vec<[f64; 3]>| {
            let mut row: Vec<f64> = sums.iter().map(|s| s[quantity as usize] * scale).collect();
            row.resize(buckets, 0.0);
            row
        };
        self.sums.iter().flat_map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lasts_over_several_buckets_is_shared_among_them() {
        let mut timeline = Timeline::new(2, 10.0);
        timeline.add(1, Quantity::Running, 5.0, 25.0, 3.0);
        timeline.add(1, Quantity::PrefillTokens, 8.0, 12.0, 100.0);
        timeline.add(0, Quantity::Waiting, 0.0, 5.0, 1.0);
        assert_eq!(timeline.column(Quantity::Running), [0.0, 0.0, 0.0, 1.5, 3.0, 1.5]);
        assert_eq!(timeline.column(Quantity::PrefillTokens), [0.0, 0.0, 0.0, 200.0, 200.0, 0.0]);
        assert_eq!(timeline.column(Quantity::Waiting), [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]);
    }
}
