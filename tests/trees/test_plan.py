"""Attention plans: every visible pair exactly once, for all partitions and sizes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.trees.forest import KVForest
from specdeft.trees.named import named_tree
from specdeft.trees.partition import balanced_chunk_tokens, build_plan, query_tiles
from specdeft.trees.plan import AttentionPlan, ItemField, Partition
from specdeft.trees.plan_check import check_plan, coverage
from specdeft.trees.token_tree import TokenTree

PARTITIONS = list(Partition)


def plan_of(
    forest: KVForest, partition: Partition, tile_queries: int, chunk_tokens: int
) -> AttentionPlan:
    chunk = None if partition is Partition.NODE else chunk_tokens
    return build_plan(forest, partition, tile_queries=tile_queries, chunk_tokens=chunk)


def star(prompt: int, branches: int, branch_tokens: int) -> KVForest:
    """Few-shot: one prompt, `branches` leaves below it."""
    starts = [prompt + branch * branch_tokens for branch in range(branches)]
    runs = [range(prompt), *(range(start, start + branch_tokens) for start in starts)]
    return KVForest.from_nodes([-1] + [0] * branches, runs, range(1, branches + 1))


def speculation(contexts: list[int], tree: TokenTree) -> KVForest:
    """Sequences of their own, each with a token tree in the slots behind its context."""
    capacity = max(contexts) + tree.num_nodes
    firsts = [sequence * capacity for sequence in range(len(contexts))]
    pairs = list(zip(firsts, contexts, strict=True))
    return KVForest.with_token_trees(
        [-1] * len(contexts),
        [range(first, first + length) for first, length in pairs],
        range(len(contexts)),
        tree,
        [range(first + length, first + length + tree.num_nodes) for first, length in pairs],
    )


@st.composite
def forests(draw: st.DrawFn) -> KVForest:
    """Random forests: empty nodes, dead branches, inner queries, several a node, any row order."""
    num_nodes = draw(st.integers(0, 14))
    parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
    sizes = [draw(st.sampled_from([0, 1, 1, 2, 5, 140])) for _ in range(num_nodes)]
    begins = [sum(sizes[:node]) for node in range(num_nodes)]
    runs = [range(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
    nodes = st.integers(0, num_nodes - 1) if num_nodes else st.nothing()
    queries = draw(st.lists(nodes, max_size=90 if num_nodes else 0))
    return KVForest.from_nodes(parents, runs, queries)


def walked_slots(forest: KVForest, query: int) -> list[int]:
    """A query's slots by following parents: another way to the meaning than intervals."""
    parents, begins = forest.parents.tolist(), forest.token_begins.tolist()
    runs, node = [], int(forest.query_nodes[query])
    while node >= 0:
        begin = begins[node]
        runs.append(forest.slots[begin : begin + int(forest.num_tokens[node])].tolist())
        node = parents[node]
    return [slot for run in reversed(runs) for slot in run]


@given(forests())
@settings(max_examples=60, deadline=None)
def test_the_forest_means_what_a_walk_to_the_root_finds(forest: KVForest) -> None:
    visible = forest.visible()
    assert visible.shape == (forest.num_queries, forest.total_tokens)
    table = forest.path_table()
    positions = forest.token_positions()
    for query in range(forest.num_queries):
        expected = walked_slots(forest, query)
        assert forest.slots[visible[query]].tolist() == expected
        assert table.slots[query, : table.lengths[query]].tolist() == expected
        assert positions[visible[query]].tolist() == list(range(len(expected)))
        assert int(forest.query_positions()[query]) == len(expected) - 1


@given(
    forests(),
    st.sampled_from(PARTITIONS),
    st.sampled_from([1, 2, 3, 16, 63, 64, 65, 130]),
    st.sampled_from([1, 2, 7, 64, 128, 1000]),
)
@settings(max_examples=150, deadline=None)
def test_every_visible_pair_is_computed_exactly_once(
    forest: KVForest, partition: Partition, tile_queries: int, chunk_tokens: int
) -> None:
    check_plan(plan_of(forest, partition, tile_queries, chunk_tokens), forest)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("num_queries", [1, 63, 64, 65, 127, 128, 129, 512, 1000])
