//! Slots whose own load has changed, for the other workers of a server and for peer routers.

/// The slots, once somebody asks for them.
#[derive(Clone, Debug, Default)]
pub struct Changes(Option<Changed>);

#[derive(Clone, Debug, Default)]
struct Changed {
    slots: Vec<u32>,
    /// By slot: whether `slots` has it.
    noted: Vec<bool>,
}

impl Changes {
    /// Starts to note changes.
    pub fn start(&mut self) {
        self.0 = Some(Changed::default());
    }

    /// Returns whether changes are noted.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Notes a change.
    #[inline]
    pub(super) fn note(&mut self, slot: usize) {
        let Some(changed) = &mut self.0 else { return };
        if changed.noted.len() <= slot {
            changed.noted.resize(slot + 1, false);
        }
        if !std::mem::replace(&mut changed.noted[slot], true) {
            changed.slots.push(slot as u32);
        }
    }

    /// Moves the changed slots to `slots`. Returns whether there are any.
    #[inline]
    pub fn take(&mut self, slots: &mut Vec<u32>) -> bool {
        slots.clear();
        self.0.as_mut().is_some_and(|changed| {
            std::mem::swap(&mut changed.slots, slots);
            slots.iter().for_each(|slot| changed.noted[*slot as usize] = false);
            !slots.is_empty()
        })
    }
}
