"""Published layouts of Medusa heads load, and compute what their tensors say."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdeft.heads.medusa import MedusaHeads
from tests.heads.formats_fixtures import (
    BASE,
    F1,
    F1_TWO_BLOCKS,
    F2,
    F4,
    F5,
    F5_NO_BIAS,
    F5_ORIGINAL,
    F5_PREFIXED,
    F7,
    F8,
    F9,
    H,
    K,
    V,
    Values,
    base_tensors,
    table,
    values,
    write,
    write_shards,
)

TGI = {"base_model_name_or_path": BASE, "medusa_num_heads": 3, "medusa_num_layers": 1}
VLLM = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": H,
    "vocab_size": V,
    "num_heads": 3,
    "num_hidden_layers": 1,
    "medusa_fc_bias": True,
}
MERGED = {"model_type": "llama", "medusa_num_heads": 3, "medusa_num_layers": 1}
MODELOPT = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "medusa": {"num_medusa_heads": 3, "num_medusa_layers": 1},
}


def check(path: Path, made: Values, **load: Any) -> MedusaHeads:
    """Loaded without a notice, the heads give the logits of the values."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heads = MedusaHeads.load(path, hidden_size=H, vocab_size=V, **load)
    assert_logits(heads, made)
    return heads


def assert_logits(heads: MedusaHeads, made: Values, output: Tensor | None = None) -> None:
    hidden = torch.randn(5, H)
    layer = nn.Linear(H, V, bias=False)
    layer.weight = nn.Parameter(made.output[0] if output is None else output)
    logits = heads(hidden, torch.zeros(5, dtype=torch.int64), nn.Embedding(V, H), layer)
    torch.testing.assert_close(logits, made.logits(hidden))
    assert not any(parameter.requires_grad for parameter in heads.parameters())


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_fasterdecoding_counts_heads_from_the_file(tmp_path: Path, file: str) -> None:
    """The published config says 2 heads of the 5 in the file (here of 3)."""
    made = values()
    write(tmp_path, file, table(F1, made), **{**TGI, "medusa_num_heads": 2})
    with pytest.warns(UserWarning, match="says heads 2 for 3 in the file"):
        heads = MedusaHeads.load(tmp_path, hidden_size=H, vocab_size=V)
    assert_logits(heads, made)
    assert heads.config.num_heads == K
    assert heads.config.output == "own"
    assert heads.config.base_model == BASE


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_two_blocks(tmp_path: Path, file: str) -> None:
    made = values(2)
    write(tmp_path, file, table(F1_TWO_BLOCKS, made), **{**TGI, "medusa_num_layers": 2})
    assert check(tmp_path, made).config.num_layers == 2


def test_tied_blocks_load(tmp_path: Path) -> None:
    """FasterDecoding repeats one block n times: n names of one storage."""
    made = values(2)
    assert made.bias is not None
    made.weight[1], made.bias[1] = made.weight[0], made.bias[0]
    tensors = table(F1_TWO_BLOCKS, made)
    for head in range(K):
        for kind in ("weight", "bias"):
            tensors[f"{head}.1.linear.{kind}"] = tensors[f"{head}.0.linear.{kind}"]
    write(tmp_path, "medusa_lm_head.pt", tensors)
    check(tmp_path, made)


def test_legacy_version_2_shares_the_targets_output_layer(tmp_path: Path) -> None:
    made = values(one_output=True)
    write(tmp_path, "medusa_lm_head.safetensors", table(F2, made), **TGI, version="2")
    heads = check(tmp_path, made)
    assert heads.config.output == "shared"
    assert heads.output_weight is None


def test_tgi(tmp_path: Path) -> None:
    made = values()
    check(write(tmp_path, "medusa_lm_head.safetensors", table(F1, made), **TGI), made)


@pytest.mark.parametrize("where", ["single", "safetensors", "bin"])
def test_merged_medusa_2(tmp_path: Path, where: str) -> None:
    made = values()
    tensors = {**table(F4, made), **base_tensors()}
    if where == "single":
        write(tmp_path, "model.safetensors", tensors, **MERGED)
    else:
        write_shards(tmp_path, where, tensors, **MERGED)
    check(tmp_path, made)


@pytest.mark.parametrize(("names", "bias"), [(F5, True), (F5_NO_BIAS, False), (F5_PREFIXED, False)])
def test_vllm(tmp_path: Path, names: str, bias: bool) -> None:
    made = values(bias=bias)
    config = {**VLLM, "medusa_fc_bias": bias}
    heads = check(write(tmp_path, "model.safetensors", table(names, made), **config), made)
    assert bool(heads.block_bias.any()) == bias


def test_vllm_sharded(tmp_path: Path) -> None:
    made = values()
    check(write_shards(tmp_path, "safetensors", table(F5, made), **VLLM), made)


