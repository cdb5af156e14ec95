"""The compared methods by name: ours, DeFT's partitions, the paper's baselines, today's peers."""

from __future__ import annotations

import torch
from torch import Tensor

from specdeft.bench.attention_workloads import Workload
from specdeft.kernels.baselines.dense_mask import prepare_medusa, prepare_sdpa
from specdeft.kernels.baselines.flashinfer import PagedTree, prepare_cascade, prepare_xqa
from specdeft.kernels.baselines.flex import prepare_flex
from specdeft.kernels.baselines.per_path import duplicated, path_forest, prepare_plan
from specdeft.kernels.baselines.prepared import Prepared
from specdeft.kernels.launch_shape import SharedPrefix, prefix_pays, sm_count
from specdeft.trees.mask import mask_words_from_ancestors
from specdeft.trees.partition import balanced_chunk_tokens, build_plan
from specdeft.trees.plan import Partition

OURS = "specdeft"
ONCE, APART = "specdeft-once", "specdeft-apart"  # how a shared prefix is read, whatever pays
OUR_WAYS = (OURS, ONCE, APART)
SPECULATION_ONLY = (*OUR_WAYS, "flashinfer", "flashinfer-xqa")  # these read scattered pages
FOREST_METHODS = (
    "flatten",
    "node-chunk",
    "node",
    "radix",
    "flash-decoding",
    "specinfer",
    "medusa",
    "sdpa",
    "flex",
)
BATCH_METHODS = (*OUR_WAYS, "flatten")
METHODS = (*SPECULATION_ONLY, *FOREST_METHODS)
OWN_LAYOUT = ("flash-decoding",)  # reads copies that no other method can use
# These read the shared tokens once per query. Far above the floor they are not even prepared.
PER_QUERY = ("radix", "flash-decoding", "specinfer")
MOST_REREADS = 40
_PATHS_LIMIT = 1 << 34  # bytes of KV written out path by path


