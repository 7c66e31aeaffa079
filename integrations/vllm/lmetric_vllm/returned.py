"""The KV blocks that are free when running requests go back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    Table = Sequence[KVCacheBlock]


class Returned:
    """Counts the KV blocks that no request holds when some requests go back.

    Requests with a common beginning share its blocks: who holds a block mostly holds the blocks
    before it, too. So bisection finds the first block of a table that no other request holds.
    Counting goes on from there when the last of its holders goes back.

    vLLM keeps duplicates of blocks that were computed at once, and evicts one by one. So a request
    may get the first block of one request and the second block of another, and bisection may count
    blocks that another request holds. `mixed` finds them.

    Args:
        hits: IDs of the blocks that the request in their place finds in the cache.
    """

    def __init__(self, hits: set[int]) -> None:
        self._hits = hits
        self._stopped: dict[int, list[Table]] = {}  # tables whose counting ended at a block
        self._parts: list[tuple[list[Table], int, int]] = []  # counted blocks of common tables
        self._likely = 0  # where the common blocks of the table before ended

    def add(self, blocks: Table, mixed: int = 0) -> int:
        """Returns how many more blocks are free when a request with these blocks goes back.

        `mixed`: first blocks that do not count.
        """
        tables, begin = [blocks], len(blocks)
        while begin > mixed:
            end, begin = begin, self._begin(blocks, mixed, begin, len(tables))
            self._parts.append((tables, begin, end))
            if begin == mixed:
                break
            last = blocks[begin - 1]
            if last.block_id in self._hits:
                break  # and all before it
            stopped = self._stopped.setdefault(last.block_id, [])
            stopped += tables
            if last.ref_cnt > len(stopped):
                break
            tables = self._stopped.pop(last.block_id)
        self._likely = begin
        return len(blocks) - begin

    def _begin(self, blocks: Table, low: int, high: int, requests: int) -> int:
        """Index of the first block between these with at most this number of holders."""
        hits = self._hits
        # As many common blocks as the request before, and none: both without bisection.
        probe = self._likely - 1 if low < self._likely <= high else low
        while low < high:
            block = blocks[probe]
            if block.ref_cnt > requests or block.block_id in hits:
                low = probe + 1
                probe = low if low == self._likely and low < high else (low + high) // 2
            else:
                high = probe
                probe = (low + high) // 2
        return low

    def mixed(self) -> dict[int, int]:
        """The place behind the last block that should not have counted, by `id` of its table; empty
        if all counts are right.

        Looks at each block that was counted.
        """
        found: dict[int, int] = {}
        for tables, begin, end in self._parts:
            first, *others = [table[begin:end] for table in tables]
            if (
                [block.ref_cnt for block in first].count(len(tables)) == end - begin
                and not (self._hits and not self._hits.isdisjoint([block.block_id for block in first]))
                and all(other == first for other in others)
            ):
                continue
            for at in reversed(range(begin, end)):
                block = tables[0][at]
                is_theirs = block.ref_cnt == len(tables) and all(table[at] is block for table in tables)
                if not is_theirs or block.block_id in self._hits:
                    found |= {id(table): max(at + 1, found.get(id(table), 0)) for table in tables}
                    break
        return found