def test_any_number_of_queries_and_bit_63(partition: Partition, num_queries: int) -> None:
    chain = speculation([100], TokenTree.chain(num_queries - 1))
    flat = speculation([100], TokenTree.full([num_queries - 1] if num_queries > 1 else []))
    for forest in (chain, flat):
        for tile_queries in (64, 129):
            check_plan(plan_of(forest, partition, tile_queries, 128), forest)


@pytest.mark.parametrize("context", [0, 1, 127, 128, 129, 1000])
def test_contexts_around_the_chunk_size(context: int) -> None:
    forest = speculation([context, 3], named_tree("deft-32"))
    for partition in PARTITIONS:
        check_plan(plan_of(forest, partition, 16, 128), forest)


def test_items_of_a_small_forest_are_as_drawn() -> None:
    """Prompt of 6 tokens, leaves of 3 and 5, chunks of 4: [pppp][pp aaa][a...] by hand."""
    forest = KVForest.from_nodes([-1, 0, 0], [range(6), range(6, 9), range(9, 14)], [2, 1])
    plan = plan_of(forest, Partition.FLATTEN, 2, 4)
    F = ItemField
    columns = [F.KV_BEGIN, F.SHARED_END, F.KV_END, F.QUERY_BEGIN, F.QUERY_END]
    assert plan.items[:, columns].tolist() == [
        [0, 4, 4, 0, 2],
        [4, 6, 8, 0, 2],
        [8, 8, 12, 0, 2],
        [12, 14, 14, 1, 2],
    ]
    # Query place 0 is row 1 (leaf a), place 1 is row 0 (leaf b).
    assert plan.query_rows.tolist() == [1, 0]
    assert plan.mask_words.tolist() == [[1], [1], [1], [2], [2], [2]]
    assert plan.items[:, F.PARTIAL_ROW].tolist() == [0, 2, 4, 6]
    assert plan.items[:, F.MASK_ROW].tolist() == [0, 0, 2, 0]
    assert (plan.tile_begins.tolist(), plan.tile_items.tolist()) == ([0, 2], [0, 1, 2, 3])
    assert plan.num_partial_rows == 7
    counts = plan.counts()
    assert (counts.kv_tokens, counts.unique_tokens, counts.masked_tokens) == (14, 14, 6)
    assert (counts.scores, counts.mask_words) == (26, 6)


def test_node_partitions_need_no_mask() -> None:
    forest = speculation([500, 70], named_tree("deft-64"))
    for partition in (Partition.NODE, Partition.NODE_CHUNK):
        plan = plan_of(forest, partition, 16, 128)
        assert plan.mask_words.shape[0] == 0
        assert torch.equal(plan.items[:, ItemField.SHARED_END], plan.items[:, ItemField.KV_END])


def test_partitions_cut_where_they_say() -> None:
    forest = star(prompt=300, branches=3, branch_tokens=10)
    begins = {
        partition: plan_of(forest, partition, 4, 128).items[:, ItemField.KV_BEGIN].tolist()
        for partition in PARTITIONS
    }
    assert begins[Partition.NODE] == [0, 300, 310, 320]
    assert begins[Partition.NODE_CHUNK] == [0, 128, 256, 300, 310, 320]
    assert begins[Partition.FLATTEN] == [0, 128, 256]


def test_the_shared_part_of_a_mixed_chunk_carries_no_words() -> None:
    plan = plan_of(speculation([1000], named_tree("deft-64")), Partition.FLATTEN, 64, 2048)
    assert plan.num_items == 1
    # The root of the token tree is seen by all 64 queries as well.
    assert plan.items[0, : ItemField.QUERY_BEGIN].tolist() == [0, 1001, 1064]
    assert plan.mask_words.shape == (63, 1)


def test_tokens_a_tile_does_not_see_are_skipped_when_there_are_many() -> None:
    """The second tile sees the prompt and its own leaves, not the 16 x 40 tokens in between."""
    forest = star(prompt=100, branches=32, branch_tokens=40)
    plan = plan_of(forest, Partition.FLATTEN, 16, 2000)
    check_plan(plan, forest)
    assert plan.counts().kv_tokens == 2 * 100 + 32 * 40
    near = star(prompt=100, branches=32, branch_tokens=4)
    assert plan_of(near, Partition.FLATTEN, 16, 2000).num_items == 2


