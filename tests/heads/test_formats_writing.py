"""Every format written, read and compared; what a format cannot say is refused before a file is."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdeft.heads.formats.content import Source
from specdeft.heads.formats.hub import export_to_hub
from specdeft.heads.formats.writing import WRITERS, export_heads
from specdeft.heads.medusa import HeadsConfig, MedusaHeads

H, V, R = 16, 23, 6
BASE = "lab/base-model"
FILES = {
    "fasterdecoding": "medusa_lm_head.pt",
    "vllm": "model.safetensors",
    "tgi": "medusa_lm_head.safetensors",
    "tensorrt-llm": "medusa_lm_head.safetensors",
}


def layer(bias: bool = False) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(H, V, bias=bias)


def make(num_heads: int = 3, num_layers: int = 1, *, bias: bool = True, **changes: Any) -> Any:
    config = HeadsConfig(num_heads, num_layers, H, V, base_model=BASE, **changes)
    ids = None if config.draft_vocab_size is None else torch.tensor([1, 4, 5, 9, 12, 19])
    heads = MedusaHeads(config, ids)
    generator = torch.Generator().manual_seed(num_heads)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        if not bias:
            heads.block_bias.zero_()
    return heads.requires_grad_(False)


def logits(heads: MedusaHeads, output: nn.Linear) -> Tensor:
    hidden = torch.randn(5, H, generator=torch.Generator().manual_seed(9))
    rows: Tensor = heads(hidden, torch.zeros(5, dtype=torch.int64), nn.Embedding(V, H), output)
    return rows


def load(folder: Path, output: nn.Linear | None = None) -> MedusaHeads:
    known = None if output is None else output.weight
    return MedusaHeads.load(folder, hidden_size=H, vocab_size=V, output_weight=known)


@pytest.mark.parametrize("to", list(WRITERS))
@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_layers", [0, 1, 2])
@pytest.mark.parametrize("output", ["shared", "own"])
@pytest.mark.parametrize("bias", [True, False])
def test_round_trip(
    tmp_path: Path, to: str, num_heads: int, num_layers: int, output: str, bias: bool
) -> None:
    heads, out = make(num_heads, num_layers, bias=bias, output=output), layer()
    files = export_heads(Source(heads, out, BASE), to, tmp_path / "out")
    assert files == tuple(sorted([FILES[to], "config.json"]))
    again = load(tmp_path / "out", out)
    assert again.config == heads.config
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert torch.equal(logits(again, out), logits(heads, out))
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("to", list(WRITERS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tied_blocks_and_16_bit_weights(tmp_path: Path, to: str, dtype: torch.dtype) -> None:
    heads = make(2, 2, output="own")
    heads.block_weight[1], heads.block_bias[1] = heads.block_weight[0], heads.block_bias[0]
    heads = heads.to(dtype)
    export_heads(Source(heads, None, BASE), to, tmp_path / "out")
    again = MedusaHeads.load(tmp_path / "out", dtype=dtype)
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize("to", list(WRITERS))
@pytest.mark.parametrize("output", ["shared", "own"])
def test_a_projection_is_folded_into_the_output_layer(tmp_path: Path, to: str, output: str) -> None:
    heads, out = make(output=output, projection=True), layer()
    export_heads(Source(heads, out, BASE), to, tmp_path / "out")
    again = load(tmp_path / "out", out)
    assert not again.config.projection
    assert again.config.output == "own"
    # One fp32 product in another order: H terms, so some H units in the last place.
    torch.testing.assert_close(logits(again, out), logits(heads, out), rtol=H * 2e-7, atol=1e-6)


@pytest.mark.parametrize(
    ("output", "projection", "read_as"),
    [("reduced", False, "reduced"), ("reduced", True, "own"), ("own", False, "own")],
)
def test_vllm_holds_a_draft_vocabulary(
    tmp_path: Path, output: str, projection: bool, read_as: str
) -> None:
    heads = make(output=output, projection=projection, draft_vocab_size=R)
    out = layer()
    export_heads(Source(heads, out, BASE), "vllm", tmp_path / "out")
    again = load(tmp_path / "out", out)
    assert again.config.output == read_as
    assert again.draft_ids is not None
    assert heads.draft_ids is not None
    assert torch.equal(again.draft_ids, heads.draft_ids)
    torch.testing.assert_close(logits(again, out), logits(heads, out), rtol=H * 2e-7, atol=1e-6)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["truncated_vocab_size"], config["vocab_size"]) == (R, V)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["token_map"].dtype == torch.int64
    assert stored["lm_heads.0.weight"].shape == (R, H)


# The names that vLLM's Medusa model gives its parameters, for 2 heads of 2 layers; and the keys
# of its config, where any other one with "num" beside "heads" or "layers" would be taken for them.
VLLM_NAMES = """
blocks.0.layers.0.weight blocks.0.layers.0.bias blocks.0.layers.1.weight blocks.0.layers.1.bias
blocks.1.layers.0.weight blocks.1.layers.0.bias blocks.1.layers.1.weight blocks.1.layers.1.bias
lm_heads.0.weight lm_heads.1.weight
"""


def test_vllm_names_key_by_key(tmp_path: Path) -> None:
    heads = make(2, 2, output="own")
    export_heads(Source(heads, None, BASE), "vllm", tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert set(stored) == set(VLLM_NAMES.split())
    for head in range(2):
        for block in range(2):
            stem = f"blocks.{head}.layers.{block}"
            assert torch.equal(stored[f"{stem}.weight"], heads.block_weight[block, head])
            assert torch.equal(stored[f"{stem}.bias"], heads.block_bias[block, head])
        assert torch.equal(stored[f"lm_heads.{head}.weight"], heads.output_weight[head])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": H,
        "vocab_size": V,
        "truncated_vocab_size": None,
        "num_heads": 2,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "base_model_name_or_path": BASE,
    }


def test_vllm_shared_output_layer_is_stored_once(tmp_path: Path) -> None:
    out = layer()
    export_heads(Source(make(3, bias=False), out, BASE), "vllm", tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    blocks = {f"blocks.{head}.layers.0.weight" for head in range(3)}
    assert set(stored) == blocks | {"lm_heads.0.weight"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["original_lm_head"], config["medusa_fc_bias"]) == (True, False)


def test_vllm_reads_its_config_as_meant(tmp_path: Path) -> None:
    """Its rule: a key with "num" and "heads" is num_heads, one with "num" and "layers" is
    num_hidden_layers, the last one wins."""
    export_heads(Source(make(2, 2, output="own"), None, BASE), "vllm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    counted = {
        key: "heads" if "heads" in key else "layers"
        for key in config
        if "num" in key and ("heads" in key or "layers" in key)
    }
    assert counted == {"num_heads": "heads", "num_hidden_layers": "layers"}


@pytest.mark.parametrize("to", ["fasterdecoding", "tgi", "tensorrt-llm"])
def test_names_and_config_of_the_others(tmp_path: Path, to: str) -> None:
    heads = make(2, 2, bias=False, output="own")
    export_heads(Source(heads, None, BASE), to, tmp_path / "out")
    path = tmp_path / "out" / FILES[to]
    stored = torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path)
    blocks = {
        f"{head}.{block}.linear.{kind}"
        for head in range(2)
        for block in range(2)
        for kind in ("weight", "bias")
    }
    assert set(stored) == blocks | {"0.2.weight", "1.2.weight"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "base_model_name_or_path": BASE,
        "medusa_num_heads": 2,
        "num_medusa_heads": 2,
        "medusa_num_layers": 2,
    }


def test_tgi_needs_no_output_layer_for_one_shared_block(tmp_path: Path) -> None:
    export_heads(Source(make(2), None, BASE), "tgi", tmp_path / "out")
    stored = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    assert set(stored) == {f"{i}.0.linear.{kind}" for i in range(2) for kind in ("weight", "bias")}


class FakeTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    source = Source(make(output="own"), None, BASE, FakeTokenizer())
    assert "tokenizer.json" in export_heads(source, "tgi", tmp_path / "out")


@pytest.mark.parametrize("to", list(WRITERS))
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_input": True, "sequential": True}, "sequential.*--no-token-input"),
        ({"token_input": True}, "token just decided.*--no-token-input"),
    ],
)
def test_what_no_format_can_say_is_refused(
    tmp_path: Path, to: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        export_heads(Source(make(**changes), layer(), BASE), to, tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("to", "source", "message"),
    [
        (
            "tgi",
            Source(make(output="reduced", draft_vocab_size=R), layer(), BASE),
            "part of the vocabulary.*--to vllm",
        ),
        ("fasterdecoding", Source(make(), None, BASE), "--model"),
        ("vllm", Source(make(), None, BASE), "--model"),
        ("vllm", Source(make(projection=True), None, BASE), "--model"),
        ("vllm", Source(make(), layer(bias=True), BASE), "has a bias"),
        ("vllm", Source(make(), nn.Linear(H, V + 1, bias=False), BASE), "another model|trained on"),
        ("tensorrt-llm", Source(make(output="own"), None, ""), "--base-model"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, to: str, source: Source, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_heads(source, to, tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["a file", "a folder with a file"])
def test_nothing_is_overwritten(tmp_path: Path, what: str) -> None:
    out = tmp_path / "out"
    kept = out if what == "a file" else out / "kept"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        export_heads(Source(make(output="own"), None, BASE), "vllm", out)
    assert kept.read_text() == "mine"
    assert len(list(tmp_path.rglob("*"))) == (1 if what == "a file" else 2)


def test_a_write_that_changed_something_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one bias differs in the file: nothing is left behind."""

    def wrong(tensors: dict[str, Tensor], *rest: Any, **more: Any) -> None:
        tensors["1.0.linear.bias"][3] = torch.nextafter(
            tensors["1.0.linear.bias"][3], torch.tensor(9.0)
        )
        save_file(tensors, *rest, **more)

    monkeypatch.setattr("specdeft.heads.formats.writing.save_file", wrong)
    with pytest.raises(ValueError, match="not what was written"):
        export_heads(Source(make(output="own"), None, BASE), "tgi", tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_hub_folder_holds_what_was_measured(tmp_path: Path) -> None:
    origin = tmp_path / "heads"
    heads = make(output="reduced", draft_vocab_size=R, token_input=True, sequential=True)
    heads.save(origin)
    record = {
        "command": ["specdeft", "train", "--output", "/somewhere/private/heads"],
        "environment": {"torch": "2.13"},
        "result": {"top1": [0.5, 0.25, 0.125], "tau": {"16": 2.25}},
    }
    (origin / "training_record.json").write_text(json.dumps(record))
    (origin / "tree_values.json").write_text('{"paths": [[0], [0, 0]], "values": [0.5, 0.2]}')
    report = tmp_path / "report.md"
    report.write_text("# Latency\n\n| tau |\n| --- |\n| 1.95 |\n")
    files = export_to_hub(heads, origin, tmp_path / "out", BASE, (report,))
    assert files == (
        "README.md",
        "config.json",
        "model.safetensors",
        "training_record.json",
        "tree_values.json",
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: specdeft\n")
    assert f"base_model: {BASE}\n" in card
    assert "| top1 | 0.500 | 0.250 | 0.125 |" in card
    assert "2.25 with 16 nodes" in card
    assert "## Latency" in card
    assert "1.95" in card
    assert "private" not in (tmp_path / "out" / "training_record.json").read_text()
    again = MedusaHeads.load(tmp_path / "out")
    assert again.config == heads.config


def test_hub_card_invents_nothing(tmp_path: Path) -> None:
    origin = tmp_path / "heads"
    heads = make()
    heads.save(origin)
    export_to_hub(heads, origin, tmp_path / "out", "")
    assert "Nothing was measured" in (tmp_path / "out" / "README.md").read_text()


def test_a_base_model_name_cannot_write_the_card(tmp_path: Path) -> None:
    evil = 'x", heads=None); evil()\n---\nlicense: stolen\n<script>'
    heads = make()
    heads.save(tmp_path / "heads")
    export_to_hub(heads, tmp_path / "heads", tmp_path / "out", evil)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.count("\n---\n") == 1
    assert "\nlicense" not in card
    (line,) = (line for line in card.splitlines() if line.startswith("decoder ="))
    call = ast.parse(line).body[0].value  # type: ignore[attr-defined]
    assert [argument.value for argument in call.args] == [evil.replace("\n", "?")]
