"""The theorem on the accelerator: kernels, CUDA graphs and compilation change no token (fp32).

Run there: python -m pytest tests/test_gpu.py -m gpu
"""

import _thread
import gc
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from specdeft.bench.random_model import random_heads, random_model
from specdeft.config import GenerationConfig
from specdeft.decoder import SpecDecoder
from specdeft.engine import Engine
from specdeft.graphs import StepGraphs
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from specdeft.trees.token_tree import TokenTree
from tests.core.tiny import (
    FAMILIES,
    VOCAB_SIZE,
    WINDOW,
    ByteTokenizer,
    DeviceScriptedHeads,
    SuccessorHeads,
    prompt_ids,
    tiny_model,
)
from tests.test_lossless import SCRIPTS, SETTINGS, TREES

pytestmark = pytest.mark.gpu
NUM_TOKENS = 40


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def on_gpu(family: str) -> Any:
    return tiny_model(family).to("cuda")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_speculative_equals_plain_and_the_cpu(family: str, cuda_graphs: bool) -> None:
    if family == "gpt-oss" and cuda_graphs:
        pytest.skip("gpt-oss routes its experts on the host: see the test of its refusal")
    on_cpu = SpecDecoder(tiny_model(family), ByteTokenizer())
    model = on_gpu(family)
    plain_decoder = SpecDecoder(model, ByteTokenizer(), cuda_graphs=cuda_graphs)
    names = list(TREES)
    for index, settings in enumerate(SETTINGS):
        prompt = prompt_ids((WINDOW - 1, WINDOW + 1, 3 * WINDOW)[index])
        request = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **settings}
        plain = plain_decoder.generate(prompt, **request)
        assert plain.token_ids == on_cpu.generate(prompt, **request).token_ids
        for offset, script in enumerate(SCRIPTS.values()):
            tree, path = TREES[names[(2 * index + offset) % len(names)]]
            heads = DeviceScriptedHeads(plain.token_ids, path, script, "cuda")
            decoder = SpecDecoder(model, ByteTokenizer(), heads, tree=tree, cuda_graphs=cuda_graphs)
            decoder.generate(prompt, **request)  # captures, which runs the script ahead
            heads.reset()
            result = decoder.generate(prompt, **request)
            assert result.token_ids == plain.token_ids
            if script == [5]:
                assert result.stats.tau > len(path) * 0.8


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("num_lookup", [1, 5, 24])
def test_lookup_chains_equal_plain(num_lookup: int, cuda_graphs: bool) -> None:
    model = on_gpu("llama")
    tree = TokenTree.chain(0).with_lookup(num_lookup)
    decoder = SpecDecoder(model, ByteTokenizer(), tree=tree, cuda_graphs=cuda_graphs)
    half = prompt_ids(30)
    prompts = [torch.tensor(prompt) for prompt in (half + half, half[:7], half[:1])]
    taus = []
    for settings in SETTINGS:
        request = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **settings}
        results = decoder.generate(prompts, **request)
        for row, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            assert result.token_ids == decoder.plain(prompt, sequence=row, **request).token_ids
            taus.append(result.stats.tau)
    assert max(taus) > 1.0


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2-window"])
def test_prompts_filled_up_in_graphs_give_the_text_of_eager_ones(family: str) -> None:
    model = on_gpu(family)
    eager, replayed = (
        SpecDecoder(model, ByteTokenizer(), cuda_graphs=cuda_graphs)
        for cuda_graphs in (False, True)
    )
    request: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.7, "ignore_eos": True}
    for length in (200, 1, 63, 64, 65, 129, 2):
        prompt = prompt_ids(length, seed=length)
        expected = eager.plain(prompt, **request).token_ids
        for _ in range(2):  # captured, then replayed
            assert replayed.plain(prompt, **request).token_ids == expected
    graphs = replayed._states._prompt_graphs
    assert graphs is not None
    assert [key.num_tokens for key in graphs._graphs] == [256, 64, 128]


def test_a_model_that_no_graph_holds_is_named() -> None:
    model = on_gpu("gpt-oss")
    with pytest.raises(ValueError, match=r"GptOssForCausalLM cannot be captured .*cuda_graphs=Fa"):
        SpecDecoder(model, ByteTokenizer()).generate(prompt_ids(9), max_new_tokens=4)
    eager = SpecDecoder(model, ByteTokenizer(), cuda_graphs=False)
    assert eager.generate(prompt_ids(9), max_new_tokens=4).stats.num_new_tokens == 4


COMPILED = [("llama", True), ("llama", False), ("gemma2", True), ("qwen2-window", True)]