def test_vllm_with_one_output_layer(tmp_path: Path) -> None:
    made = values(one_output=True)
    config = {**VLLM, "original_lm_head": True}
    write(tmp_path, "model.safetensors", table(F5_ORIGINAL, made), **config)
    assert check(tmp_path, made).config.output == "own"
    shared = check(tmp_path, made, output_weight=made.output[0])
    assert shared.config.output == "shared"


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_vllm_draft_vocabulary(tmp_path: Path, whole: bool, known: bool) -> None:
    """`token_map` beside rows of its own, or beside whole output layers it takes rows of."""
    ids = torch.tensor([2, 3, 5, 7, 11])
    made = values(one_output=True)
    tensors = table(F5, made)
    tensors["token_map"] = ids
    if not whole:
        for head in range(K):
            name = f"lm_heads.{head}.weight"
            tensors[name] = tensors[name][ids].clone()
    write(tmp_path, "model.safetensors", tensors, **VLLM, truncated_vocab_size=5)
    target = made.output[0] if known else None
    heads = MedusaHeads.load(tmp_path, hidden_size=H, output_weight=target)
    assert heads.config.output == ("reduced" if known else "own")
    assert heads.config.vocab_size == V
    layer = nn.Linear(H, V, bias=False)
    layer.weight = nn.Parameter(made.output[0])
    hidden, root = torch.randn(4, H), torch.zeros(4, dtype=torch.int64)
    embed = nn.Embedding(V, H)
    torch.testing.assert_close(heads(hidden, root, embed, layer), made.logits(hidden)[..., ids])
    drafted = heads.draft(hidden, root, embed, layer, 5)
    assert set(drafted.unique().tolist()) <= set(ids.tolist())


def test_modelopt(tmp_path: Path) -> None:
    made = values()
    tensors = {**table(F7, made), **base_tensors()}
    check(write(tmp_path, "model.safetensors", tensors, **MODELOPT), made)


def test_modelopt_float8_times_its_scale(tmp_path: Path) -> None:
    made = values()
    tensors = table(F7, made)
    for name in [name for name in tensors if name.endswith("weight")]:
        scale = tensors[name].abs().max() / 448
        packed = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[name].copy_(packed.float() * scale)  # what the file means
        made_from = tensors[name]
        tensors[name] = packed
        tensors[name.removesuffix("weight") + "weight_scale"] = scale.reshape(1)
        tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        _, head, block, *rest = name.split(".")
        if rest == ["weight"]:
            made.output[int(head)] = made_from
        else:
            made.weight[int(block), int(head)] = made_from
    check(write(tmp_path, "heads.safetensors", tensors, **MODELOPT), made)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensorrt_llm_checkpoint(tmp_path: Path, ranks: int) -> None:
    """Column-parallel slices of every tensor; V = 23 is cut as 11 and 11 and so 22 are left."""
    made = values()
    whole = table(F8, made)
    for rank in range(ranks):
        slices = {
            name: tensor[rank * (len(tensor) // ranks) :][: len(tensor) // ranks].clone()
            for name, tensor in whole.items()
        }
        write(tmp_path, f"rank{rank}.safetensors", slices, num_medusa_heads=3)
    if ranks == 1:
        check(tmp_path, made)
        return
    with pytest.warns(UserWarning, match="22 output rows and the model 23"):
        heads = MedusaHeads.load(tmp_path, hidden_size=H, vocab_size=V)
    assert heads.draft_ids is not None
    hidden = torch.randn(3, H)
    logits = heads.logits(heads.states(hidden, None), nn.Linear(H, V))
    torch.testing.assert_close(logits, made.logits(hidden)[..., :22])


def test_heads_counted_from_one(tmp_path: Path) -> None:
    made = values()
    write(tmp_path, "medusa_lm_head.safetensors", table(F9, made), **TGI)
    with pytest.warns(UserWarning, match="counts its heads from 1"):
        heads = MedusaHeads.load(tmp_path, hidden_size=H, vocab_size=V)
    assert_logits(heads, made)


@pytest.mark.parametrize("wrapper", ["module.", "model.", "module.model.", "base_model.model."])
def test_wrappers_of_training_frameworks_are_stripped(tmp_path: Path, wrapper: str) -> None:
    made = values()
    tensors = {wrapper + name: tensor for name, tensor in table(F1, made).items()}
    check(write(tmp_path, "medusa_lm_head.safetensors", tensors), made)


@pytest.mark.parametrize("file", ["any-name.pt", "any-name.safetensors", "any-name"])
def test_a_single_file_of_any_name(tmp_path: Path, file: str) -> None:
    made = values()
    write(tmp_path, file, table(F1, made))
    check(tmp_path / file, made)


def test_a_file_without_biases_says_so(tmp_path: Path) -> None:
    made = values(bias=False)
    names = " ".join(name for name in F1.split() if not name.endswith("bias"))
    write(tmp_path, "medusa_lm_head.safetensors", table(names, made))
    with pytest.warns(UserWarning, match="no biases"):
        heads = MedusaHeads.load(tmp_path, vocab_size=V)
    assert_logits(heads, made)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_asked_for_is_given(tmp_path: Path, stored: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in table(F1, values()).items()}
    write(tmp_path, "medusa_lm_head.safetensors", tensors)
    heads = MedusaHeads.load(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("rows", [V - 1, V + 4])
def test_padding_of_the_vocabulary_is_no_difference(tmp_path: Path, rows: int) -> None:
    made = values()
    padded = Values(made.weight, made.bias, torch.randn(K, rows, H))
    write(tmp_path, "medusa_lm_head.safetensors", table(F1, padded))
    with pytest.warns(UserWarning, match=f"{rows} output rows and the model {V}"):
        heads = MedusaHeads.load(tmp_path, vocab_size=V)
    hidden = torch.randn(3, H)
    kept = min(rows, V)
    assert heads.config.num_logits == kept
    logits = heads.logits(heads.states(hidden, None), nn.Linear(H, V))
    torch.testing.assert_close(logits, padded.logits(hidden)[..., :kept])


def test_safetensors_come_before_their_twin(tmp_path: Path) -> None:
    made = values()
    write(tmp_path, "medusa_lm_head.safetensors", table(F1, made))
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"not even opened")
    check(tmp_path, made)
