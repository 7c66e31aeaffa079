//! From one segment of a plan to the next: a prompt is prefilled on one instance, its KV moves, and it decodes on another.
use super::{Cluster, Event};
use crate::events::{Admitted, Prefilled};
use crate::record::Quantity;
use crate::transfer::Load;
use lmetric_core::CoreError;
use lmetric_core::fleet::Role;
use lmetric_core::ids::Seconds;
use lmetric_core::plan::{Binding, Segment, Usage};

/// The tokens of a request that are at work on one instance: those of the open segment of its plan.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub(super) struct Part {
    pub from: u32,
    /// `None`: to its end.
    pub to: Option<u32>,
    /// Where it runs, and where the part before it ran.
    pub instance: u32,
    pub before: u32,
    /// One past the last token that was pulled before it began; 0: none was.
    pub pulled: u32,
    /// When its engine took it off its queue, and the part before it.
    pub began: Seconds,
    pub before_began: Seconds,
    /// Whether the part before that one ran here, too: the request comes back.
    pub back: bool,
    /// Whether its instance computes what came before it again, but for what its cache holds.
    pub recomputed: bool,
}

impl Part {
    /// Whether it ends before the first output token that counts, of a request with so many prompt tokens.
    pub fn prefills_only(&self, prompt: u32) -> bool {
        self.to.is_some_and(|to| to <= prompt)
    }

    /// Tokens of a request with so many prompt tokens up to which its engine is asked, where it ends before the request does: it hands over with a token that is made
    /// again behind the cut, unless what it makes is `kept`.
    pub fn asked(&self, prompt: u32, kept: bool) -> Option<u32> {
        self.to.map(|to| if kept && to > prompt { to } else { to + 1 })
    }

    /// Whether another part follows it: not where it makes all of the answer.
    pub fn follows(&self, prompt: u32, output: u32, kept: bool) -> bool {
        self.prefills_only(prompt) || self.asked(prompt, kept).is_some_and(|to| to < prompt + output)
    }

    /// Whether its tokens are known as they are made, where those that others follow are `silent` or not.
    pub fn streams(&self, prompt: u32, silent: bool) -> bool {
        self.to.is_none_or(|to| to > prompt && !silent)
    }
}

impl Cluster<'_> {
    /// A prompt whose prefill waits for nobody takes its own time (SIBYL, Algorithm 2); its engine knows nothing of it.
    pub(super) fn prefill_alone(&mut self, request: usize, instance: usize) -> Result<(), CoreError> {
        let tokens = self.workload.shape.input_tokens[request];
        let seconds = self.engines[instance].profile().prefill_seconds(tokens);
        self.records.scheduled_seconds[request] = self.now;
        self.parts[request].began = self.now;
        let id = request as u64;
        let admitted = Admitted { id, cached_tokens: 0, pulled_tokens: 0, first_time: true };
        self.routers.of(id).started(&admitted, self.now)?;
        let (start, end) = (self.now, self.now + seconds);
        self.timeline.add(instance, Quantity::Running, start, end, 1.0);
        self.timeline.add(instance, Quantity::PrefillTokens, start, end, f64::from(tokens) / seconds);
        self.at(end, Event::Prefilled { request: request as u32 });
        Ok(())
    }

    /// A segment of a request is placed.
    pub(super) fn begin(&mut self, request: usize, segment: Segment) {
        let (from, to) = (segment.from_token, segment.to_token);
        let last = self.parts[request];
        let instance = segment.instance.0;
        self.parts[request] = Part {
            from,
            to,
            instance,
            before: last.instance,
            pulled: 0,
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

    /// The open segment of a request is known to be over, at `ended`: the router says where it goes on.
    pub(super) fn next_segment(&mut self, request: usize, ended: Seconds) -> Result<(), CoreError> {
        if self.config.router.binding == Binding::Late {
            self.routers.catch_up(request as u64, &self.engines, self.now)?;
        }
        let prompt = self.workload.shape.input_tokens[request];
        let made = self.parts[request].to.map_or(0, |to| to.saturating_sub(prompt));
        if made > 0 {
            // What it made is with the client by now.
            let at = &mut self.records.first_token_seconds[request];
            *at = if at.is_nan() { ended } else { *at };
        }
        let usage = Usage {
            prompt_tokens: Some(prompt),
            cached_tokens: Some(self.records.found_tokens(request)),
            output_tokens: Some(made.max(1)),
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

    /// A segment of a request is over: its KV begins to move to where the next one runs, or has begun to.
    pub(super) fn prefilled(&mut self, request: usize) -> Result<(), CoreError> {
        if self.parts[request].from == 0 {
            // One that no engine ran: its prefill waited for nobody.
            let tokens = self.workload.shape.input_tokens[request];
            let chunk = Prefilled { id: request as u64, tokens, done: true };
            self.routers.of(chunk.id).prefilled(&chunk, false, self.now)?;
            self.next_segment(request, self.now)?;
        }
        let Part { from, instance, before, before_began, back, .. } = self.parts[request];
        // The last token that counts has no KV yet where it is kept.
        let kept = self.config.split.keeps_tokens();
        let tokens = from - u32::from(kept && from > self.workload.shape.input_tokens[request]);
        let to = instance as usize;
        self.records.handoff_least_loaded[request] = i64::from(self.least_loaded(to));
        let chain = super::chain(self.workload, self.config, request);
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

    /// A request's KV has arrived: it queues where it goes on.
    pub(super) fn hand_over(&mut self, request: usize) -> Result<(), CoreError> {
        self.routers.of(request as u64).sent(request as u64, self.now)?;
        self.submit(request, self.parts[request].instance as usize)
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
