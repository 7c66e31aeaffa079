//! Moves of running requests. A request leaves its engine at the end of the current step, its KV is
//! sent, and it queues on the target. It makes no token in between, as in STAR (section 5.4: the
//! paused request's KV is sent while the others decode).
use super::recompute::MoveBy;
use super::{Cluster, Event, State};
use crate::gaps::Gaps;
use crate::profile::StepWork;
use crate::transfer::Load;
use lmetric_core::CoreError;
use lmetric_core::fleet::Role;
use lmetric_core::ids::{Seconds, Slot};
use lmetric_core::router::Carry;
use std::cmp::Reverse;

/// Seconds between two comparisons of step times.
const COMPARED_SECONDS: Seconds = 1.0;

impl Cluster<'_> {
    /// Runs a round of rebalancing: the router chooses the moves.
    pub(super) fn rebalance(&mut self) -> Result<(), CoreError> {
        let mut moves = Vec::new();
        for observer in self.routers.each() {
            observer.catch_up_tokens(&self.engines, self.now)?;
            let (named, _) = observer.router.rebalance(self.now)?;
            let requests = named.iter().map(|named| (observer.request_of(named.ticket), named.why.target));
            moves.extend(requests);
        }
        for (request, target) in moves {
            let Some(request) = request else { continue };
            self.begin_move(request as usize, target)?;
        }
        let period = self.config.rebalance.as_ref().map_or(1.0, |settings| settings.period_seconds);
        self.at(self.now + period, Event::Rebalance);
        Ok(())
    }

    /// Records the current variance of decode steps.
    pub(super) fn compare(&mut self) {
        let decodes = |i: &usize| self.config.roles.get(*i) != Some(&Role::Prefill);
        let (mut n, mut sum, mut squares, mut running) = (0.0, 0.0, 0.0, 0);
        for engine in (0..self.engines.len()).filter(decodes).map(|i| &self.engines[i]) {
            let (sequences, context_tokens) = engine.decode_load(engine.progress(self.now).1);
            let work = StepWork { decode_sequences: sequences, context_tokens, ..StepWork::default() };
            // An idle instance counts with the time of a step without tokens: with 0 s, one idle
            // engine would outweigh all differences of load.
            let seconds = engine.profile().step_seconds(&work);
            if seconds.is_finite() {
                (n, sum, squares) = (n + 1.0, sum + seconds, squares + seconds * seconds);
                running += sequences;
            }
        }
        if n > 1.0 && running > 0 {
            let mean = sum / n;
            self.variances.0 += (squares / n - mean * mean).max(0.0);
            self.variances.1 += 1.0;
        }
        // Without a decode, nothing changes until the next event.
        let next = self.events.peek().map(|Reverse((time, _))| f64::from_bits(*time));
        let idle = running == 0 && self.ready.is_empty();
        let rounds = next.filter(|_| idle).map_or(1.0, |at| ((at - self.now) / COMPARED_SECONDS).ceil());
        self.at(self.now + rounds.max(1.0) * COMPARED_SECONDS, Event::Compare);
    }

    /// Begins to move a running request to `target`. Returns false if the move may not begin now.
    ///
    /// # Errors
    /// The errors of [`lmetric_core::router::Router::begin_move`].
    pub(super) fn begin_move(&mut self, request: usize, target: Slot) -> Result<bool, CoreError> {
        let by = self.config.move_by;
        if let MoveBy::Recompute(bounds) = by
            && !self.warm(request, target, bounds)?
        {
            return Ok(false);
        }
        // Tokens that a target computes ahead are there when the request arrives, as if their KV
        // had been sent.
        self.routers.of(request as u64).begin_move(request as u64, target, Carry::Kv, self.now)?;
        if by == MoveBy::Kv {
            self.ask_to_leave(request, self.parts[request].instance as usize)?;
        }
        Ok(true)
    }

    /// Makes a running request leave its instance at the end of the current step there.
    pub(super) fn ask_to_leave(&mut self, request: usize, source: usize) -> Result<(), CoreError> {
        self.leaving[source].push(request as u32);
        match self.instances[source].state {
            State::Stepping => {
                if let Some(end) = self.engines[source].interrupt(self.now) {
                    self.expect(source, end);
                }
            }
            // A step that was seen before its end still runs until then.
            State::Idle | State::Seen => {
                self.let_go(source, self.instances[source].busy_until.max(self.now))?;
            }
        }
        Ok(())
    }

    /// Between two steps of an instance, at `ended`: removes the requests that move. A request that
    /// has ended, or was preempted, stays.
    pub(super) fn let_go(&mut self, instance: usize, ended: Seconds) -> Result<(), CoreError> {
        let mut leaving = std::mem::take(&mut self.leaving[instance]);
        for request in leaving.drain(..).map(|request| request as usize) {
            let id = request as u64;
            let Some((made, gaps)) = self.engines[instance].leave(id) else {
                self.routers.of(id).cancel_move(id, self.now)?;
                continue;
            };
            let prompt = self.workload.shape.input_tokens[request];
            let made = self.parts[request].from.saturating_sub(prompt) + made;
            self.leave(request, prompt, made, gaps, ended)?;
        }
        self.leaving[instance] = leaving;
        Ok(())
    }

    fn leave(
        &mut self,
        request: usize,
        prompt: u32,
        made: u32,
        gaps: Gaps,
        ended: Seconds,
    ) -> Result<(), CoreError> {
        self.records.add_gaps(request, gaps);
        self.records.moves[request] += 1;
        self.last_tokens[request] = ended;
        let segment = self.routers.of(request as u64).moved(request as u64, prompt, made, self.now)?;
        self.begin(request, segment);
        let (to, from) = (segment.instance.index(), self.parts[request].before as usize);
        self.records.decode_instance[request] = to as i64;
        if matches!(self.config.move_by, MoveBy::Recompute(_)) {
            self.parts[request].recomputed = true;
            self.at(ended.max(self.now), Event::HandOver { request: request as u32 });
            return Ok(());
        }
        let chain = super::chain(self.workload, self.config, request);
        let held = self.engines[to].hit_tokens(chain, segment.from_token);
        let tokens = segment.from_token - held;
        let there = self.links.carry(Load { from, to, tokens, began: None, ended });
        self.at(there, Event::HandOver { request: request as u32 });
        Ok(())
    }
}
