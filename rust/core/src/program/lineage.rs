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
pub struct Path {
    /// Hashes at the checkpoints of its latest prompt, in order.
    checkpoints: Vec<u64>,
    /// Ends of its prompts, oldest first.
    marks: Vec<Mark>,
}

impl Path {
    /// Returns the end of the latest prompt; `None` if it has no whole block.
    pub fn last(&self) -> Option<Mark> {
        self.marks.last().copied()
    }
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

/// Registered hashes of all programs.
#[derive(Clone, Debug, Default)]
pub struct Lineage {
    /// Number of programs that registered each checkpoint, and the latest of them.
    checkpoints: HashMap<u64, (u32, ProgramId)>,
    /// Latest program whose prompt ended at a block.
    marks: HashMap<u64, ProgramId>,
    /// Positions of all checkpoints up to the longest prompt so far.
    positions: Vec<u32>,
}

impl Lineage {
    fn extend_positions(&mut self, blocks: u32) {
        while self.positions.last().copied().unwrap_or(0) < blocks {
            self.positions.push(next_checkpoint(self.positions.last().copied().unwrap_or(0)));
        }
    }

    /// Returns the number of checkpoints within `blocks`.
    fn within(&self, blocks: u32) -> usize {
        self.positions.partition_point(|&at| at <= blocks)
    }

    /// Looks a prompt up by the chained hashes of its blocks.
    pub fn look_up(&mut self, chain: &[u64]) -> Known {
        let blocks = u32::try_from(chain.len()).unwrap_or(u32::MAX);
        self.extend_positions(blocks);
        let places = &self.positions[..self.within(blocks)];
        let at = |place: u32| chain[place as usize - 1];
        let known = places.partition_point(|&place| self.checkpoints.contains_key(&at(place)));
        let from = known.checked_sub(1).map(|last| places[last]);
        let shared = from.map(|place| Mark { blocks: place, hash: at(place) });
        let sharer = shared.and_then(|mark| self.checkpoints.get(&mark.hash)).map(|(_, program)| *program);
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

    /// Returns the longest end of a prompt of `path` that `chain` passes through.
    pub fn fork_point(path: &Path, chain: &[u64]) -> Option<Mark> {
        let passes = |mark: &&Mark| chain.get(mark.blocks as usize - 1) == Some(&mark.hash);
        path.marks.iter().rev().find(passes).copied()
    }

    /// Registers a prompt of a program, in place of the part of its path that the prompt leaves.
    pub fn register(&mut self, program: ProgramId, path: &mut Path, chain: &[u64]) {
        let blocks = u32::try_from(chain.len()).unwrap_or(u32::MAX);
        self.extend_positions(blocks);
        let places = self.within(blocks);
        let hash_at = |place: usize, positions: &[u32]| chain[positions[place] as usize - 1];
        let positions = std::mem::take(&mut self.positions);
        let common = path.checkpoints.len().min(places);
        let keep = (0..common).take_while(|&p| path.checkpoints[p] == hash_at(p, &positions)).count();
        for hash in path.checkpoints.drain(keep..) {
            release(&mut self.checkpoints, hash);
        }
        load(&self.checkpoints, (keep..places).map(|place| hash_at(place, &positions)));
        for place in keep..places {
            let hash = hash_at(place, &positions);
            path.checkpoints.push(hash);
            let entry = self.checkpoints.entry(hash).or_insert((0, program));
            *entry = (entry.0 + 1, program);
        }
        self.positions = positions;
        let left = |mark: &Mark| chain.get(mark.blocks as usize - 1) != Some(&mark.hash);
        let marks = &mut self.marks;
        path.marks.retain(|mark| {
            let gone = left(mark);
            if gone {
                forget(marks, mark.hash, program);
            }
            !gone
        });
        let Some(&hash) = chain.last() else { return };
        let mark = Mark { blocks, hash };
        if path.marks.last() != Some(&mark) {
            if path.marks.len() == MARKS {
                forget(marks, path.marks.remove(0).hash, program);
            }
            path.marks.push(mark);
        }
        marks.insert(hash, program);
    }

    /// Removes a program's hashes.
    pub fn remove(&mut self, program: ProgramId, path: &mut Path) {
        load(&self.checkpoints, path.checkpoints.iter().copied());
        for hash in path.checkpoints.drain(..) {
            release(&mut self.checkpoints, hash);
        }
        for mark in path.marks.drain(..) {
            forget(&mut self.marks, mark.hash, program);
        }
    }

    /// Returns the number of registered hashes.
    #[cfg(test)]
    pub fn registered(&self) -> usize {
        self.checkpoints.len() + self.marks.len()
    }
}

/// Looks hashes up before they change. In a large map, each look-up waits for memory; look-ups
/// alone wait together.
fn load(checkpoints: &HashMap<u64, (u32, ProgramId)>, hashes: impl Iterator<Item = u64>) {
    let known = hashes.filter(|hash| checkpoints.contains_key(hash)).count();
    std::hint::black_box(known);
}

fn release(checkpoints: &mut HashMap<u64, (u32, ProgramId)>, hash: u64) {
    if let Some(entry) = checkpoints.get_mut(&hash) {
        entry.0 -= 1;
        if entry.0 == 0 {
            checkpoints.remove(&hash);
        }
    }
}

fn forget(marks: &mut HashMap<u64, ProgramId>, hash: u64, program: ProgramId) {
    if marks.get(&hash) == Some(&program) {
        marks.remove(&hash);
    }
}
