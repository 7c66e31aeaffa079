//! Two-phase hot-spot guard (LMETRIC section 5.2).
//!
//! A score that multiplies cached work by load fails in one case: a prefix in very high demand. The
//! few instances that hold it, M, keep winning however long their queues grow. The guard detects
//! such a prefix and excludes M for its requests until enough instances hold the prefix.
//!
//! - A **class** is a shared prefix: the chain hash at a power-of-two depth of the *matched* part
//!   of a prompt (the paper leaves the definition open). The guard counts the heaviest classes over
//!   a sliding window ([`heavy`]). x is a class's share of all *work*: the tokens of all prompts,
//!   in blocks. The paper counts requests. Then an alarm on long prompts ends while a few instances
//!   still read most of the context.
//! - **Phase 1**, at each [`Guard::tick`]: a class is suspected if x / (1 - x) > |M| / |not M|
//!   (Equation 2 broken). Equation 3 is misprinted and not used. If M is empty or contains all
//!   instances, nothing can be filtered, so no alarm is raised.
//! - **Phase 2**, at each request of a suspected class: M is filtered out once more than 2|M|
//!   *consecutive* requests scored lower on M than elsewhere (Equation 4). Equal scores do not
//!   count, since they do not draw the request to M. Requests without a choice between M and
//!   elsewhere change nothing.
//! - **Release** (the paper leaves it open): an alarm ends when phase 1 no longer holds with a
//!   margin, x / (1 - x) <= `release_factor` x |M| / |not M|. A filtered request makes its new
//!   instance a holder at once. So a filter spreads the prefix to as many instances as its demand
//!   needs, and then ends, mostly within a few requests. The new instance stays a holder for a
//!   window, because an index from KV events shows it only after its prefill. Otherwise, each check
//!   during that prefill would raise the alarm again, and further requests would queue behind it.
//! - **Nested classes.** A prompt belongs to one class at each depth. Holders of a longer prefix
//!   also hold the shorter prefix. If nested classes have the *same* holders, only the shallowest
//!   is suspected: it has all their requests, so it is hot whenever they are. If a deeper class has
//!   fewer holders, both are suspected, each with its own count. If several filter, the shallowest
//!   applies: its M contains the M of the others.
//! - If the filter would leave no instance, the router balances load only
//!   ([`Restriction::BalanceOnly`]; section 1 of the paper).
//!
//! The guard is a state machine without a clock: callers pass the time. While no class is
//! suspected, the only cost is counting.
pub mod heavy;
mod settings;
pub mod slots;

pub use heavy::classes_of;
pub use settings::GuardConfig;
pub use slots::{Restriction, SlotSet};

use crate::Slot;
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::policy::{Policy, Prefer, Scores};
use hashbrown::HashMap;
use heavy::HeavyClasses;

fn word(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// Returns the reason for a guard that the `guard` setting turned on or off.
pub fn set_reason(on: bool) -> String {
    format!("the setting `guard` is {}", word(on))
}

/// Returns whether the guard is on, and why: `chosen` if given, else the policy's declaration, else
/// off.
pub fn applies(policy: &dyn Policy, chosen: Option<bool>) -> (bool, String) {
    let spec = policy.spec();
    match (chosen, spec.guard) {
        (Some(on), _) => (on, set_reason(on)),
        (None, Some(on)) => (on, format!("policy {} declares guard: {}", spec.name, word(on))),
        (None, None) => (false, "the default".into()),
    }
}

/// Phase of an alarm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Phase 1: the class's share of prompt tokens exceeds its holders' share of the fleet.
    Suspected,
    /// Phase 2: the class's holders are filtered out for its requests.
    Filtering,
}

/// Current state of a class under alarm.
#[derive(Clone, Debug)]
pub struct Alarm {
    /// Chain hash of the class.
    pub class: u64,
    /// Number of blocks that its requests share.
    pub depth: u32,
    /// Current phase.
    pub phase: Phase,
    /// Its share of all prompt tokens in the window, 0 to 1, at the last check.
    pub share: f64,
    /// M: the instances that hold the prefix.
    pub holders: SlotSet,
    /// Consecutive requests that scored lower on M than elsewhere.
    consecutive: u32,
}

impl Alarm {
    fn has(&self, chain: &[u64]) -> bool {
        chain.get(self.depth as usize - 1) == Some(&self.class)
    }

    fn event(&self, released: bool, instances: usize) -> GuardEvent {
        GuardEvent {
            class: self.class,
            depth: self.depth,
            phase: self.phase,
            released,
            share: self.share,
            holders: self.holders.len(),
            instances,
        }
    }
}

