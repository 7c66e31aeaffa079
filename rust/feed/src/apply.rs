//! Applies cache events to the index: decides which blocks count, in which domain, and what a
//! repeated report of known blocks means.
use crate::decode::DecodeError;
use crate::early::EarlyEvents;
use crate::event::{Event, MAX_STEPS, Removed, Scratch, Stored, moment_of, read_batch};
use crate::extra::Rest;
use crate::groups::{Others, Role};
use crate::load::LOAD;
use lmetric_core::feed::{Applied, KvFeed, Means, Source, Stored as Blocks};
use lmetric_core::kv::groups::Group;
use lmetric_core::kv::hash::Domain;
use lmetric_core::kv::tier::Tier;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Maximum number of tier names that are counted separately, and their maximum length in bytes.
/// Engines choose these names.
const MAX_TIER_NAMES: usize = 16;
const MAX_TIER_NAME_BYTES: usize = 64;
/// Blocks of one event that are applied at once. Other users of the feed wait that long.
const PIECE: usize = 1024;

/// Counts of a source's events and of their effects on the index.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Events received, malformed events included.
    pub events: u64,
    /// Load events among them.
    pub loads: u64,
    /// Blocks of the GPU added to the index. Repeated reports count again.
    pub blocks_stored: u64,
    /// Blocks of the GPU with the session of their request.
    pub session_blocks: u64,
    /// Blocks of the GPU removed from the index.
    pub blocks_removed: u64,
    /// KV cache groups of windows and states.
    pub groups: usize,
    /// Blocks of these groups, stored or removed.
    pub group_blocks: u64,
    /// Times that the engine cleared its whole cache.
    pub cleared: u64,
    /// Blocks of the GPU with an unknown parent.
    pub unknown_parent: u64,
    /// Removals of unknown blocks of the GPU.
    pub unknown_removed: u64,
    /// Skipped blocks and events, by reason.
    pub skipped: BTreeMap<&'static str, u64>,
    /// Blocks on tiers other than the GPU, by tier name: stored minus removed.
    pub tiers: BTreeMap<String, i64>,
    /// Tiers of the index below the GPU with stored blocks and without any removal: their blocks
    /// may be gone.
    pub hints: BTreeSet<&'static str>,
    /// Tokens per block, as the engine reports.
    pub block_size: Option<u64>,
    /// The data-parallel rank that the engine reports.
    pub reported_rank: Option<u64>,
    /// Last error: an unreadable message, or a replay request that failed.
    pub last_error: Option<String>,
}

impl Tally {
    /// Counts skipped blocks or events under `reason`.
    pub fn skip(&mut self, reason: &'static str, count: usize) {
        if count > 0 {
            *self.skipped.entry(reason).or_default() += count as u64;
        }
    }

    fn tier(&mut self, name: &str, blocks: i64) {
        if let Some(known) = self.tiers.get_mut(name) {
            *known += blocks;
            return;
        }
        let room = self.tiers.len() < MAX_TIER_NAMES && name.len() <= MAX_TIER_NAME_BYTES;
        *self.tiers.entry(if room { name } else { "other" }.to_string()).or_default() += blocks;
    }

    fn add(&mut self, tier: Tier, applied: Applied) {
        if tier == Tier::Gpu {
            self.unknown_parent += applied.unknown_parent as u64;
            self.unknown_removed += applied.unknown_removed as u64;
        } else {
            self.skip("tier_parent", applied.unknown_parent);
            self.skip("tier_removed", applied.unknown_removed);
        }
        self.skip("no_tokens", applied.unknown_name);
        self.add_refused(applied);
    }

    /// Counts the blocks of a group apart from full attention.
    fn add_group(&mut self, applied: Applied) {
        self.group_blocks += applied.done as u64;
        self.skip("group_name", applied.unknown_name);
        self.skip("group_removed", applied.unknown_removed);
        self.add_refused(applied);
    }

    fn add_refused(&mut self, applied: Applied) {
        self.skip("no_room", applied.unplaced);
        self.skip("instance_gone", applied.gone);
        self.skip("not_exact", applied.not_exact);
    }
}

/// The event of blocks that wait to be applied. Engines send one event per block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waiting {
    Removed(Tier),
    /// Stored in a lower tier and reported by name alone.
    Named(Tier),
}

