//! Lineage of prompts: which known program a prompt continues, and how much of it is known.
//!
//! Block hashes are chained, so the hash of one block stands for everything before it. Each program
//! registers the hash at the end of each of its latest prompts (a *mark*) and hashes at fixed
//! positions (*checkpoints*, at most 6% apart). A prompt's known part is monotone: a program that
//! registered a checkpoint registered all checkpoints before it. So a binary search over the
//! checkpoints finds the known part within 6%, and the marks behind the last known checkpoint give
//! the exact end of a known prompt. A look-up costs some microseconds at any number of programs.
use super::programs::ProgramId;
use hashbrown::HashMap;
use slotmap::SecondaryMap;

/// Checkpoints are this many blocks apart up to `DENSE`, then grow by this ratio.
const STEP: u32 = 4;
const DENSE: u32 = 64;
const RATIO: f64 = 1.06;
/// Marks kept per program; the oldest are dropped first.
const MARKS: usize = 64;

/// Returns the checkpoint behind `blocks`, as a number of blocks.
fn next_checkpoint(blocks: u32) -> u32 {
    if blocks < DENSE {
        (blocks / STEP + 1) * STEP
    } else {
        ((f64::from(blocks) * RATIO) as u32).max(blocks + STEP)
    }
}

/// A known end of a prompt: the position behind its last block, and that block's hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Blocks before the mark.
    pub blocks: u32,
    /// Hash of the last of these blocks.
    pub hash: u64,
}

/// Registered hashes of one program.
#[derive(Clone, Debug, Default)]
struct Path {
    /// Hashes at the checkpoints of its latest prompt, in order.
    checkpoints: Vec<u64>,
    /// Leading checkpoints that are in the map. No other program has the checkpoints behind them.
    in_map: usize,
    /// Ends of its prompts, oldest first.
    marks: Vec<Mark>,
}

/// The known part of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Known {
    /// The longest known end of a prompt that this prompt passes through, and its program.
    pub mark: Option<(Mark, ProgramId)>,
    /// Leading blocks that some program has registered, at least; and the hash of the last of them.
    pub shared: Option<Mark>,
    /// A program that registered `shared`.
    pub sharer: Option<ProgramId>,
}

/// Programs that registered a checkpoint.
#[derive(Clone, Copy, Debug)]
struct Checkpoint {
    programs: u32,
    latest: ProgramId,
    /// The program that may have further checkpoints outside the map behind this one. It may have
    /// gone, or left this prompt: then none of its checkpoints match.
    owner: Option<ProgramId>,
}

/// Registered hashes of all programs.
///
/// The map has the checkpoints that several programs registered, and the first checkpoint that only
/// one program has. Further checkpoints of that program are in its path alone, until another
/// program registers them. So a program whose prompt no other program shares costs one entry.
#[derive(Clone, Debug, Default)]
pub struct Lineage {
    paths: SecondaryMap<ProgramId, Path>,
    checkpoints: HashMap<u64, Checkpoint>,
    /// Latest program whose prompt ended at a block.
    marks: HashMap<u64, ProgramId>,
    /// Positions of all checkpoints up to the longest prompt so far.
    positions: Vec<u32>,
}

impl Lineage {
    /// Returns the positions of all checkpoints of a prompt with this number of blocks.
    pub(super) fn positions(&mut self, blocks: u32) -> &[u32] {
        while self.positions.last().copied().unwrap_or(0) < blocks {
            self.positions.push(next_checkpoint(self.positions.last().copied().unwrap_or(0)));
        }
        &self.positions[..self.positions.partition_point(|&at| at <= blocks)]
    }

    /// Looks a prompt up by the chained hashes of its blocks.
    pub fn look_up(&mut self, chain: &[u64]) -> Known {
        let blocks = u32::try_from(chain.len()).unwrap_or(u32::MAX);
        self.positions(blocks);
        let places = &self.positions[..self.positions.partition_point(|&at| at <= blocks)];
        let at = |place: u32| chain[place as usize - 1];
        let mut known = places.partition_point(|&place| self.checkpoints.contains_key(&at(place)));
        let last = known.checked_sub(1).and_then(|last| self.checkpoints.get(&at(places[last])));
        let mut sharer = last.map(|checkpoint| checkpoint.latest);
        let owner = last.and_then(|checkpoint| checkpoint.owner);
        if let Some((owner, path)) = owner.and_then(|owner| Some((owner, self.paths.get(owner)?))) {
            let rest = path.checkpoints.iter().skip(known).zip(&places[known..]);
            let more = rest.take_while(|(hash, place)| **hash == at(**place)).count();
            if more > 0 {
                (known, sharer) = (known + more, Some(owner));
            }
        }
        let from = known.checked_sub(1).map(|last| places[last]);
        let shared = from.map(|place| Mark { blocks: place, hash: at(place) });
        // The mark lies behind the last known checkpoint, or is one of the earlier marks.
        let to = places.get(known).copied().unwrap_or(blocks + 1).min(blocks + 1);
        let in_range = |from: u32, to: u32| {
            (from.max(1)..to).rev().find_map(|place| {
                let program = *self.marks.get(&at(place))?;
                Some((Mark { blocks: place, hash: at(place) }, program))
            })
        };
        let mark = in_range(from.unwrap_or(1), to);
        Known { mark, shared, sharer }
    }

