"""`specdeft bench attention`: one layer's tree attention, ours beside every other method.

A cell is a head shape, a context and a number of tree tokens. In one process, on the same inputs:
each method is first checked against float64, and a wrong one gets no time; then timed by CUDA-graph
replay over rotated, cold KV. The floor is max(bytes / bandwidth, operations / rate) with both
ceilings measured in the run. Ours reads scattered pages; methods without page tables are granted a
contiguous cache. What a step prepares once for all layers is not in the times.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdeft.bench.cuda_timing import Ceilings, measure_ceilings, num_sets, time_rotated
from specdeft.bench.manifest import command_line, git_state, machine, versions
from specdeft.bench.report import FORMATS, Finished, Report, Table
from specdeft.kernels import io_cost
from specdeft.kernels.baselines.dense_mask import prepare_medusa, prepare_sdpa
from specdeft.kernels.baselines.flex import prepare_flex
from specdeft.kernels.baselines.per_path import duplicated, path_forest, prepare_plan
from specdeft.kernels.baselines.prepared import HeadShape, Prepared
from specdeft.kernels.launch_shape import sm_count
from specdeft.kernels.reference import tree_attention_reference
from specdeft.trees.forest import KVForest
from specdeft.trees.mask import mask_words_from_ancestors
from specdeft.trees.options import Options
from specdeft.trees.partition import balanced_chunk_tokens, build_plan
from specdeft.trees.plan import Partition
from specdeft.trees.token_tree import TokenTree

OURS = "specdeft"
METHODS = (
    OURS,
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
DEFAULT_METHODS = (OURS, "sdpa", "medusa", "flex")
# Twice what a fused method in the same type loses, rounded up: 2.2e-3 was measured in bfloat16.
WORST_ERROR = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
UNFUSED_FACTOR = 2  # Medusa's form rounds its scores to that type too: 5.8e-3 measured
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_BYTES_LIMIT = 1 << 35  # KV of paths written out one by one beyond this is not tried


class Cell(NamedTuple):
    """What is measured: the heads, the committed tokens, the tree."""

    shape: HeadShape
    num_context: int
    tree: TokenTree

    @property
    def label(self) -> str:
        """Hq/Hkv/D."""
        return f"{self.shape.query_heads}/{self.shape.kv_heads}/{self.shape.head_dim}"


class Outcome(NamedTuple):
    """A method in a cell: error against float64, then the time; or why there is none."""

    cell: Cell
    method: str
    floor_us: float
    error: float | None
    median_us: float | None
    spread_us: float | None
    failure: str | None


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = Options(
        prog="specdeft bench attention",
        description="Time one layer's tree attention against the floor and other methods, each "
        "checked against float64 first. Needs a CUDA device.",
    )
    options.add_argument("--heads", nargs="+", default=["32/8/128"], metavar="HQ/HKV/D")
    options.add_argument("--context", nargs="+", type=int, default=[2048, 8192, 32768])
    options.add_argument("--nodes", nargs="+", type=int, default=[16, 64, 256])
    options.add_argument("--methods", nargs="+", default=list(DEFAULT_METHODS), choices=METHODS)
    options.add_argument("--page-size", type=int, default=128, help="of our paged KV")
    options.add_argument("--dtype", default="bfloat16", choices=list(_DTYPES))
    options.add_argument("--output", default="table", choices=list(FORMATS), help="to stdout")
    return options


def main(arguments: Sequence[str]) -> Finished:
    """Run the command.

    Raises:
        ValueError: there is no CUDA device, or a head shape is malformed.
    """
    options = parser().parse_args(arguments)
    shapes = [parse_heads(text, _DTYPES[options.dtype]) for text in options.heads]
    if not torch.cuda.is_available():
        raise ValueError("bench attention times CUDA kernels: run it on a machine with a GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    ceilings = measure_ceilings(device)
    outcomes = [
        outcome
        for shape in shapes
        for context in options.context
        for nodes in options.nodes
        for outcome in measure_cell(
            Cell(shape, context, random_tree(nodes)), options.methods, options.page_size, ceilings
        )
    ]
    return Finished(make_report(outcomes, ceilings, device), options.output)


def parse_heads(text: str, dtype: torch.dtype) -> HeadShape:
    """ "32/8/128" as a shape; the scale is D ** -0.5."""
    try:
        query_heads, kv_heads, head_dim = (int(part) for part in text.split("/"))
    except ValueError as error:
        raise ValueError(f"--heads {text!r} is not HQ/HKV/D, as in 32/8/128") from error
    if min(query_heads, kv_heads, head_dim) < 1 or query_heads % kv_heads:
        raise ValueError(f"--heads {text!r}: HKV must divide HQ, and all be 1 or more")
    return HeadShape(query_heads, kv_heads, head_dim, dtype, head_dim**-0.5)


def random_tree(num_nodes: int) -> TokenTree:
    """A seeded depth-first tree with chains and fans, as searched trees have."""
    draw = random.Random(num_nodes)
    parents = [-1]
    for node in range(1, num_nodes):
        above = node - 1
        while above > 0 and draw.random() < 0.5:
            above = parents[above]
        parents.append(above)
    return TokenTree.from_parents(parents)


def speculation_forest(cell: Cell) -> KVForest:
    """The committed tokens as one node, each tree token as a node of one below it, contiguous."""
    total = cell.num_context + cell.tree.num_nodes
    return KVForest(
        torch.tensor([-1, *(parent + 1 for parent in cell.tree.parents)]),
        torch.tensor([cell.num_context, *([1] * cell.tree.num_nodes)]),
        torch.arange(total, dtype=torch.int32),
        torch.arange(1, cell.tree.num_nodes + 1),
    )


def prepare(
    method: str, cell: Cell, forest: KVForest, page_size: int, device: torch.device
) -> Prepared:
    """A method ready to run on this cell; see `kernels.baselines.prepared`."""
    shape = cell.shape
    if method == OURS:
        return prepare_ours(cell, page_size, device)
    if method in ("sdpa", "medusa", "flex"):
        make = {"sdpa": prepare_sdpa, "medusa": prepare_medusa, "flex": prepare_flex}[method]
        return make(forest, shape, device)
    if method == "specinfer":
        from specdeft.kernels.baselines.query_bitmask import prepare_specinfer

        words = mask_words_from_ancestors(forest.visible())
        return prepare_specinfer(forest, words, shape, device)
    tile_queries = max(1, 64 // shape.group)
    if method in ("radix", "flash-decoding"):
        forest, tile_queries = path_forest(forest, duplicate=method == "flash-decoding"), 1
    partition = Partition.FLATTEN if tile_queries == 1 else Partition(method)
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


def prepare_ours(cell: Cell, page_size: int, device: torch.device) -> Prepared:
    """The speculation kernel over shuffled pages: position p stands in page table[p // size]."""
    from specdeft.kernels.deft_flatten import tree_attention

    table = page_table(cell, page_size).to(device)[None]
    lengths = torch.tensor([cell.num_context], dtype=torch.int32, device=device)
    words = cell.tree.mask_words().to(device)

    def run(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        out, _lse = tree_attention(
            q[None],
            k_pool,
            v_pool,
            lengths=lengths,
            mask_words=words,
            page_table=table,
            page_size=page_size,
            capacity=k_pool.shape[0],
            max_context=cell.num_context,
            scale=cell.shape.scale,
        )
        return out[0]

    return Prepared(OURS, run)


def page_table(cell: Cell, page_size: int) -> Tensor:
    """int32 [P]: a seeded shuffle of as many pages as the tokens fill."""
    pages = -(-(cell.num_context + cell.tree.num_nodes) // page_size)
    return torch.randperm(pages, generator=torch.Generator().manual_seed(pages)).int()


def pool_for(method: str, cell: Cell, forest: KVForest, kv: Tensor, page_size: int) -> Tensor:
    """The tokens kv [S, Hkv, D], in flattened order, laid out as the method reads them."""
    if method == "flash-decoding":
        return duplicated(forest, kv)
    if method != OURS:
        return kv
    table = page_table(cell, page_size).long().to(kv.device)
    position = torch.arange(kv.shape[0], device=kv.device)
    pool = torch.zeros(table.shape[0] * page_size, *kv.shape[1:], dtype=kv.dtype, device=kv.device)
    pool[table[position // page_size] * page_size + position % page_size] = kv
    return pool


def measure_cell(
    cell: Cell, methods: Sequence[str], page_size: int, ceilings: Ceilings
) -> list[Outcome]:
    """Every method in one cell, on one device, checked and then timed."""
    device = torch.device("cuda", torch.cuda.current_device())
    forest = speculation_forest(cell)
    floor_us = 1e6 * io_cost.floor(forest, cell.shape).seconds(*ceilings)
    torch.manual_seed(0)
    q, k, v = random_inputs(cell, forest, device)
    exact = exact_output(cell, forest, q, k, v)
    outcomes = []
    for method in methods:
        outcomes.append(_measure(method, cell, forest, (q, k, v), exact, page_size, floor_us))
        torch.cuda.empty_cache()
    return outcomes


def random_inputs(
    cell: Cell, forest: KVForest, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, Hq, D], k and v [S, Hkv, D]."""
    shape = cell.shape
    kv = (forest.total_tokens, shape.kv_heads, shape.head_dim)
    queries = (forest.num_queries, shape.query_heads, shape.head_dim)
    q, k, v = (torch.randn(size, device=device) for size in (queries, kv, kv))
    return q.to(shape.dtype), k.to(shape.dtype), v.to(shape.dtype)


def exact_output(cell: Cell, forest: KVForest, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The float64 result, a KV head at a time."""
    visible = forest.visible().to(q.device)
    group = cell.shape.group
    outs = [
        tree_attention_reference(
            q[:, head * group : (head + 1) * group],
            k[:, head : head + 1],
            v[:, head : head + 1],
            visible,
            scale=cell.shape.scale,
        )[0]
        for head in range(cell.shape.kv_heads)
    ]
    return torch.cat(outs, dim=1)


def worst_error(method: str, dtype: torch.dtype) -> float:
    """The gate: a method above it gets no time."""
    return WORST_ERROR[dtype] * (UNFUSED_FACTOR if method == "medusa" else 1)


def relative_error(out: Tensor, exact: Tensor) -> float:
    """||out - exact|| / ||exact||; infinite where out is not finite everywhere."""
    error = float((out.double() - exact).norm() / exact.norm())
    return error if error == error else float("inf")


def _measure(
    method: str,
    cell: Cell,
    forest: KVForest,
    inputs: tuple[Tensor, Tensor, Tensor],
    exact: Tensor,
    page_size: int,
    floor_us: float,
) -> Outcome:
    """One method: the gate, then the clock. A method that cannot run says why."""
    q, k, v = inputs
    error: float | None = None
    try:
        if method == "flash-decoding":
            paths = int(forest.path_lengths().sum())
            if 4 * paths * k[0].numel() * k.element_size() > _BYTES_LIMIT:
                raise ValueError(f"{paths} tokens written out path by path are too many")
        prepared = prepare(method, cell, forest, page_size, q.device)
        pools = [pool_for(method, cell, forest, kv, page_size) for kv in (k, v)]
        error = relative_error(prepared.run(q, pools[0], pools[1]), exact)
        if not error <= worst_error(method, cell.shape.dtype):
            raise ValueError(f"wrong result: relative error {error:.1e}")
        sets = num_sets(2 * pools[0].numel() * pools[0].element_size())
        rotated = [[pool.clone() for pool in pools] for _ in range(sets)]
        timing = time_rotated(_rotating(prepared, q, rotated), sets)
    except (ValueError, RuntimeError) as failure:
        reason = str(failure).strip().splitlines()[0][:120] if str(failure) else repr(failure)
        return Outcome(cell, method, floor_us, error, None, None, reason)
    return Outcome(cell, method, floor_us, error, *timing, None)


def _rotating(
    prepared: Prepared, q: Tensor, rotated: list[list[Tensor]]
) -> Callable[[int], object]:
    return lambda index: prepared.run(q, rotated[index][0], rotated[index][1])


def make_report(outcomes: Sequence[Outcome], ceilings: Ceilings, device: torch.device) -> Report:
    """The table of all outcomes, and the cells in which another method is ahead of ours."""
    columns = (
        "Hq/Hkv/D", "context", "nodes", "method", "us", "spread us", "% of floor", "TB/s",
        "error", "note",
    )  # fmt: skip
    rows = tuple(_row(outcome) for outcome in outcomes)
    return Report(
        title="Tree attention, one layer",
        notes=(
            f"ceilings of this run: {ceilings.bytes_per_s / 1e12:.2f} TB/s copy, "
            f"{ceilings.flops_per_s / 1e12:.0f} TFLOP/s bf16 product",
            "cold KV, CUDA-graph replay, median; error against float64; TB/s of the floor's bytes",
        ),
        tables=(Table("Methods", columns, rows),),
        remarks=tuple(_behind(outcomes)),
        data={
            "command": ["specdeft", *command_line()],
            "versions": versions(),
            "git": git_state(),
            "machine": machine(device),
            "ceilings": ceilings._asdict(),
            "outcomes": [_as_data(outcome) for outcome in outcomes],
        },
    )


def _row(outcome: Outcome) -> tuple[Any, ...]:
    cell, time = outcome.cell, outcome.median_us
    floor = io_cost.floor(speculation_forest(cell), cell.shape)
    return (
        cell.label,
        cell.num_context,
        cell.tree.num_nodes,
        outcome.method,
        time,
        outcome.spread_us,
        None if time is None else 100 * outcome.floor_us / time,
        None if time is None else floor.num_bytes / time / 1e6,
        None if outcome.error is None else f"{outcome.error:.1e}",
        outcome.failure,
    )


def _as_data(outcome: Outcome) -> dict[str, Any]:
    cell = outcome.cell
    return {
        "heads": cell.label,
        "dtype": str(cell.shape.dtype).removeprefix("torch."),
        "context": cell.num_context,
        "nodes": cell.tree.num_nodes,
        "tree": cell.tree.content_hash,
        "method": outcome.method,
        "floor_us": outcome.floor_us,
        "error": outcome.error,
        "median_us": outcome.median_us,
        "spread_us": outcome.spread_us,
        "failure": outcome.failure,
    }


def _behind(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for each cell in which our kernel is not the fastest."""
    found = []
    ours = {outcome.cell: outcome.median_us for outcome in outcomes if outcome.method == OURS}
    for outcome in outcomes:
        mine, theirs = ours.get(outcome.cell), outcome.median_us
        if outcome.method != OURS and mine is not None and theirs is not None and theirs < mine:
            cell = outcome.cell
            found.append(
                f"{outcome.method} is ahead at {cell.label}, context {cell.num_context}, "
                f"{cell.tree.num_nodes} nodes: {theirs:.1f} us against {mine:.1f}"
            )
    return found
