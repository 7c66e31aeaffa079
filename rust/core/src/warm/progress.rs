//! Fetches of a fleet change in progress: which fetch begins when.
use super::plan::Fetch;
use super::settings::WarmConfig;
use crate::fleet::{Fleet, InstanceId};
use crate::ids::{Seconds, Slot};
use std::collections::VecDeque;

/// A fetch that has begun.
#[derive(Clone, Copy, Debug)]
struct Begun {
    number: u64,
    source: InstanceId,
    target: InstanceId,
    at: Seconds,
}

/// The fetches of a fleet change: planned, begun and ended.
///
/// A fetch begins if its source and its target have fewer than [`WarmConfig::max_fetches`] fetches
/// and the source does not rest. After a fetch of `s` seconds, the source rests so long that its
/// fetches use [`WarmConfig::link_share`] of the time.
#[derive(Debug)]
pub struct Warming {
    planned: VecDeque<Fetch>,
    begun: Vec<Begun>,
    /// Time until which each source rests.
    rests: Vec<(InstanceId, Seconds)>,
    until: Seconds,
    config: WarmConfig,
    next_number: u64,
    ended: u64,
    fetched_tokens: u64,
}

impl Warming {
    /// Starts the clock of a plan.
    pub fn new(planned: Vec<Fetch>, config: WarmConfig, now: Seconds) -> Warming {
        Warming {
            planned: planned.into(),
            begun: Vec::new(),
            rests: Vec::new(),
            until: now + config.max_seconds,
            config,
            next_number: 0,
            ended: 0,
            fetched_tokens: 0,
        }
    }

    /// Returns the next fetch to begin now, with its number; `None`: none may begin now. Drops the
    /// planned fetches from and to instances that are gone, even if their names or slots are used
    /// again.
    pub fn begin(&mut self, fleet: &Fleet, now: Seconds) -> Option<(u64, Fetch)> {
        let is_there = |fetch: &Fetch| fleet.is_current(fetch.source) && fleet.is_current(fetch.target);
        self.planned.retain(|fetch| now < self.until && is_there(fetch));
        let free = |fetch: &Fetch| {
            let load = |of: &dyn Fn(&Begun) -> InstanceId, id| {
                self.begun.iter().filter(|begun| of(begun) == id).count() < self.config.max_fetches as usize
            };
            let rests = self.rests.iter().any(|(id, until)| *id == fetch.source && *until > now);
            !rests && load(&|begun| begun.source, fetch.source) && load(&|begun| begun.target, fetch.target)
        };
        let place = self.planned.iter().position(free)?;
        let fetch = self.planned.remove(place)?;
        let number = self.next_number;
        self.next_number += 1;
        self.begun.push(Begun { number, source: fetch.source, target: fetch.target, at: now });
        Some((number, fetch))
    }

    /// Records the end of a fetch: `tokens` arrived. 0: it failed.
    pub fn ended(&mut self, number: u64, tokens: u32, now: Seconds) {
        let Some(place) = self.begun.iter().position(|begun| begun.number == number) else { return };
        let begun = self.begun.swap_remove(place);
        self.ended += 1;
        self.fetched_tokens += u64::from(tokens);
        let rest = (now - begun.at).max(0.0) * (1.0 / self.config.link_share - 1.0);
        self.rests.retain(|(id, until)| *until > now && *id != begun.source);
        self.rests.push((begun.source, now + rest));
    }

    /// Drops the planned fetches from and to an instance that begins to leave.
    pub fn forget(&mut self, leaving: Slot) {
        self.planned.retain(|fetch| fetch.source.slot() != leaving && fetch.target.slot() != leaving);
    }

    /// Returns whether no fetch is left.
    pub fn is_over(&self, now: Seconds) -> bool {
        self.begun.is_empty() && (self.planned.is_empty() || now >= self.until)
    }

    /// Returns the time at which to call [`Warming::begin`] again if no fetch ends before it;
    /// `None`: only the end of a fetch changes something.
    pub fn wakes(&self, now: Seconds) -> Option<Seconds> {
        if self.planned.is_empty() {
            return None;
        }
        let rests = self.rests.iter().map(|(_, until)| *until).filter(|until| *until > now);
        Some(rests.fold(self.until, f64::min)).filter(|at| *at > now)
    }