@pytest.mark.parametrize(("family", "cuda_graphs"), COMPILED)
def test_compiled_equals_eager(family: str, cuda_graphs: bool) -> None:
    """The layers, the draft by parallel and sequential heads, and the decision."""
    model = on_gpu(family)
    request: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "temperature": 0.7, "top_p": 0.9}
    # Eager batches are compiled anew for every number of rows that still go on.
    prompts = [torch.tensor(prompt) for prompt in batch_prompts()[: 8 if cuda_graphs else 2]]
    plain_decoder = SpecDecoder(model, ByteTokenizer(), cuda_graphs=False)
    alone = [
        plain_decoder.generate(prompt, sequence=row, **request).token_ids
        for row, prompt in enumerate(prompts)
    ]
    for sequential in (False, True):
        config = HeadsConfig(
            num_heads=4,
            num_layers=1,
            hidden_size=64,
            vocab_size=VOCAB_SIZE,
            token_input=True,
            sequential=sequential,
        )
        heads = MedusaHeads(config).to("cuda")
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        decoder = SpecDecoder(
            model, ByteTokenizer(), heads, tree="deft-32", cuda_graphs=cuda_graphs, compile=True
        )
        assert decoder.generate(prompts[0], **request).token_ids == alone[0]
        assert [r.token_ids for r in decoder.generate(prompts, **request)] == alone


