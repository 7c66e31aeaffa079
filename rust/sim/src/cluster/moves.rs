//! Running requests move: each leaves its engine at the end of the step that runs, its KV is sent, and it queues where it goes on. It makes no token in
//! between, as in STAR (section 5.4: the paused request's KV is sent while the others decode).
use super::{Cluster, Event, State};
use crate::gaps::Gaps;
use crate::transfer::Load;
use lmetric_core::CoreError;
use lmetric_core::ids::{InstanceId, Seconds};
use lmetric_core::router::Carry;

impl Cluster<'_> {
    /// A running request is to go on at `target`.
    ///
    /// # Errors
    /// What [`lmetric_core::router::Router::begin_move`] refuses.
    pub(super) fn begin_move(&mut self, request: usize, target: InstanceId) -> Result<(), CoreError> {
        self.observer.begin_move(request as u64, target, Carry::Kv, self.now)?;
        let source = self.parts[request].instance as usize;
        self.leaving[source].push(request as u32);
        match self.instances[source].state {
            State::Stepping => {
                if let Some(end) = self.engines[source].interrupt(self.now) {
                    self.expect(source, end);
                }
            }
            State::Idle | State::Seen => self.let_go(source, self.now)?,
        }
        Ok(())
    }

    /// Between two steps of an instance, at `ended`: whoever is to go on elsewhere leaves. One that has ended, or was put back into the queue, stays.
    pub(super) fn let_go(&mut self, instance: usize, ended: Seconds) -> Result<(), CoreError> {
        let mut leaving = std::mem::take(&mut self.leaving[instance]);
        for request in leaving.drain(..).map(|request| request as usize) {
            let id = request as u64;
            let Some((made, gaps)) = self.engines[instance].leave(id) else {
                self.observer.cancel_move(id, self.now)?;
                continue;
            };
            let prompt = self.workload.shape.input_tokens[request];
            let made = self.parts[request].from.saturating_sub(prompt) + made;
            self.leave(request, prompt, made, gaps, ended)?;
        }
        self.leaving[instance] = leaving;
        Ok(())
    }

    fn leave(
        &mut self,
        request: usize,
        prompt: u32,
        made: u32,
        gaps: Gaps,
        ended: Seconds,
    ) -> Result<(), CoreError> {
        self.records.add_gaps(request, gaps);
        self.records.moves[request] += 1;
        self.last_tokens[request] = ended;
        let segment = self.observer.moved(request as u64, prompt, made, self.now)?;
        self.begin(request, segment);
        let (to, from) = (segment.instance.index(), self.parts[request].before as usize);
        self.records.decode_instance[request] = to as i64;
        let chain = super::chain(self.workload, self.config, request);
        let held = self.engines[to].hit_tokens(chain, segment.from_token);
        let tokens = segment.from_token - held;
        let there = self.links.carry(Load { from, to, tokens, began: None, ended });
        self.at(there, Event::HandOver { request: request as u32 });
        Ok(())
    }
}
