//! Held requests of agent programs.
use super::{Cluster, Event, router_request};
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;
use lmetric_core::request::Request as RouterRequest;

/// Seconds between two rounds of admission, as in the server.
const PERIOD_SECONDS: Seconds = 0.5;

impl Cluster<'_> {
    /// Runs a round of admission in each router and places the admitted requests.
    pub(super) fn admit_held(&mut self) -> Result<(), CoreError> {
        self.routers.catch_up_all(&self.engines, self.now)?;
        let mut released = Vec::new();
        for observer in self.routers.each() {
            released.extend(observer.router.release_programs(self.now));
        }
        for admitted in released {
            // A request that was admitted at its arrival is not held.
            let Some(request) = self.held.remove(&admitted.turn) else { continue };
            let asked = router_request(self.workload, self.config, request as usize);
            self.place(request as usize, &RouterRequest { program_turn: Some(admitted.turn), ..asked })?;
        }
        self.at(self.now + PERIOD_SECONDS, Event::Programs);
        Ok(())
    }
}
