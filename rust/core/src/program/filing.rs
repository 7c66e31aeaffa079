//! Writers of the indexes. [`Programs::set_state`] and [`Programs::set_tokens`] are the only
//! writers of a program's state and tokens: they keep the indexes complete.
use super::entry::Program;
use super::programs::Programs;
#[cfg(test)]
use super::programs::Turn;
use super::sets::{CAME_BACK, ENDED, Filed, Share, order_of, time_of};
use super::settings::ProgramMode;
use super::types::{ProgramId, State};
use crate::ids::Seconds;

impl Programs {
    /// Changes a program's state. Call it with the same state after a change of the flags that say
    /// how its gap counts.
    pub(super) fn set_state(&mut self, id: ProgramId, state: State) {
        let Some(program) = self.programs.get_mut(id) else { return };
        program.state = state;
        let set = if program.came_back { CAME_BACK } else { 0 }
            + if program.forgotten || program.said_final { ENDED } else { 0 };
        let gap = state.rests().then_some((set, order_of(program.since)));
        let filed = Filed { state, gap };
        let old = program.filed.replace(filed);
        if old != Some(filed) {
            self.sets.refile(id, old, Some(filed));
            let placed = |filed: Option<Filed>| filed.is_some_and(|filed| filed.state.has_place());
            if placed(old) != placed(Some(filed)) {
                self.note_fork(id);
            }
        }
        self.note_state(id);
    }

    /// Removes a program from the indexes.
    pub(super) fn unfile(&mut self, id: ProgramId, program: &Program) {
        self.sets.refile(id, program.filed, None);
        self.sets.tokens -= program.tokens;
        if let Some(session) = program.session {
            self.sets.sessions.remove(&(session, id));
        }
    }

    /// Changes the tokens of a program's context.
    pub(super) fn set_tokens(&mut self, id: ProgramId, tokens: f64) {
        let program = &mut self.programs[id];
        self.sets.tokens += tokens - program.tokens;
        program.tokens = tokens;
        self.note_change(id);
        let program = &self.programs[id];
        if program.share.is_some() {
            self.count_share(id);
        }
    }

    /// Counts a program for its tenant, or counts it again.
    pub(super) fn count_share(&mut self, id: ProgramId) {
        let program = &mut self.programs[id];
        let tokens = program.own_tokens();
        let share = self.sets.shares.entry(program.tenant).or_default();
        if let Some(before) = program.share.replace(tokens) {
            share.tokens -= before;
            share.programs -= 1;
            if share.programs == 0 {
                share.tokens = 0.0; // rounding errors do not add up
            }
        }
        *share =
            Share { tokens: share.tokens + tokens, weight: program.weight, programs: share.programs + 1 };
    }

    /// Takes a program off its tenant's share.
    pub(super) fn uncount_share(&mut self, id: ProgramId) {
        let Some(program) = self.programs.get_mut(id) else { return };
        let Some(tokens) = program.share.take() else { return };
        let Some(share) = self.sets.shares.get_mut(&program.tenant) else { return };
        share.tokens -= tokens;
        share.programs -= 1;
        if share.programs == 0 {
            self.sets.shares.remove(&program.tenant);
        }
    }

    /// Returns the programs without children whose gap is longer than `seconds` and does not count
    /// as an end yet.
    pub(super) fn overdue(&self, seconds: Seconds, now: Seconds) -> Vec<ProgramId> {
        self.without_children(self.sets.resting_for(&[0, CAME_BACK], seconds, now))
    }

    /// Returns the programs without children whose gap is longer than `seconds`.
    pub(super) fn resting_for(&self, seconds: Seconds, now: Seconds) -> Vec<ProgramId> {
        self.without_children(self.sets.resting_for(&[0, 1, 2, 3], seconds, now))
    }

    fn without_children(&self, mut ids: Vec<ProgramId>) -> Vec<ProgramId> {
        ids.retain(|id| self.programs[*id].children.is_empty());
        ids
    }

    /// Returns the program that makes room for a new one in a full table: the one with the longest
    /// gap. Programs that are only observed and came once go first, once their gap is longer than
    /// that of programs that usually return.
    pub(super) fn to_drop(&self, now: Seconds) -> Option<ProgramId> {
        let oldest = |sets: &[usize]| sets.iter().filter_map(|set| self.sets.gaps[*set].first()).min();
        let is_overdue = |since: u64| now - time_of(since) > self.config.forget_seconds;
        let once = oldest(&[0, ENDED]).filter(|(since, _)| is_overdue(*since));
        let once = once.filter(|_| self.config.mode == ProgramMode::Observe);
        once.or_else(|| oldest(&[0, 1, 2, 3])).map(|(_, id)| *id)
    }
}

#[cfg(test)]
impl Programs {
    /// Checks that the indexes are what a walk through all programs finds.
    pub fn check_sets(&self) {
        use hashbrown::HashMap;
        use std::collections::BTreeSet;

        let mut counts = [0; 4];
        let (mut placed, mut resting, mut tokens) = (BTreeSet::new(), 0, 0.0);
        let mut shares: HashMap<u64, f64> = HashMap::new();
        for (id, program) in &self.programs {
            counts[program.state as usize] += 1;
            resting += usize::from(program.state.rests());
            tokens += program.tokens;
            if program.state.has_place() {
                placed.insert(id);
            }
            if program.charge().is_some() {
                *shares.entry(program.tenant).or_default() += program.own_tokens() / program.weight;
            }
            if program.state.rests() {
                let (set, since) = program.filed.and_then(|filed| filed.gap).expect("filed");
                assert!(self.sets.gaps[set].contains(&(since, id)));
                assert_eq!(since, order_of(program.since));
            }
        }
        assert_eq!(counts, self.sets.counts);
        assert_eq!(placed, self.sets.placed);
        assert_eq!(resting, self.sets.gaps.iter().map(BTreeSet::len).sum::<usize>());
        assert_eq!(tokens, self.sets.tokens);
        let named = self.programs.iter().filter_map(|(id, program)| Some((program.session?, id)));
        assert_eq!(named.collect::<BTreeSet<_>>(), self.sets.sessions);
        let live = |turn: &Turn| turn.program.is_some_and(|id| self.programs.contains_key(id));
        let turns = self.turns.values().filter(|turn| live(turn));
        let of_programs = self.programs.values().map(|program| program.turns.len()).sum::<usize>();
        assert_eq!(turns.count(), of_programs);
        let counted: HashMap<u64, f64> =
            self.sets.shares.keys().map(|tenant| (*tenant, self.sets.share(*tenant))).collect();
        assert_eq!(shares, counted);
    }
}
