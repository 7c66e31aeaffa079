//! Held and refused requests.
use super::{Cluster, Event, router_request};
use lmetric_core::CoreError;
use lmetric_core::admission::RefusedFor;
use lmetric_core::ids::Seconds;
use lmetric_core::request::Request as RouterRequest;

/// Seconds between two rounds of admission, as in the server: without and with admission by load.
const PERIOD_SECONDS: Seconds = 0.5;
const LOAD_PERIOD_SECONDS: Seconds = 0.05;

impl Cluster<'_> {
    /// Runs a round of admission and schedules the next one.
    pub(super) fn admit_round(&mut self) -> Result<(), CoreError> {
        self.admit_held()?;
        let period = if self.config.load.is_some() { LOAD_PERIOD_SECONDS } else { PERIOD_SECONDS };
        self.at(self.now + period, Event::Admit);
        Ok(())
    }

    /// Runs a round of admission in each router, places the admitted requests and ends the refused
    /// ones.
    pub(super) fn admit_held(&mut self) -> Result<(), CoreError> {
        if !self.churn.any_present() {
            return Ok(());
        }
        self.routers.catch_up_all(&self.engines, self.now)?;
        let (mut ready, mut refused) = (Vec::new(), Vec::new());
        for (number, observer) in self.routers.each().enumerate() {
            let released = observer.router.release_held(self.now);
            ready.extend(released.ready.into_iter().map(|(arrival, _)| (number, arrival)));
            refused.extend(
                released.refused.into_iter().map(|(arrival, by, after)| (number, arrival, by, after)),
            );
        }
        for (router, arrival) in ready {
            // A request that was admitted at its arrival is not held.
            let Some(request) = self.held.remove(&(router, arrival)) else { continue };
            let asked = router_request(self.workload, self.config, request as usize);
            self.place(request as usize, &RouterRequest { arrival: Some(arrival), ..asked })?;
        }
        for (router, arrival, by, retry_after_seconds) in refused {
            let Some(request) = self.held.remove(&(router, arrival)) else { continue };
            self.refuse(request, by, retry_after_seconds);
        }
        Ok(())
    }

    /// Refuses a request. The client of a program tries again; a request that admission by load
    /// refuses ends.
    pub(super) fn refuse(&mut self, request: u32, by: RefusedFor, retry_after_seconds: Seconds) {
        if by == RefusedFor::Programs {
            self.at(self.now + retry_after_seconds, Event::Arrival { request });
            return;
        }
        let request = request as usize;
        self.left -= 1;
        self.records.refused_seconds[request] = self.now;
        let next: Vec<_> = self.waiting.end(self.workload, request, self.now).collect();
        next.into_iter().for_each(|(at, request)| self.at(at, Event::Arrival { request }));
    }
}
