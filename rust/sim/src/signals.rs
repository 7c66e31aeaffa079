//! Signals from the engines to the router, and their delay: one code path with settings, from
//! perfect information to that of a live server.
use crate::engine::Engine;
use crate::events::{Admitted, KvEvent, KvLog, Prefilled};
use hashbrown::HashMap;
use lmetric_core::ids::Seconds;
use lmetric_core::indicators::{Indicator, IndicatorSet};
use lmetric_core::plan::{Event, Segment, Usage};
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{Carry, Router, TicketId};
use lmetric_core::{CoreError, Slot};

/// Content and delay of the router's signals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Signals {
    /// Whether the results of a step are known once it runs, as if it had ended; else they are
    /// known at its end.
    pub step_end: bool,
    /// Whether engines report admissions and computed prompt chunks. Else the router infers its
    /// backlog from first tokens, as it does live.
    pub progress: bool,
    /// Delay in seconds of changes of the caches.
    pub event_delay_seconds: Seconds,
    /// Seconds between an engine's load reports. None: a report for every decision.
    pub report_period_seconds: Option<Seconds>,
    /// Whether load reports include the prompt tokens to compute.
    pub report_tokens: bool,
    /// Number of steps of a batch between two reports of its tokens to the router. Reporting every
    /// token costs time at every decision in proportion to the number of decodes.
    pub token_stride: u32,
}

impl Signals {
    /// All signals, at the moment they arise.
    pub const EXACT: Signals = Signals {
        step_end: false,
        progress: true,
        event_delay_seconds: 0.0,
        report_period_seconds: None,
        report_tokens: false,
        token_stride: 1,
    };
    /// All engines as at the end of their current step.
    pub const STEP_END: Signals = Signals { step_end: true, ..Signals::EXACT };

    /// The signals of a live server: late cache events, sampled load reports, and only the progress
    /// that responses show.
    pub fn delayed(event_delay_seconds: Seconds, report_period_seconds: Seconds) -> Signals {
        Signals {
            step_end: false,
            progress: false,
            event_delay_seconds,
            report_period_seconds: Some(report_period_seconds),
            ..Signals::EXACT
        }
    }

    pub(crate) fn check(&self) -> Result<(), CoreError> {
        let period = self.report_period_seconds.unwrap_or(1.0);
        for (what, value, least) in
            [("event_delay_seconds", self.event_delay_seconds, 0.0), ("report_period_seconds", period, 1e-3)]
        {
            if !(value >= least && value <= 1e9) {
                return Err(CoreError::BadValue {
                    what: what.into(),
                    got: value.to_string(),
                    expected: format!("{least} to 1e9 seconds"),
                });
            }
        }
        if self.token_stride == 0 {
            return Err(CoreError::BadValue {
                what: "token_stride".into(),
                got: "0".into(),
                expected: "1 token or more".into(),
            });
        }
        Ok(())
    }
}

/// Indicators that change with every output token, or that engines report.
const BY_TOKEN: IndicatorSet = IndicatorSet::of(&[
    Indicator::Tokens,
    Indicator::DecodeTokens,
    Indicator::RemainingTokens,
    Indicator::WindowOutputTokens,
    Indicator::PredictedTtftSeconds,
    Indicator::PredictedTpotSeconds,
    Indicator::StepSeconds,
    Indicator::StepRelativeError,
    Indicator::DecodeTokensPerSecond,
    Indicator::HandoffRunningTokens,
    Indicator::HandoffArrivedTokens,
    Indicator::HandoffComingTokens,
    Indicator::DecodePressure,
]);
const REPORTED: IndicatorSet = IndicatorSet::of(&[
    Indicator::KvUsage,
    Indicator::ReportedWaiting,
    Indicator::ReportedRunning,
    Indicator::ReportAgeSeconds,
]);

/// A request in flight, in the router's view.
#[derive(Clone, Copy, Debug)]
struct Flight {
    ticket: TicketId,
    /// Output tokens reported to the router.
    told: u32,
    /// Output tokens made before the open segment, and output tokens that count once it has ended.
    before: u32,
    most: u32,
}

impl Flight {
    /// Opens `segment` of a request with `prompt` prompt tokens, of which `before` output tokens
    /// were made earlier.
    fn open(&mut self, segment: Segment, prompt: u32, before: u32) {
        (self.told, self.before) = (0, before);
        self.most = segment.to_token.map_or(u32::MAX, |to| to.saturating_sub(prompt));
    }
}

