//! The way from one segment of a plan to the next: one instance prefills a prompt, its KV moves,
//! and another instance decodes.
use super::{Cluster, Event};
use crate::events::{Admitted, Prefilled};
use crate::record::Quantity;
use crate::transfer::Load;
use lmetric_core::CoreError;
use lmetric_core::fleet::Role;
use lmetric_core::ids::Seconds;
use lmetric_core::plan::{Binding, Segment, Usage};

/// The tokens of a request that one instance works on: those of the open segment of its plan.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub(super) struct Part {
    pub from: u32,
    /// `None`: to the request's end.
    pub to: Option<u32>,
    /// The instance of this part, and the instance of the part before it.
    pub instance: u32,
    pub before: u32,
    /// One past the last token that was fetched before it began; 0: no prefix fetch.
    pub fetched: u32,
    /// Times at which the engines took this part and the part before it off their queues.
    pub began: Seconds,
    pub before_began: Seconds,
    /// Whether the part before the previous one ran here, too: the request comes back.
    pub back: bool,
    /// Whether its instance computes all earlier tokens again, except for those in its cache.
    pub recomputed: bool,
}

impl Part {
    /// Whether it ends before the first output token that counts, for a request with `prompt`
    /// prompt tokens.
    pub fn prefills_only(&self, prompt: u32) -> bool {
        self.to.is_some_and(|to| to <= prompt)
    }

    /// Returns one past the last token that its engine makes, for a request with `prompt` prompt
    /// tokens; None if the part runs to the request's end. The last token is made again behind the
    /// boundary, unless its tokens are `kept`.
    pub fn asked(&self, prompt: u32, kept: bool) -> Option<u32> {
        self.to.map(|to| if kept && to > prompt { to } else { to + 1 })
    }

    /// Whether another part follows it: not if it makes the rest of the answer.
    pub fn follows(&self, prompt: u32, output: u32, kept: bool) -> bool {
        self.prefills_only(prompt) || self.asked(prompt, kept).is_some_and(|to| to < prompt + output)
    }

    /// Whether its tokens are known as they are made. `silent`: parts with a successor send nothing
    /// until their end.
    pub fn streams(&self, prompt: u32, silent: bool) -> bool {
        self.to.is_none_or(|to| to > prompt && !silent)
    }
}