/// Event to log and count: an alarm entered a phase, or ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GuardEvent {
    /// Chain hash of the class.
    pub class: u64,
    /// Number of blocks that its requests share.
    pub depth: u32,
    /// The phase entered; if `released`, the phase that the alarm had reached.
    pub phase: Phase,
    /// Whether the alarm ended.
    pub released: bool,
    /// x: the class's share of all prompt tokens in the window, 0 to 1.
    pub share: f64,
    /// |M|.
    pub holders: usize,
    /// |M| + |not M|.
    pub instances: usize,
}

/// Hot-spot guard of one pool. Leave out [`excluded`](Guard::excluded) instances before scoring,
/// call [`observe`](Guard::observe) after each decision, and [`tick`](Guard::tick) about once a
/// second.
#[derive(Clone, Debug)]
pub struct Guard {
    config: GuardConfig,
    heavy: HeavyClasses,
    /// Sorted by depth, shallowest first.
    alarms: Vec<Alarm>,
    /// Instances of filtered requests by class, each with the end of its time as a holder.
    new_holders: HashMap<u64, Vec<(Slot, Seconds)>>,
    instances: usize,
    events: Vec<GuardEvent>,
}

impl Guard {
    /// Creates a guard with no observations.
    ///
    /// # Errors
    /// `BadValue` with the setting and its range.
    pub fn new(config: GuardConfig) -> Result<Guard, CoreError> {
        config.check()?;
        let heavy = HeavyClasses::new(config.classes, config.window_seconds);
        let (alarms, events) = (Vec::new(), Vec::new());
        Ok(Guard { config, heavy, alarms, new_holders: HashMap::new(), instances: 0, events })
    }

    /// Returns the settings.
    pub fn config(&self) -> &GuardConfig {
        &self.config
    }

    /// Enables or disables the guard. Disabling clears its observations and releases all alarms;
    /// the next tick returns the releases.
    pub fn set_on(&mut self, on: bool) {
        if self.config.on && !on {
            self.heavy = HeavyClasses::new(self.config.classes, self.config.window_seconds);
            self.new_holders.clear();
            let instances = self.instances;
            self.events.extend(self.alarms.drain(..).map(|alarm| alarm.event(true, instances)));
        }
        self.config.on = on;
    }

    /// Returns the classes under alarm, shallowest first.
    pub fn alarms(&self) -> &[Alarm] {
        &self.alarms
    }

    /// Returns the instances excluded for this chain: M of its shallowest filtered class.
    #[inline]
    pub fn excluded(&self, chain: &[u64]) -> Option<&SlotSet> {
        let mut filtering = self.alarms.iter().filter(|alarm| alarm.phase == Phase::Filtering);
        filtering.find(|alarm| alarm.has(chain)).map(|alarm| &alarm.holders)
    }

    /// Records a decision.
    ///
    /// `matched_blocks`: the longest prefix of `chain` that any instance holds. `scores` and
    /// `eligible`: the candidates without the [`excluded`](Guard::excluded) ones. `chosen`: the
    /// instance of the request.
    #[inline]
    pub fn observe(
        &mut self,
        now: Seconds,
        chain: &[u64],
        matched_blocks: u32,
        scores: &Scores,
        eligible: &[bool],
        chosen: Slot,
    ) {
        if !self.config.on {
            return;
        }
        self.heavy.advance(now);
        self.heavy.count(chain, matched_blocks);
        if !self.alarms.is_empty() {
            self.follow(now, chain, matched_blocks, scores, eligible, chosen);
        }
    }

    /// Runs phase 2, and adds the new holders of filtered prefixes.
    fn follow(
        &mut self,
        now: Seconds,
        chain: &[u64],
        matched_blocks: u32,
        scores: &Scores,
        eligible: &[bool],
        chosen: Slot,
    ) {
        let Guard { config, heavy, alarms, new_holders, instances, events } = self;
        alarms.retain_mut(|alarm| {
            if !alarm.has(chain) {
                return true;
            }
            if alarm.phase == Phase::Filtering {
                if alarm.holders.insert(chosen) {
                    let until = now + config.window_seconds;
                    for (class, _) in classes_of(chain, matched_blocks) {
                        new_holders.entry(class).or_default().push((chosen, until));
                    }
                }
                let work = heavy.get(alarm.class).map_or(0, |class| class.work);
                let hot = is_hot(work, heavy.work(), &alarm.holders, *instances, config.release_factor);
                if !hot {
                    events.push(alarm.event(true, *instances));
                }
                return hot;
            }
            match drawn_to(&alarm.holders, scores, eligible) {
                Some(true) => alarm.consecutive += 1,
                Some(false) => alarm.consecutive = 0,
                None => {}
            }
            if f64::from(alarm.consecutive) > config.phase2_factor * alarm.holders.len() as f64 {
                alarm.phase = Phase::Filtering;
                events.push(alarm.event(false, *instances));
            }
            true
        });
    }

