"""The ranks of the drafted tokens that a text holds, found again from the text itself.

The decoder says how many drafted tokens each step kept, not which nodes held them. The heads are
deterministic functions of the target's hidden states, so one forward over the finished text and one
batched draft name the rank of every kept token, whatever way the steps were run.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from specdeft.bench.metrics import Run
from specdeft.bench.workbench import Workbench
from specdeft.heads.eight_bit import Product, product_for

# A lookup guessed the token, or rounding moved it out of the heads' first ranks.
UNKNOWN = -1


@torch.inference_mode()
def kept_ranks(
    bench: Workbench, prompt_ids: Sequence[int], run: Run, top_k: int
) -> tuple[tuple[int, ...], ...]:
    """Per step, the ranks of its kept tokens (at most ``top_k``) by depth."""
    heads, model = bench.heads, bench.model
    steps = run.per_step_accepted
    if heads is None or not any(steps):
        return tuple(() for _ in steps)
    base: Any = model.base_model
    tokens = torch.tensor([[*prompt_ids, *run.token_ids]], device=model.device)
    hidden = base(input_ids=tokens, use_cache=False).last_hidden_state[0]
    roots_at = [0]
    for accepted in steps[:-1]:
        roots_at.append(roots_at[-1] + 1 + accepted)
    at = torch.tensor(roots_at, device=model.device) + len(prompt_ids)
    # The root and the tokens behind it, as every head found them; past the end no rank is read.
    ahead = at[:, None] + torch.arange(heads.config.num_heads, device=model.device)
    drafted = heads.draft_along(
        hidden[at - 1],
        tokens[0, ahead.clamp(max=tokens.shape[1] - 1)],
        model.get_input_embeddings(),
        model.get_output_embeddings(),
        top_k,
        _product(bench),
    ).tolist()
    return tuple(
        tuple(
            _rank(drafted[step][depth], run.token_ids[root + 1 + depth])
            if depth < heads.config.num_heads
            else UNKNOWN
            for depth in range(accepted)
        )
        for step, (root, accepted) in enumerate(zip(roots_at, steps, strict=True))
    )


def _product(bench: Workbench) -> Product:
    """As the steps drafted, but for all of them at once."""
    if bench.heads is None or not bench.heads.config.sequential:
        return linear
    return product_for(bench.model.device, compiled=bench.compile, most_rows=sys.maxsize)


def _rank(ranked: Sequence[int], token: int) -> int:
    return ranked.index(token) if token in ranked else UNKNOWN
