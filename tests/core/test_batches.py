"""Several prompts at once: each gets what it gets alone, whatever the others do."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdeft.attention import KernelChoice
from specdeft.decoder import SpecDecoder
from specdeft.kernels import launch_shape
from specdeft.prompts import MIN_SHARED_TOKENS, num_shared_tokens
from specdeft.tree_choice import TreeChoice
from specdeft.trees.named import named_tree
from specdeft.trees.token_tree import TokenTree
from tests.core.tiny import (
    FAMILIES,
    MAX_POSITIONS,
    WINDOW,
    ByteTokenizer,
    SuccessorHeads,
    prompt_ids,
    tiny_model,
)

TREES = {
    "plain": TokenTree.chain(0),
    "chain-4": TokenTree.chain(4),
    "full-3-3": TokenTree.full([3, 3]),
    "deft-32": named_tree("deft-32"),
}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "seed": 2**40},
]
NUM_TOKENS = 24


def prompts_of(size: int, shared: int = 0) -> list[list[int]]:
    """Different lengths around the sliding window, behind ``shared`` common tokens."""
    lengths = (1, WINDOW - 1, WINDOW + 1, 3 * WINDOW, 2, 40, WINDOW, 5)
    trunk = prompt_ids(shared, seed=99)
    return [trunk + prompt_ids(lengths[row % 8], seed=row) for row in range(size)]


def alone(decoder: SpecDecoder, prompts: list[list[int]], settings: dict[str, Any]) -> list[Any]:
    return [decoder.plain(prompt, sequence=row, **settings) for row, prompt in enumerate(prompts)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_equals_its_rows_alone(family: str) -> None:
    """Families x trees x batch sizes x settings x shared prompts, thinned out per family."""
    model = tiny_model(family)
    offset = FAMILIES.index(family)
    accepted = 0.0
    for turn, name in enumerate(TREES):
        size = (2, 8, 3, 5)[(turn + offset) % 4]
        settings = {"max_new_tokens": NUM_TOKENS, **SETTINGS[(turn + offset) % 3]}
        prompts = prompts_of(size, shared=(0, MIN_SHARED_TOKENS + 5)[(turn + offset) % 2])
        expected = alone(SpecDecoder(model, ByteTokenizer()), prompts, settings)
        heads = SuccessorHeads([result.token_ids for result in expected])
        decoder = SpecDecoder(model, ByteTokenizer(), heads, tree=TREES[name])
        results = decoder.generate([torch.tensor(prompt) for prompt in prompts], **settings)
        for prompt, result, wanted in zip(prompts, results, expected, strict=True):
            case = (name, size, settings, len(prompt))
            assert result.token_ids == wanted.token_ids, case
            assert result.text == wanted.text, case
            assert result.finish_reason == wanted.finish_reason, case
            assert list(result.prompt_ids) == prompt
            stats = result.stats
            kept = sum(n * (a + 1) for a, n in enumerate(stats.acceptance_histogram))
            assert stats.num_new_tokens in (kept, kept + 1)
            accepted += stats.acceptance_length
        assert decoder._states.cache is not None
        decoder._states.cache.check_invariants()
    assert accepted > 1  # drafts were accepted, so lengths did drift apart


def test_rows_that_end_early_leave_the_others_alone() -> None:
    """Ends of every kind at different steps: end of text, stop string, and the whole budget."""
    model = tiny_model("llama")
    prompts = prompts_of(6)
    long = [
        r.token_ids
        for r in alone(SpecDecoder(model, ByteTokenizer()), prompts, {"max_new_tokens": 40})
    ]
    settings = {
        "max_new_tokens": 40,
        "eos_token_ids": (long[0][3], long[1][17]),
        "stop": [chr(32 + long[2][9])],
    }
    expected = alone(SpecDecoder(model, ByteTokenizer()), prompts, settings)
    decoder = SpecDecoder(model, ByteTokenizer(), SuccessorHeads(long), tree="deft-32")
    results = decoder.generate([torch.tensor(prompt) for prompt in prompts], **settings)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert [r.finish_reason for r in results] == [r.finish_reason for r in expected]
    assert len({r.stats.num_new_tokens for r in results}) > 2


def test_rows_that_ended_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    prompts = prompts_of(3)
    ids = [r.token_ids for r in alone(SpecDecoder(model, ByteTokenizer()), prompts, {})]
    rows: list[int] = []
    forward = type(model).forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(kwargs["input_ids"].shape[0])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counted)
    results = SpecDecoder(model, ByteTokenizer(), lookup="off").generate(
        [torch.tensor(prompt) for prompt in prompts], max_new_tokens=30, eos_token_ids=(ids[0][4],)
    )
    steps = sorted(result.stats.num_steps for result in results)
    expected = [1] * 3 + [3] * steps[0] + [2] * (steps[1] - steps[0]) + [1] * (steps[2] - steps[1])
    assert rows == expected
    assert steps[0] < steps[-1]


def test_more_prompts_than_fit_a_batch_come_in_order() -> None:
    model = tiny_model("llama")
    prompts = prompts_of(7)
    settings = {"max_new_tokens": 9, "temperature": 0.9, "seed": 4}
    decoder = SpecDecoder(model, ByteTokenizer(), max_batch_size=3)
    results = decoder.generate([torch.tensor(prompt) for prompt in prompts], **settings)
    expected = alone(decoder, prompts, settings)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    with pytest.raises(ValueError, match="max_batch_size is 0"):
        SpecDecoder(model, ByteTokenizer(), max_batch_size=0)


def test_equal_prompts_are_sampled_independently_and_reproducibly() -> None:
    model = tiny_model("llama")
    decoder = SpecDecoder(model, ByteTokenizer())
    prompts = [torch.tensor(prompt_ids(50))] * 4
    settings = {"max_new_tokens": 12, "temperature": 1.0, "seed": 8}
    first, second = (decoder.generate(prompts, **settings) for _ in range(2))
    assert [r.token_ids for r in first] == [r.token_ids for r in second]
    assert len({r.token_ids for r in first}) == 4


def test_a_bad_prompt_of_a_list_is_refused_before_any_work() -> None:
    decoder = SpecDecoder(tiny_model("llama"), ByteTokenizer())
    with pytest.raises(ValueError, match="the prompt is empty"):
        decoder.generate(["Hello", ""], max_new_tokens=2)
    assert decoder._states.cache is None


# ---- a shared beginning


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([[1] * 100], 0),
        ([[1] * 100, [1] * 100], 99),
        ([[1] * 100, [1] * 60 + [2] * 40], 60),
        ([[1] * 100, [1] * 60], 59),
        ([[2] + [1] * 99, [1] * 100], 0),
        ([[1] * 100, [1] * 60 + [2] * 40, [1] * 50 + [2]], 50),
        ([[1] * MIN_SHARED_TOKENS] * 2, 0),
        ([[1] * MIN_SHARED_TOKENS + [2], [1] * MIN_SHARED_TOKENS + [3, 4]], MIN_SHARED_TOKENS),
    ],
)
def test_how_much_is_shared(prompts: list[list[int]], expected: int) -> None:
    assert num_shared_tokens(prompts) == expected
    assert num_shared_tokens(prompts[::-1]) == expected


def test_a_shared_beginning_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    read: list[int] = []
    forward = type(model).forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(kwargs["input_ids"].numel())
        return forward(self, *args, **kwargs)

    prompts = prompts_of(4, shared=100)
    monkeypatch.setattr(type(model), "forward", counted)
    decoder = SpecDecoder(model, ByteTokenizer(), tree=1)  # "auto" measures
    decoder.generate([torch.tensor(prompt) for prompt in prompts], max_new_tokens=1)
    assert sum(read) == 100 + sum(len(prompt) - 100 for prompt in prompts)


@pytest.mark.parametrize(
    ("family", "prefix_once"), [("llama", False), ("llama", True), ("gemma2", True)]
)
def test_batches_through_the_triton_kernels(
    family: str, prefix_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages shared by the rows, tables of different lengths, and a row that ends: interpreted."""
    deft_flatten = pytest.importorskip("specdeft.kernels.deft_flatten")
    monkeypatch.setattr(launch_shape, "MIN_PREFIX_TOKENS", 128 if prefix_once else 1 << 30)
    prefixes: list[Any] = []
    attention = deft_flatten.tree_attention

    def watched(*args: Any, **kwargs: Any) -> Any:
        prefixes.append(kwargs["prefix"])
        return attention(*args, **kwargs)

    monkeypatch.setattr(deft_flatten, "tree_attention", watched)
    model = tiny_model(family)
    trunk = prompt_ids(130, seed=3)  # more than a page
    prompts = [trunk + prompt_ids(length, seed=length) for length in (3, 9, 5)]
    plain = SpecDecoder(model, ByteTokenizer())
    settings: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0.7}
    expected = alone(plain, prompts, settings)
    heads = SuccessorHeads([result.token_ids for result in expected])
    decoder = SpecDecoder(
        model, ByteTokenizer(), heads, tree=TokenTree.full([2]), kernels=KernelChoice.TRITON
    )
    settings["eos_token_ids"] = (expected[0].token_ids[1],)
    expected = alone(plain, prompts, settings)
    results = decoder.generate([torch.tensor(prompt) for prompt in prompts], **settings)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert any(prefix is not None for prefix in prefixes) == prefix_once
    assert any(prefix is None for prefix in prefixes)  # prompts, layers with a window


