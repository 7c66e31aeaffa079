//! Storage tiers of an engine's KV cache.

/// A storage tier of an engine's KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The GPU's memory, from which requests are served.
    #[default]
    Gpu,
    /// The host's memory.
    Cpu,
    /// Files or a remote store.
    Storage,
}

impl Tier {
    /// All tiers, with their media in the engines' events.
    pub const MEDIA: [(&'static str, Tier); 3] =
        [("GPU", Tier::Gpu), ("CPU", Tier::Cpu), ("STORAGE", Tier::Storage)];
    /// Further media in events: SGLang's names.
    const OTHER_MEDIA: [(&'static str, Tier); 3] =
        [("CPU_PINNED", Tier::Cpu), ("DISK", Tier::Storage), ("EXTERNAL", Tier::Storage)];
    /// Tiers below the GPU.
    pub const LOWER: [Tier; 2] = [Tier::Cpu, Tier::Storage];

    /// Returns the tier of an event's medium, ignoring case; `None` for an unknown medium. Events
    /// without a medium are about the GPU.
    pub fn of_medium(medium: Option<&str>) -> Option<Tier> {
        let Some(medium) = medium.filter(|medium| !medium.is_empty()) else { return Some(Tier::Gpu) };
        let mut all = Tier::MEDIA.iter().chain(&Tier::OTHER_MEDIA);
        all.find(|(name, _)| name.eq_ignore_ascii_case(medium)).map(|(_, tier)| *tier)
    }

    /// Returns the tier's medium in events.
    pub fn medium(self) -> &'static str {
        Tier::MEDIA[self as usize].0
    }
}