    /// Runs phase 1 over the heavy classes, and returns the events since the last tick.
    ///
    /// `instances`: number of eligible instances (|M| + |not M|). `holders` appends the eligible
    /// instances that hold the prefix ending in a block, as `KvIndex::holders` does. It is called
    /// only for heavy classes.
    pub fn tick(
        &mut self,
        now: Seconds,
        instances: usize,
        mut holders: impl FnMut(u64, &mut Vec<Slot>),
    ) -> Vec<GuardEvent> {
        if self.config.on {
            self.heavy.advance(now);
            self.new_holders.retain(|_, new| {
                new.retain(|(_, until)| now < *until);
                !new.is_empty()
            });
            self.instances = instances;
            self.suspect(&mut holders);
        }
        std::mem::take(&mut self.events)
    }

    fn suspect(&mut self, holders: &mut dyn FnMut(u64, &mut Vec<Slot>)) {
        let (all, instances) = (self.heavy.work(), self.instances);
        let mut before = std::mem::take(&mut self.alarms);
        let mut by_depth: Vec<_> = self.heavy.classes().iter().collect();
        by_depth.sort_unstable_by_key(|class| (class.depth, class.hash));
        let mut hot: Vec<(u64, SlotSet)> = Vec::new();
        let mut ids = Vec::new();
        for class in by_depth {
            let known = before.iter().position(|alarm| alarm.class == class.hash);
            let one = class.work * instances as u64 > all;
            if known.is_none() && (class.requests < self.config.min_requests || !one) {
                continue; // not hot even with a single holder
            }
            ids.clear();
            holders(class.hash, &mut ids);
            let new = self.new_holders.get(&class.hash).into_iter().flatten();
            let held: SlotSet = ids.iter().chain(new.map(|(id, _)| id)).copied().collect();
            let factor = if known.is_some() { self.config.release_factor } else { 1.0 };
            if !is_hot(class.work, all, &held, instances, factor) {
                continue;
            }
            let share = class.work as f64 / all as f64;
            if let Some(i) = known {
                let alarm = before.swap_remove(i);
                self.alarms.push(Alarm { share, holders: held.clone(), ..alarm });
            } else if !hot.iter().any(|(hash, same)| Some(*hash) == class.parent && *same == held) {
                let (class, depth, phase) = (class.hash, class.depth, Phase::Suspected);
                let alarm = Alarm { class, depth, phase, share, holders: held.clone(), consecutive: 0 };
                self.events.push(alarm.event(false, instances));
                self.alarms.push(alarm);
            }
            hot.push((class.hash, held));
        }
        self.events.extend(before.iter().map(|alarm| alarm.event(true, instances)));
    }

    /// Removes an instance, because its slot may be reused for another instance.
    pub fn instance_removed(&mut self, id: Slot) {
        for alarm in &mut self.alarms {
            alarm.holders.remove(id);
        }
        for new in self.new_holders.values_mut() {
            new.retain(|(holder, _)| *holder != id);
        }
    }
}

/// Returns x / (1 - x) > factor x |M| / |not M|, without dividing by 0.
fn is_hot(work: u64, all: u64, holders: &SlotSet, instances: usize, factor: f64) -> bool {
    let (m, rest) = (holders.len(), instances.saturating_sub(holders.len()));
    m > 0 && work as f64 * rest as f64 > factor * (all - work) as f64 * m as f64
}

/// Returns whether the best score on M beats the best score elsewhere (Equation 4, strictly).
/// `None` without a candidate on M or without one elsewhere: then the scores chose neither, for
/// example for a request that may only use the engine of its program.
fn drawn_to(holders: &SlotSet, scores: &Scores, eligible: &[bool]) -> Option<bool> {
    let sign = if scores.prefer == Prefer::Min { 1.0 } else { -1.0 };
    let (mut on, mut elsewhere) = (f64::INFINITY, f64::INFINITY);
    let words = scores.score.chunks(SlotSet::WORD).zip(eligible.chunks(SlotSet::WORD));
    for (held, (score, eligible)) in holders.words().iter().zip(words) {
        for (bit, (score, eligible)) in score.iter().zip(eligible).enumerate() {
            let score = if *eligible { sign * score } else { f64::INFINITY };
            let held = held >> bit & 1 == 1;
            on = if held & (score < on) { score } else { on };
            elsewhere = if !held & (score < elsewhere) { score } else { elsewhere };
        }
    }
    (on < f64::INFINITY && elsewhere < f64::INFINITY).then_some(on < elsewhere)
}

#[cfg(test)]
pub(crate) mod testing {
    /// Builds a prompt's chain: `shared` blocks are the same for all `id`s, the others depend on
    /// `id`.
    pub fn prompt(id: u64, shared: usize, blocks: usize) -> Vec<u64> {
        (0..blocks as u64)
            .map(|i| {
                (i + 1 + if i < shared as u64 { 0 } else { id << 20 }).wrapping_mul(0x9E37_79B9_7F4A_7C15)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests;
