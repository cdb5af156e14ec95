"""Heads of every format inside the decoder: the text stays plain decoding's, token for token."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdeft import SpecDecoder
from specdeft.cli import main
from specdeft.heads.formats.content import Source
from specdeft.heads.formats.writing import WRITERS, export_heads
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.trees.token_tree import TokenTree
from tests.core.test_generate_command import save_tokenizer
from tests.core.tiny import VOCAB_SIZE, tiny_model

TREE = TokenTree.full([3, 2, 1])
PROMPT = "Hello there"


@pytest.fixture(scope="module", params=["llama", "llama-tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(path)
    save_tokenizer(path, chat=False)
    return path


def made(output: str) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsConfig(3, 1, 64, VOCAB_SIZE, output, base_model="tiny"))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return heads.requires_grad_(False)


@pytest.mark.parametrize("to", list(WRITERS))
@pytest.mark.parametrize("output", ["shared", "own"])
def test_exported_heads_decode_losslessly(
    folder: Path, tmp_path: Path, to: str, output: str
) -> None:
    plain = SpecDecoder.from_pretrained(folder, dtype="float32")
    layer = plain.model.get_output_embeddings()
    export_heads(Source(made(output), layer, "tiny"), to, tmp_path / "heads")
    decoder = SpecDecoder.from_pretrained(
        folder, heads=tmp_path / "heads", dtype="float32", tree=TREE
    )
    assert decoder.heads is not None
    assert decoder.heads.config.output == output
    for settings in ({}, {"temperature": 1.0, "seed": 3}):
        ours = decoder.generate(PROMPT, max_new_tokens=40, **settings)
        assert ours.token_ids == plain.generate(PROMPT, max_new_tokens=40, **settings).token_ids
        assert ours.stats.tau >= 1


def test_a_merged_model_is_model_and_heads_at_once(folder: Path, tmp_path: Path) -> None:
    """Medusa-2: the heads' tensors stand in the model's own files."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    heads = made("own")
    assert heads.output_weight is not None
    tensors = load_file(folder / "model.safetensors")
    for head in range(3):
        stem = f"medusa_head.{head}"
        tensors[f"{stem}.0.linear.weight"] = heads.block_weight[0, head].clone()
        tensors[f"{stem}.0.linear.bias"] = heads.block_bias[0, head].clone()
        tensors[f"{stem}.1.weight"] = heads.output_weight[head].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    decoder = SpecDecoder.from_pretrained(tmp_path, heads=tmp_path, dtype="float32", tree=TREE)
    assert decoder.heads is not None
    assert torch.equal(decoder.heads.block_weight, heads.block_weight)
    ours = decoder.generate(PROMPT, max_new_tokens=30)
    plain = SpecDecoder.from_pretrained(folder, dtype="float32")
    assert ours.token_ids == plain.generate(PROMPT, max_new_tokens=30).token_ids


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_exports_and_generate_reads(folder: Path, tmp_path: Path, capsys: Any) -> None:
    made("shared").save(tmp_path / "ours")
    out = tmp_path / "vllm"
    code, text, err = run(
        capsys, "export", str(tmp_path / "ours"), "--to", "vllm", "--model", str(folder),
        "--out", str(out),
    )  # fmt: skip
    assert code == 0, err
    assert "read again and found equal" in text
    assert '"method": "medusa"' in text
    assert '"num_speculative_tokens": 3' in text
    assert err == ""
    tree = tmp_path / "tree.json"
    TREE.save(tree)
    code, _, err = run(
        capsys, "generate", PROMPT, "--model", str(folder), "--heads", str(out), "--dtype",
        "float32", "--tree", str(tree), "--max-new-tokens", "20", "--compare",
    )  # fmt: skip
    assert code == 0, err
    assert "identical to plain decoding: yes" in err


def test_a_file_of_any_format_can_be_exported_again(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    made("own").save(tmp_path / "ours")
    previous = str(tmp_path / "ours")
    for to in ("fasterdecoding", "tgi", "vllm", "tensorrt-llm", "hub"):
        out = str(tmp_path / to)
        code, _, err = run(
            capsys, "export", previous, "--to", to, "--out", out, "--base-model", "lab/tiny"
        )
        assert code == 0, err
        previous = out
    again, ours = MedusaHeads.load(tmp_path / "hub"), MedusaHeads.load(tmp_path / "ours")
    assert again.config.base_model == "lab/tiny"
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ours", "--to", "vllm", "--out", "out"], "--model"),
        (["smollm2-135m", "--to", "vllm", "--out", "out"], "--no-token-input"),
        (["nowhere", "--to", "vllm", "--out", "out"], "nothing of that name"),
        (["ours", "--to", "tgi", "--out", "ours", "--base-model", "a/b"], "not empty"),
        (["ours", "--to", "tgi", "--out", "out", "--report", "r.md"], "--to hub"),
    ],
)
def test_refusals_are_one_sentence(
    tmp_path: Path, capsys: Any, monkeypatch: Any, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    made("shared").save("ours")
    code, text, err = run(capsys, "export", *arguments)
    assert (code, text) == (2, "")
    assert message in err
    assert err.startswith("specdeft: ")
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


@pytest.mark.filterwarnings("default")  # elsewhere a notice of ours is an error
def test_a_notice_is_one_line(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """A published config that is wrong about its heads, and heads that are never right."""
    heads = made("own")
    torch.nn.init.zeros_(heads.output_weight)
    export_heads(Source(heads, None, "tiny"), "tgi", tmp_path / "heads")
    config = tmp_path / "heads" / "config.json"
    config.write_text(config.read_text().replace('"medusa_num_heads": 3', '"medusa_num_heads": 2'))
    code, _, err = run(
        capsys, "generate", PROMPT, "--model", str(folder), "--heads", str(tmp_path / "heads"),
        "--tree", "chain-3", "--max-new-tokens", "40", "--dtype", "float32",
    )  # fmt: skip
    assert code == 0, err
    lines = err.splitlines()
    assert [line for line in lines if "says heads 2 for 3" in line and "specdeft: " in line]
    assert not [line for line in lines if ".py:" in line]
    assert [line for line in lines if "not one drafted token was right" in line]


def test_the_serving_line_can_be_pasted(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Names out of files and folders of others stay one argument each."""
    monkeypatch.chdir(tmp_path)
    made("own").save("ours")
    base, out = "lab/base; touch pasted $(id)", "my heads' copy"
    code, text, err = run(
        capsys, "export", "ours", "--to", "vllm", "--out", out, "--base-model", base
    )
    assert code == 0, err
    words = shlex.split(text.splitlines()[1])
    assert words[:4] == ["serve:", "vllm", "serve", base]
    assert json.loads(words[5])["model"] == out
    assert text.splitlines()[2:] == ["with vLLM up to 0.32: 0.33 serves no Medusa heads any more"]
    config = replace(made("own").config, draft_vocab_size=8)
    MedusaHeads(config, torch.arange(8)).save("small")
    code, text, err = run(capsys, "export", "small", "--to", "vllm", "--out", "narrow")
    assert code == 0, err
    assert "refuses to load one (token_map)" in text.splitlines()[-1]
