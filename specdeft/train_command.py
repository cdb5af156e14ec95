"""`specdeft train`: the trainer of heads/, with the names of the embedded models understood."""

from collections.abc import Sequence

from specdeft.default_model import DEFAULT_MODELS, resolve_default_model
from specdeft.heads.train import main as train


def main(arguments: Sequence[str]) -> int:
    """Run the command; see `specdeft train --help`."""
    return train(arguments, _folder_of)


def _folder_of(name: str) -> str:
    return str(resolve_default_model(name)) if name in DEFAULT_MODELS else name
