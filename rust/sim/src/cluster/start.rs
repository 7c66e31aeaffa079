//! The start of a cluster: checks its settings and queues its first events.
use super::churn::Churn;
use super::handover::Part;
use super::instances::{add_instance, new_engine};
use super::{Cluster, ClusterConfig, Event, Instance, State, bad, engine_request};
use crate::engine::Admission;
use crate::gaps::{GapHistogram, TokenGaps, TokenSlo};
use crate::record::{Records, Timeline};
use crate::routers::{Policies, Routers};
use crate::transfer::Links;
use crate::workload::{Waiting, Workload};
use hashbrown::HashMap;
use lmetric_core::CoreError;
use lmetric_core::fleet::Role;
use lmetric_core::ids::Seconds;
use lmetric_core::kv::tier::Tier;
use lmetric_core::router::{IndexFeed, Router, RouterConfig};
use std::collections::BinaryHeap;

/// Largest number of buckets of the timeline: each costs memory on each instance.
const MAX_BUCKETS: f64 = 1e6;

impl<'a> Cluster<'a> {
    pub(super) fn new(
        workload: &'a Workload,
        policies: Vec<Policies>,
        config: &'a ClusterConfig,
    ) -> Result<Cluster<'a>, CoreError> {
        config.signals.check()?;
        config.transfer.check()?;
        config.fetching.check()?;
        config.move_by.check()?;
        if let Some(seconds) = config.sharing_seconds.filter(|seconds| !(1e-3..=1e6).contains(seconds)) {
            return bad("sharing_seconds", seconds, "0.001 to 1e6 seconds");
        }
        if config.profiles.is_empty() {
            return bad("instances", 0, "at least 1");
        }
        let has = |role| config.roles.contains(&role);
        if !config.roles.is_empty() && config.roles.len() != config.profiles.len() {
            return bad(
                "roles",
                config.roles.len(),
                format!("{}, one for each instance", config.profiles.len()),
            );
        }
        if !config.step_times.is_empty() && config.step_times.len() != config.profiles.len() {
            let expected = format!("{}, one for each instance", config.profiles.len());
            return bad("step times", config.step_times.len(), expected);
        }
        if has(Role::Prefill) != has(Role::Decode) {
            return bad("roles", "prefill or decode alone", "instances of both roles");
        }
        if config.router.unlimited_prefill && config.split.planner().is_some() {
            return bad("split", "a split planner", "none with unlimited_prefill");
        }
        if config.router.unlimited_prefill && config.router.fetch.is_some() {
            return bad("prefix_fetch", "prefix fetches", "none with unlimited_prefill");
        }
        if config.cached_answers && config.admission != Admission::Vllm {
            return bad("cached_answers", "admission reserve", "admission vllm: its cache holds answers");
        }
        let TokenSlo { answer_seconds, think_seconds } = config.token_slo;
        for (what, seconds) in [("token_slo_seconds", answer_seconds), ("think_slo_seconds", think_seconds)] {
            if !(seconds > 0.0 && seconds <= 1e9) {
                return bad(what, seconds, "more than 0, up to 1e9 seconds");
            }
        }
        if !(config.timeline_seconds >= 1e-3 && config.timeline_seconds <= 1e9) {
            return bad("timeline_seconds", config.timeline_seconds, "0.001 to 1e9 seconds");
        }
        check_times(workload, config.timeline_seconds)?;
        let exact = config.router.index_feed == IndexFeed::Exact;
        let router = RouterConfig {
            drain: !config.signals.progress,
            partial_blocks: config.admission == Admission::Reserve,
            ..config.router.clone()
        };
        let mut routers = policies
            .into_iter()
            .zip(0..)
            .map(|(policies, i)| {
                made(policies, config, RouterConfig { seed: router.seed.wrapping_add(i), ..router.clone() })
            })
            .collect::<Result<Vec<Router>, CoreError>>()?;
        if routers.is_empty() {
            return bad("routers", 0, "at least 1");
        }
        if config.host.is_some()
            && exact
            && !routers.iter_mut().all(|router| router.caches().write().open_tier(Tier::Cpu))
        {
            return bad("index_bytes", config.router.index_bytes, "more: a quarter is for the host tier");
        }
        let mut engines = Vec::with_capacity(config.profiles.len());
        for (i, profile) in config.profiles.iter().enumerate() {
            if profile.block_tokens != workload.block_tokens() {
                let expected = format!("{}, which the workload was cut into", workload.block_tokens());
                return bad("block_tokens of the profile", profile.block_tokens, expected);
            }
            for router in &mut routers {
                add_instance(router, config, i)?;
            }
            engines.push(new_engine(config, i)?);
        }
        let churn = Churn::new(&config.changes, engines.len(), &config.roles)?;
        let instance = || Instance {
            state: State::Idle,
            version: 0,
            ready: false,
            busy_until: 0.0,
            queue_since: 0.0,
            queued: 0,
        };
        let mut cluster = Cluster {
            routers: Routers::new(routers, config.signals, workload.len(), config.router.seed),
            links: Links::new(config.transfer, engines.len()),
            churn,
            fetches: HashMap::new(),
            waiting: Waiting::new(workload),
            parts: vec![Part::default(); workload.len()],
            started: vec![false; workload.len()],
            early: vec![false; workload.len()],
            priorities: vec![0; workload.len()],
            records: Records::new(workload.len()),
            timeline: Timeline::new(engines.len(), config.timeline_seconds),
            instances: engines.iter().map(|_| instance()).collect(),
            events: BinaryHeap::new(),
            ready: Vec::new(),
            now: 0.0,
            left: workload.len(),
            moving: 0,
            held: HashMap::new(),
            leaving: vec![Vec::new(); engines.len()],
            warming: HashMap::new(),
            last_tokens: vec![f64::NAN; workload.len()],
            variances: (0.0, 0.0),
            seams: TokenGaps::new(config.token_slo),
            again: GapHistogram::default(),
            guard_alarms: 0,
            guard_filters: 0,
            stalled: 0,
            config,
            workload,
            engines,
        };
        for (i, engine) in cluster.engines.iter().enumerate() {
            let kind = |i: usize| (&config.profiles[i], config.roles.get(i));
            if i > 0 && kind(i) == kind(i - 1) {
                continue; // the same checks apply
            }
            for (request, &prompt) in workload.shape.input_tokens.iter().enumerate() {
                let part = match config.roles.get(i) {
                    Some(Role::Prefill) => Part { to: Some(prompt), ..Part::default() },
                    Some(Role::Decode) => Part { from: prompt, ..Part::default() },
                    _ => Part::default(),
                };
                engine.check(&engine_request(workload, config, request, part))?;
            }
        }
        cluster.schedule_first_events();
        cluster.schedule_changes()?;
        Ok(cluster)
    }

    fn schedule_first_events(&mut self) {
        for request in 0..self.workload.len() {
            if self.workload.shape.waits.counts[request] == 0 {
                let at = self.workload.arrival_seconds[request];
                self.at(at, Event::Arrival { request: request as u32 });
            }
        }
        if let Some(period) = self.config.signals.report_period_seconds {
            // In practice, engines are scraped at different moments.
            let instances = self.engines.len() as u32;
            for instance in 0..instances {
                self.at(period * f64::from(instance) / f64::from(instances), Event::Report { instance });
            }
        }
        if let Some(period) = self.config.sharing_seconds {
            let routers = self.routers.len() as u32;
            for router in (0..routers).filter(|_| routers > 1) {
                self.at(period * f64::from(router) / f64::from(routers), Event::Share { router });
            }
        }
        if self.config.rebalance.is_some() {
            self.at(0.0, Event::Rebalance);
        }
        if self.engines.len() > 1 {
            self.at(0.0, Event::Compare);
        }
        if self.config.router.programs.is_some() || self.config.load.is_some() {
            self.at(0.0, Event::Admit);
        }
        if self.config.router.guard.on {
            self.at(0.0, Event::Tick);
        }
    }
}