/// Applies one source's batches to the index.
pub struct Applier {
    feed: Arc<KvFeed>,
    source: Source,
    /// The group of layers whose blocks form prefixes: the first full-attention group reported.
    group: Option<u64>,
    /// The other groups whose blocks count.
    others: Others,
    tally: Tally,
    /// Blocks of consecutive events of one kind, to apply together.
    waiting: Option<Waiting>,
    hashes: Vec<u64>,
    /// Blocks of lower tiers whose previous block may come later in the batch.
    early: EarlyEvents,
    /// Lower tiers that have reported a removal.
    removes: BTreeSet<&'static str>,
    narrowing: Vec<u64>,
    scratch: Scratch,
    /// Timestamp before which batches are of old weights.
    old_before: Option<f64>,
    /// Work since the start, in steps.
    steps: u64,
    /// The limit that the last batch exceeded.
    over_limit: Option<String>,
}

impl Applier {
    /// Creates an applier of the source's batches.
    pub fn new(feed: Arc<KvFeed>, source: Source) -> Applier {
        Applier {
            feed,
            source,
            group: None,
            others: Others::default(),
            tally: Tally::default(),
            waiting: None,
            hashes: Vec::new(),
            early: EarlyEvents::default(),
            removes: BTreeSet::new(),
            narrowing: Vec::new(),
            scratch: Scratch::default(),
            old_before: None,
            steps: 0,
            over_limit: None,
        }
    }

    /// Returns the work since the start, in steps ([`crate::event::Batch::steps`]).
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the limit that a batch has exceeded since the last call.
    pub fn take_over_limit(&mut self) -> Option<String> {
        self.over_limit.take()
    }

    /// Returns the counts so far.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Returns the counts so far, to add to.
    pub fn tally_mut(&mut self) -> &mut Tally {
        &mut self.tally
    }

    /// Returns the source of the batches.
    pub fn source(&self) -> Source {
        self.source
    }

    /// Sets the source after another instance took the same name.
    pub fn set_source(&mut self, source: Source) {
        self.source = source;
        self.forget_groups();
    }

    /// Forgets the KV cache groups. Batches of another process may come, whose engine may have
    /// other groups or none.
    pub fn forget_groups(&mut self) {
        (self.group, self.others, self.tally.groups) = (None, Others::default(), 0);
        self.feed.forget_groups(self.source);
    }

    /// Sets the timestamp before which batches are of old weights: their blocks do not count.
    pub fn set_old_before(&mut self, moment: Option<f64>) {
        self.old_before = moment;
    }

    /// Forgets the source's blocks, tiers and block size.
    pub fn clear(&mut self) {
        self.feed.cleared(self.source);
        drop(self.others.take_unnamed());
        drop(self.early.take());
        self.tally.tiers.clear();
        self.tally.hints.clear();
        self.tally.block_size = None;
    }

    /// Applies a batch. Returns true if the batch cleared the whole cache.
    pub fn apply(&mut self, batch: &[u8]) -> bool {
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut cleared = false;
        let is_old = self.old_before.is_some_and(|moment| moment_of(batch).is_some_and(|at| at < moment));
        let read = read_batch(batch, &mut scratch, |event| match event {
            Event::Stored(stored) if is_old => self.tally.skip("old_weights", stored.hashes.len()),
            Event::Removed(_) if is_old => {}
            Event::Stored(stored) => self.stored(&stored),
            Event::Removed(removed) => self.removed(&removed),
            Event::Cleared => {
                self.flush();
                self.tally.cleared += 1;
                self.clear();
                cleared = true;
            }
            Event::Other(LOAD) => self.tally.loads += 1, // its content counts at its arrival alone
            Event::Other(_) => self.tally.skip("unknown_event", 1),
        });
        self.flush();
        self.drop_early();
        self.name_others();
        self.scratch = scratch;
        match read {
            Ok(batch) => {
                self.steps += batch.steps;
                self.tally.events += batch.events;
                self.tally.skip("malformed_event", batch.malformed as usize);
                self.tally.reported_rank = batch.rank.or(self.tally.reported_rank);
            }
            Err(error) => {
                self.steps += MAX_STEPS;
                if matches!(error, DecodeError::TooMuch(_)) {
                    self.over_limit = Some(error.to_string());
                } else {
                    self.tally.skip("malformed_batch", 1);
                }
                self.tally.last_error = Some(error.to_string());
            }
        }
        cleared
    }

