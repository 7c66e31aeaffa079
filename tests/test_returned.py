"""The KV blocks that are free when running requests go back, in random block tables."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from lmetric_vllm.returned import Returned


@dataclass
class Block:
    """The part of vLLM's block that is read."""

    block_id: int
    ref_cnt: int = 0


class Table(list[Block]):
    """A block table that counts the blocks that are looked at one by one."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += isinstance(at, int)
        return super().__getitem__(at)


Tables = list[Table]


def of_common_beginnings(rng: random.Random) -> Tables:
    """Requests that took the first blocks of another request, and then made their own."""
    tables: Tables = []
    made = 0
    for _ in range(rng.randrange(2, 8)):
        base = rng.choice(tables) if tables and rng.random() < 0.8 else Table()
        table = Table(base[: rng.randrange(len(base) + 1)])
        for _ in range(rng.randrange(5) + (not table)):
            table.append(Block(made))
            made += 1
        tables.append(table)
    return tables


def of_duplicates(rng: random.Random) -> Tables:
    """Requests with one prompt that took any duplicate of each block."""
    length = rng.randrange(1, 12)
    duplicates = [[Block(3 * at + number) for number in range(rng.randrange(1, 4))] for at in range(length)]
    return [
        Table(rng.choice(blocks) for blocks in duplicates[: rng.randrange(1, length + 1)])
        for _ in range(rng.randrange(2, 8))
    ]


def counted(tables: Tables, rng: random.Random) -> tuple[list[int], list[int], Returned]:
    """Holders go back in any order, all but the last, which may stand for the request in their
    place.

    Returns the counts, the blocks that are free indeed, and the counting.
    """
    rng.shuffle(tables)
    *going, last = tables
    hits = {block.block_id for block in last} if rng.random() < 0.5 else set()
    held = Counter(block.block_id for table in tables for block in table)
    for block in (block for table in tables for block in table):
        block.ref_cnt = held[block.block_id]
    returned, counts, free = Returned(hits), [], []
    for table in going:
        counts.append(returned.add(table))
        held.subtract(block.block_id for block in table)
        free.append(sum(held[each.block_id] == 0 and each.block_id not in hits for each in table))
    return counts, free, returned


def test_blocks_of_common_beginnings_are_counted_exactly() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        counts, free, returned = counted(of_common_beginnings(rng), rng)
        assert counts == free
        assert not returned.mixed()


def test_counts_that_are_too_high_are_found() -> None:
    """With duplicates, bisection may count blocks that another request holds. Without the first
    blocks that are mixed, no count is too high."""
    rng = random.Random(4)
    wrong = 0
    for _ in range(3000):
        tables = of_duplicates(rng)
        counts, free, returned = counted(tables, rng)
        wrong += sum(counts) > sum(free)
        skipped: dict[int, int] = {}
        for _ in range(20):
            if not (mixed := returned.mixed()):
                break
            skipped |= {at: max(first, skipped.get(at, 0)) for at, first in mixed.items()}
            returned = Returned(returned._hits)
            counts = [returned.add(table, skipped.get(id(table), 0)) for table in tables[:-1]]
        assert not mixed
        assert sum(counts) <= sum(free)
    assert wrong > 100, "no count is too high: the test compares nothing"


@pytest.mark.parametrize(
    ("beginning", "own", "looks"),
    [(0, 1000, 1), (1000, 30, 5), (1000, 0, 5)],
    ids=["none in common", "common beginning", "only in common"],
)
def test_few_blocks_of_a_table_are_looked_at(beginning: int, own: int, looks: int) -> None:
    """Beside the first table: the common blocks of the next ones end at the same block."""
    common = [Block(at, 256) for at in range(beginning)]
    tables = [Table([*common, *(Block(10_000 * n + at, 1) for at in range(1, own + 1))]) for n in range(256)]
    returned = Returned(set())
    counts = [returned.add(table) for table in tables]
    assert counts == [own] * 255 + [own + beginning]
    assert not returned.mixed()
    assert sum(table.looks for table in tables) <= 256 * looks + 20, "bisection of the first table: 10 blocks"