def test_the_end_of_the_context_is_a_reason() -> None:
    model = tiny_model("llama")
    prompts = [torch.tensor(prompt_ids(MAX_POSITIONS - 6)), torch.tensor(prompt_ids(3))]
    decoder = SpecDecoder(model, ByteTokenizer())
    results = decoder.generate(prompts, eos_token_ids=())
    assert [r.finish_reason for r in results] == ["context", "context"]
    assert results[0].stats.num_new_tokens == 6
    assert results[1].stats.num_new_tokens == MAX_POSITIONS - 3
    assert decoder.generate(prompts, max_new_tokens=4, ignore_eos=True)[0].finish_reason == "length"


def test_warming_up_changes_nothing_and_says_how_long_it_took() -> None:
    model = tiny_model("llama")
    ticks = iter(range(100_000))
    decoder = SpecDecoder(model, ByteTokenizer(), clock=lambda: float(next(ticks)))
    expected = decoder.generate(prompt_ids(9), max_new_tokens=8).token_ids
    assert decoder.warmup(100, batch_size=3, temperature=0.5) > 0
    assert decoder.generate(prompt_ids(9), max_new_tokens=8).token_ids == expected
    with pytest.raises(ValueError, match="at least 16 tokens"):
        decoder.warmup(15)
    with pytest.raises(ValueError, match="at least 1 sequence"):
        decoder.warmup(batch_size=0)
    with pytest.raises(ValueError, match="context"):
        decoder.warmup(2 * MAX_POSITIONS)


