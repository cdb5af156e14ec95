"""specdeft: speculative decoding that leaves the text unchanged.

Medusa heads propose a token tree, the target verifies the whole tree in one forward with
DeFT-Flatten attention, and the accepted path is committed into a KV tree.

The public names are resolved lazily so that ``import specdeft.trees.token_tree`` pulls in
neither triton nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdeft.config import GenerationConfig
    from specdeft.decoder import SpecDecoder
    from specdeft.result import GenerationResult
    from specdeft.trees.token_tree import TokenTree

__version__ = "0.1.0"

_PUBLIC = {
    "SpecDecoder": "specdeft.decoder",
    "GenerationResult": "specdeft.result",
    "GenerationConfig": "specdeft.config",
    "TokenTree": "specdeft.trees.token_tree",
}

__all__ = ["GenerationConfig", "GenerationResult", "SpecDecoder", "TokenTree", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'specdeft' has no attribute {name!r}")