    /// Returns the number of fetches that ended, and the tokens that arrived.
    pub fn fetched(&self) -> (u64, u64) {
        (self.ended, self.fetched_tokens)
    }

    /// Returns the number of fetches that have not begun.
    pub fn planned(&self) -> usize {
        self.planned.len()
    }

    /// Returns the time at which the rest of the plan is dropped.
    pub fn until(&self) -> Seconds {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::id_of;
    use super::*;
    use crate::fleet::Role;

    fn fetch(source: u32, target: u32) -> Fetch {
        Fetch {
            prompt: 1,
            chain: vec![1],
            tokens: 100,
            source: id_of(Slot(source)),
            target: id_of(Slot(target)),
        }
    }

    /// A fleet of the first instances of ten slots.
    fn fleet() -> Fleet {
        let mut fleet = Fleet::default();
        for slot in 0..10 {
            fleet.add(&format!("e{slot}"), Role::Both).unwrap();
        }
        fleet
    }

    fn config() -> WarmConfig {
        WarmConfig { max_seconds: 10.0, max_fetches: 2, link_share: 0.5, ..WarmConfig::default() }
    }

    #[test]
    fn sources_and_targets_have_a_limit_and_sources_rest() {
        let plan = vec![fetch(0, 9), fetch(0, 9), fetch(1, 9), fetch(0, 8)];
        let mut warming = Warming::new(plan, config(), 0.0);
        let begun: Vec<u64> =
            std::iter::from_fn(|| warming.begin(&fleet(), 0.0)).map(|(number, _)| number).collect();
        assert_eq!(begun, [0, 1], "two to one target, two from one source");
        warming.ended(0, 100, 1.0);
        // Source 0 took 1 s, so it rests for 1 s. Source 1 does not.
        let (number, next) = warming.begin(&fleet(), 1.0).unwrap();
        assert_eq!((number, next.source), (2, id_of(Slot(1))));
        assert!(warming.begin(&fleet(), 1.5).is_none());
        assert_eq!(warming.wakes(1.5), Some(2.0));
        assert_eq!(warming.begin(&fleet(), 2.0).unwrap().1.target, id_of(Slot(8)));
        assert_eq!((warming.wakes(2.0), warming.is_over(2.0)), (None, false));
        (1..4).for_each(|number| warming.ended(number, 50, 3.0));
        warming.ended(3, 50, 3.0); // counts once
        assert!(warming.is_over(3.0));
        assert_eq!(warming.fetched(), (4, 250));
    }

    #[test]
    fn the_plan_ends_in_time() {
        let mut warming = Warming::new(vec![fetch(0, 9), fetch(0, 9), fetch(0, 9)], config(), 5.0);
        assert!(warming.begin(&fleet(), 5.0).is_some() && warming.begin(&fleet(), 14.9).is_some());
        assert!(warming.begin(&fleet(), 14.9).is_none());
        assert!(!warming.is_over(15.0), "two fetches still run");
        (0..2).for_each(|number| warming.ended(number, 0, 15.0));
        assert!(warming.is_over(15.0) && warming.begin(&fleet(), 15.0).is_none());
    }

    #[test]
    fn neither_an_instance_that_is_gone_nor_its_successor_is_asked() {
        for name in ["e0", "new"] {
            let mut fleet = fleet();
            let plan = vec![fetch(0, 9), fetch(1, 9), fetch(1, 0), fetch(2, 9)];
            let mut warming = Warming::new(plan, config(), 0.0);
            fleet.remove(Slot(0));
            assert_eq!(fleet.add(name, Role::Both).unwrap(), Slot(0));
            assert_eq!(warming.begin(&fleet, 0.0).unwrap().1, fetch(1, 9));
            fleet.remove(Slot(2));
            assert!(warming.begin(&fleet, 0.0).is_none());
            assert_eq!(warming.planned(), 0);
        }
    }

    #[test]
    fn an_instance_that_begins_to_leave_is_not_asked() {
        let mut warming = Warming::new(vec![fetch(0, 9), fetch(1, 9), fetch(1, 0)], config(), 0.0);
        warming.forget(Slot(0));
        assert_eq!(warming.begin(&fleet(), 0.0).unwrap().1, fetch(1, 9));
        assert_eq!(warming.planned(), 0);
    }
}
