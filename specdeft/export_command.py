"""`specdeft export`: heads in the formats of other engines, or a folder ready to be published."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdeft.default_model import DEFAULT_MODELS
from specdeft.trees.options import Options

FORMATS = ("fasterdecoding", "vllm", "tgi", "tensorrt-llm", "hub")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = Options(
        prog="specdeft export",
        description="Write draft heads in another engine's format, read them again and compare "
        "bit for bit. Heads of any known format can be read.",
        epilog="Example: specdeft export my-heads --to vllm --model Qwen/Qwen3-0.6B --out "
        "my-heads-vllm. What each format can express: docs/formats.md. SGLang serves no Medusa "
        "heads.",
    )
    add = options.add_argument
    add(
        "heads",
        metavar="HEADS",
        help=f"folder, file, hub id, or {', '.join(DEFAULT_MODELS)}",
    )
    add("--to", required=True, choices=FORMATS, help="the format")
    add("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    add(
        "--model",
        help="the heads' model (name, Hugging Face id or folder), from which the output layer and "
        "the tokenizer are taken; needed where the heads share its output layer",
    )
    add("--base-model", help="what the other engine is to load, if that is not --model")
    add("--dtype", choices=_DTYPES, default="auto", help="of the weights; auto: as they are")
    add(
        "--report",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="with --to hub: a report.md of `specdeft bench` for the model card; repeatable",
    )
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the command; bad input raises ValueError before anything is written."""
    options = parser().parse_args(arguments)
    if options.report and options.to != "hub":
        raise ValueError("--report goes into a model card: use it with --to hub")

    # Everything below imports torch.
    from specdeft.heads.formats.hub import export_to_hub
    from specdeft.heads.formats.writing import export_heads

    origin = _origin(options.heads)
    source = _source(options, origin)
    if options.to == "hub":
        files = export_to_hub(
            source.heads, origin, options.out, source.base_model, tuple(options.report)
        )
    else:
        files = export_heads(source, options.to, options.out)
    sys.stdout.write(f"{options.out}: {', '.join(files)} written, read again and found equal\n")
    config = source.heads.config
    sys.stdout.write(_next_step(options.to, options.out, source.base_model, config.num_heads))
    if options.to == "vllm":
        sys.stdout.write(f"with vLLM up to 0.32: {_VLLM_VERSIONS}\n")
        if config.draft_vocab_size is not None:
            sys.stdout.write(f"draft vocabulary: {_VLLM_TOKEN_MAP}\n")
    return 0


# Both were tried, docs/formats.md says how.
_VLLM_VERSIONS = "0.33 serves no Medusa heads any more"
_VLLM_TOKEN_MAP = (
    "vLLM 0.32 refuses to load one (token_map): train with --heads-output own or shared"
)


def _origin(heads: str) -> Path:
    from specdeft.heads.formats.fetch import local_path
    from specdeft.loading import shipped_heads

    return shipped_heads(heads) if heads in DEFAULT_MODELS else local_path(heads)


def _source(options: argparse.Namespace, origin: Path) -> Any:
    """The heads with what is known of their model, which is loaded only where it is named."""
    import torch

    from specdeft.heads.checkpoint import read_config
    from specdeft.heads.formats.content import Source
    from specdeft.heads.formats.express import check_expressible
    from specdeft.heads.formats.load import is_own, load_any_heads, stored_dtype
    from specdeft.heads.formats.parts import TargetSizes
    from specdeft.loading import load_target, pick_dtype, quiet_loading

    if options.to != "hub" and is_own(origin):
        check_expressible(read_config(origin))  # before a large model is loaded
    auto = options.dtype == "auto"
    dtype = stored_dtype(origin) if auto else pick_dtype(options.dtype, torch.device("cpu"))
    if options.model is None:
        heads = load_any_heads(origin, dtype=dtype)
        return Source(heads, None, options.base_model or heads.config.base_model)
    quiet_loading()
    loaded = load_target(options.model, dtype=dtype, device="cpu")
    layer = loaded.model.get_output_embeddings()
    vocab_size, hidden_size = layer.weight.shape
    target = TargetSizes(hidden_size, vocab_size, layer.weight)
    heads = load_any_heads(origin, target, dtype=dtype)
    return Source(heads, layer, options.base_model or options.model, loaded.tokenizer)


def _next_step(to: str, folder: Path, base: str, num_heads: int) -> str:
    """How the folder is used, in one line."""
    place = shlex.quote(str(folder))
    if to == "vllm":
        asked = {"method": "medusa", "model": str(folder), "num_speculative_tokens": num_heads}
        how = shlex.quote(json.dumps(asked))
        return f"serve: vllm serve {shlex.quote(base or 'BASE_MODEL')} --speculative-config {how}\n"
    if to == "tgi":
        return f"serve: text-generation-launcher --model-id {place} --speculate {num_heads}\n"
    if to == "hub":
        return f"publish: hf upload NAME/REPOSITORY {place}\n"
    return ""