def batch_prompts() -> list[list[int]]:
    """Eight prompts behind a common beginning of more than a page, around the window."""
    trunk = prompt_ids(140, seed=99)
    lengths = (1, WINDOW - 1, WINDOW + 1, 3 * WINDOW, 2, 40, WINDOW, 5)
    return [trunk + prompt_ids(length, seed=row) for row, length in enumerate(lengths)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_batch_of_eight_equals_its_rows_alone(family: str, cuda_graphs: bool) -> None:
    if family == "gpt-oss" and cuda_graphs:
        pytest.skip("gpt-oss routes its experts on the host: see the test of its refusal")
    model, prompts = on_gpu(family), batch_prompts()
    plain_decoder = SpecDecoder(model, ByteTokenizer(), cuda_graphs=cuda_graphs)
    for settings, tree in zip(
        SETTINGS, ("deft-64", "deft-32", TokenTree.full([3, 3])), strict=True
    ):
        request: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **settings}
        alone = [
            plain_decoder.generate(prompt, sequence=row, **request).token_ids
            for row, prompt in enumerate(prompts)
        ]
        heads = SuccessorHeads(alone, "cuda")
        decoder = SpecDecoder(model, ByteTokenizer(), heads, tree=tree, cuda_graphs=cuda_graphs)
        results = decoder.generate([torch.tensor(prompt) for prompt in prompts], **request)
        assert [result.token_ids for result in results] == alone
        assert sum(result.stats.acceptance_length for result in results) > 1
        # Rows that end early, one of them at once, change nothing for the others.
        request |= {"ignore_eos": False, "eos_token_ids": (alone[0][0], alone[3][7], alone[5][20])}
        alone = [
            plain_decoder.generate(prompt, sequence=row, **request).token_ids
            for row, prompt in enumerate(prompts)
        ]
        results = decoder.generate([torch.tensor(prompt) for prompt in prompts], **request)
        assert [result.token_ids for result in results] == alone
        assert len({result.stats.num_steps for result in results}) > 1


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_prefix_read_once_by_a_batch(
    family: str, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several prefixes, rows without one, and rows that end, by the same graphs."""
    read_once: list[bool] = []
    asked = Engine.reads_prefix_once

    def watched(*arguments: Any) -> bool:
        read_once.append(asked(*arguments))
        return read_once[-1]

    monkeypatch.setattr(Engine, "reads_prefix_once", watched)
    model = tiny_model(family, max_position_embeddings=2048).to("cuda")
    plain_decoder = SpecDecoder(model, ByteTokenizer(), cuda_graphs=cuda_graphs)
    request: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "temperature": 0.7}
    request |= {"eos_token_ids": ()}
    batches, alone, texts = [], [], []
    for num_shared in (600, 140, 0, 1100):
        trunk = prompt_ids(num_shared, seed=num_shared)
        prompts = [trunk + prompt_ids(5 + 9 * row, seed=row) for row in range(8)]
        whole = [plain_decoder.generate(p, sequence=r, **request) for r, p in enumerate(prompts)]
        # The first row ends first: its table led to the prefix too.
        ends = {**request, "eos_token_ids": (whole[0].token_ids[4], whole[5].token_ids[20])}
        cut = [plain_decoder.generate(p, sequence=r, **ends) for r, p in enumerate(prompts)]
        texts += [result.token_ids for result in whole]
        alone.append([result.token_ids for result in cut])
        batches.append((prompts, ends))
    heads = SuccessorHeads(texts, "cuda")
    for tree in (TokenTree.chain(0), TokenTree.full([2])):
        decoder = SpecDecoder(model, ByteTokenizer(), heads, tree=tree, cuda_graphs=cuda_graphs)
        read_once.clear()
        for (prompts, ends), expected in zip(batches, alone, strict=True):
            results = decoder.generate([torch.tensor(prompt) for prompt in prompts], **ends)
            assert [result.token_ids for result in results] == expected
        assert set(read_once) == {False, True}


def test_a_graphed_step_never_waits_for_the_device() -> None:
    model = on_gpu("llama")
    decoder = SpecDecoder(model, ByteTokenizer())
    decoder.generate(prompt_ids(9), max_new_tokens=60)
    stream = decoder.stream(prompt_ids(9), max_new_tokens=60, ignore_eos=True)
    next(stream)  # the prefill reads its token; the steps must not
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _piece in stream:
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stream.result is not None
    assert stream.result.stats.num_new_tokens == 60


def test_a_graph_keeps_the_tree_it_was_captured_with() -> None:
    """The tree of a single request is dropped after it; the graph must not read freed memory."""
    decoder = SpecDecoder(on_gpu("llama"), ByteTokenizer())
    first = decoder.plain(prompt_ids(9), max_new_tokens=30)
    gc.collect()
    # Take over whatever was freed, with numbers that no tree holds.
    junk = [torch.full((size,), 1 << 40, device="cuda") for size in (1, 2, 8, 64, 512) * 50]
    assert decoder.plain(prompt_ids(9), max_new_tokens=30).token_ids == first.token_ids
    assert len(junk) == 250


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compile", [False, True])
def test_sixteen_bit_text_passes_the_tiers(dtype: torch.dtype, compile: bool) -> None:
    """A model whose text is decided by far: other kernels for one row and for many do not show."""
    model, tokenizer = random_model("random:llama-tiny", dtype, torch.device("cuda"))
    decoder = SpecDecoder(
        model, tokenizer, random_heads(model), tree="deft-32", lookup="off", compile=compile
    )
    for temperature in (0.0, 0.5):
        config = GenerationConfig(max_new_tokens=60, ignore_eos=True, temperature=temperature)
        prompts = [torch.tensor(prompt) for prompt in batch_prompts()]
        plain = [
            decoder.plain(prompt, config=config, sequence=row) for row, prompt in enumerate(prompts)
        ]
        results = decoder.generate(prompts, config=config)
        for row, (result, wanted) in enumerate(zip(results, plain, strict=True)):
            assert decoder.compare(result, wanted, config, sequence=row).passed


@pytest.mark.parametrize("num_left", [1, 2, 5, 33])
def test_the_end_of_the_context_in_graphs(num_left: int) -> None:
    """Nodes that stand past the last position change nothing before it."""
    model = on_gpu("llama")
    end = model.config.max_position_embeddings
    prompt = prompt_ids(end - num_left)
    plain = SpecDecoder(model, ByteTokenizer(), cuda_graphs=False)
    expected = plain.generate(prompt, eos_token_ids=())
    assert expected.finish_reason == "context"
    heads = SuccessorHeads([expected.token_ids], "cuda")
    decoder = SpecDecoder(model, ByteTokenizer(), heads, tree="deft-64")
    for _ in range(2):  # captured, then replayed from the start
        result = decoder.generate(prompt, eos_token_ids=())
        assert result.token_ids == expected.token_ids
        assert result.finish_reason == "context"
        assert len(result.token_ids) == num_left


def test_two_decoders_take_turns_on_one_model() -> None:
    model = on_gpu("llama")
    request: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.7}
    prompts = [prompt_ids(9, seed=seed) for seed in (1, 2)]
    plain = SpecDecoder(model, ByteTokenizer(), cuda_graphs=False)
    expected = [plain.generate(prompt, **request).token_ids for prompt in prompts]
    heads = SuccessorHeads(expected, "cuda")
    decoders = [
        SpecDecoder(model, ByteTokenizer(), heads, tree=tree) for tree in ("deft-32", "deft-64")
    ]
    streams = [
        decoder.stream(prompt, **request) for decoder, prompt in zip(decoders, prompts, strict=True)
    ]
    going = [iter(stream) for stream in streams]
    while going:
        going = [pieces for pieces in going if next(pieces, None) is not None]
    assert [stream.result.token_ids for stream in streams if stream.result] == expected


# ---- faults


def test_short_memory_at_capture_is_said_and_decoded_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = on_gpu("llama")
    request: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    expected = SpecDecoder(model, ByteTokenizer()).generate(prompt_ids(9), **request).token_ids
    decoder = SpecDecoder(model, ByteTokenizer(), tree=1)
    attempts: list[int] = []

    def short(_graphs: StepGraphs, _tree: Any, max_context: int) -> None:
        attempts.append(max_context)
        raise torch.cuda.OutOfMemoryError("short")

    monkeypatch.setattr(StepGraphs, "_warm_and_capture", short)
    with pytest.warns(RuntimeWarning, match="no memory is left to capture a step of"):
        result = decoder.generate(prompt_ids(9), **request)
    assert result.token_ids == expected
    assert len(attempts) == 2  # once more without the other graphs, then not again


def test_memory_that_runs_out_at_capture_costs_speed_not_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The allocator itself says so: while a step is captured the process may take nothing more."""
    model = on_gpu("llama")
    request: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    expected = SpecDecoder(model, ByteTokenizer()).generate(prompt_ids(9), **request).token_ids
    total = torch.cuda.get_device_properties(0).total_memory
    capture = StepGraphs._warm_and_capture
    attempts: list[int] = []

    def short(graphs: StepGraphs, tree: Any, max_context: int) -> Any:
        attempts.append(max_context)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        try:
            return capture(graphs, tree, max_context)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    monkeypatch.setattr(StepGraphs, "_warm_and_capture", short)
    decoder = SpecDecoder(model, ByteTokenizer(), tree=1)
    with pytest.warns(RuntimeWarning, match="no memory is left to capture a step of"):
        result = decoder.generate(prompt_ids(9), **request)
    assert result.token_ids == expected
    assert len(attempts) == 2
    monkeypatch.setattr(StepGraphs, "_warm_and_capture", capture)
    again = SpecDecoder(model, ByteTokenizer(), tree=1).generate(prompt_ids(9), **request)
    assert again.token_ids == expected


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    decoder = SpecDecoder(on_gpu("llama"), ByteTokenizer(), kv_memory_fraction=1e-9)
    with pytest.raises(ValueError, match=r"GiB of KV cache .* GiB are free"):
        decoder.generate(prompt_ids(9), max_new_tokens=4)


def test_two_threads_with_a_decoder_each_on_one_model() -> None:
    model = on_gpu("llama")
    request: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "temperature": 0.8}
    prompts = [prompt_ids(9, seed=seed) for seed in range(8)]
    expected = [SpecDecoder(model, ByteTokenizer()).generate(p, **request) for p in prompts]
    found: dict[int, tuple[int, ...]] = {}

    def work(first: int) -> None:
        decoder = SpecDecoder(model, ByteTokenizer())  # captures while the other one decodes
        for index in range(first, 8, 2):
            found[index] = decoder.generate(prompts[index], **request).token_ids

    threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(8)] == [result.token_ids for result in expected]


