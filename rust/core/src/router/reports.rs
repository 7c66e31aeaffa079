//! Reports of load from engines and peer routers.
use super::ledger::{Ledger, Published, Report, Share};
use super::listeners::Listeners;
use super::listeners::replicas::{Ledgers, Message};
use super::router::Router;
use super::state::State;
use crate::error::CoreError;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::{DeclaredIndicator, declared};
use crate::program::{Followed, PeerPrograms};
use crate::suggest::nearest;
use std::sync::Arc;

impl Router {
    /// Applies an engine's load report.
    ///
    /// # Errors
    /// `UnknownName`, or `BadValue` for an impossible number.
    pub fn engine_report(&mut self, name: &str, report: Report) -> Result<(), CoreError> {
        self.engine_report_with(name, report, [])
    }

    /// Applies an engine's load report with values of declared indicators.
    ///
    /// # Errors
    /// The errors of [`Router::engine_report`] and [`Router::report_declared`]. Nothing has changed
    /// then.
    pub fn engine_report_with<'a>(
        &mut self,
        name: &str,
        report: Report,
        extra: impl IntoIterator<Item = (&'a str, Option<f64>)>,
    ) -> Result<(), CoreError> {
        let id = self.state.fleet.find(name)?;
        for (what, value) in [
            ("waiting", report.waiting),
            ("running", report.running),
            ("kv_usage", report.kv_usage),
            ("prefill_tokens", report.prefill_tokens),
        ] {
            if let Some(v) = value.filter(|v| !v.is_finite() || *v < 0.0) {
                return Err(CoreError::BadValue {
                    what: format!("{what} in the load report of {name}"),
                    got: v.to_string(),
                    expected: "a finite number, at least 0".into(),
                });
            }
        }
        self.report_declared(name, extra, report.at)?;
        let at = self.clock(report.at);
        self.state.ledger.report(id.index(), Report { at, ..report });
        Ok(())
    }

    /// Sets the values of declared indicators for one instance, as of `at`. `None` removes the
    /// value, as if it had never been reported.
    ///
    /// # Errors
    /// `UnknownName` for an unknown instance or an undeclared indicator; `BadValue` for a value
    /// that is not finite. Nothing has changed then.
    pub fn report_declared<'a>(
        &mut self,
        name: &str,
        values: impl IntoIterator<Item = (&'a str, Option<f64>)>,
        at: Seconds,
    ) -> Result<(), CoreError> {
        let slot = self.state.fleet.find(name)?.index();
        let checked = |(indicator, value): (&str, Option<f64>)| {
            let decl = declared::find(indicator).ok_or_else(|| unknown_declared(indicator))?;
            match value.filter(|value| !value.is_finite()) {
                None => Ok((decl, value)),
                Some(bad) => Err(CoreError::BadValue {
                    what: format!("{} in the load report of {name}", decl.name),
                    got: bad.to_string(),
                    expected: "a finite number, or none for a value that is no longer known".into(),
                }),
            }
        };
        let values: Vec<(&DeclaredIndicator, Option<f64>)> =
            values.into_iter().map(checked).collect::<Result<_, CoreError>>()?;
        let at = self.clock(at);
        values.iter().for_each(|(decl, value)| self.state.ledger.set_declared(slot, decl.id, *value, at));
        Ok(())
    }

    /// Returns the load that this router placed on each instance, for its peers. Idle instances are
    /// left out.
    pub fn share(&self, now: Seconds) -> Vec<(Arc<str>, Published)> {
        let now = self.latest.max(now);
        let State { fleet, ledger, .. } = &self.state;
        let load = published(self.listeners.admission.followed(), now);
        self.state
            .ids()
            .filter(|id| fleet.is_live(*id))
            .map(|id| (fleet.name(id).clone(), load(ledger, id)))
            .filter(|(_, load)| !load.is_nothing())
            .collect()
    }

