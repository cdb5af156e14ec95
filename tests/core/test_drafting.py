"""What drafting reads beside the heads: the tokens so far, kept by position on the device."""

import torch

from specdeft.attention import KernelChoice
from specdeft.batch import Batch
from specdeft.config import GenerationConfig
from specdeft.engine import Engine
from specdeft.model import TargetModel
from specdeft.sampling import Sampler
from specdeft.trees.token_tree import TokenTree
from tests.core.tiny import ScriptedHeads, prompt_ids, tiny_model


def test_history_holds_the_prompt_and_every_emitted_token() -> None:
    model, prompt, tree = tiny_model(), prompt_ids(700), TokenTree.chain(3)
    target = TargetModel(model)
    plain = _run(Engine(target, None, KernelChoice.CPU), prompt, TokenTree.chain(0), 40)
    heads = ScriptedHeads(plain[len(prompt) :], (0, 0, 0), [2, 0, 3])
    speculated = _run(Engine(target, heads, KernelChoice.CPU), prompt, tree, 12)
    assert len(speculated) == 700 + 1 + 12 + 4 * (2 + 0 + 3)
    assert speculated == plain[: len(speculated)]


def _run(engine: Engine, prompt: list[int], tree: TokenTree, num_steps: int) -> list[int]:
    """The history after some steps, checked against what they emitted."""
    cache = engine.new_cache(len(prompt) + 64)
    sequence = cache.open()
    cache.reserve(sequence, cache.capacity)
    batch = Batch.empty(engine.target, cache, (sequence,), tree.max_depth + 1)
    sampler = Sampler.build(GenerationConfig(), (0,), engine.target.device)
    engine.prefill(cache, batch, torch.tensor(prompt), sampler)
    emitted = [*prompt, int(batch.root)]
    for _ in range(num_steps):
        engine.step(cache, batch, engine.load_tree(tree), sampler)
        cache.advance(sequence, int(batch.counts))
        emitted += batch.emitted[0, : int(batch.counts)].tolist()
        assert batch.history[0, : int(batch.lengths) + 1].tolist() == emitted
    return emitted