impl Cluster<'_> {
    /// Runs a prefill that waits for no other request and takes its own time (SIBYL, Algorithm 2).
    /// Its engine does not know of it.
    pub(super) fn prefill_alone(&mut self, request: usize, instance: usize) -> Result<(), CoreError> {
        let tokens = self.workload.shape.input_tokens[request];
        let seconds = self.engines[instance].profile().prefill_seconds(tokens);
        self.records.scheduled_seconds[request] = self.now;
        self.records.computed_tokens[request] += i64::from(tokens);
        self.parts[request].began = self.now;
        let id = request as u64;
        let admitted =
            Admitted { id, cached_tokens: 0, fetched_tokens: 0, loaded_tokens: 0, first_time: true };
        self.routers.of(id).started(&admitted, self.now)?;
        let (start, end) = (self.now, self.now + seconds);
        self.timeline.add(instance, Quantity::Running, start, end, 1.0);
        self.timeline.add(instance, Quantity::PrefillTokens, start, end, f64::from(tokens) / seconds);
        self.at(end, Event::Prefilled { request: request as u32 });
        Ok(())
    }

    /// Begins a segment of a request that was placed.
    pub(super) fn begin(&mut self, request: usize, segment: Segment) {
        let (from, to) = (segment.from_token, segment.to_token);
        let last = self.parts[request];
        let instance = segment.instance.0;
        self.parts[request] = Part {
            from,
            to,
            instance,
            before: last.instance,
            fetched: 0,
            began: f64::NAN,
            before_began: last.began,
            back: last.from > 0 && instance == last.before,
            recomputed: false,
        };
        self.started[request] = false;
        if from > 0 {
            self.records.decode_start_seconds[request] = f64::NAN;
        }
        let by_roles = self.config.roles.get(instance as usize) == Some(&Role::Prefill);
        if let Some(cut) = to.filter(|_| !by_roles) {
            let column = match from {
                0 => &mut self.records.cut_tokens,
                _ => &mut self.records.answer_cut_tokens,
            };
            column[request] = i64::from(cut);
        }
    }

    /// Ends the open segment of a request at `ended`; the router chooses the next instance.
    pub(super) fn next_segment(&mut self, request: usize, ended: Seconds) -> Result<(), CoreError> {
        if self.config.router.binding == Binding::Late {
            self.routers.catch_up(request as u64, &self.engines, self.now)?;
        }
        let prompt = self.workload.shape.input_tokens[request];
        let made = self.parts[request].to.map_or(0, |to| to.saturating_sub(prompt));
        if made > 0 {
            // The client has its tokens by now.
            let at = &mut self.records.first_token_seconds[request];
            *at = if at.is_nan() { ended } else { *at };
        }
        let usage = Usage {
            prompt_tokens: Some(prompt),
            cached_tokens: Some(self.records.found_tokens(request)),
            output_tokens: Some(made.max(1)),
            ..Usage::default()
        };
        let observer = self.routers.of(request as u64);
        let bound = observer.bound(request as u64).next();
        let Some(segment) = observer.finished(request as u64, usage, made, self.now)? else {
            let got = format!("request {request} without a segment behind the one that ended");
            return super::bad("plan", got, "one that leads to the request's end");
        };
        self.begin(request, segment);
        self.records.decode_instance[request] = segment.instance.index() as i64;
        self.early[request] = bound.is_some_and(|bound| bound.instance == segment.instance);
        self.records.handoff_seconds[request] = ended;
        Ok(())
    }

    /// Begins, or continues, the transfer of a segment's KV to the next segment's instance.
    pub(super) fn prefilled(&mut self, request: usize) -> Result<(), CoreError> {
        if self.parts[request].from == 0 {
            // No engine ran this prefill, which waited for no other request.
            let tokens = self.workload.shape.input_tokens[request];
            let chunk = Prefilled { id: request as u64, tokens, done: true, decodes: false };
            self.routers.of(chunk.id).prefilled(&chunk, false, self.now)?;
            self.next_segment(request, self.now)?;
        }
        let Part { from, instance, before, before_began, back, .. } = self.parts[request];
        // If it is kept, the last token that counts has no KV yet.
        let kept = self.config.split.keeps_tokens();
        let tokens = from - u32::from(kept && from > self.workload.shape.input_tokens[request]);
        let to = instance as usize;
        self.records.handoff_least_loaded[request] = i64::from(self.least_loaded(to));
        let chain = super::chain_with_answer(self.workload, self.config, request);
        let held = match back {
            true => self.engines[to].own_tokens(chain, request as u64, tokens),
            false => self.engines[to].hit_tokens(chain, tokens),
        };
        let there = self.links.carry(Load {
            from: before as usize,
            to,
            tokens: tokens - held,
            began: self.early[request].then_some(before_began),
            ended: self.now,
        });
        self.at(there, Event::HandOver { request: request as u32 });
        Ok(())
    }

    /// Queues a request on its next instance when its KV has arrived.
    pub(super) fn hand_over(&mut self, request: usize) -> Result<(), CoreError> {
        self.routers.of(request as u64).sent(request as u64, self.now)?;
        self.submit(request, self.parts[request].instance as usize)
    }

    /// Whether no other instance that may decode holds fewer context tokens of running requests
    /// than this instance now. (SIBYL, Table 1: the optimal assignment ratio is the share of such
    /// transfers.)
    fn least_loaded(&self, instance: usize) -> bool {
        let tokens = |i: usize| {
            let engine = &self.engines[i];
            engine.load_after(engine.progress(self.now).1).context_tokens
        };
        let own = tokens(instance);
        let decodes = |i: &usize| self.config.roles.get(*i) != Some(&Role::Prefill);
        (0..self.engines.len()).filter(decodes).all(|i| own <= tokens(i))
    }

    /// Adds to the timeline the batches of engines that stand still forever, until the last event.
    pub(super) fn time_stalls(&mut self) {
        for (instance, engine) in self.engines.iter().enumerate() {
            if let Some(start) = engine.last_step_start().filter(|_| self.stalled > 0 && engine.stalled()) {
                let running = f64::from(engine.running());
                self.timeline.add(instance, Quantity::Running, start, self.now, running);
            }
        }
    }
}
