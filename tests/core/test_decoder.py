"""SpecDecoder as a user meets it: inputs, stops, streams, refusals, and an untouched model."""

import threading
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, T5ForConditionalGeneration

from specdeft import SpecDecoder
from specdeft.config import GenerationConfig
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.trees.named import named_tree
from specdeft.trees.search import ValuedPaths
from specdeft.trees.token_tree import TokenTree
from tests.core.tiny import (
    EOS_ID,
    MAX_POSITIONS,
    VOCAB_SIZE,
    ByteTokenizer,
    ScriptedHeads,
    prompt_ids,
    tiny_model,
)

CHAIN = TokenTree.chain(4)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def scripted(model: Any, plain_ids: tuple[int, ...], lengths: list[int]) -> SpecDecoder:
    heads = ScriptedHeads(plain_ids, (0, 0, 0, 0), lengths)
    return SpecDecoder(model, ByteTokenizer(), heads, tree=CHAIN)


def random_heads(**changes: Any) -> MedusaHeads:
    fields = {"num_heads": 4, "num_layers": 1, "hidden_size": 64, "vocab_size": VOCAB_SIZE}
    return MedusaHeads(HeadsConfig(**{**fields, **changes}))


# ---- stops, at each offset of a block


@pytest.mark.parametrize("offset", range(1, 12))
def test_an_end_of_text_token_ends_the_text_wherever_it_stands(model: Any, offset: int) -> None:
    plain = SpecDecoder(model, ByteTokenizer()).generate(prompt_ids(5), max_new_tokens=30)
    stop_at = plain.token_ids[offset]
    model.generation_config.eos_token_id = [EOS_ID, stop_at]
    try:
        expected = SpecDecoder(model, ByteTokenizer()).generate(prompt_ids(5), max_new_tokens=30)
        decoder = scripted(model, plain.token_ids, [4, 2, 0, 3])
        result = decoder.generate(prompt_ids(5), max_new_tokens=30)
    finally:
        model.generation_config.eos_token_id = EOS_ID
    assert result.token_ids == expected.token_ids
    assert result.token_ids[-1] == stop_at
    assert stop_at not in result.token_ids[:-1]
    assert result.finish_reason == expected.finish_reason == "eos"
    assert result.text == expected.text
    kept = 1 + sum(n * (a + 1) for a, n in enumerate(result.stats.acceptance_histogram))
    assert kept == len(result.token_ids)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5, 17])
def test_never_more_tokens_than_asked(model: Any, max_new_tokens: int) -> None:
    plain = SpecDecoder(model, ByteTokenizer()).generate(prompt_ids(5), max_new_tokens=30)
    result = scripted(model, plain.token_ids, [4]).generate(
        prompt_ids(5), max_new_tokens=max_new_tokens
    )
    assert result.token_ids == plain.token_ids[:max_new_tokens]
    assert result.finish_reason == "length"


@pytest.mark.parametrize("start", range(12))
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_cuts_text_and_ids_alike(model: Any, start: int, length: int) -> None:
    plain = SpecDecoder(model, ByteTokenizer()).generate(prompt_ids(5), max_new_tokens=30)
    stop = plain.text[start : start + length]
    expected = SpecDecoder(model, ByteTokenizer()).generate(
        prompt_ids(5), max_new_tokens=30, stop=[stop]
    )
    decoder = scripted(model, plain.token_ids, [4, 1])
    stream = decoder.stream(prompt_ids(5), max_new_tokens=30, stop=stop)
    shown = "".join(stream)
    result = stream.result
    assert result is not None
    assert result.text == expected.text == shown == plain.text[: plain.text.index(stop)]
    assert result.token_ids == expected.token_ids
    assert result.finish_reason == expected.finish_reason == "stop"
    assert decoder._states.cache is not None
    decoder._states.cache.check_invariants()


def test_the_last_position_of_the_context_can_be_used(model: Any) -> None:
    prompt = prompt_ids(MAX_POSITIONS - 9)
    plain = SpecDecoder(model, ByteTokenizer()).generate(prompt, max_new_tokens=9, ignore_eos=True)
    result = scripted(model, plain.token_ids, [0, 4, 1]).generate(
        prompt, max_new_tokens=9, ignore_eos=True
    )
    assert result.token_ids == plain.token_ids
    assert len(result.token_ids) == 9


# ---- streams


