//! What the router learns of the engines, and when: one way with settings, from perfect to what a live server sees.
use crate::engine::Engine;
use crate::events::{Admitted, KvEvent, KvLog, Prefilled};
use hashbrown::HashMap;
use lmetric_core::ids::Seconds;
use lmetric_core::indicators::{Indicator, IndicatorSet};
use lmetric_core::plan::{Event, Segment, Usage};
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{Carry, Router, TicketId};
use lmetric_core::{CoreError, InstanceId};

/// When the router learns what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Signals {
    /// What a step does is known once it runs, as if it had ended; else when it has ended.
    pub step_end: bool,
    /// Engines tell what they take off their queues, and each prompt chunk computed; else the router infers its backlog
    /// from first tokens, as it does live.
    pub progress: bool,
    /// Seconds that changes of the caches take to the router.
    pub event_delay_seconds: Seconds,
    /// Seconds between an engine's load reports. None: whenever the router decides.
    pub report_period_seconds: Option<Seconds>,
    /// The router hears of an engine's tokens once its batch has run so many more steps. Telling it of each costs, at every decision,
    /// as much as there are decodes.
    pub token_stride: u32,
}

impl Signals {
    /// Everything, at the moment it happens.
    pub const EXACT: Signals = Signals {
        step_end: false,
        progress: true,
        event_delay_seconds: 0.0,
        report_period_seconds: None,
        token_stride: 1,
    };
    /// Every engine as at the end of the step that runs.
    pub const STEP_END: Signals = Signals { step_end: true, ..Signals::EXACT };

    /// As a live server: late cache events, sampled reports, and of its requests what their responses show.
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

/// Indicators that move with every output token, or that engines report.
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
    Indicator::HandoffArrivedTokensForCertain,
    Indicator::HandoffComingTokens,
    Indicator::DecodePressure,
    Indicator::DecodePressureKnown,
]);
const REPORTED: IndicatorSet = IndicatorSet::of(&[
    Indicator::KvUsage,
    Indicator::ReportedWaiting,
    Indicator::ReportedRunning,
    Indicator::ReportAgeSeconds,
]);

/// A request in flight, as the router knows it.
#[derive(Clone, Copy, Debug)]
struct Flight {
    ticket: TicketId,
    /// Output tokens that the router was told of.
    told: u32,
    /// Those that were made before the open segment, and those that count once it has ended.
    before: u32,
    most: u32,
}

impl Flight {
    /// `segment` is open now, of a request with so many prompt tokens, of which `before` output tokens were made before it.
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
    /// Steps of each engine up to which the router was told of tokens.
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

    /// A request was placed.
    pub fn placed(&mut self, request: u64, ticket: TicketId, segment: Segment, prompt: u32) {
        let mut flight = Flight { ticket, told: 0, before: 0, most: 0 };
        flight.open(segment, prompt, 0);
        self.flights[request as usize] = Some(flight);
        self.by_ticket.insert(ticket, request);
    }

    /// The open segment of its plan goes out.
    pub fn sent(&mut self, request: u64, now: Seconds) -> Result<(), CoreError> {
        self.tell(request, Event::Sent, now).map(drop)
    }

    /// What a request was to pull is there, as far as it came.
    pub fn pulled(
        &mut self,
        request: u64,
        tokens: u32,
        seconds: Seconds,
        now: Seconds,
    ) -> Result<(), CoreError> {
        self.tell(request, Event::Pulled { tokens, seconds }, now).map(drop)
    }

    /// Before a decision or a tick: what only these ask for.
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

    /// Tells of the tokens made by now.
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

    /// The request of a ticket that is in flight.
    pub fn request_of(&self, ticket: TicketId) -> Option<u64> {
        self.by_ticket.get(&ticket).copied()
    }

    /// Of an engine's steps under way, those whose results are seen by now.
    fn steps_seen(&self, engine: &Engine, now: Seconds) -> u32 {
        let (begun, ended) = engine.progress(now);
        if self.signals.step_end { begun } else { ended }
    }

    /// An engine's load report.
    pub fn report(&mut self, instance: usize, engine: &Engine, now: Seconds) -> Result<(), CoreError> {
        let load = engine.load_after(self.steps_seen(engine, now));
        let report = Report {
            at: now,
            waiting: Some(f64::from(load.waiting)),
            running: Some(f64::from(load.running)),
            kv_usage: Some(load.kv_usage),
        };
        self.router.engine_report(&self.names[instance], report)
    }

    /// A request was taken off a queue.
    pub fn started(&mut self, admitted: &Admitted, now: Seconds) -> Result<(), CoreError> {
        if self.signals.progress {
            let there = admitted.cached_tokens + admitted.pulled_tokens;
            self.tell(admitted.id, Event::Scheduled(Some(there)), now)?;
        }
        Ok(())
    }

    /// A prompt chunk was computed. `first`: the request's first output token came with it.
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

    /// The open segment of a request's plan has ended as planned, with `made` output tokens in all so far. Gives the next one.
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

    /// A move of a running request begins; it may be given up again.
    pub fn begin_move(
        &mut self,
        request: u64,
        target: InstanceId,
        carry: Carry,
        now: Seconds,
    ) -> Result<(), CoreError> {
        match &self.flights[request as usize] {
            Some(flight) => self.router.begin_move(flight.ticket, target, carry, now).map(drop),
            None => Ok(()),
        }
    }

    /// See [`Observer::begin_move`].
    pub fn cancel_move(&mut self, request: u64, now: Seconds) -> Result<(), CoreError> {
        match &self.flights[request as usize] {
            Some(flight) => self.router.cancel_move(flight.ticket, now),
            None => Ok(()),
        }
    }

    /// A request has left where it ran, with `made` output tokens so far: where it goes on.
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
            got: format!("request {request} that goes nowhere"),
            expected: "one that is in flight".into(),
        })
    }

    /// A request has all its output tokens.
    pub fn ended(&mut self, request: u64, usage: Usage, now: Seconds) -> Result<(), CoreError> {
        self.made(request, usage.output_tokens.unwrap_or(0), now)?;
        self.tell(request, Event::Ended(usage), now)?;
        if let Some(flight) = self.flights[request as usize].take() {
            self.by_ticket.remove(&flight.ticket);
        }
        Ok(())
    }

    /// The segments that are bound behind a request's open one, in order.
    pub fn bound(&mut self, request: u64) -> impl Iterator<Item = Segment> {
        let flight = self.flights[request as usize];
        flight.map(|flight| self.router.bound(flight.ticket)).into_iter().flatten()
    }

    /// An instance's cache has changed.
    pub fn apply(&mut self, instance: usize, log: &KvLog) {
        let (id, index) = (InstanceId(instance as u32), self.router.index_mut());
        for event in &log.events {
            match event {
                KvEvent::Stored { parent, hashes, .. } => {
                    index.stored(id, *parent, &log.hashes[hashes.clone()]);
                }
                KvEvent::Removed { hashes } => {
                    index.removed_all(id, &log.hashes[hashes.clone()]);
                }
                KvEvent::Cleared => index.cleared(id),
            }
        }
    }

    /// The request has `made` output tokens by now; the first one is told of apart.
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