/// A router with its view of the engines.
pub(crate) struct Observer {
    pub router: Router,
    signals: Signals,
    flights: Vec<Option<Flight>>,
    by_ticket: HashMap<TicketId, u64>,
    by_token: bool,
    /// Steps of each engine up to which tokens were reported to the router.
    told_steps: Vec<u64>,
    reported: bool,
    names: Vec<String>,
}

impl Observer {
    pub fn new(router: Router, signals: Signals, requests: usize) -> Observer {
        let reads = router.reads();
        Observer {
            by_token: reads.intersects(BY_TOKEN),
            reported: reads.intersects(REPORTED) && signals.report_period_seconds.is_none(),
            told_steps: vec![0; router.fleet().slots()],
            names: router.fleet().live_names().map(str::to_owned).collect(),
            router,
            signals,
            flights: vec![None; requests],
            by_ticket: HashMap::new(),
        }
    }

    /// Records that a request was placed.
    pub fn placed(&mut self, request: u64, ticket: TicketId, segment: Segment, prompt: u32) {
        let mut flight = Flight { ticket, told: 0, before: 0, most: 0 };
        flight.open(segment, prompt, 0);
        self.flights[request as usize] = Some(flight);
        self.by_ticket.insert(ticket, request);
    }

    /// Reports that the open segment of a request's plan was sent.
    pub fn sent(&mut self, request: u64, now: Seconds) -> Result<(), CoreError> {
        self.tell(request, Event::Sent, now).map(drop)
    }

    /// Reports the end of a request's prefix fetch, with the tokens that arrived.
    pub fn fetched(
        &mut self,
        request: u64,
        tokens: u32,
        seconds: Seconds,
        now: Seconds,
    ) -> Result<(), CoreError> {
        self.tell(request, Event::Fetched { tokens, seconds, late: false }, now).map(drop)
    }

    /// Brings the router up to date before a decision or a tick: reads the signals that only these
    /// need.
    pub fn catch_up(&mut self, engines: &[Engine], now: Seconds) -> Result<(), CoreError> {
        if self.by_token {
            self.catch_up_tokens(engines, now)?;
        }
        if self.reported {
            for (instance, engine) in engines.iter().enumerate() {
                self.report(instance, engine, now)?;
            }
        }
        Ok(())
    }

    /// Reports the tokens made by now.
    pub fn catch_up_tokens(&mut self, engines: &[Engine], now: Seconds) -> Result<(), CoreError> {
        for (instance, engine) in engines.iter().enumerate() {
            let steps = self.steps_seen(engine, now);
            let all = engine.steps() + u64::from(steps);
            if all < self.told_steps[instance] + u64::from(self.signals.token_stride) {
                continue;
            }
            self.told_steps[instance] = all;
            for (request, made) in engine.decoding() {
                let before = self.flights[request as usize].map_or(0, |flight| flight.before);
                self.made(request, before + made + steps, now)?;
            }
        }
        Ok(())
    }

    /// Forgets what it knows of an instance's engine, which is gone.
    pub fn forget(&mut self, instance: usize) {
        self.told_steps[instance] = 0;
    }

    /// Returns the request of an open ticket.
    pub fn request_of(&self, ticket: TicketId) -> Option<u64> {
        self.by_ticket.get(&ticket).copied()
    }

    /// Returns how many of an engine's steps under way have visible results by now.
    fn steps_seen(&self, engine: &Engine, now: Seconds) -> u32 {
        let (begun, ended) = engine.progress(now);
        if self.signals.step_end { begun } else { ended }
    }

    /// Passes an engine's load report to the router.
    pub fn report(&mut self, instance: usize, engine: &Engine, now: Seconds) -> Result<(), CoreError> {
        let load = engine.load_after(self.steps_seen(engine, now));
        let report = Report {
            at: now,
            waiting: Some(f64::from(load.waiting)),
            running: Some(f64::from(load.running)),
            kv_usage: Some(load.kv_usage),
            prefill_tokens: self.signals.report_tokens.then(|| engine.prefill_tokens() as f64),
        };
        self.router.engine_report(&self.names[instance], report)
    }

    /// Reports that a request was taken off a queue.
    pub fn started(&mut self, admitted: &Admitted, now: Seconds) -> Result<(), CoreError> {
        if self.signals.progress {
            let there = admitted.cached_tokens + admitted.fetched_tokens;
            self.tell(admitted.id, Event::Scheduled(Some(there)), now)?;
        }
        Ok(())
    }

    /// Reports a computed prompt chunk. `first`: it made the request's first output token.
    pub fn prefilled(&mut self, chunk: &Prefilled, first: bool, now: Seconds) -> Result<(), CoreError> {
        if self.signals.progress {
            self.tell(chunk.id, Event::Prefilled(chunk.tokens), now)?;
        }
        if first {
            self.tell(chunk.id, Event::FirstToken, now)?;
            if let Some(flight) = &mut self.flights[chunk.id as usize] {
                flight.told = flight.before + 1;
            }
        }
        Ok(())
    }