def test_warming_up_batches_prepares_steps_with_and_without_a_common_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared: list[int] = []

    def watched(_decoder: SpecDecoder, prompts: Any, **_settings: Any) -> None:
        shared.append(num_shared_tokens([prompt.tolist() for prompt in prompts]))

    monkeypatch.setattr(SpecDecoder, "generate", watched)
    decoder = SpecDecoder(tiny_model("llama"), ByteTokenizer())
    decoder.warmup(100, batch_size=3)
    assert shared[0] == 0  # what takes more memory comes first
    assert shared[1] > 0
    shared.clear()
    decoder.warmup(100, batch_size=1)
    assert len(shared) == 2  # a tree and plain steps


def test_warming_up_prepares_the_trees_of_all_places_and_short_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trees, prompts = list[TokenTree](), list[int]()

    def watched(_decoder: SpecDecoder, _prompts: Any, tree: Any, **_settings: Any) -> None:
        trees.append(tree)

    def watched_plain(_decoder: SpecDecoder, prompt: Any, **settings: Any) -> None:
        assert settings == {"max_new_tokens": 1}
        prompts.append(len(prompt))

    monkeypatch.setattr(SpecDecoder, "generate", watched)
    monkeypatch.setattr(SpecDecoder, "plain", watched_plain)
    # "auto" takes another tree behind more than 256 tokens.
    monkeypatch.setattr(
        TreeChoice, "tree_at", lambda _, place, _asked: TokenTree.chain(place.num_context // 256)
    )
    decoder = SpecDecoder(tiny_model("llama"), ByteTokenizer())
    decoder.warmup(200)
    assert trees == [TokenTree.chain(1), TokenTree.chain(0)]
    assert not prompts  # read eagerly here
    trees.clear()
    monkeypatch.setattr(decoder, "_engine", replace(decoder.engine, cuda_graphs=True))
    decoder.warmup(1500)
    assert trees == [TokenTree.chain(length) for length in (16, 0, 1, 4, 0)]
    assert prompts == [64, 128, 256, 512, 768, 1024]
