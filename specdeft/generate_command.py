"""`specdeft generate`: stream one answer, then say how it came about; `--compare` proves it."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from specdeft.config import GenerationConfig
from specdeft.default_model import DEFAULT_MODELS
from specdeft.trees.options import HelpFormatter, Options

_DEFAULT_MODEL = next(iter(DEFAULT_MODELS))
WARM_UP_TOKENS = 8
STEPS_TO_JUDGE = 16


def parser() -> argparse.ArgumentParser:
    """The command's options; every default is `GenerationConfig`'s."""
    defaults = GenerationConfig()
    options = Options(
        prog="specdeft generate",
        description="Continue a prompt with speculative decoding. The text goes to standard output "
        "as it arrives, the figures to standard error.",
        epilog="Examples:\n"
        '  specdeft generate "Why is the sky blue?"\n'
        '  specdeft generate --compare --temperature 0.7 --seed 1 "Write a haiku"\n'
        "  cat article.txt | specdeft generate - --max-new-tokens 100\n"
        '  specdeft generate --model Qwen/Qwen3-0.6B --heads none "..."',
        formatter_class=HelpFormatter,
    )
    options.add_argument(
        "text", nargs="?", metavar="PROMPT", help="the prompt; - reads it from stdin"
    )
    options.add_argument("--prompt", help="the same as an option")
    options.add_argument("--model", default=_DEFAULT_MODEL, help="name, Hugging Face id or folder")
    options.add_argument("--heads", default="auto", help="draft heads of any format, auto, or none")
    options.add_argument("--raw", action="store_true", help="do not use the chat template")
    options.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="default: 256, or what fits"
    )
    options.add_argument(
        "--temperature", type=float, default=defaults.temperature, help="0 is greedy"
    )
    options.add_argument("--top-p", type=float, default=defaults.top_p)
    options.add_argument("--top-k", type=int, default=defaults.top_k)
    options.add_argument("--seed", type=int, default=defaults.seed, help="same seed, same text")
    options.add_argument(
        "--stop", action="append", default=[], help="end before this text; repeatable"
    )
    options.add_argument(
        "--tree", default="auto", help="auto (measured), number of nodes, name, or JSON file"
    )
    options.add_argument(
        "--lookup",
        default="auto",
        choices=("auto", "on", "off"),
        help="guess what followed the same words earlier in the text: auto is where it pays",
    )
    options.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    options.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options.add_argument(
        "--compare", action="store_true", help="decode plainly too: speed ratio and identity"
    )
    options.add_argument("--json", action="store_true", help="print one JSON document instead")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the command; bad input raises ValueError before any work."""
    options = parser().parse_args(arguments)
    config = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=tuple(options.stop),
    )
    prompt = _read_prompt(options)

    # Loading takes seconds: only after everything that can be refused without it.
    from specdeft.decoder import SpecDecoder
    from specdeft.loading import quiet_loading
    from specdeft.prompt import encode_prompt

    quiet_loading()
    heads = None if options.heads == "none" else options.heads
    decoder = SpecDecoder.from_pretrained(
        options.model,
        heads=heads,
        dtype=options.dtype,
        device=options.device,
        tree=options.tree,
        lookup=options.lookup,
    )
    prompt_ids = encode_prompt(decoder.tokenizer, prompt, raw=options.raw)
    stream = decoder.stream(prompt_ids, config=config)
    tree = decoder.tree_of(config, len(prompt_ids))
    why = decoder.tree_report_of(config, len(prompt_ids))
    _say(f"{options.model} in {decoder.dtype_name} on {decoder.device_name}; {why}")
    if options.compare:
        _warm_up(decoder, prompt, options)
    for piece in stream:
        if not options.json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if not options.json:
        sys.stdout.write("\n")
        sys.stdout.flush()
    result = stream.result
    assert result is not None
    report: dict[str, Any] = {
        "model": options.model,
        "dtype": decoder.dtype_name,
        "device": decoder.device_name,
        "tree_nodes": tree.num_nodes,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_dict(),
    }
    _say(_describe(result.stats, decoder.expected_tau_of(config, len(prompt_ids))))
    if decoder.heads is not None and _never_right(result.stats):
        _say(
            f"not one drafted token was right in {result.stats.num_steps} steps: these heads look "
            "as if they were made for another model"
        )
    if options.compare:
        report["compare"] = _compare(decoder, prompt, config, options.raw, result)
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    return 0


def _read_prompt(options: argparse.Namespace) -> str:
    given = [text for text in (options.text, options.prompt) if text is not None]
    if len(given) != 1:
        raise ValueError(
            "give one prompt, as an argument, with --prompt, or - to read standard input: "
            f"{'two were given' if given else 'there is none'}"
        )
    prompt = _standard_input() if given[0] == "-" else str(given[0])
    if not prompt.strip():
        raise ValueError("the prompt is empty: give at least one character")
    return prompt


def _standard_input() -> str:
    if sys.stdin is None:
        raise ValueError("the prompt - reads standard input, which is closed: pipe a text into it")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"standard input is not {error.encoding} text (byte {error.start}): convert it first"
        ) from error


def _warm_up(decoder: Any, prompt: str, options: argparse.Namespace) -> None:
    """Both sides run once first: the first forwards of a process are slower."""
    asked = options.max_new_tokens or WARM_UP_TOKENS
    for run in (decoder.generate, decoder.plain):
        run(prompt, max_new_tokens=min(WARM_UP_TOKENS, asked), raw=options.raw)


def _compare(
    decoder: Any, prompt: str, config: GenerationConfig, raw: bool, result: Any
) -> dict[str, Any]:
    """Plain decoding in the same process: speed beside it, and whether the ids are the same."""
    plain = decoder.plain(prompt, config=config, raw=raw)
    identity = decoder.compare(result, plain, config)
    plain_speed = plain.stats.tokens_per_second
    ratio = result.stats.tokens_per_second / plain_speed if plain_speed else None
    if ratio is None:
        _say("plain decoding: too few tokens for a speed")
    else:
        _say(f"plain decoding: {plain_speed:.1f} tokens/s; speed ratio {ratio:.2f}x")
    _say(identity.describe())
    return {
        "plain_tokens_per_second": plain_speed,
        "speed_ratio": ratio,
        "identical": identity.identical,
        "identity_tier": identity.tier,
        "first_difference": identity.first_difference,
    }


def _describe(stats: Any, expected_tau: float | None) -> str:
    expected = f" ({expected_tau:.2f} expected)" if expected_tau else ""
    seconds = stats.prefill_s + stats.decode_s
    plain = ""
    if stats.num_nodes > 1 and stats.num_plain_steps:
        plain = (
            f"; {stats.num_plain_steps} of {stats.num_steps} steps were plain, where drafting did "
            "not pay"
        )
    return (
        f"{stats.num_new_tokens} tokens in {seconds:.2f} s: "
        f"tau {stats.tau:.2f} tokens a step{expected}, "
        f"acceptance length {stats.acceptance_length:.2f}, "
        f"{stats.tokens_per_second:.1f} tokens/s, first token after {stats.prefill_s:.2f} s{plain}"
    )


def _never_right(stats: Any) -> bool:
    """Whether so many guesses failed that it cannot be chance; heads of any use are right in every
    second step."""
    wrong = stats.acceptance_histogram[:1] == (stats.num_steps,)
    return bool(wrong and stats.num_nodes > 1 and stats.num_steps >= STEPS_TO_JUDGE)


def _say(line: str, end: str = "\n") -> None:
    sys.stderr.write(line + end)
    sys.stderr.flush()
