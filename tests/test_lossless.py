"""The theorem of the project: speculative decoding equals plain decoding, token for token (fp32).

Over families x trees x scripted acceptance x prompts around the sliding window x temperatures.
Plain decoding in turn equals transformers' own greedy generate.
"""

from itertools import product

import pytest
import torch

from specdeft.attention import KernelChoice
from specdeft.decoder import SpecDecoder
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.trees.named import named_tree
from specdeft.trees.token_tree import TokenTree
from tests.core.tiny import (
    FAMILIES,
    VOCAB_SIZE,
    WINDOW,
    ByteTokenizer,
    ScriptedHeads,
    hf_greedy,
    prompt_ids,
    tiny_model,
)

NUM_TOKENS = 40
TREES = {
    "chain-5": (TokenTree.chain(5), (0, 0, 0, 0, 0)),
    "siblings": (TokenTree.full([12]), (7,)),
    "full-3-3": (TokenTree.full([3, 3]), (2, 1)),
    "deft-32": (named_tree("deft-32"), (0, 0, 1, 0)),
    "deft-64": (named_tree("deft-64"), (0, 1, 2)),
    "one-long-path": (
        TokenTree.from_parents([-1, 0, 0, 2, 3, 4], [-1, 0, 4, 2, 0, 1]),
        (4, 2, 0, 1),
    ),
}
SCRIPTS = {"none": [0], "all": [5], "rising": [0, 1, 2, 3, 4], "mixed": [3, 0, 5, 1, 1, 4, 0, 2]}
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 2**40 + 1},
]


def speculative(model, prompt, plain_ids, tree_name, script_name, settings):
    tree, path = TREES[tree_name]
    heads = ScriptedHeads(plain_ids, path, SCRIPTS[script_name])
    decoder = SpecDecoder(model, ByteTokenizer(), heads, tree=tree)
    return decoder.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_speculative_equals_plain(family: str) -> None:
    """Every family; the pairs of tree, script, prompt and settings are thinned out by stepping
    through their product, differently for every family."""
    model = tiny_model(family)
    plain_decoder = SpecDecoder(model, ByteTokenizer())
    lengths = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
    cases = list(product(TREES, SCRIPTS, lengths, range(len(SETTINGS))))
    seen_tau = set()
    for tree_name, script_name, length, index in cases[FAMILIES.index(family) :: 23]:
        prompt, settings = prompt_ids(length), SETTINGS[index]
        plain = plain_decoder.generate(
            prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True, **settings
        )
        result = speculative(model, prompt, plain.token_ids, tree_name, script_name, settings)
        case = (tree_name, script_name, length, settings)
        assert result.token_ids == plain.token_ids, case
        assert result.stats.num_new_tokens == NUM_TOKENS
        expected_steps = _steps_of(script_name, tree_name)
        assert result.stats.num_steps == expected_steps, case
        seen_tau.add(round(result.stats.tau, 3))
    assert max(seen_tau) > 3.5  # the script really was accepted deeply
    assert min(seen_tau) == 1.0  # and really refused


def _steps_of(script_name: str, tree_name: str) -> int:
    """How many steps the script needs for the tokens after the first."""
    script, depth = SCRIPTS[script_name], len(TREES[tree_name][1])
    emitted, steps = 1, 0
    while emitted < NUM_TOKENS:
        emitted += 1 + min(script[steps % len(script)], depth)
        steps += 1
    return steps


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, WINDOW, 3 * WINDOW])
def test_plain_greedy_equals_transformers_generate(family: str, length: int) -> None:
    model = tiny_model(family)
    prompt = prompt_ids(length, seed=length)
    expected = hf_greedy(model, prompt, NUM_TOKENS)
    plain = SpecDecoder(model, ByteTokenizer()).generate(prompt, max_new_tokens=NUM_TOKENS)
    assert list(plain.token_ids) == expected
    # And the stock model is untouched: it still answers the same on its own.
    assert hf_greedy(model, prompt, NUM_TOKENS) == expected


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("sequential", [False, True])
def test_real_heads_of_random_weights(settings: dict[str, float], sequential: bool) -> None:
    model = tiny_model("llama")
    config = HeadsConfig(
        num_heads=4,
        num_layers=1,
        hidden_size=64,
        vocab_size=VOCAB_SIZE,
        token_input=True,
        sequential=sequential,
    )
    heads = MedusaHeads(config)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    decoder = SpecDecoder(model, ByteTokenizer(), heads, tree="deft-64")
    accepted = 0.0
    for seed in range(6):
        prompt = prompt_ids(9, seed=seed)
        result = decoder.generate(prompt, max_new_tokens=48, **settings)
        plain = decoder.plain(prompt, max_new_tokens=48, **settings)
        assert result.token_ids == plain.token_ids
        assert result.text == plain.text
        assert result.finish_reason == plain.finish_reason
        accepted += result.stats.acceptance_length
    assert accepted > 0  # 64 guesses among 97 tokens: some were right


def test_a_wrong_position_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: positions by row number instead of depth must break the theorem."""
    model = tiny_model("llama")
    prompt = prompt_ids(6)
    plain = SpecDecoder(model, ByteTokenizer()).generate(prompt, max_new_tokens=NUM_TOKENS)
    from specdeft.model import TargetModel

    forward = TargetModel.forward

    def by_row(self, input_ids, position_ids, attention, **settings):
        numbers = torch.arange(position_ids.shape[1]) + position_ids[:, :1]
        return forward(self, input_ids, numbers, attention, **settings)

    monkeypatch.setattr(TargetModel, "forward", by_row)
    tree, path = TREES["deft-64"]
    heads = ScriptedHeads(plain.token_ids, path, [3])
    decoder = SpecDecoder(model, ByteTokenizer(), heads, tree=tree)
    try:
        result = decoder.generate(prompt, max_new_tokens=NUM_TOKENS)
    except AssertionError:  # the script noticed first
        return
    assert result.token_ids != plain.token_ids


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_triton_kernels_under_the_interpreter(family: str) -> None:
    """The same theorem through the accelerator's kernels: paged KV, mask words, commit."""
    pytest.importorskip("triton")
    model = tiny_model(family)
    prompt, settings = prompt_ids(WINDOW + 1), {"max_new_tokens": 9, "temperature": 0.7}
    plain = SpecDecoder(model, ByteTokenizer()).generate(prompt, **settings)
    tree, path = TREES["full-3-3"]
    heads = ScriptedHeads(plain.token_ids, path, [2, 0, 1])
    decoder = SpecDecoder(model, ByteTokenizer(), heads, tree=tree, kernels=KernelChoice.TRITON)
    assert decoder.generate(prompt, **settings).token_ids == plain.token_ids