def test_sequences_do_not_share_tiles() -> None:
    forest = speculation([50, 60, 70], TokenTree.chain(19))
    assert query_tiles(forest, 16).tolist() == [0, 10, 20, 30, 40, 50, 60]
    assert query_tiles(forest, 64).tolist() == [0, 20, 40, 60]


def test_dead_branches_and_blind_queries() -> None:
    """A pruned leaf keeps its tokens but gets no work; a query without tokens gets no item."""
    forest = KVForest.from_nodes([-1, 0, -1], [range(4), range(4, 300), []], [0, 2])
    for partition in PARTITIONS:
        plan = plan_of(forest, partition, 8, 64)
        check_plan(plan, forest)
        assert plan.counts().kv_tokens == 4
        assert plan.tile_item_begins.diff().tolist() == [1, 0]


def test_a_forest_without_queries_has_an_empty_plan() -> None:
    for forest in (KVForest.from_nodes([], [], []), star(10, 0, 0)):
        silent = KVForest(
            forest.parents, forest.num_tokens, forest.slots, torch.zeros(0, dtype=torch.int64)
        )
        for partition in PARTITIONS:
            plan = plan_of(silent, partition, 8, 64)
            check_plan(plan, silent)
            assert (plan.num_items, plan.num_tiles, plan.num_partial_rows) == (0, 0, 0)


@pytest.mark.parametrize("context", [1000, 8192, 32_768])
@pytest.mark.parametrize("num_kv_heads", [3, 8, 32])
def test_balanced_chunks_fill_the_programs_without_a_small_rest(
    context: int, num_kv_heads: int
) -> None:
    forest = speculation([context], named_tree("deft-64"))
    chunk = balanced_chunk_tokens(
        forest, tile_queries=16, num_kv_heads=num_kv_heads, num_programs=264, block_tokens=64
    )
    assert chunk % 64 == 0
    plan = plan_of(forest, Partition.FLATTEN, 16, chunk)
    assert plan.num_items * num_kv_heads <= 264
    # Every chunk meets the four tiles; the last may hold tree tokens that some tiles do not see.
    num_chunks = -(-forest.total_tokens // chunk)
    assert 4 * (num_chunks - 1) < plan.num_items <= 4 * num_chunks
    # Rounding to whole blocks adds less than one block to an even share.
    assert chunk <= -(-forest.total_tokens // (264 // num_kv_heads // 4)) + 64


def test_balanced_chunks_of_branches() -> None:
    forest = star(prompt=4000, branches=50, branch_tokens=400)
    chunk = balanced_chunk_tokens(
        forest, tile_queries=16, num_kv_heads=8, num_programs=264, block_tokens=64
    )
    plan = plan_of(forest, Partition.FLATTEN, 16, chunk)
    check_plan(plan, forest)
    assert 264 // 8 // 2 <= plan.num_items <= 264 // 8 * 1.5


def test_a_plan_moves_as_a_whole() -> None:
    plan = plan_of(star(30, 3, 5), Partition.FLATTEN, 2, 16)
    moved = plan.to("meta")
    assert moved.items.device.type == moved.mask_words.device.type == "meta"
    assert (moved.partition, moved.num_partial_rows) == (plan.partition, plan.num_partial_rows)
    assert (moved.num_items, moved.num_words, moved.num_queries) == (plan.num_items, 1, 3)


def test_bad_sizes_are_refused() -> None:
    forest = star(30, 3, 5)
    with pytest.raises(ValueError, match="tile_queries is 0"):
        build_plan(forest, Partition.NODE, tile_queries=0)
    with pytest.raises(ValueError, match="chunk_tokens is 64 but the Node partition"):
        build_plan(forest, Partition.NODE, tile_queries=4, chunk_tokens=64)
    for partition in (Partition.FLATTEN, Partition.NODE_CHUNK):
        for chunk in (None, 0):
            with pytest.raises(
                ValueError, match=f"the {partition.value} partition needs 1 or more"
            ):
                build_plan(forest, partition, tile_queries=4, chunk_tokens=chunk)


def broken_items(column: ItemField, change: int) -> Callable[[AttentionPlan], AttentionPlan]:
    def damage(plan: AttentionPlan) -> AttentionPlan:
        items = plan.items.clone()
        items[2, column] += change
        return dataclasses.replace(plan, items=items)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (broken_items(ItemField.KV_BEGIN, 1), "computes the pair 0 times"),
        (broken_items(ItemField.KV_BEGIN, -1), "computes the pair 2 times"),
        (broken_items(ItemField.KV_BEGIN, 99), "an item has no tokens"),
        (broken_items(ItemField.SHARED_END, 9), "SHARED_END is outside"),
        (broken_items(ItemField.SHARED_END, 1), "mask rows are missing or left over"),
        (broken_items(ItemField.QUERY_END, 9), "reaches beyond its tile"),
        (broken_items(ItemField.QUERY_BEGIN, 2), "an item has no queries"),
        (broken_items(ItemField.TILE, 1), "another tile's list"),
        (broken_items(ItemField.PARTIAL_ROW, 1), "partial rows overlap or gap"),
        (broken_items(ItemField.MASK_ROW, 1), "mask rows overlap or gap"),
        (lambda p: dataclasses.replace(p, slots=p.slots + 1), "slots differ"),
        (lambda p: dataclasses.replace(p, query_rows=p.query_rows * 0), "not a permutation"),
        (lambda p: dataclasses.replace(p, mask_words=p.mask_words * 0), "sees token"),
        (lambda p: dataclasses.replace(p, mask_words=p.mask_words - 2**40), "past the item's"),
        (lambda p: dataclasses.replace(p, tile_items=p.tile_items.flip(0)), "tile's list"),
        (lambda p: dataclasses.replace(p, tile_begins=p.tile_begins + 1), "do not cut the queries"),
        (lambda p: dataclasses.replace(p, num_partial_rows=1), "num_partial_rows is wrong"),
    ],
)
def test_the_checker_sees_damage(
    damage: Callable[[AttentionPlan], AttentionPlan], message: str
) -> None:
    forest = star(prompt=10, branches=4, branch_tokens=3)
    plan = plan_of(forest, Partition.FLATTEN, 2, 8)
    check_plan(plan, forest)
    with pytest.raises(ValueError, match=message):
        check_plan(damage(plan), forest)


