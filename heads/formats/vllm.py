"""vLLM's draft model of method "medusa".

One linear layer a block, with biases if the config says so; output layers apart from the blocks,
lm_heads.0 for all heads with `original_lm_head`; a `token_map` lists a draft vocabulary.
Its loader skips names it does not know without a word, so a file in another layout drafts noise.
Sources: https://github.com/vllm-project/vllm, vllm/model_executor/models/medusa.py at 01dbb08 and
vllm/transformers_utils/configs/medusa.py at 4bb77b3.
"""

from __future__ import annotations

from specdeft.heads.formats.layout import Layout

SHARED = "original_lm_head"  # in the config: one output layer for all heads

LAYOUT = Layout(
    "vLLM",
    block="blocks.{head}.layers.{block}.{kind}",
    output="lm_heads.{head}.weight",
    optional_prefix="medusa_heads.",
    token_map="token_map",
    shares_output=True,
)
