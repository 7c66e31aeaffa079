//! Bounds under a cache without an end: the prompt tokens that must be computed, and the earliest
//! ends.
use super::Workload;
use crate::engine::Admission;
use crate::profile::Profile;
use hashbrown::HashSet;
use lmetric_core::ids::Seconds;

impl Workload {
    /// Returns the prompt tokens of each request that some engine must compute even if no cache
    /// ever drops a block and all engines share one. Requests are taken in the workload's order.
    /// `cached_answers`: whether prompts find the blocks of earlier answers.
    pub fn min_computed_tokens(&self, admission: Admission, cached_answers: bool) -> Vec<i64> {
        let shape = &self.shape;
        let mut held: HashSet<u64> = HashSet::new();
        (0..self.len())
            .map(|i| {
                let prompt = shape.input_tokens[i];
                let chain = match admission {
                    Admission::Reserve => shape.chain(i),
                    Admission::Vllm => shape.full_blocks(i, prompt - 1),
                };
                // A hash covers all blocks before it, so the held blocks are a leading run.
                let found = chain.partition_point(|hash| held.contains(hash));
                let named = match (admission, cached_answers) {
                    (Admission::Reserve, _) => shape.chain(i),
                    (Admission::Vllm, false) => shape.full_blocks(i, prompt),
                    (Admission::Vllm, true) => shape.chain_with_answer(i),
                };
                held.extend(named[found.min(named.len())..].iter().copied());
                i64::from(prompt - (found as u32 * shape.block_tokens).min(prompt - 1))
            })
            .collect()
    }

    /// Returns the earliest end of each request, in seconds on the trace's clock. Each request
    /// computes `computed_tokens[i]` prompt tokens and decodes its answer when it arrives, alone on
    /// the fastest of the engines. Requests wait for each other as in the trace. So a program alone
    /// ends no earlier.
    pub fn ideal_finished_seconds(&self, profiles: &[Profile], computed_tokens: &[i64]) -> Vec<Seconds> {
        let mut kinds: Vec<&Profile> = Vec::new();
        for profile in profiles {
            if !kinds.contains(&profile) {
                kinds.push(profile);
            }
        }
        let shape = &self.shape;
        let mut after = vec![0.0f64; self.len()]; // the latest end that a request waits for
        let mut ends = vec![0.0; self.len()];
        for i in shape.waits.order() {
            let (prompt, output) = (shape.input_tokens[i], shape.output_tokens[i]);
            let computed = (computed_tokens[i].clamp(1, i64::from(prompt))) as u32;
            let seconds = |profile: &&Profile| {
                profile.prefill_seconds_behind(prompt - computed, computed)
                    + profile.decode_seconds(prompt + 1, output - 1)
            };
            let service = kinds.iter().map(seconds).fold(f64::INFINITY, f64::min);
            let think = if shape.waits.counts[i] > 0 { self.think_seconds(i) } else { 0.0 };
            ends[i] = self.arrival_seconds[i].max(after[i] + think) + service;
            shape.waits.followers(i).for_each(|next| after[next] = after[next].max(ends[i]));
        }
        ends
    }
}
