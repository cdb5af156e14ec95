"""The theorem of the project over trees with a lookup chain: the text is plain decoding's (fp32).

Random models repeat themselves often enough for lookups to be accepted; the scripted heads share
the tree with them, right and wrong.
"""

import pytest
import torch

from specdeft.decoder import SpecDecoder
from specdeft.prompts import MIN_SHARED_TOKENS
from specdeft.trees.token_tree import TokenTree
from tests.core.tiny import (
    FAMILIES,
    WINDOW,
    ByteTokenizer,
    DeviceScriptedHeads,
    SuccessorHeads,
    prompt_ids,
    tiny_model,
)

NUM_TOKENS = 48
SETTINGS = [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 2, "seed": 5}]
CHAINS = (1, 3, 12)


def repeating(length: int) -> list[int]:
    """A prompt that says the same thing twice."""
    half = prompt_ids(max(length // 2, 1), seed=length)
    return (half + half)[:length] or half


@pytest.mark.parametrize("family", FAMILIES)
def test_lookup_alone_equals_plain(family: str) -> None:
    model = tiny_model(family)
    decoder = SpecDecoder(model, ByteTokenizer(), tree=TokenTree.chain(0).with_lookup(5))
    seen = set()
    for length in (1, 2, WINDOW + 1, 4 * WINDOW + 3):
        for settings in SETTINGS:
            asked = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **settings}
            result = decoder.generate(repeating(length), **asked)
            assert result.token_ids == decoder.plain(repeating(length), **asked).token_ids
            seen.add(result.stats.tau)
    assert max(seen) > 1.0  # some lookups were right


@pytest.mark.parametrize("num_lookup", CHAINS)
def test_beside_heads_that_are_right_and_wrong(num_lookup: int) -> None:
    model, prompt = tiny_model(), repeating(40)
    heads_tree = TokenTree.from_paths([(0,), (0, 0), (0, 0, 1), (1,), (1, 0), (2,)])
    plain = SpecDecoder(model, ByteTokenizer())
    for settings in SETTINGS:
        asked = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **settings}
        expected = plain.generate(prompt, **asked).token_ids
        for lengths in ([0], [3], [1, 0, 2]):
            heads = DeviceScriptedHeads(expected, (0, 0, 1), lengths, "cpu")
            decoder = SpecDecoder(
                model, ByteTokenizer(), heads, tree=heads_tree.with_lookup(num_lookup)
            )
            result = decoder.generate(prompt, **asked)
            assert result.token_ids == expected
            if lengths == [3] and num_lookup <= 3:
                assert result.stats.tau > 3.5  # the heads' part is read where it belongs


def test_the_token_budget_cuts_the_chain() -> None:
    decoder = SpecDecoder(tiny_model(), ByteTokenizer(), tree=TokenTree.chain(0).with_lookup(9))
    for budget in range(1, 8):
        asked = {"max_new_tokens": budget, "ignore_eos": True}
        result = decoder.generate(repeating(30), **asked)
        assert result.token_ids == decoder.plain(repeating(30), **asked).token_ids
        assert result.stats.num_new_tokens == budget


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("beside_heads", [False, True])
def test_a_batch_with_lookup_equals_its_rows_alone(family: str, beside_heads: bool) -> None:
    """The rows share a beginning, repeat it, and end at different steps; each is guessed from its
    own text as well as alone."""
    model, settings = tiny_model(family), SETTINGS[(FAMILIES.index(family) + beside_heads) % 2]
    trunk = repeating(MIN_SHARED_TOKENS + 6)
    prompts = [trunk + repeating(length) for length in (2, WINDOW + 1, 20)]
    ends = SpecDecoder(model, ByteTokenizer()).plain(prompts[0], max_new_tokens=9).token_ids[4:6]
    asked = {"max_new_tokens": 24, "eos_token_ids": ends, **settings}
    plain = SpecDecoder(model, ByteTokenizer())
    expected = [plain.plain(prompt, sequence=row, **asked) for row, prompt in enumerate(prompts)]
    heads = SuccessorHeads([result.token_ids for result in expected]) if beside_heads else None
    tree = (TokenTree.full([2, 2]) if beside_heads else TokenTree.chain(0)).with_lookup(5)
    decoder = SpecDecoder(model, ByteTokenizer(), heads, tree=tree)
    together = decoder.generate([torch.tensor(prompt) for prompt in prompts], **asked)
    for row, (prompt, result, wanted) in enumerate(zip(prompts, together, expected, strict=True)):
        assert result.token_ids == wanted.token_ids
        assert result.finish_reason == wanted.finish_reason
        alone = decoder.generate(prompt, sequence=row, **asked).stats
        assert result.stats.acceptance_histogram == alone.acceptance_histogram


def test_the_report_of_a_tree_asked_for_says_what_lookup_adds() -> None:
    heads = SuccessorHeads([])
    decoder = SpecDecoder(tiny_model(), ByteTokenizer(), heads, tree="chain-2", lookup="on")
    assert decoder.tree.num_lookup > 0
    assert decoder.tree_report == (
        f"tree of {decoder.tree.num_nodes} nodes ({decoder.tree.num_lookup} of lookup), as asked"
    )
