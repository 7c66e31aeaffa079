//! From one segment of a plan to the next: a prompt is prefilled on one instance, its KV moves, and it decodes on another.
use super::{Cluster, Event};
use crate::events::{Admitted, Prefilled};
use crate::record::Quantity;
use crate::transfer::Load;
use lmetric_core::CoreError;
use lmetric_core::fleet::Role;
use lmetric_core::ids::Seconds;
use lmetric_core::plan::{Binding, Segment, Usage};

/// What of a request is at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) enum Leg {
    /// All of it, on one instance.
    #[default]
    Whole,
    /// Its prompt; it decodes elsewhere.
    Prefill,
    /// Its output; its prompt was prefilled elsewhere.
    Decode,
}

impl Cluster<'_> {
    /// A prompt whose prefill waits for nobody takes its own time (SIBYL, Algorithm 2); its engine knows nothing of it.
    pub(super) fn prefill_alone(&mut self, request: usize, instance: usize) -> Result<(), CoreError> {
        let tokens = self.workload.shape.input_tokens[request];
        let seconds = self.engines[instance].profile().prefill_seconds(tokens);
        self.records.scheduled_seconds[request] = self.now;
        let id = request as u64;
        let admitted = Admitted { id, cached_tokens: 0, pulled_tokens: 0, first_time: true };
        self.observer.started(&[admitted], self.now)?;
        let (start, end) = (self.now, self.now + seconds);
        self.timeline.add(instance, Quantity::Running, start, end, 1.0);
        self.timeline.add(instance, Quantity::PrefillTokens, start, end, f64::from(tokens) / seconds);
        self.at(end, Event::Prefilled { request: request as u32 });
        Ok(())
    }

    /// The prefill of a request is known to be over, at `ended`: the router says where it decodes.
    pub(super) fn next_segment(&mut self, request: usize, ended: Seconds) -> Result<(), CoreError> {
        if self.config.router.binding == Binding::Late {
            self.observer.catch_up(&self.engines, self.now)?;
        }
        let usage = Usage {
            prompt_tokens: Some(self.workload.shape.input_tokens[request]),
            cached_tokens: Some(self.records.hit_tokens[request] as u32),
            output_tokens: Some(1),
        };
        let Some(Segment { instance, .. }) = self.observer.finished(request as u64, usage, self.now)? else {
            let got = format!("request {request} without a segment behind its prefill");
            return super::bad("plan", got, "one that leads to the request's end");
        };
        self.legs[request] = Leg::Decode;
        let bound = std::mem::replace(&mut self.records.decode_instance[request], instance.index() as i64);
        self.early[request] = bound == instance.index() as i64;
        self.records.handoff_seconds[request] = ended;
        Ok(())
    }

    /// A request's prefill is over: its KV begins to move to where it decodes, or has begun to.
    pub(super) fn prefilled(&mut self, request: usize) -> Result<(), CoreError> {
        let tokens = self.workload.shape.input_tokens[request];
        if self.legs[request] == Leg::Prefill {
            let chunk = Prefilled { id: request as u64, tokens, done: true };
            self.observer.prefilled(&chunk, false, self.now)?;
            self.next_segment(request, self.now)?;
        }
        let to = self.records.decode_instance[request] as usize;
        self.records.handoff_least_loaded[request] = i64::from(self.least_loaded(to));
        let held = self.engines[to].hit_tokens(super::chain(self.workload, self.config, request), tokens);
        let there = self.links.carry(Load {
            from: self.records.instance[request] as usize,
            to,
            tokens: tokens - held,
            began: self.early[request].then_some(self.records.scheduled_seconds[request]),
            ended: self.now,
        });
        self.at(there, Event::HandOver { request: request as u32 });
        Ok(())
    }

    /// A request's KV has arrived: it queues where it decodes.
    pub(super) fn hand_over(&mut self, request: usize) -> Result<(), CoreError> {
        self.observer.sent(request as u64, self.now)?;
        self.submit(request, self.records.decode_instance[request] as usize)
    }

    /// Whether no instance for decodes holds fewer context tokens of running requests than this one now (SIBYL, Table 1: the
    /// optimal assignment ratio is the share of such hand-overs).
    fn least_loaded(&self, instance: usize) -> bool {
        let tokens = |i: usize| {
            let engine = &self.engines[i];
            engine.load_after(engine.progress(self.now).1).context_tokens
        };
        let own = tokens(instance);
        let decodes = |i: &usize| self.config.roles.get(*i) == Some(&Role::Decode);
        (0..self.engines.len()).filter(decodes).all(|i| own <= tokens(i))
    }

    /// Engines that stand still for ever do so with a batch: it counts until the last thing that happened.
    pub(super) fn time_stalls(&mut self) {
        for (instance, engine) in self.engines.iter().enumerate() {
            if let Some(start) = engine.last_step_start().filter(|_| self.stalled > 0 && engine.stalled()) {
                let running = f64::from(engine.running());
                self.timeline.add(instance, Quantity::Running, start, self.now, running);
            }
        }
    }
}
