"""FasterDecoding's Medusa repository: the layout most others follow.

v1.3 (Medusa-1): `medusa_lm_head.pt`, every head with its own output layer. Legacy version 2: the
same without output layers, which are the base model's. Medusa-2: the heads inside the base model's
own files. Its loader reads `medusa_lm_head.pt` and builds as many heads as config.json says.
Sources: https://github.com/FasterDecoding/Medusa, medusa/model/medusa_model.py at 60eeab9.
"""

from __future__ import annotations

from specdeft.heads.formats.layout import Layout

LAYOUT = Layout(
    "FasterDecoding (also TGI, TensorRT-LLM's input)",
    block="{head}.{block}.linear.{kind}",
    output="{head}.{block}.weight",
)
MERGED = Layout("merged Medusa-2 model", LAYOUT.block, LAYOUT.output, prefix="medusa_head.")
# Seen in forks: counted from 1, as the position a head predicts, or from 0.
PREFIXED = Layout("heads.N", LAYOUT.block, LAYOUT.output, prefix="heads.", first_heads=(0, 1))
