//! Agent programs: settings and snapshots.
use crate::errors::Result;
use crate::settings;
use lmetric_core::program::State;
use lmetric_core::program::programs::Counters;
use lmetric_core::program::{Finish, GapClass, ProgramConfig};
use lmetric_core::router::Router;
use lmetric_core::{CoreError, Maturity, Slot};
use lmetric_study::program;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Arc;

/// Returns the settings of this kind; `None` for `"none"`. `offers`: the least mature rules that
/// are accepted.
///
/// # Errors
/// `BadValue` for an unknown kind or setting, or a value out of range; `Immature` for rules that
/// are not offered.
pub fn programs_of(
    offers: Maturity,
    kind: &str,
    settings: Option<&Bound<'_, PyDict>>,
) -> Result<Option<ProgramConfig>> {
    let mut reader = settings::reader(&format!("programs {kind}"), settings)?;
    let programs = program::named(kind, &mut reader)?;
    reader.finish()?;
    if programs.as_ref().is_some_and(|config| config.rules.is_some()) && offers < Maturity::Study {
        let name = if kind == program::THUNDER { kind.into() } else { format!("{kind} with its settings") };
        return Err(CoreError::Immature { kind: "programs".into(), name, maturity: Maturity::Study }.into());
    }
    Ok(programs)
}

/// The numbers of one instance's ledger.
struct Ledger {
    name: Arc<str>,
    capacity_tokens: Option<f64>,
    reported_tokens: Option<f64>,
    measured_tokens: Option<f64>,
    expected_tokens: f64,
    peer_tokens: f64,
    /// Tokens of programs, of shared roots and of other requests.
    parts: (f64, f64, f64),
    programs: u32,
}

/// The numbers of a router's programs, read under its lock.
pub struct Snapshot {
    states: [usize; 4],
    holds: bool,
    counters: Counters,
    instances: Vec<Ledger>,
    /// By the end of the last answer: share of the gaps without a return, and observed gaps.
    ended: [(&'static str, (f64, f64)); Finish::NAMES.len()],
}

impl Snapshot {
    /// Copies it from a router; `None` if programs are not followed.
    pub fn of(router: &Router) -> Option<Snapshot> {
        let programs = router.programs()?;
        let ids = (0..router.fleet().slots()).map(|slot| Slot(slot as u32));
        let live = ids.filter(|id| router.fleet().is_live(*id));
        let ledgers = live.filter_map(|id| Some((id, router.program_ledger(id)?)));
        let tokens = |blocks: u32| f64::from(blocks) * programs.tokens_per_block().max(1.0);
        let gaps = programs.gaps();
        Some(Snapshot {
            states: programs.own_states(),
            holds: programs.holds(),
            counters: programs.counters(),
            instances: ledgers
                .map(|(id, ledger)| Ledger {
                    name: router.fleet().name(id).clone(),
                    capacity_tokens: ledger.capacity_tokens,
                    reported_tokens: router.cache_blocks(id).map(tokens),
                    measured_tokens: router.measured_cache_blocks(id).map(tokens),
                    expected_tokens: ledger.expected_tokens(),
                    peer_tokens: ledger.peer_tokens(),
                    parts: ledger.parts(),
                    programs: ledger.programs,
                })
                .collect(),
            ended: Finish::NAMES
                .map(|(name, finish)| (name, gaps.share_ended(GapClass { long: true, finish }))),
        })
    }

    /// Returns it as a dictionary.
    pub fn dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        let states = PyDict::new(py);
        for ((name, _), count) in State::NAMES.iter().zip(self.states) {
            states.set_item(name, count)?;
        }
        dict.set_item("states", states)?;
        dict.set_item("holds", self.holds)?;
        let counters = self.counters;
        for (name, count) in [
            ("new_programs", counters.new_programs),
            ("forks", counters.forks),
            ("continuations", counters.continuations),
            ("other_requests", counters.chats),
            ("untracked", counters.untracked),
            ("forgotten", counters.forgotten),
            ("paused", counters.paused),
            ("held", counters.held),
            ("refused", counters.refused),
            ("admitted", counters.admitted),
        ] {
            dict.set_item(name, count)?;
        }
        dict.set_item("held_seconds", counters.held_seconds)?;
        let instances = PyDict::new(py);
        for ledger in &self.instances {
            let (own, roots, others) = ledger.parts;
            let each = PyDict::new(py);
            each.set_item("capacity_tokens", ledger.capacity_tokens)?;
            each.set_item("reported_tokens", ledger.reported_tokens)?;
            each.set_item("measured_tokens", ledger.measured_tokens)?;
            each.set_item("expected_tokens", ledger.expected_tokens)?;
            each.set_item("program_tokens", own)?;
            each.set_item("shared_tokens", roots)?;
            each.set_item("other_tokens", others)?;
            each.set_item("peer_tokens", ledger.peer_tokens)?;
            each.set_item("programs", ledger.programs)?;
            instances.set_item(&*ledger.name, each)?;
        }
        dict.set_item("instances", instances)?;
        let gaps = PyDict::new(py);
        for (name, ended) in self.ended {
            gaps.set_item(name, ended)?;
        }
        dict.set_item("share_ended", gaps)?;
        Ok(dict)
    }
}
