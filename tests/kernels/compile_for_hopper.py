"""Compile the kernels' main configurations for sm_90, with no GPU; a JSON line for each.

Run in a fresh process without TRITON_INTERPRET: python -m tests.kernels.compile_for_hopper
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from specdeft.kernels import (
    commit_triton,
    deft_flatten,
    flatten_hopper,
    flatten_hopper_wide,
    forest_attention,
    merge,
)
from specdeft.kernels.launch_shape import (
    HOPPER_LONG_TILES,
    HOPPER_TILES,
    HOPPER_WIDE_TILES,
    Kernel,
    tile_shape,
)

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    "q_ptr": "bf16", "k_ptr": "bf16", "v_ptr": "bf16", "out_ptr": "bf16", "lse_ptr": "fp32",
    "part_out_ptr": "fp32", "part_lse_ptr": "fp32", "words_ptr": "i64", "path_ptr": "i64",
    "sinks_ptr": "fp32",
}  # fmt: skip
FLOATS = {"scale", "cap", "factor"}


def compile_kernel(
    name: str, kernel: Any, constants: dict[str, Any], options: dict[str, int], desc: str = ""
) -> None:
    """Compile with strides and pointers known to be divisible by 16, and report."""
    signature, values, attributes = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            values[(index,)] = constants[argument]
        elif argument.endswith("_desc"):
            signature[argument] = desc
        else:
            pointer = argument.endswith("_ptr")
            kind = POINTERS.get(argument, "i32") if pointer else "i32"
            signature[argument] = f"*{kind}" if pointer else "fp32" if argument in FLOATS else kind
            if pointer or ("stride" in argument and not argument.startswith(("words", "table"))):
                attributes[(index,)] = [["tt.divisibility", 16]]
    make = GluonASTSource if desc else ASTSource
    source = make(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    compiled = triton.compile(source, target=TARGET, options=options)
    sys.stdout.write(json.dumps({"name": name, **resources(compiled)}) + "\n")


def resources(compiled: Any) -> dict[str, int]:
    """Registers and stack bytes of a thread, shared bytes, kinds of matrix instructions."""
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True)
            for flag in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    assert found is not None
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": compiled.metadata.shared,
        "hgmma": code.stdout.count("HGMMA"),
        "hmma": code.stdout.count("HMMA."),
    }


def main() -> None:
    """All configurations."""
    heads = {"KV_HEADS": 8, "GROUP": 4, "DIM": 128}
    paged = {"PAGE_SIZE": 64, "PAGED": True}
    for rows, one_split, has_prefix in ((16, False, False), (64, True, False), (16, False, True)):
        tile = tile_shape(rows, 128, torch.bfloat16)
        constants = {
            **heads, **paged, "DIM_PADDED": 128, "ROWS": tile.rows, "BLOCK": tile.block,
            "MASKED_TILE": 64, "MASKED_STAGES": 1, "ONE_SPLIT": one_split, "MIN_BLOCKS": 2,
            "WINDOW": 0, "CAPPED": False, "HAS_SINKS": False, "HAS_PREFIX": has_prefix,
            "PRECISION": "tf32", "PDL": True,
        }  # fmt: skip
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        name = f"flatten-{rows}" + ("-prefix" if has_prefix else "")
        compile_kernel(name, deft_flatten._tree_attention_kernel, constants, options)
    hopper_tiles = {f"hopper-{dim}": (dim, tile) for dim, tile in HOPPER_TILES.items()}
    hopper_tiles |= {f"hopper-long-{dim}": (dim, tile) for dim, tile in HOPPER_LONG_TILES.items()}
    hopper_tiles |= {f"hopper-wide-{dim}": (dim, tile) for dim, tile in HOPPER_WIDE_TILES.items()}
    for (name, (dim, tile)), has_prefix in itertools.product(hopper_tiles.items(), (False, True)):
        constants = {
            "KV_HEADS": 3, "GROUP": 3, "DIM": dim, "PAGE_SIZE": 128, "PAGED": True,
            "ROWS": tile.rows, "BLOCK": tile.block, "STAGES": tile.num_stages, "ONE_SPLIT": False,
            "MIN_BLOCKS": 2, "HAS_SINKS": False, "HAS_PREFIX": has_prefix,
        }  # fmt: skip
        is_wide = tile.kernel is Kernel.HOPPER_WIDE
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        compile_kernel(
            f"{name}-prefix" if has_prefix else name,
            flatten_hopper_wide.wide_attention_kernel
            if is_wide
            else flatten_hopper.hopper_attention_kernel,
            constants,
            {"num_warps": tile.num_warps},
            desc=f"tensordesc<bf16[{tile.block}, {dim}],{layout!r}>",
        )
    merged = {
        **heads, "DIM_PADDED": 128, "ROWS": 64, "BLOCK": 64, "MIN_BLOCKS": 2, "WINDOW": 0,
        "HAS_SINKS": False, "HAS_PREFIX": False, "MERGED": 2, "SPLITS_PADDED": 8, "PDL": True,
    }  # fmt: skip
    compile_kernel("merge", merge.merge_kernel, merged, {"num_warps": 1})
    # The most that one warp holds: the splits of a prefix and of a sequence in one tile.
    merged |= {"HAS_PREFIX": True, "MERGED": 1, "SPLITS_PADDED": 32}
    compile_kernel("merge-prefix", merge.merge_kernel, merged, {"num_warps": 1})
    forest = {"GROUP": 4, "DIM": 128, "DIM_PADDED": 128}
    partials = {
        **forest, "ROWS": 64, "BLOCK": 64, "NUM_WORDS": 1, "WINDOW": 0, "CAPPED": False,
        "PRECISION": "tf32",
    }  # fmt: skip
    compile_kernel(
        "forest-partials",
        forest_attention._partials_kernel,
        partials,
        {"num_warps": 4, "num_stages": 2},
    )
    reduce = {
        **forest, "KV_HEADS": 8, "PARTS": 32, "MERGED": 2, "ITEMS": 8, "HAS_SINKS": False,
    }  # fmt: skip
    compile_kernel("forest-reduce", forest_attention._reduce_kernel, reduce, {"num_warps": 1})
    moved = {"PAGE_SIZE": 64, "PAGED": True, "ROWS": 8, "COLUMNS": 512}
    compile_kernel("commit", commit_triton._commit_kernel, moved, {"num_warps": 4})


if __name__ == "__main__":
    main()