    fn stored(&mut self, event: &Stored<'_>) {
        let blocks = event.hashes.len();
        let tier = Tier::of_medium(event.medium);
        if tier != Some(Tier::Gpu) {
            self.tally.tier(medium(tier, event.medium), blocks as i64);
        }
        let Some(tier) = tier else { return };
        match self.others.role(event, self.group, self.feed.keys().block_size as u64) {
            // All full-attention groups hold the same blocks. If only one group counts, each block
            // counts once.
            Role::Full => {
                if event.group.is_some()
                    && *self.group.get_or_insert(event.group.unwrap_or(0)) != event.group.unwrap_or(0)
                {
                    return self.tally.skip("group", blocks);
                }
            }
            Role::Other(group) => return self.stored_in_other(tier, group, event),
            Role::Unknown(reason) => return self.tally.skip(reason, blocks),
        }
        if tier != Tier::Gpu && !self.removes.contains(tier.medium()) {
            self.tally.hints.insert(tier.medium());
        }
        if tier != Tier::Gpu
            && (event.tokens.is_empty() || self.feed.names_all(self.source, tier, event.hashes))
        {
            return self.wait(Waiting::Named(tier), event.hashes);
        }
        self.flush();
        if event.tokens.is_empty() {
            return self.tally.skip("no_tokens", blocks);
        }
        // Keep the largest: engines report parts of blocks with smaller sizes.
        self.tally.session_blocks += if event.session_id.is_some() { blocks as u64 } else { 0 };
        self.tally.block_size = self.tally.block_size.max(Some(event.block_size));
        let keys = self.feed.keys();
        if event.block_size != keys.block_size as u64 {
            return self.tally.skip("block_size", blocks);
        }
        if event.tokens.len() != blocks * keys.block_size {
            return self.tally.skip("malformed_event", 1);
        }
        let domain = self.domain(keys.tokens, event);
        let means = match event.reused {
            // Lower tiers keep one copy of each block.
            _ if tier != Tier::Gpu => Means::Report,
            Some(true) => Means::Report,
            Some(false) => Means::NewCopy,
            // A full report (vLLM's `kv_cache_report_mode`) always begins at the prompt's first
            // block. A second copy of known blocks hardly ever begins there, since its front would
            // have been a hit. If such a copy is taken for a report, the copy is forgotten too
            // early, which costs a hit. If a report is taken for a copy, the index keeps a block
            // that is gone. Hybrid models often compute known blocks again, because a window lacks
            // theirs; the router requests no reports from them.
            None if event.parent.is_none() && self.others.count() == 0 => Means::Report,
            None => Means::NewCopy,
        };
        let applied = self.store(tier, event, domain, means);
        if tier == Tier::Gpu {
            self.tally.blocks_stored += applied.done as u64;
        } else if applied.unknown_parent == blocks && self.early.add(tier, event, domain, &self.narrowing) {
            return;
        }
        self.tally.add(tier, applied);
        if tier != Tier::Gpu && applied.unknown_parent == 0 {
            self.store_behind(tier, event.hashes.to_vec());
        }
    }

    /// Stores the blocks of an event, with their tokens, in pieces.
    fn store(&mut self, tier: Tier, event: &Stored<'_>, domain: Domain, means: Means) -> Applied {
        let (mut all, mut parent) = (Applied::default(), event.parent);
        let block_size = self.feed.keys().block_size;
        for (at, hashes) in event.hashes.chunks(PIECE).enumerate() {
            let from = at * PIECE;
            let piece = Blocks {
                parent,
                engine_hashes: hashes,
                token_ids: &event.tokens[from * block_size..(from + hashes.len()) * block_size],
                domain,
                narrowing: self.narrowing.get(from..).unwrap_or_default(),
                means,
            };
            let applied = self.feed.stored_in(self.source, tier, &piece);
            all.add(applied);
            if applied.done < hashes.len() {
                // The rest has the same fate: the block before it is missing.
                let rest = event.hashes.len() - from - hashes.len();
                match applied {
                    Applied { unknown_parent: 1.., .. } => all.unknown_parent += rest,
                    Applied { gone: 1.., .. } => all.gone += rest,
                    Applied { not_exact: 1.., .. } => all.not_exact += rest,
                    _ => all.unplaced += rest,
                }
                break;
            }
            parent = hashes.last().copied();
        }
        all
    }

    /// Stores the early blocks behind blocks that are stored now. Engines report a tier's blocks in
    /// any order.
    fn store_behind(&mut self, tier: Tier, mut stored: Vec<u64>) {
        while !self.early.is_empty()
            && let Some(block) = stored.pop()
        {
            for early in self.early.behind(tier, block) {
                self.steps += early.hashes.len() as u64;
                let applied = self.feed.stored_in(self.source, tier, &early.blocks());
                self.tally.add(tier, applied);
                if applied.unknown_parent == 0 {
                    stored.extend(early.hashes);
                }
            }
        }
    }

    /// Ends a batch: counts early blocks whose previous block has not come.
    fn drop_early(&mut self) {
        for early in self.early.take() {
            let unknown_parent = early.hashes.len();
            self.tally.add(early.tier, Applied { unknown_parent, ..Applied::default() });
        }
    }

