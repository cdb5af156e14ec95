"""`specdeft calibrate`: what drafts of this model bring and what steps cost on this device."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specdeft.default_model import DEFAULT_MODELS
from specdeft.prompt_file import parse_prompts, read_source
from specdeft.trees.options import Options, whole_numbers

if TYPE_CHECKING:
    from specdeft.decoder import SpecDecoder
    from specdeft.heads.documents import Documents
    from specdeft.step_cost import Place
    from specdeft.tree_choice import TreeChoice
    from specdeft.trees.search import ValuedPaths

_BUILTIN = "builtin"
_TEMPERATURES = (0.0, 0.7)
Wanted = tuple[int, int]  # context and batch


_DESCRIPTION = """\
Measure, for --tree auto, what drafts bring and what they cost. The model answers prompts, greedily
and sampled, and its answers say how often each guess of the heads and of lookup comes true (tau:
tokens a step, 1 is plain decoding). Then whole steps are timed by tree size, greedy and sampled
ones apart, since drawing costs time. Both are kept in the cache for this model, heads, device and
versions and used from then on; where one of these changes, it is measured again. The best tree has
the most tokens per time.
"""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = Options(
        prog="specdeft calibrate",
        description=_DESCRIPTION,
        epilog="Examples:\n"
        "  specdeft calibrate\n"
        "  specdeft calibrate --prompts my_prompts.jsonl --contexts 1024,16384 --batches 1,8\n"
        "  specdeft calibrate --model Qwen/Qwen3-0.6B --heads none\n"
        "A line of a prompts file is an object with prompt (text), messages (a chat) or turns.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--model", default=next(iter(DEFAULT_MODELS)), help="name, id or folder")
    options.add_argument("--heads", default="auto", help="folder of heads, auto, or none: lookup")
    options.add_argument(
        "--prompts",
        default=_BUILTIN,
        help="JSON Lines file with prompts like those the model will meet, builtin, or - (stdin)",
    )
    options.add_argument("--num-prompts", type=int, metavar="N", help="the first N of them only")
    options.add_argument("--max-new-tokens", type=int, default=192, metavar="N")
    options.add_argument(
        "--contexts", default="256,1024", help="context lengths to time steps at, commas"
    )
    options.add_argument("--batches", default="1", help="batch sizes to time steps at, commas")
    options.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    options.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options.add_argument("--compile", action="store_true", help="time compiled steps (CUDA)")
    options.add_argument(
        "--refresh", action="store_true", help="measure again what the cache holds already"
    )
    options.add_argument("--json", action="store_true", help="print one JSON document instead")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the command; bad input raises ValueError before any work."""
    options = parser().parse_args(arguments)
    contexts = whole_numbers(options.contexts, "contexts", "1024,16384")
    batches = whole_numbers(options.batches, "batches", "1,8")
    if options.max_new_tokens < 2:
        raise ValueError(f"max_new_tokens is {options.max_new_tokens}: ask for at least 2")
    prompts = read_prompts(options.prompts, options.num_prompts)

    # Loading takes seconds: only after everything that can be refused without it.
    from specdeft.calibration_cache import VALUES_FILE, cached_values, calibration_folder
    from specdeft.decoder import SpecDecoder
    from specdeft.heads.calibration import calibrate
    from specdeft.tree_choice import TreeChoice

    decoder = SpecDecoder.from_pretrained(
        options.model,
        heads=None if options.heads == "none" else options.heads,
        dtype=options.dtype,
        device=options.device,
        tree="lookup-8",
        compile=options.compile,
    )
    model, heads = decoder.model, decoder.heads
    folder = calibration_folder(model, heads)
    values = None if options.refresh else cached_values(model, heads)
    if values is None:
        _say(f"{options.model} answers {len(prompts)} prompts, greedily and sampled")
        texts = answers(decoder, prompts, options.max_new_tokens)
        folder.mkdir(parents=True, exist_ok=True)
        calibrate(model, heads, texts, folder)
        values = cached_values(model, heads)
        assert values is not None
    report: dict[str, Any] = {"values": str(folder / VALUES_FILE), "places": []}
    choice = TreeChoice(decoder.engine, "auto", values, time.perf_counter, refresh=options.refresh)
    for place, wanted in _places(choice, contexts, batches).items():
        if wanted != [tuple(place)]:
            _say(_rounded(place, wanted))
        report["places"].append(_place_report(choice, values, place))
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write("\n".join(_text(place) for place in report["places"]))
        _say(f"kept in {folder}")
    return 0