def test_a_stream_that_is_closed_frees_the_decoder(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    stream = decoder.stream("Hello", max_new_tokens=20)
    next(stream)
    stream.close()
    assert stream.result is None
    assert list(stream) == []
    assert decoder.generate("again", max_new_tokens=3).stats.num_new_tokens == 3


def test_an_error_in_the_consumer_leaves_the_decoder_usable(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())

    def consume() -> None:
        for _piece in decoder.stream("Hello", max_new_tokens=20):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:  # keeps the frame, and so the stream, alive
        consume()
    fresh = SpecDecoder(model, ByteTokenizer()).generate("Hello", max_new_tokens=8)
    assert decoder.generate("Hello", max_new_tokens=8).token_ids == fresh.token_ids
    assert kept.traceback
    cache = decoder._states.cache
    assert cache is not None
    cache.check_invariants()
    assert not cache._sequences


def test_a_superseded_stream_says_so(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    first = decoder.stream("Hello", max_new_tokens=20)
    next(first)
    assert decoder.generate("World", max_new_tokens=4).stats.num_new_tokens == 4
    with pytest.raises(RuntimeError, match="ended by a later generation"):
        next(first)


def test_two_threads_are_refused_not_mixed(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    stream = decoder.stream("Hello", max_new_tokens=20)
    next(stream)
    refused: list[str] = []

    def other() -> None:
        try:
            decoder.generate("World", max_new_tokens=5)
        except RuntimeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert len("".join(stream)) > 0


def test_two_decoders_share_a_model(model: Any) -> None:
    one, two = (SpecDecoder(model, ByteTokenizer()) for _ in range(2))
    expected = [one.generate(text, max_new_tokens=10).token_ids for text in ("Hello", "World")]
    first, second = one.stream("Hello", max_new_tokens=10), two.stream("World", max_new_tokens=10)
    for _pieces in zip(first, second, strict=False):
        pass
    for stream in (first, second):
        for _piece in stream:
            pass
    assert [stream.result.token_ids for stream in (first, second) if stream.result] == expected


# ---- inputs


def test_text_ids_tensors_and_lists_are_the_same_prompt(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    ids = ByteTokenizer()("Hello")["input_ids"]
    results = [
        decoder.generate("Hello", max_new_tokens=6),
        decoder.generate(ids, max_new_tokens=6),
        decoder.generate(torch.tensor(ids), max_new_tokens=6),
        decoder.generate(torch.tensor([ids]), max_new_tokens=6),
        *decoder.generate(["Hello", "Hello"], max_new_tokens=6),
    ]
    assert {result.token_ids for result in results} == {results[0].token_ids}
    assert {result.prompt_ids for result in results} == {tuple(ids)}


def test_config_and_fields(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    config = GenerationConfig(max_new_tokens=4, temperature=0.5, seed=7)
    by_config = decoder.generate("Hello", config=config)
    by_fields = decoder.generate("Hello", max_new_tokens=4, temperature=0.5, seed=7)
    assert by_config.token_ids == by_fields.token_ids


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        (torch.zeros(0, dtype=torch.int64), {}, "the prompt is empty"),
        (torch.zeros(2, 3, dtype=torch.int64), {}, "one row of token ids"),
        (torch.zeros(3), {}, "one row of token ids"),
        ([1, "a"], {}, "mixed items"),
        ([{"role": "user", "content": "x"}], {}, "no chat template"),
        ([1, VOCAB_SIZE], {}, f"token id {VOCAB_SIZE} is not in the vocabulary of {VOCAB_SIZE}"),
        ([1, -1], {}, "token id -1 is not in the vocabulary"),
        (prompt_ids(MAX_POSITIONS), {}, f"has {MAX_POSITIONS} tokens and the model's context"),
        (prompt_ids(250), {"max_new_tokens": 7}, "ask for at most 6"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens is 0: give a whole number"),
        ("x", {"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ("x", {"temperature": -0.1}, "temperature is -0.1"),
        ("x", {"temperature": float("nan")}, "temperature is nan"),
        ("x", {"temperature": float("inf")}, "temperature is inf"),
        ("x", {"top_p": 0.0}, "top_p is 0.0: it must be above 0"),
        ("x", {"top_p": 1.1}, "top_p is 1.1"),
        ("x", {"top_k": 0}, "top_k is 0"),
        ("x", {"seed": -1}, "seed is -1"),
        ("x", {"stop": [""]}, "every stop string must be text"),
        ("x", {"max_tokens": 3}, "generate has no setting max_tokens: it takes max_new_tokens"),
        ("x", {"lookup": "on"}, "lookup is set once for a decoder, not for a text: give it to"),
        ("x", {"compile": True, "seed": 1}, "compile is set once for a decoder"),
        ("x", {"sequence": -1}, "sequence is -1: give a whole number from 0"),
        ("x", {"sequence": 1.5}, "sequence is 1.5; give a whole number"),
        ("x", {"ignore_eos": "no"}, "ignore_eos is 'no': give True or False"),
        ("x", {"raw": "no"}, "raw is 'no': give True or False"),
        ("x", {"config": GenerationConfig(), "seed": 1}, "config and seed were both given"),
        ("x", {"tree": "oak"}, "there is no tree 'oak': give auto, a number of nodes"),
        ("x", {"tree": 0}, "a tree of 0 nodes is empty"),
        ("x", {"tree": "deft-64"}, "no draft heads"),
        ("x", {"tree": 64}, "cannot be chosen from 0 valued paths and a lookup chain"),
        ("x", {"tree": "missing.json"}, "missing.json"),
    ],
)
def test_bad_input_is_one_sentence(
    model: Any, prompt: Any, settings: dict[str, Any], message: str
) -> None:
    decoder = SpecDecoder(model, ByteTokenizer())
    with pytest.raises(ValueError, match=message) as refusal:
        decoder.generate(prompt, **settings)
    assert "\n" not in str(refusal.value)
    # Refused before anything was taken: the decoder works on.
    assert decoder.generate("x", max_new_tokens=1).stats.num_new_tokens == 1


# ---- trees and heads


@pytest.mark.parametrize("name", ["compile", "cuda_graphs"])
def test_a_word_is_no_truth_value(model: Any, name: str) -> None:
    settings: dict[str, Any] = {name: "no"}
    with pytest.raises(ValueError, match=f"{name} is 'no': give True or False"):
        SpecDecoder(model, ByteTokenizer(), **settings)


def test_a_tree_deeper_than_the_heads_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="4 deep but there are 2 heads"):
        SpecDecoder(model, ByteTokenizer(), random_heads(num_heads=2), tree="deft-64")


def test_auto_with_neither_heads_nor_lookup_is_plain_and_says_so(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer(), lookup="off")
    assert decoder.tree.num_nodes == 1
    assert decoder.tree_report == "no draft heads and no lookup: plain decoding"
    with pytest.raises(ValueError, match="no draft heads to fill a tree"):
        decoder.generate("x", tree=16)


def test_without_heads_trees_are_lookup_chains(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer(), tree=6)
    assert decoder.tree == TokenTree.chain(0).with_lookup(5)
    assert decoder.plain(prompt_ids(9), max_new_tokens=5).stats.num_nodes == 1


def test_auto_without_calibration_is_refused(model: Any) -> None:
    decoder = SpecDecoder(model, ByteTokenizer(), random_heads())
    with pytest.raises(ValueError, match="not calibrated"):
        decoder.generate("x")


@pytest.mark.parametrize(("per_node_s", "expected"), [(0.0, 8), (10.0, 1)])
def test_auto_takes_the_size_that_pays(
    model: Any, per_node_s: float, expected: int, monkeypatch: Any, tmp_path: Any
) -> None:
    """With a clock that charges nothing for nodes the largest tree wins, with a steep one, none."""
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path))
    paths = [(0,), (0, 0), (1,), (0, 0, 0), (2,), (0, 1), (3,)]
    values = ValuedPaths(tuple(paths), (0.6, 0.4, 0.2, 0.2, 0.1, 0.1, 0.05))
    now = [0.0]
    forward_of = type(model).forward

    def charged(self: Any, *args: Any, **kwargs: Any) -> Any:
        now[0] += 1.0 + per_node_s * kwargs["input_ids"].shape[1]
        return forward_of(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", charged)
    decoder = SpecDecoder(
        model, ByteTokenizer(), random_heads(), tree_values=values, clock=lambda: now[0]
    )
    assert decoder.tree.num_nodes == expected
    assert f"tree of {expected} nodes by measured step cost" in decoder.tree_report
    if expected > 1:
        assert decoder.expected_tau == pytest.approx(1 + sum(values.values[: expected - 1]))
    else:
        assert decoder.expected_tau is None  # plain decoding drafts nothing
    # Remembered: a second decoder reads the cost instead of measuring it.
    again = SpecDecoder(
        model, ByteTokenizer(), random_heads(), tree_values=values, clock=lambda: 1 / 0
    )
    assert again.tree == decoder.tree
    # A damaged file is measured again.
    (file,) = (tmp_path / "step_cost").iterdir()
    file.write_text("{")
    third = SpecDecoder(
        model, ByteTokenizer(), random_heads(), tree_values=values, clock=lambda: now[0]
    )
    assert third.tree == decoder.tree


def test_a_model_without_our_attention_is_named(model: Any) -> None:
    config = AutoConfig.for_model("bloom", vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match="BloomForCausalLM"):
        SpecDecoder(AutoModelForCausalLM.from_config(config), ByteTokenizer())
    config = AutoConfig.for_model(
        "t5", vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    encoder_decoder = T5ForConditionalGeneration(config)
    with pytest.raises(ValueError, match="not a decoder-only"):
        SpecDecoder(encoder_decoder, ByteTokenizer())


def test_stats_by_hand(model: Any) -> None:
    plain = SpecDecoder(model, ByteTokenizer()).generate(prompt_ids(5), max_new_tokens=30)
    ticks = iter(range(1000))
    decoder = SpecDecoder(
        model,
        ByteTokenizer(),
        ScriptedHeads(plain.token_ids, (0, 0, 0, 0), [4, 0, 2]),
        tree=CHAIN,
        clock=lambda: float(next(ticks)),
    )
    stats = decoder.generate(prompt_ids(5), max_new_tokens=1 + 5 + 1 + 3 + 5).stats
    assert stats.acceptance_histogram == (1, 0, 1, 0, 2)
    assert (stats.num_steps, stats.num_new_tokens, stats.num_nodes) == (4, 15, 5)
    assert stats.tau == pytest.approx(14 / 4)
    assert stats.acceptance_length == pytest.approx(10 / 4)
    assert stats.tokens_per_second == pytest.approx(14 / stats.decode_s)
    assert stats.to_dict()["tau"] == stats.tau
    assert named_tree("deft-64").num_nodes == 64
