//! Calls about the other workers of the same server.
use crate::board::Board;
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::program::Followed;
use crate::router::listeners::workers::Workers;
use crate::router::router::Router;
use std::sync::Arc;

/// Bits of the numbers of one worker's decisions: enough for thousands of years, and all numbers
/// stay exact as floats.
const WORKER_BITS: u32 = 48;

impl Router {
    /// Exchanges load with the other workers of this server from now on. `model`: a number that the
    /// routers of the same model share. The router must not have decided yet: its decisions are
    /// numbered anew, so that no two workers use the same number.
    ///
    /// # Errors
    /// `BadValue` if the board has no room for a further model.
    pub fn join(&mut self, board: Arc<Board>, model: u64) -> Result<(), CoreError> {
        self.state.ledger.changes.start();
        // A decision's number names it in all workers.
        self.requests.records.begin_at(((board.writer() as u64) << WORKER_BITS) + 1);
        self.listeners.admission.share(board.clone(), model, &self.state.fleet)?;
        self.workers = Some(Box::new(Workers::new(board, model, &self.state.fleet)));
        Ok(())
    }

    /// Ends the exchange with the other workers. Call it before a router is dropped whose process
    /// goes on: otherwise the others wait for its agent programs.
    pub fn leave(&mut self) {
        if let Some(workers) = self.workers.take() {
            workers.leave();
        }
        self.listeners.admission.leave();
    }

    /// Returns whether this router has the agent programs of the other workers. Until then, its
    /// requests belong to no program.
    pub fn has_programs_of_workers(&self) -> bool {
        self.listeners.admission.followed().is_none_or(Followed::is_present)
    }

    /// Publishes the load that has changed to the other workers of this server.
    #[inline]
    pub fn publish_changes(&mut self) {
        if let Some(workers) = &mut self.workers {
            workers.publish(&mut self.state.ledger, &self.state.fleet, self.latest);
        }
    }

    /// Publishes all load as of `now` to the other workers. Returns false if the board has no room
    /// for some of it.
    pub fn publish_all(&mut self, now: Seconds) -> bool {
        let now = self.clock(now);
        self.listeners.admission.follow(now);
        self.workers.as_mut().is_none_or(|workers| {
            workers.publish_all(&self.state.ledger, &self.state.fleet, now);
            !workers.is_full()
        })
    }
}