    /// Returns the end of a program's latest prompt; `None` if it has no whole block.
    pub fn last(&self, program: ProgramId) -> Option<Mark> {
        self.paths.get(program)?.marks.last().copied()
    }

    /// Returns the longest end of a prompt of a program that `chain` passes through.
    pub fn fork_point(&self, program: ProgramId, chain: &[u64]) -> Option<Mark> {
        let passes = |mark: &&Mark| chain.get(mark.blocks as usize - 1) == Some(&mark.hash);
        self.paths.get(program)?.marks.iter().rev().find(passes).copied()
    }

    /// Registers a prompt of a program, in place of the part of its path that the prompt leaves.
    pub fn register(&mut self, program: ProgramId, chain: &[u64]) {
        let blocks = u32::try_from(chain.len()).unwrap_or(u32::MAX);
        let hashes: Vec<u64> =
            self.positions(blocks).iter().map(|place| chain[*place as usize - 1]).collect();
        let mut path = self.paths.remove(program).unwrap_or_default();
        let keep = path.checkpoints.iter().zip(&hashes).take_while(|(old, new)| old == new).count();
        for hash in path.checkpoints.drain(keep..).take(path.in_map.saturating_sub(keep)) {
            release(&mut self.checkpoints, hash);
        }
        path.in_map = path.in_map.min(keep);
        self.add(program, &mut path, &hashes);
        let left = |mark: &Mark| chain.get(mark.blocks as usize - 1) != Some(&mark.hash);
        let marks = &mut self.marks;
        path.marks.retain(|mark| {
            let gone = left(mark);
            if gone {
                forget(marks, mark.hash, program);
            }
            !gone
        });
        if let Some(&hash) = chain.last() {
            let mark = Mark { blocks, hash };
            if path.marks.last() != Some(&mark) {
                if path.marks.len() == MARKS {
                    forget(marks, path.marks.remove(0).hash, program);
                }
                path.marks.push(mark);
            }
            marks.insert(hash, program);
        }
        self.paths.insert(program, path);
    }

    /// Adds the checkpoints `hashes` that a path does not have yet.
    fn add(&mut self, program: ProgramId, path: &mut Path, hashes: &[u64]) {
        while let Some(hash) = hashes.get(path.checkpoints.len())
            && path.in_map == path.checkpoints.len()
        {
            let place = path.in_map;
            if let Some(checkpoint) = self.checkpoints.get_mut(hash) {
                (checkpoint.programs, checkpoint.latest) = (checkpoint.programs + 1, program);
            } else {
                let before = path.checkpoints.last().and_then(|hash| self.checkpoints.get_mut(hash));
                let mut new = Checkpoint { programs: 1, latest: program, owner: Some(program) };
                if let Some(before) = before
                    && let Some(owner) = before.owner
                {
                    if owner == program {
                        break;
                    }
                    // Another program may have it outside the map.
                    let other = self.paths.get_mut(owner);
                    if let Some(other) = other.filter(|path| path.checkpoints.get(place) == Some(hash)) {
                        other.in_map += 1;
                        before.owner = None;
                        (new.programs, new.owner) = (2, Some(owner));
                    }
                }
                self.checkpoints.insert(*hash, new);
            }
            path.checkpoints.push(*hash);
            path.in_map += 1;
        }
        path.checkpoints.extend(hashes.iter().skip(path.checkpoints.len()));
    }

    /// Removes a program's hashes.
    pub fn remove(&mut self, program: ProgramId) {
        let Some(path) = self.paths.remove(program) else { return };
        for hash in &path.checkpoints[..path.in_map] {
            release(&mut self.checkpoints, *hash);
        }
        for mark in path.marks {
            forget(&mut self.marks, mark.hash, program);
        }
    }

    /// Returns the number of registered hashes.
    #[cfg(test)]
    pub fn registered(&self) -> usize {
        self.checkpoints.len() + self.marks.len() + self.paths.len()
    }
}

fn release(checkpoints: &mut HashMap<u64, Checkpoint>, hash: u64) {
    if let Some(checkpoint) = checkpoints.get_mut(&hash) {
        checkpoint.programs -= 1;
        if checkpoint.programs == 0 {
            checkpoints.remove(&hash);
        }
    }
}

fn forget(marks: &mut HashMap<u64, ProgramId>, hash: u64, program: ProgramId) {
    if marks.get(&hash) == Some(&program) {
        marks.remove(&hash);
    }
}
