"""Faults found by attacking: each test names a kind of input, not one value."""

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdeft import SpecDecoder
from specdeft.cli import main
from specdeft.config import GenerationConfig
from specdeft.heads.checkpoint import load_heads
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.model import TargetModel
from specdeft.sampling import gumbel_noise, noise_keys
from specdeft.trees.search import ValuedPaths
from specdeft.trees.token_tree import TokenTree
from specdeft.user_cache import damage
from tests.core.test_generate_command import save_tokenizer
from tests.core.tiny import (
    MAX_POSITIONS,
    VOCAB_SIZE,
    ByteTokenizer,
    SuccessorHeads,
    hf_greedy,
    prompt_ids,
    tiny_model,
)

PROMPT = [5, 6, 7]
CHAIN = TokenTree.chain(4)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def heads(**changes: Any) -> MedusaHeads:
    fields = {"num_heads": 4, "num_layers": 1, "hidden_size": 64, "vocab_size": VOCAB_SIZE}
    return MedusaHeads(HeadsConfig(**{**fields, **changes}))


# ---- sampling


def test_noise_is_finite_at_every_position() -> None:
    """24 random bits and a half do not fit a float32: the largest rounds to 1 and its noise to
    infinity, which draws one token whatever its probability."""
    noise = gumbel_noise(noise_keys(1, torch.tensor([0])), torch.tensor([[314, 382]]), 49152)
    assert bool(noise.isfinite().all())


@pytest.mark.parametrize("temperature", [1e-8, 1e-37, 1e-40, 1e-300])
def test_a_temperature_near_zero_is_greedy(model: Any, temperature: float) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    greedy = decoder.generate(PROMPT, max_new_tokens=12)
    near = decoder.generate(PROMPT, max_new_tokens=12, temperature=temperature)
    assert near.token_ids == greedy.token_ids


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e300},
        {"temperature": "0.7"},
        {"temperature": None},
        {"top_p": None},
        {"top_p": "0.5"},
        {"top_k": 2.5},
        {"top_k": float("nan")},
        {"top_k": "3"},
        {"seed": 2.5},
        {"seed": None},
        {"seed": "1"},
        {"stop": 5},
        {"stop": (5,)},
        {"stop": b"a"},
        {"eos_token_ids": "2"},
        {"eos_token_ids": (2, "3")},
        {"eos_token_ids": 2.0},
    ],
)
def test_a_setting_of_another_type_is_one_sentence(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        GenerationConfig(**fields)


def test_whole_numbers_of_numpy_are_whole_numbers(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    result = decoder.generate(
        PROMPT, max_new_tokens=np.int64(4), top_k=np.int64(5), temperature=0.7, seed=np.int64(3)
    )
    assert result.stats.num_new_tokens == 4


def test_one_end_token_needs_no_tuple() -> None:
    assert GenerationConfig(eos_token_ids=2).eos_token_ids == (2,)


@pytest.mark.parametrize("name", ["max_batch_size", "max_context"])
@pytest.mark.parametrize("size", [2.5, "4", True])
def test_a_size_that_is_no_whole_number_is_named(model: Any, name: str, size: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*give a whole number"):
        SpecDecoder(model, ByteTokenizer(), **{name: size})


# ---- prompts


def test_a_list_of_texts_where_one_is_taken_is_named(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    for one in (decoder.stream, decoder.plain):
        with pytest.raises(ValueError, match="give a list to generate"):
            one(["a", "b"], max_new_tokens=2)


@pytest.mark.parametrize("prompt", [np.array(PROMPT), [np.int64(token) for token in PROMPT]])
def test_ids_of_numpy_are_ids(model: Any, prompt: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    expected = decoder.generate(PROMPT, max_new_tokens=3).token_ids
    assert decoder.generate(prompt, max_new_tokens=3).token_ids == expected


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        b"abc",
        [1.0, 2.0],
        torch.tensor([[5], [6], [7]]),
        torch.tensor([True, False]),
        torch.zeros(3, dtype=torch.complex64),
        [{"content": "no role"}],
    ],
)
def test_what_is_no_prompt_is_one_sentence(model: Any, prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"prompt|message"):
        SpecDecoder(model, ByteTokenizer()).generate(prompt, max_new_tokens=2)


def test_a_batch_with_one_bad_prompt_computes_nothing(model: Any, monkeypatch: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    monkeypatch.setattr(type(decoder), "_start", lambda *_: pytest.fail("it began"))
    with pytest.raises(ValueError, match="not in the vocabulary"):
        decoder.generate([[5], [VOCAB_SIZE]], max_new_tokens=2)


# ---- statistics


def test_tau_is_never_negative(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    text = decoder.generate(PROMPT, max_new_tokens=12).text
    stats = decoder.generate(PROMPT, max_new_tokens=12, stop=text[:3]).stats
    assert stats.num_new_tokens == 0
    assert stats.tau >= 0
    assert stats.tokens_per_second >= 0


# ---- heads and models


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 32}, {"vocab_size": 50}, {"vocab_size": 500, "output": "own"}]
)
def test_heads_of_another_model_are_refused_by_the_constructor(
    model: Any, changes: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="heads"):
        SpecDecoder(model, ByteTokenizer(), heads(**changes), tree=CHAIN)


def test_heads_of_another_dtype_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="float64"):
        SpecDecoder(model, ByteTokenizer(), heads().double(), tree=CHAIN)


@pytest.mark.parametrize(
    "change", [{"num_heads": 2.5}, {"num_layers": 1.5}, {"num_heads": 10**18}, {"num_layers": 1.0}]
)
def test_a_heads_config_with_impossible_numbers_is_named(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    heads().save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=r"config\.json"):
        load_heads(tmp_path)


@pytest.mark.parametrize("by_layer_kind", [False, True])
def test_long_rope_stays_where_its_angles_do_not_change(by_layer_kind: bool) -> None:
    """Past the original context the angles of a whole forward change, those of drafted nodes and of
    other rows of the batch with it: the text would depend on them."""
    original = 48
    long_rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": original,
    }
    model = tiny_model("phi3", rope_parameters=long_rope, original_max_position_embeddings=original)
    if by_layer_kind:
        model.config.rope_parameters = {"full_attention": long_rope}
        assert TargetModel(model).max_context == original
        return
    prompts = [prompt_ids(original - 6), prompt_ids(5)]
    asked = {"max_new_tokens": 6, "ignore_eos": True}
    plain = SpecDecoder(model, ByteTokenizer(), lookup="off")
    expected = [plain.generate(prompt, **asked).token_ids for prompt in prompts]
    decoder = SpecDecoder(model, ByteTokenizer(), SuccessorHeads(expected), tree="deft-32")
    together = decoder.generate([torch.tensor(prompt) for prompt in prompts], **asked)
    assert [result.token_ids for result in together] == expected
    assert list(expected[0]) == hf_greedy(model, prompts[0], 6)
    with pytest.raises(ValueError, match=f"context of {original}: ask for at most 6"):
        decoder.generate(prompts[0], max_new_tokens=7)