    /// Enters this router's load at `now` as the version `version` for its peers; versions grow
    /// from 1 on. `oldest`: oldest version that a message can still change. Takes time for the
    /// instances whose load changes, or for all if agent programs are followed.
    ///
    /// # Errors
    /// `BadValue` for a version that is not above the last one.
    pub fn enter_load(&mut self, version: u64, oldest: u64, now: Seconds) -> Result<(), CoreError> {
        let now = self.clock(now);
        let Router { state, listeners: Listeners { admission, outgoing, .. }, .. } = self;
        let all = admission.programs().is_some();
        let load = published(admission.followed().filter(|followed| followed.publishes()), now);
        outgoing.enter(version, oldest, all, &mut state.ledger, &state.fleet, now, load)
    }

    /// Returns the load of the instances that changed since the version `base` of
    /// [`Router::enter_load`]; `None`: of all that have load.
    pub fn load_since(&self, base: Option<u64>, now: Seconds) -> Vec<(Box<str>, Published)> {
        let State { fleet, ledger, .. } = &self.state;
        self.listeners.outgoing.since(base, ledger, fleet, self.latest.max(now))
    }

    /// Replaces the published load of the router `replica` on each instance. Load on instances that
    /// are not in the fleet counts once they are.
    ///
    /// # Errors
    /// `BadValue` for an impossible number, or for more than
    /// [`MAX_REPLICAS`](super::MAX_REPLICAS) replicas. Nothing has changed then.
    pub fn hear<'a>(
        &mut self,
        replica: &str,
        shares: impl IntoIterator<Item = (&'a str, impl Into<Published>)>,
        now: Seconds,
    ) -> Result<(), CoreError> {
        let loads = shares.into_iter().map(|(instance, load)| (instance, load.into()));
        self.hear_message(Message { from: replica, version: 0, base: None, loads }, now).map(drop)
    }

    /// Applies the message of a peer. Takes time for the instances in the message alone, if it has
    /// changes. Returns false if it changes another version than the last one from this peer;
    /// nothing has changed then, and the peer's next message must be full.
    ///
    /// # Errors
    /// `BadValue` for an impossible number, or for too many peers or instances. Nothing has changed
    /// then.
    pub fn hear_message<'a>(
        &mut self,
        message: Message<'_, impl IntoIterator<Item = (&'a str, Published)>>,
        now: Seconds,
    ) -> Result<bool, CoreError> {
        let now = self.clock(now);
        let Router { state, listeners: Listeners { admission, replicas, .. }, .. } = self;
        let mut ledgers = Ledgers { load: &mut state.ledger, programs: admission.followed_mut() };
        replicas.hear(&mut ledgers, &state.fleet, message, now)
    }

    /// Removes the load of peers without a message in the last `seconds`. After that, their
    /// requests count only through engine reports. Returns the peers' names.
    pub fn forget_silent(&mut self, seconds: Seconds, now: Seconds) -> Vec<Box<str>> {
        let now = self.clock(now);
        let Router { state, listeners: Listeners { admission, replicas, .. }, .. } = self;
        let mut ledgers = Ledgers { load: &mut state.ledger, programs: admission.followed_mut() };
        replicas.forget_silent(&mut ledgers, seconds, now)
    }

    /// Yields the peers whose load counts, each with the time of its last message.
    pub fn replicas(&self) -> impl Iterator<Item = (&str, Seconds)> {
        self.listeners.replicas.heard()
    }
}

/// Returns a function that returns a router's load on an instance at `now`.
fn published(programs: Option<&Followed>, now: Seconds) -> impl Fn(&Ledger, InstanceId) -> Published {
    let demand = programs.map(|followed| followed.programs().demand_per_instance(now));
    move |ledger, id| {
        let mut load = Published::from(ledger.share(id.index(), now));
        if let (Some(programs), Some(demand)) = (programs, demand) {
            let PeerPrograms { tokens, programs, held_tokens, admitted_tokens, roots } =
                programs.published(id, demand);
            load.share = Share {
                program_tokens: tokens,
                programs,
                held_program_tokens: held_tokens,
                admitted_program_tokens: admitted_tokens,
                ..load.share
            };
            load.roots = roots;
        }
        load
    }
}

fn unknown_declared(name: &str) -> CoreError {
    CoreError::UnknownName {
        kind: "declared indicator".into(),
        name: name.into(),
        nearest: nearest(name, declared::declared().iter().map(|decl| decl.name)),
    }
}
