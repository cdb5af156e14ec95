"""A Llama-architecture GGUF file as a Hugging Face model folder (fp32 safetensors).

transformers can read GGUF files too, but it refuses to save what it read, reads the file three
times, and its versions disagree on the tokenizer (5.17 takes another end-of-text token than 5.24
and decodes U+2581 as a space). Read directly, the folder is the same whatever versions are there.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

# GGUF's name for a tensor of the model, and of layer i below "blk.{i}.".
_MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# GGUF's token type of a control token such as <|im_end|>.
_CONTROL = 3


def convert_llama_gguf(gguf: Path, folder: Path) -> None:
    """Write model, configuration, tokenizer and chat template of ``gguf`` into ``folder``.

    Covers what the embedded model needs: Llama, tied embeddings, byte-level BPE of SmolLM.
    Raises ValueError where the file is of another kind or the package gguf is missing.
    """
    fields, tensors = _read(gguf)
    kind = (fields("general.architecture"), fields("tokenizer.ggml.pre"))
    if kind != ("llama", "smollm") or "output.weight" in tensors:
        raise ValueError(
            f"{gguf.name} holds {kind}: only a Llama with tied embeddings and SmolLM's tokenizer "
            "is read here; convert it with its own tools and give the folder's path"
        )
    config = _config(fields)
    _write_weights(tensors, config, folder)
    _write_tokenizer(fields, config, folder)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config", config), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read(gguf: Path) -> tuple[Callable[[str], Any], dict[str, Any]]:
    """The file's metadata as a function of the key, and its (still quantised) tensors by name."""
    try:
        importlib.metadata.version("gguf")
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            "reading the embedded model needs the package gguf, which is missing: "
            "run: pip install 'specdeft[demo]'"
        ) from error
    from gguf import GGUFReader

    reader = GGUFReader(gguf)

    def fields(key: str) -> Any:
        return reader.fields[key].contents()

    return fields, {tensor.name: tensor for tensor in reader.tensors}


def _config(fields: Callable[[str], Any]) -> dict[str, Any]:
    """config.json of the same model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": fields("llama.vocab_size"),
        "hidden_size": fields("llama.embedding_length"),
        "intermediate_size": fields("llama.feed_forward_length"),
        "num_hidden_layers": fields("llama.block_count"),
        "num_attention_heads": fields("llama.attention.head_count"),
        "num_key_value_heads": fields("llama.attention.head_count_kv"),
        "head_dim": fields("llama.rope.dimension_count"),
        "max_position_embeddings": fields("llama.context_length"),
        "rms_norm_eps": fields("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields("llama.rope.freq_base")},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields("tokenizer.ggml.padding_token_id"),
    }


def _write_weights(tensors: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file
    from tqdm import tqdm

    rotated_heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    weights = {}
    for name, tensor in tqdm(tensors.items(), desc="converting", unit="tensor"):
        # Copied, since an unquantised tensor is a view of the read-only file.
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if num_heads := rotated_heads.get(name.split(".")[-2]):
            weight = _halves_apart(weight, num_heads)
        weights[_hf_name(name)] = weight.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    *layer, kind, suffix = name.split(".")
    if layer:
        return f"model.layers.{layer[1]}.{_LAYER_TENSORS[kind]}.{suffix}"
    return f"{_MODEL_TENSORS[kind]}.{suffix}"


def _halves_apart(weight: Any, num_heads: int) -> Any:
    """Reorder the rows of a query or key projection, [heads * D, hidden], for transformers.

    GGUF keeps the two numbers that a rotary angle turns side by side (rows 2i, 2i + 1 of a head);
    transformers keeps them D/2 apart (rows i, i + D/2).
    """
    hidden = weight.shape[1]
    pairs = weight.view(num_heads, -1, 2, hidden)
    return pairs.transpose(1, 2).reshape(-1, hidden)


def _write_tokenizer(fields: Callable[[str], Any], config: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    words = fields("tokenizer.ggml.tokens")
    backend = _byte_level_bpe(words, fields("tokenizer.ggml.merges"))
    types = fields("tokenizer.ggml.token_type")
    control = [word for word, kind in zip(words, types, strict=True) if kind == _CONTROL]
    backend.add_special_tokens(
        [AddedToken(word, normalized=False, special=True) for word in control]
    )
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=words[config["bos_token_id"]],
        eos_token=words[config["eos_token_id"]],
        pad_token=words[config["pad_token_id"]],
        unk_token=words[fields("tokenizer.ggml.unknown_token_id")],
        model_max_length=config["max_position_embeddings"],
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields("tokenizer.chat_template")
    tokenizer.save_pretrained(folder)


def _byte_level_bpe(words: list[str], merges: list[str]) -> Any:
    """GPT-2's byte-level BPE with every digit on its own, as SmolLM was trained."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {word: index for index, word in enumerate(words)}
    pairs = []
    for merge in merges:
        left, right = merge.split(" ", 1)
        pairs.append((left, right))
    backend = Tokenizer(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend
