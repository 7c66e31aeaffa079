//! Slots whose own load has changed, for the other workers of a server.

/// The slots, once somebody asks for them.
#[derive(Clone, Debug, Default)]
pub struct Changes(Option<Vec<u32>>);

impl Changes {
    /// Starts to note changes.
    pub fn start(&mut self) {
        self.0 = Some(Vec::new());
    }

    /// Notes a change.
    #[inline]
    pub(super) fn note(&mut self, slot: usize) {
        if let Some(changed) = &mut self.0
            && changed.last() != Some(&(slot as u32))
        {
            changed.push(slot as u32);
        }
    }

    /// Moves the changed slots, which may repeat, to `slots`. Returns whether there are any.
    #[inline]
    pub fn take(&mut self, slots: &mut Vec<u32>) -> bool {
        slots.clear();
        self.0.as_mut().is_some_and(|changed| {
            std::mem::swap(changed, slots);
            !slots.is_empty()
        })
    }
}