# ---- inside transformers


def test_the_end_token_asked_for_ends_the_text(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    ids = torch.tensor([PROMPT])
    end = decoder.generate(PROMPT, max_new_tokens=12).token_ids[3]
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    ours = model.generate(ids, **asked, eos_token_id=end, custom_generate=decoder)
    assert torch.equal(ours, model.generate(ids, **asked, eos_token_id=end))


def test_rows_of_a_batch_are_drawn_independently(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    ids = torch.tensor([PROMPT, PROMPT])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=True,
        top_k=0,
        temperature=1.5,
        custom_generate=decoder,
    )
    assert not torch.equal(out[0], out[1])


def test_right_padding_is_refused_for_masks_of_any_dtype(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    with pytest.raises(ValueError, match="left only"):
        model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.tensor([[True, True, False]]),
            max_new_tokens=2,
            custom_generate=decoder,
        )


# ---- streams and threads


def test_a_stream_nobody_holds_frees_the_decoder(model: Any) -> None:
    """A worker thread breaks out of a stream and ends; nothing refers to the stream any more."""
    decoder = SpecDecoder(model, ByteTokenizer())

    def worker() -> None:
        for _piece in decoder.stream(PROMPT, max_new_tokens=9):
            break

    thread = threading.Thread(target=worker)
    thread.start()
    thread.join()
    assert decoder.generate(PROMPT, max_new_tokens=3).stats.num_new_tokens == 3


# ---- caches


def test_a_manifest_without_files_is_damage(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert damage(tmp_path) is not None
    (tmp_path / "manifest.json").write_text('{"files": {}}')
    assert damage(tmp_path) is not None


@pytest.mark.parametrize(
    "step_ms",
    ["{}", '{"4": 1.0}', '{"1": NaN, "2": 1}', '{"1": 0, "2": 0}', f'{{"1": 1{"0" * 400}}}'],
)
def test_step_times_that_cannot_be_are_measured_again(
    model: Any, tmp_path: Path, monkeypatch: Any, step_ms: str
) -> None:
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path))
    values = ValuedPaths(((0,), (0, 0), (1,)), (0.6, 0.4, 0.2))

    def tree() -> TokenTree:
        return SpecDecoder(model, ByteTokenizer(), heads(), tree_values=values).tree

    tree()
    (file,) = (tmp_path / "step_cost").iterdir()
    file.write_text(f'{{"step_ms": {step_ms}}}')
    assert tree().num_nodes >= 1
    known = json.loads(file.read_text())["step_ms"]
    assert set(known) == {"1", "2", "4"}
    assert all(0 < value < math.inf for value in known.values())


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    save_tokenizer(path, chat=True)
    return path


def test_compare_works_up_to_the_end_of_the_context(folder: Path, capsys: Any) -> None:
    prompt = "a" * (MAX_POSITIONS - 5)  # and the two brackets of the template
    code = main(["generate", prompt, "--model", str(folder), "--compare", "--max-new-tokens", "3"])
    assert code == 0, capsys.readouterr().err


@pytest.mark.parametrize("damage_it", ["truncated", "other sizes", "a tensor missing"])
def test_a_damaged_model_folder_is_one_sentence(
    folder: Path, capsys: Any, tmp_path: Path, damage_it: str
) -> None:
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    if damage_it == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage_it == "other sizes":
        config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 32}))
    else:
        tensors = load_file(weights)
        tensors.pop("model.layers.0.mlp.up_proj.weight")
        save_file(tensors, weights, metadata={"format": "pt"})
    assert main(["generate", "a", "--model", str(tmp_path), "--max-new-tokens", "2"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("specdeft: ")
    assert err.count("\n") == 1
