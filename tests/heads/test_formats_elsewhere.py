"""What other engines build from an exported folder, rebuilt from their documentation: modules with
their names, loaded strictly, compute the logits of our heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import silu

from specdeft.heads.formats.content import Source
from specdeft.heads.formats.writing import export_heads
from specdeft.heads.medusa import HeadsConfig, MedusaHeads

H, V, R = 16, 23, 6
CASES = [(1, 1, True), (3, 1, False), (4, 2, True), (5, 2, False)]


class Block(nn.Module):
    """A residual block whose layer is called `linear`, as in FasterDecoding's repository."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.linear(x))


class Chain(nn.Module):
    """vLLM's residual block: all layers of a head, called `layers`."""

    def __init__(self, num_layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H, bias=bias) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + silu(layer(x))
        return x


class VllmMedusa(nn.Module):
    """vLLM's draft model as its config describes it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        heads, layers = config["num_heads"], config["num_hidden_layers"]
        rows = config["truncated_vocab_size"] or config["vocab_size"]
        bias = config["medusa_fc_bias"]
        self.blocks = nn.ModuleList(Chain(layers, bias) for _ in range(heads))
        count = 1 if config["original_lm_head"] else heads
        self.lm_heads = nn.ModuleList(
            nn.Linear(config["hidden_size"], rows, bias=False) for _ in range(count)
        )
        self.token_map: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[K,B,V]; tokens outside the draft vocabulary cannot be drafted."""
        outputs = [*self.lm_heads] * (len(self.blocks) // len(self.lm_heads))
        rows = torch.stack(
            [output(block(hidden)) for block, output in zip(self.blocks, outputs, strict=True)]
        )
        if self.token_map is None:
            return rows
        whole = rows.new_full((*rows.shape[:-1], V), -torch.inf)
        whole[..., self.token_map] = rows
        return whole


def layer() -> nn.Linear:
    torch.manual_seed(4)
    return nn.Linear(H, V, bias=False)


def make(num_heads: int, num_layers: int, bias: bool, **changes: Any) -> MedusaHeads:
    config = HeadsConfig(num_heads, num_layers, H, V, **changes)
    ids = None if config.draft_vocab_size is None else torch.tensor([1, 4, 5, 9, 12, 19])
    heads = MedusaHeads(config, ids)
    torch.manual_seed(num_heads)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.3)
    if not bias:
        nn.init.zeros_(heads.block_bias)
    return heads.requires_grad_(False)


def ours(heads: MedusaHeads, hidden: Tensor) -> Tensor:
    rows: Tensor = heads.logits(heads.states(hidden, None), layer())
    if heads.draft_ids is None:
        return rows
    whole = rows.new_full((*rows.shape[:-1], V), -torch.inf)
    whole[..., heads.draft_ids] = rows
    return whole


@pytest.mark.parametrize(("num_heads", "num_layers", "bias"), CASES)
@pytest.mark.parametrize("output", ["own", "shared", "reduced", "own over a draft vocabulary"])
@pytest.mark.parametrize("projection", [False, True])
def test_vllm(
    tmp_path: Path, num_heads: int, num_layers: int, bias: bool, output: str, projection: bool
) -> None:
    kind = output.split()[0]
    size = R if output not in ("own", "shared") else None
    heads = make(
        num_heads, num_layers, bias, output=kind, draft_vocab_size=size, projection=projection
    )
    export_heads(Source(heads, layer(), "lab/base"), "vllm", tmp_path / "out")
    model = VllmMedusa(json.loads((tmp_path / "out" / "config.json").read_text()))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    model.token_map = tensors.pop("token_map", None)
    model.load_state_dict(tensors, strict=True)
    hidden = torch.randn(7, H)
    torch.testing.assert_close(model.logits(hidden), ours(heads, hidden))


@pytest.mark.parametrize("to", ["fasterdecoding", "tgi", "tensorrt-llm"])
@pytest.mark.parametrize(("num_heads", "num_layers", "bias"), CASES)
@pytest.mark.parametrize("output", ["own", "shared"])
@pytest.mark.parametrize("projection", [False, True])
def test_the_others(
    tmp_path: Path,
    to: str,
    num_heads: int,
    num_layers: int,
    bias: bool,
    output: str,
    projection: bool,
) -> None:
    heads = make(num_heads, num_layers, bias, output=output, projection=projection)
    export_heads(Source(heads, layer(), "lab/base"), to, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    blocks = range(config["medusa_num_layers"])
    model = nn.ModuleList(
        nn.Sequential(*[Block() for _ in blocks], nn.Linear(H, V, bias=False))
        for _ in range(config["medusa_num_heads"])
    )
    (file,) = (tmp_path / "out").glob("medusa_lm_head.*")
    tensors = torch.load(file, weights_only=True) if file.suffix == ".pt" else load_file(file)
    if to == "tgi" and output == "shared" and not projection and num_layers == 1:
        # TGI puts the base model's layer where the file has none.
        tensors |= {f"{head}.1.weight": layer().weight for head in range(num_heads)}
    model.load_state_dict(tensors, strict=True)
    hidden = torch.randn(7, H)
    logits = torch.stack([head(hidden) for head in model])
    torch.testing.assert_close(logits, ours(heads, hidden))