def read_prompts(source: str, num_prompts: int | None) -> list[Any]:
    """Prompts as `SpecDecoder.generate` takes them.

    Raises:
        ValueError: the file is missing, empty or malformed (the line is named), or too short.
    """
    from specdeft.heads.calibration_texts import calibration_prompts

    if source == _BUILTIN:
        prompts: list[Any] = list(calibration_prompts())
    else:
        lines = parse_prompts(*read_source(source, _BUILTIN))
        prompts = [line.prompt for line in lines]
    if num_prompts is None:
        return prompts
    if not 1 <= num_prompts <= len(prompts):
        raise ValueError(f"{num_prompts} prompts were asked for: give 1 to {len(prompts)}")
    return prompts[:num_prompts]


def _places(
    choice: "TreeChoice", contexts: Sequence[int], batches: Sequence[int]
) -> dict["Place", list[Wanted]]:
    """Where steps are timed, each place once, and which contexts and batches it stands for."""
    places: dict[Place, list[Wanted]] = {}
    for context in contexts:
        for batch in batches:
            places.setdefault(choice.place(context, batch), []).append((context, batch))
    return places


def _rounded(place: "Place", wanted: Sequence[Wanted]) -> str:
    """That a place stands for others, which decoders look up there as well."""
    names = ", ".join(f"{context} tokens x {batch}" for context, batch in wanted)
    return (
        f"steps are timed at {place.num_context} tokens x {place.num_sequences}, which stands for "
        f"{names}: contexts and batches are grouped"
    )


def answers(decoder: "SpecDecoder", prompts: Sequence[Any], max_new_tokens: int) -> "Documents":
    """The model's own answers, greedy and sampled; only they are counted, not the prompts."""
    from specdeft.heads.documents import from_lists

    ids, learn, temperatures = [], [], []
    for temperature in _TEMPERATURES:
        for result in decoder.generate(
            list(prompts), max_new_tokens=max_new_tokens, temperature=temperature
        ):
            ids.append([*result.prompt_ids, *result.token_ids])
            learn.append([False] * len(result.prompt_ids) + [True] * len(result.token_ids))
            temperatures.append(temperature)
    return from_lists(ids, learn, temperatures)


def _place_report(choice: Any, values: "ValuedPaths", place: Any) -> dict[str, Any]:
    """Sizes, what they bring and cost at a place, and what is taken at each temperature."""
    from specdeft.tree_choice import Asked
    from specdeft.trees.search import replayed_tau

    asked = {f"{heat:g}": Asked(heat) for heat in _TEMPERATURES}
    step_ms = {
        heat: choice.step_ms(place, sampled=request.is_sampled) for heat, request in asked.items()
    }
    tau = {
        heat: {
            size: replayed_tau(values, size, temperature=request.temperature, lookup=True) or 1.0
            for size in step_ms[heat]
        }
        for heat, request in asked.items()
    }
    rows = [
        {
            "num_nodes": size,
            "step_ms": {heat: round(step_ms[heat][size], 3) for heat in asked},
            "tau": {heat: round(tau[heat][size], 3) for heat in asked},
        }
        for size in step_ms["0"]
    ]
    chosen = {heat: choice.at(place, request).tree.num_nodes for heat, request in asked.items()}
    return {
        "num_context": place.num_context,
        "num_sequences": place.num_sequences,
        "sizes": rows,
        "chosen": chosen,
    }


def _text(place: dict[str, Any]) -> str:
    """A table of one place, the taken sizes marked."""
    sequences = (
        "1 sequence" if place["num_sequences"] == 1 else f"{place['num_sequences']} sequences"
    )
    lines = [
        f"{sequences}, up to {place['num_context']} tokens; the tree that is taken has a *",
        "nodes" + "".join(f"   step ms  tau T={heat:<3}  speed-up " for heat in place["chosen"]),
    ]
    plain_ms = place["sizes"][0]["step_ms"]
    for row in place["sizes"]:
        cells = [f"{row['num_nodes']:>5}"]
        for heat, tau in row["tau"].items():
            mark = "*" if place["chosen"][heat] == row["num_nodes"] else " "
            own_ms = row["step_ms"][heat]
            speedup = tau * plain_ms[heat] / own_ms
            cells.append(f"{own_ms:>8.2f}  {tau:>9.2f}  {speedup:>7.2f}x{mark}")
        lines.append("  ".join(cells))
    return "\n".join(lines) + "\n"


def _say(line: str) -> None:
    sys.stderr.write(f"specdeft: {line}\n")
    sys.stderr.flush()