    fn removed(&mut self, event: &Removed<'_>) {
        let tier = Tier::of_medium(event.medium);
        if tier != Some(Tier::Gpu) {
            self.tally.tier(medium(tier, event.medium), -(event.hashes.len() as i64));
        }
        let Some(tier) = tier else { return };
        if let Some(group) = event.group.and_then(|group| self.others.get(group)) {
            return self.removed_from_other(tier, group.id, event.hashes);
        }
        if event.group.is_some() && event.group != self.group {
            return self.tally.skip("group", event.hashes.len());
        }
        if tier != Tier::Gpu {
            if !self.early.is_empty() {
                event.hashes.iter().for_each(|hash| self.early.drop_with(tier, *hash));
            }
            self.removes.insert(tier.medium());
            self.tally.hints.remove(tier.medium());
        }
        self.wait(Waiting::Removed(tier), event.hashes);
    }

    /// Stores blocks of a group apart from full attention.
    fn stored_in_other(&mut self, tier: Tier, group: Group, event: &Stored<'_>) {
        self.flush();
        let domain = self.domain(self.feed.keys().tokens, event);
        let blocks = Blocks {
            parent: event.parent,
            engine_hashes: event.hashes,
            token_ids: event.tokens,
            domain,
            narrowing: &self.narrowing,
            means: Means::NewCopy,
        };
        let place = (tier, group);
        self.tally.groups = self.others.count();
        let unnamed = &mut self.hashes;
        let applied = self.feed.stored_in_group(self.source, place, &blocks, self.group.is_some(), unnamed);
        self.others.add_unnamed(tier, group.id, unnamed);
        self.tally.add_group(applied);
    }

    /// Removes blocks of a group apart from full attention.
    fn removed_from_other(&mut self, tier: Tier, group: u32, hashes: &[u64]) {
        self.flush();
        self.hashes.extend(hashes.iter().filter(|hash| !self.others.forget(tier, group, **hash)));
        let applied = self.feed.removed_from_group(self.source, tier, group, &self.hashes);
        self.hashes.clear();
        self.tally.add_group(applied);
    }

    /// Ends a batch: stores the blocks of other groups that only events after them name.
    fn name_others(&mut self) {
        for (tier, group, hashes) in self.others.take_unnamed() {
            let applied = self.feed.named_in_group(self.source, tier, group, &hashes);
            self.tally.add_group(applied);
        }
        if self.group.is_some() && self.others.count() > 0 && !self.others.full_is_known {
            self.others.full_is_known = true;
            self.feed.note_full_attention(self.source);
        }
    }

    /// Adds blocks to those that wait, after those of another kind are applied.
    fn wait(&mut self, kind: Waiting, hashes: &[u64]) {
        if self.waiting != Some(kind) {
            self.flush();
        }
        self.waiting = Some(kind);
        self.hashes.extend_from_slice(hashes);
    }

    /// Applies the blocks that wait.
    fn flush(&mut self) {
        match self.waiting.take() {
            None => return,
            Some(Waiting::Named(tier)) => {
                let applied = self.feed.named_in(self.source, tier, &self.hashes);
                self.tally.add(tier, applied);
                if !self.early.is_empty() && applied.done > 0 {
                    self.store_behind(tier, self.hashes.clone());
                }
            }
            Some(Waiting::Removed(tier)) => {
                for hashes in self.hashes.chunks(PIECE) {
                    let applied = self.feed.removed_from(self.source, tier, hashes);
                    if tier == Tier::Gpu {
                        self.tally.blocks_removed += applied.done as u64;
                    }
                    self.tally.add(tier, applied);
                }
            }
        }
        self.hashes.clear();
    }

    /// Returns the domain of the event's blocks. Fills `narrowing` with one hash per block: of its
    /// extra keys besides the adapter's name and the cache salt, or 0 if there are none.
    fn domain(&mut self, domain: Domain, event: &Stored<'_>) -> Domain {
        self.narrowing.clear();
        let mut salt = event.cache_salt;
        for at in 0..event.hashes.len() {
            let Some(keys) = event.extra_keys(at) else { break };
            let rest = Rest::of(keys, event.lora_name, at == 0 && event.parent.is_none());
            salt = rest.salt.or(salt);
            self.narrowing.push(rest.narrowing);
        }
        let number;
        let adapter = match (event.lora_name, event.lora_id) {
            (None, Some(id)) => {
                // No request gives such a name: the engine reports the adapter's number, not its
                // name.
                number = format!("\0{id}");
                Some(number.as_str())
            }
            (name, _) => name,
        };
        domain.of_request(adapter, salt)
    }
}

/// Returns the name under which blocks of a medium are counted.
fn medium(tier: Option<Tier>, reported: Option<&str>) -> &str {
    match tier {
        Some(tier) => tier.medium(),
        None => reported.unwrap_or_default(),
    }
}