    /// Reports that the open segment of a request's plan has ended, with `made` output tokens in
    /// all so far. Returns the next segment.
    pub fn finished(
        &mut self,
        request: u64,
        usage: Usage,
        made: u32,
        now: Seconds,
    ) -> Result<Option<Segment>, CoreError> {
        self.made(request, made, now)?;
        let next = self.tell(request, Event::Finished(usage), now)?;
        if let (Some(flight), Some(segment)) = (&mut self.flights[request as usize], next) {
            flight.open(segment, usage.prompt_tokens.unwrap_or(0), made);
        }
        Ok(next)
    }

    /// Begins the move of a running request, which may be canceled later.
    pub fn begin_move(
        &mut self,
        request: u64,
        target: Slot,
        carry: Carry,
        now: Seconds,
    ) -> Result<(), CoreError> {
        match &self.flights[request as usize] {
            Some(flight) => self.router.begin_move(flight.ticket, target, carry, now).map(drop),
            None => Ok(()),
        }
    }

    /// Cancels a move that [`Observer::begin_move`] has begun.
    pub fn cancel_move(&mut self, request: u64, now: Seconds) -> Result<(), CoreError> {
        match &self.flights[request as usize] {
            Some(flight) => self.router.cancel_move(flight.ticket, now),
            None => Ok(()),
        }
    }

    /// Reports that a request has left its instance, with `made` output tokens so far. Returns its
    /// next segment.
    pub fn moved(
        &mut self,
        request: u64,
        prompt: u32,
        made: u32,
        now: Seconds,
    ) -> Result<Segment, CoreError> {
        self.made(request, made, now)?;
        let next = self.tell(request, Event::Moved, now)?;
        if let (Some(flight), Some(segment)) = (&mut self.flights[request as usize], next) {
            flight.open(segment, prompt, made);
        }
        next.ok_or_else(|| CoreError::BadValue {
            what: "move".into(),
            got: format!("request {request} without a next segment"),
            expected: "one that is in flight".into(),
        })
    }

    /// Reports that a request has all its output tokens.
    pub fn ended(&mut self, request: u64, usage: Usage, now: Seconds) -> Result<(), CoreError> {
        self.made(request, usage.output_tokens.unwrap_or(0), now)?;
        self.tell(request, Event::Ended(usage), now)?;
        if let Some(flight) = self.flights[request as usize].take() {
            self.by_ticket.remove(&flight.ticket);
        }
        Ok(())
    }

    /// Returns the segments that are bound behind a request's open one, in order.
    pub fn bound(&mut self, request: u64) -> impl Iterator<Item = Segment> {
        let flight = self.flights[request as usize];
        flight.map(|flight| self.router.bound(flight.ticket)).into_iter().flatten()
    }

    /// Applies the changes of an instance's cache.
    pub fn apply(&mut self, instance: usize, log: &KvLog) {
        let id = Slot(instance as u32);
        let mut caches = self.router.caches().write();
        for event in &log.events {
            match event {
                KvEvent::Stored { tier, parent, hashes, .. } => {
                    if let Some(index) = caches.index_mut(*tier) {
                        index.stored(id, *parent, &log.hashes[hashes.clone()]);
                    }
                }
                KvEvent::Removed { tier, hashes } => {
                    if let Some(index) = caches.index_mut(*tier) {
                        index.evicted_all(id, &log.hashes[hashes.clone()]);
                    }
                    caches.note_removal(*tier, id);
                }
                KvEvent::Cleared => caches.gpu_mut().cleared(id),
            }
        }
    }

    /// Reports that the request has `made` output tokens by now; the first one is an event of its
    /// own.
    fn made(&mut self, request: u64, made: u32, now: Seconds) -> Result<(), CoreError> {
        let most = self.flights[request as usize].map_or(0, |flight| flight.most);
        let made = made.min(most);
        if let Some(flight) = &mut self.flights[request as usize]
            && (1..made).contains(&flight.told)
        {
            let new = made - std::mem::replace(&mut flight.told, made);
            self.tell(request, Event::Tokens(new), now)?;
        }
        Ok(())
    }

    fn tell(&mut self, request: u64, event: Event, now: Seconds) -> Result<Option<Segment>, CoreError> {
        match &self.flights[request as usize] {
            Some(flight) => self.router.advance(flight.ticket, event, now),
            None => Ok(None),
        }
    }
}