def test_coverage_counts_repeats() -> None:
    forest = star(prompt=4, branches=2, branch_tokens=2)
    plan = plan_of(forest, Partition.NODE, 2, 0)
    doubled = dataclasses.replace(plan, items=plan.items.repeat(2, 1))
    assert torch.equal(coverage(doubled), 2 * forest.visible().long())


def test_replayed_reasoning_trees_at_their_widest_step() -> None:
    """Sorting and document merging: the official records, all partitions, real node lengths."""
    folder = Path(__file__).parents[3] / "shared/data/deft_trees"
    if not folder.exists():
        pytest.skip("the shared data folder is not beside this checkout")
    for name in ("sorting128", "docmerge"):
        trees = json.loads((folder / f"{name}.json").read_text())["trees"]
        nodes = next(tree["nodes"] for tree in trees if not tree["incomplete"])
        forest = widest_step(nodes)
        assert forest.num_queries > 10
        for partition in PARTITIONS:
            check_plan(plan_of(forest, partition, 16, 512), forest)


def widest_step(nodes: list[tuple[int, int, list[int]]]) -> KVForest:
    """The forest of live nodes at the step with the most live leaves."""
    parents = [-1] * len(nodes)
    for parent, (_, _, children) in enumerate(nodes):
        for child in children:
            parents[child] = parent

    def living(step: int) -> list[int]:
        return [n for n, (size, start, _) in enumerate(nodes) if start <= step < start + size]

    step = max((start for _, start, _ in nodes), key=lambda step: len(living(step)))
    leaves = living(step)
    kept: set[int] = set()
    for leaf in leaves:
        node = leaf
        while node >= 0:
            kept.add(node)
            node = parents[node]
    order = sorted(kept)
    number = {node: new for new, node in enumerate(order)}
    runs, first = [], 0
    for node in order:
        size, start, _ = nodes[node]
        length = min(size, step + 1 - start)
        runs.append(range(first, first + length))
        first += length
    return KVForest.from_nodes(
        [number.get(parents[node], -1) for node in order], runs, [number[leaf] for leaf in leaves]
    )