/// Refuses times beyond [`MAX_BUCKETS`] buckets of the timeline: they are in another unit, or count
/// from another moment.
fn check_times(workload: &Workload, bucket_seconds: Seconds) -> Result<(), CoreError> {
    let most = MAX_BUCKETS * bucket_seconds;
    for request in 0..workload.len() {
        for (what, seconds) in
            [("arrival", workload.arrival_seconds[request]), ("think time", workload.think_seconds(request))]
        {
            if seconds > most {
                let expected = format!("up to {most} s: {MAX_BUCKETS} buckets of timeline_seconds");
                return bad(&format!("{what} of request {request}"), format!("{seconds} s"), expected);
            }
        }
    }
    Ok(())
}

/// A router without instances.
fn made(policies: Policies, config: &ClusterConfig, settings: RouterConfig) -> Result<Router, CoreError> {
    let mut router = Router::new(policies.place, settings)?;
    if let Some(policy) = policies.decode {
        router.set_decode_policy(policy)?;
    }
    router.set_split(&config.split)?;
    router.set_admission(config.load.clone())?;
    router.set_priorities(config.priorities)?;
    if let Some(rebalance) = &config.rebalance {
        let mut rebalancing = rebalance.build()?;
        rebalancing.expected_is_limit = !config.output_known;
        router.set_rebalancing(Some(rebalancing))?;
    }
    Ok(router)
}