def test_an_interrupted_generation_leaves_the_decoder_usable() -> None:
    decoder = SpecDecoder(on_gpu("llama"), ByteTokenizer())
    expected = decoder.generate(prompt_ids(9), max_new_tokens=60, ignore_eos=True).token_ids

    def consume() -> None:
        for count, _piece in enumerate(decoder.stream(prompt_ids(9), max_new_tokens=60)):
            if count == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    # A real one, from outside, while steps are replayed.
    timer = threading.Timer(0.05, _thread.interrupt_main)
    timer.start()

    def decode_on() -> None:
        while True:
            decoder.generate(prompt_ids(9), max_new_tokens=200, ignore_eos=True)

    with pytest.raises(KeyboardInterrupt):
        decode_on()
    again = decoder.generate(prompt_ids(9), max_new_tokens=60, ignore_eos=True)
    assert again.token_ids == expected
    assert decoder._states.cache is not None
    decoder._states.cache.check_invariants()


def test_the_device_does_not_wait_for_the_host_between_steps() -> None:
    """A trace of replayed steps holds no pause above 50 us, within a step or between two."""
    model, tokenizer = random_model("random:smollm2-135m", torch.bfloat16, torch.device("cuda"))
    decoder = SpecDecoder(model, tokenizer)
    request: dict[str, Any] = {"max_new_tokens": 64, "ignore_eos": True}
    decoder.generate([5] * 40, **request)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        decoder.generate([5] * 40, **request)
    starts_ends = sorted(
        (event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type.name == "CUDA"
    )
    pauses_us = [later[0] - earlier[1] for earlier, later in pairwise(starts_ends)]
    steps = pauses_us[len(pauses_us) // 2 :]  # past the prompt, whose chunk the host launches
    assert len(steps) > 1000
    assert max(steps) < 50