def prepare(method: str, workload: Workload, page_size: int, device: torch.device) -> Prepared:
    """A method ready to run on this workload; see `kernels.baselines.prepared`.

    Raises:
        ValueError: the method cannot be had here, or would read the same tokens too often.
    """
    shape, forest = workload.shape, workload.forest
    if method in SPECULATION_ONLY:
        return _on_pages(method, workload, page_size, device)
    if method in ("sdpa", "medusa", "flex"):
        make = {"sdpa": prepare_sdpa, "medusa": prepare_medusa, "flex": prepare_flex}[method]
        return make(forest, shape, device)
    if method in PER_QUERY:
        _refuse_too_many_reads(method, workload)
    if method == "specinfer":
        from specdeft.kernels.baselines.query_bitmask import prepare_specinfer

        words = mask_words_from_ancestors(forest.visible(device))
        return prepare_specinfer(forest, words, shape, device)
    tile_queries = max(1, 64 // shape.group)
    if method in ("radix", "flash-decoding"):
        forest, tile_queries = path_forest(forest, duplicate=method == "flash-decoding"), 1
    partition = Partition.FLATTEN if method in ("radix", "flash-decoding") else Partition(method)
    chunk = balanced_chunk_tokens(
        forest,
        tile_queries=tile_queries,
        num_kv_heads=shape.kv_heads,
        num_programs=2 * sm_count(device),
        block_tokens=64,
    )
    plan = build_plan(
        forest,
        partition,
        tile_queries=tile_queries,
        chunk_tokens=None if partition is Partition.NODE else chunk,
    )
    return prepare_plan(method, plan, shape, device)


def pool_for(method: str, workload: Workload, kv: Tensor, page_size: int) -> Tensor:
    """The tokens kv [S, Hkv, D], in flattened order, laid out as the method reads them."""
    if method == "flash-decoding":
        return duplicated(workload.forest, kv)
    if method not in SPECULATION_ONLY:
        return kv
    tables, slots = pages_of(workload, page_size)
    size = (int(tables.max()) + 1) * page_size
    pool = torch.zeros(size, *kv.shape[1:], dtype=kv.dtype, device=kv.device)
    pool[slots.to(kv.device)] = kv
    return pool


def pages_of(workload: Workload, page_size: int) -> tuple[Tensor, Tensor]:
    """Page tables int32 [B, P] of a workload of speculation, and the slot int64 [S] of each of its
    tokens. What all sequences of a batch begin with fills pages that their tables share."""
    assert workload.tree is not None
    assert workload.num_context is not None
    behind = workload.num_own + workload.tree.num_nodes
    if workload.batch == 1:
        runs = [workload.num_context + behind]
    else:
        if workload.num_context % page_size:
            raise ValueError(
                f"a batch shares full pages of {page_size} tokens, not {workload.num_context}"
            )
        runs = [workload.num_context, *([behind] * workload.batch)]
    counts = [-(-tokens // page_size) for tokens in runs]
    pages = page_table(sum(counts) * page_size, page_size)
    of_run = pages.split(counts)
    slots = []
    for own, tokens in zip(of_run, runs, strict=True):
        position = torch.arange(tokens)
        slots.append(own.long()[position // page_size] * page_size + position % page_size)
    tables = [torch.cat([of_run[0], own]) for own in of_run[1:]] or [of_run[0]]
    return torch.stack(tables), torch.cat(slots)


def page_table(num_tokens: int, page_size: int) -> Tensor:
    """int32 [P]: a seeded shuffle of as many pages as the tokens fill."""
    pages = -(-num_tokens // page_size)
    return torch.randperm(pages, generator=torch.Generator().manual_seed(pages)).int()


def _on_pages(method: str, workload: Workload, page_size: int, device: torch.device) -> Prepared:
    ours = method in OUR_WAYS
    if workload.tree is None or workload.num_context is None or (workload.batch > 1 and not ours):
        raise ValueError(f"{method} takes one sequence with a token tree, not {workload.name}")
    if ours:
        return _ours(method, workload, page_size, device)
    make = prepare_cascade if method == "flashinfer" else prepare_xqa
    table = page_table(workload.forest.total_tokens, page_size)
    tree = PagedTree(table, page_size, workload.num_context, workload.tree.ancestors())
    return make(tree, workload.shape, device)


def _ours(method: str, workload: Workload, page_size: int, device: torch.device) -> Prepared:
    """The speculation kernel over shuffled pages; a batch's prefix is read once where that pays,
    or as the method says."""
    from specdeft.kernels.deft_flatten import tree_attention

    assert workload.tree is not None
    assert workload.num_context is not None
    shape, batch, num_nodes = workload.shape, workload.batch, workload.tree.num_nodes
    context = workload.num_context + workload.num_own
    tables = pages_of(workload, page_size)[0].to(device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    words = workload.tree.mask_words().to(device)
    once = batch > 1 and method != APART
    if once and method == OURS:
        once = prefix_pays(
            batch=batch,
            num_nodes=num_nodes,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            device=device,
            page_size=page_size,
            num_tokens=workload.num_context,
        )
    num_shared = torch.tensor([workload.num_context], dtype=torch.int32, device=device)
    prefix = SharedPrefix(num_shared, tables[0]) if once else None

    def run(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        out, _lse = tree_attention(
            q.unflatten(0, (batch, num_nodes)),
            k_pool,
            v_pool,
            lengths=lengths,
            mask_words=words,
            page_table=tables,
            page_size=page_size,
            capacity=k_pool.shape[0],
            max_context=context,
            scale=shape.scale,
            prefix=prefix,
        )
        return out.flatten(0, 1)

    return Prepared(method, run)


def _refuse_too_many_reads(method: str, workload: Workload) -> None:
    """Reads counted in tokens; one read of everything is what a shared method makes."""
    forest = workload.forest
    paths = int(forest.path_lengths().sum())
    if method == "specinfer":
        paths = forest.num_queries * forest.total_tokens
    if paths > MOST_REREADS * forest.total_tokens:
        raise ValueError(
            f"not timed: reads the tokens {paths / forest.total_tokens:.0f} times, over "
            f"{MOST_REREADS}"
        )
    shape = workload.shape
    num_bytes = 2 * paths * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
    if method == "flash-decoding" and 2 * num_bytes > _PATHS_LIMIT:
        raise ValueError(
            f"not timed: paths written out one by one take {num_bytes / 2**30:.0f} GiB a layer"
        )
