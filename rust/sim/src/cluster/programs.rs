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
        for (number, observer) in self.routers.each().enumerate() {
            let turns = observer.router.release_programs(self.now).into_iter();
            released.extend(turns.map(|admitted| (number, admitted.turn)));
        }
        for (router, turn) in released {
            // A request that was admitted at its arrival is not held.
            let Some(request) = self.held.remove(&(router, turn)) else { continue };
            let asked = router_request(self.workload, self.config, request as usize);
            self.place(request as usize, &RouterRequest { program_turn: Some(turn), ..asked })?;
        }
        self.at(self.now + PERIOD_SECONDS, Event::Programs);
        Ok(())
    }
}
