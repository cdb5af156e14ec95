"""Heads as other projects publish them, their names written out by hand; random values.

K = 3 heads, H = 16, V = 23. `by_hand` evaluates them from the values that went into a file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

K, H, V = 3, 16, 23
BASE = "lab/base-model"

# Names of K = 3 heads with one residual block: weight, bias, output layer of heads 0, 1, 2.
F1 = """
0.0.linear.weight 0.0.linear.bias 0.1.weight
1.0.linear.weight 1.0.linear.bias 1.1.weight
2.0.linear.weight 2.0.linear.bias 2.1.weight
"""
F1_TWO_BLOCKS = """
0.0.linear.weight 0.0.linear.bias 0.1.linear.weight 0.1.linear.bias 0.2.weight
1.0.linear.weight 1.0.linear.bias 1.1.linear.weight 1.1.linear.bias 1.2.weight
2.0.linear.weight 2.0.linear.bias 2.1.linear.weight 2.1.linear.bias 2.2.weight
"""
F2 = """
0.0.linear.weight 0.0.linear.bias
1.0.linear.weight 1.0.linear.bias
2.0.linear.weight 2.0.linear.bias
"""
F4 = """
medusa_head.0.0.linear.weight medusa_head.0.0.linear.bias medusa_head.0.1.weight
medusa_head.1.0.linear.weight medusa_head.1.0.linear.bias medusa_head.1.1.weight
medusa_head.2.0.linear.weight medusa_head.2.0.linear.bias medusa_head.2.1.weight
"""
F5 = """
blocks.0.layers.0.weight blocks.0.layers.0.bias lm_heads.0.weight
blocks.1.layers.0.weight blocks.1.layers.0.bias lm_heads.1.weight
blocks.2.layers.0.weight blocks.2.layers.0.bias lm_heads.2.weight
"""
F5_NO_BIAS = """
blocks.0.layers.0.weight lm_heads.0.weight
blocks.1.layers.0.weight lm_heads.1.weight
blocks.2.layers.0.weight lm_heads.2.weight
"""
F5_PREFIXED = """
medusa_heads.blocks.0.layers.0.weight medusa_heads.lm_heads.0.weight
medusa_heads.blocks.1.layers.0.weight medusa_heads.lm_heads.1.weight
medusa_heads.blocks.2.layers.0.weight medusa_heads.lm_heads.2.weight
"""
F5_ORIGINAL = """
blocks.0.layers.0.weight blocks.0.layers.0.bias lm_heads.0.weight
blocks.1.layers.0.weight blocks.1.layers.0.bias
blocks.2.layers.0.weight blocks.2.layers.0.bias
"""
F7 = """
medusa_heads.0.0.linear.weight medusa_heads.0.0.linear.bias medusa_heads.0.1.weight
medusa_heads.1.0.linear.weight medusa_heads.1.0.linear.bias medusa_heads.1.1.weight
medusa_heads.2.0.linear.weight medusa_heads.2.0.linear.bias medusa_heads.2.1.weight
"""
F8 = """
medusa_heads.0.medusa_layers.0.linear.weight medusa_heads.0.medusa_layers.0.linear.bias
medusa_heads.1.medusa_layers.0.linear.weight medusa_heads.1.medusa_layers.0.linear.bias
medusa_heads.2.medusa_layers.0.linear.weight medusa_heads.2.medusa_layers.0.linear.bias
medusa_heads.0.lm_head.weight medusa_heads.1.lm_head.weight medusa_heads.2.lm_head.weight
"""
F9 = """
heads.1.0.linear.weight heads.1.0.linear.bias heads.1.1.weight
heads.2.0.linear.weight heads.2.0.linear.bias heads.2.1.weight
heads.3.0.linear.weight heads.3.0.linear.bias heads.3.1.weight
"""
BASE_NAMES = "model.embed_tokens.weight model.layers.0.mlp.up_proj.weight lm_head.weight"


@dataclass(frozen=True)
class Values:
    """What the heads compute with: weight [n,K,H,H], bias [n,K,H] or None, output [K,V,H]."""

    weight: Tensor
    bias: Tensor | None
    output: Tensor

    def logits(self, hidden: Tensor) -> Tensor:
        """[K,B,V] from hidden [B,H], one head and one block at a time."""
        rows = []
        for head in range(self.weight.shape[1]):
            x = hidden
            for block in range(self.weight.shape[0]):
                z = x @ self.weight[block, head].T
                if self.bias is not None:
                    z = z + self.bias[block, head]
                x = x + z * torch.sigmoid(z)
            rows.append(x @ self.output[head].T)
        return torch.stack(rows)


def values(num_blocks: int = 1, *, bias: bool = True, one_output: bool = False) -> Values:
    """Random values; `one_output`: the same output layer for every head."""
    generator = torch.Generator().manual_seed(num_blocks)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    output = draw(1, V, H).repeat(K, 1, 1) if one_output else draw(K, V, H)
    biases = draw(num_blocks, K, H) if bias else None
    return Values(draw(num_blocks, K, H, H) / 4, biases, output)


def table(names: str, made: Values) -> dict[str, Tensor]:
    """Tensors under names: weights, biases and output layers each in the order of (head, block)."""
    flat = {
        "weight": list(made.weight.transpose(0, 1).flatten(0, 1)),
        "bias": [] if made.bias is None else list(made.bias.transpose(0, 1).flatten(0, 1)),
        "output": list(made.output),
    }
    content = {}
    for name in names.split():
        *_, stem, kind = name.split(".")
        is_output = "lm_head" in name or (stem.isdecimal() and "layers" not in name)
        content[name] = flat["output" if is_output else kind].pop(0).clone()
    return content


def base_tensors() -> dict[str, Tensor]:
    """A base model's tensors beside merged heads."""
    return {name: torch.randn(4, 4) for name in BASE_NAMES.split()}


def write(folder: Path, name: str, tensors: dict[str, Tensor], **config: Any) -> Path:
    """One weights file and a config.json, if anything is said in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / name)
    if config:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_shards(folder: Path, kind: str, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Two shards with their index: "safetensors" or "bin"."""
    stem = "model" if kind == "safetensors" else "pytorch_model"
    names = sorted(tensors)
    shards = {f"{stem}-0000{i + 1}-of-00002.{kind}": names[i::2] for i in range(2)}
    for shard, members in shards.items():
        write(folder, shard, {name: tensors[name] for name in members}, **config)
    places = {name: shard for shard, members in shards.items() for name in members}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
