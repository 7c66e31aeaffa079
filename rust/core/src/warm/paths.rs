//! Prompts as paths of a tree. Chains that begin alike share nodes.
//!
//! The hash of a block covers the blocks before it, so chains with equal hashes at a position are
//! equal up to it. Two chains are thus compared with a few looks, not with one per block, and a
//! node holds as many blocks as all its chains share.
use hashbrown::HashMap;
#[cfg(test)]
use std::cell::Cell;

#[cfg(test)]
thread_local! {
    /// Number of pairs of blocks that this thread has compared.
    pub(super) static COMPARED: Cell<usize> = const { Cell::new(0) };
}

/// Number of a node.
pub(super) type NodeId = usize;

/// A run of blocks that the same chains contain.
struct Node<'a> {
    /// One of these chains.
    chain: &'a [u64],
    /// Position of the node's first block.
    from: usize,
    /// Position behind its last block.
    to: usize,
    parent: Option<NodeId>,
    /// Sum of the weights of the chains.
    weight: f64,
    /// Number of the chains.
    count: u32,
}

/// A tree of chains.
#[derive(Default)]
pub(super) struct Paths<'a> {
    nodes: Vec<Node<'a>>,
    /// The nodes behind a node, by their first block.
    next: HashMap<(Option<NodeId>, u64), NodeId>,
}

impl<'a> Paths<'a> {
    /// Enters a chain of at least one block. Returns its last node, which keeps its number.
    pub fn enter(&mut self, chain: &'a [u64], weight: f64) -> NodeId {
        let (mut parent, mut depth) = (None, 0);
        while let Some(&node) = self.next.get(&(parent, chain[depth])) {
            let common = self.common(node, chain);
            let node = if common < self.nodes[node].to { self.split(node, common) } else { node };
            let of = &mut self.nodes[node];
            (of.weight, of.count) = (of.weight + weight, of.count + 1);
            (parent, depth) = (Some(node), common);
            if depth == chain.len() {
                return node;
            }
        }
        let node = self.nodes.len();
        self.nodes.push(Node { chain, from: depth, to: chain.len(), parent, weight, count: 1 });
        self.next.insert((parent, chain[depth]), node);
        node
    }

    /// Returns the number of leading blocks that a chain shares with the chains of a node, whose
    /// first block it contains.
    fn common(&self, node: NodeId, chain: &[u64]) -> usize {
        let of = &self.nodes[node];
        let equal = |at: usize| {
            #[cfg(test)]
            COMPARED.set(COMPARED.get() + 1);
            of.chain[at] == chain[at]
        };
        let end = of.to.min(chain.len());
        if equal(end - 1) {
            return end;
        }
        // Equal up to `low`, and no longer at `high`.
        let (mut low, mut high) = (of.from + 1, end - 1);
        while low < high {
            let middle = low.midpoint(high);
            if equal(middle) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Moves a node's blocks before position `at` to a new node, and returns that.
    fn split(&mut self, node: NodeId, at: usize) -> NodeId {
        let upper = self.nodes.len();
        let Node { chain, from, parent, weight, count, .. } = self.nodes[node];
        self.nodes.push(Node { chain, from, to: at, parent, weight, count });
        self.next.insert((parent, chain[from]), upper);
        self.next.insert((Some(upper), chain[at]), node);
        (self.nodes[node].from, self.nodes[node].parent) = (at, Some(upper));
        upper
    }

    /// Yields the nodes from one back to the start of its chains.
    pub fn back(&self, node: NodeId) -> impl Iterator<Item = NodeId> {
        std::iter::successors(Some(node), |node| self.nodes[*node].parent)
    }

    /// Returns the number of blocks from the start of its chains to the end of a node.
    pub fn depth(&self, node: NodeId) -> usize {
        self.nodes[node].to
    }

    /// Returns the sum of the weights of a node's chains, and their number.
    pub fn chains(&self, node: NodeId) -> (f64, u32) {
        (self.nodes[node].weight, self.nodes[node].count)
    }

    /// Returns the number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }
}
