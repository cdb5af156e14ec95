"""What is measured: rows that turn a prompt into a `Run`, all with the same weights in one process.

The clock stands outside the decoders: a run is timed as a reader of its stream sees it.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from specdeft.bench.metrics import Run
from specdeft.bench.run_folder import RunFolder
from specdeft.bench.workbench import PLAIN, Workbench
from specdeft.config import GenerationConfig
from specdeft.decoder import SpecDecoder
from specdeft.loading import LoadedTarget, load_heads
from specdeft.trees.options import listed


class Row(Protocol):
    """One way to generate.

    Attributes:
        name: unique among the rows of a run.
        is_ours: its speed is claimed, so its text must be plain decoding's.
    """

    name: str
    is_ours: bool

    def run(self, prompt_ids: Sequence[int], config: GenerationConfig) -> Run:
        """Generate for one prompt."""


def in_microseconds(seconds: float) -> float:
    """Rounded to whole microseconds: further digits are noise, and most of a record."""
    return round(seconds, 6)


class DecoderRow:
    """Our decoder with one tree; the one-node tree is the plain baseline."""

    is_ours = True

    def __init__(
        self,
        name: str,
        bench: Workbench,
        decoder: SpecDecoder | None = None,
        *,
        heads_name: str | None = None,
    ) -> None:
        """Args: the tree's name as on the command line; what it runs on; its decoder if it differs;
        the name of its heads where that tells it from another row.

        Raises:
            ValueError: there is no such tree, or the heads cannot fill it.
        """
        self.name = f"{name} [{heads_name}]" if heads_name else name
        self.tree_name = name
        self.bench = bench
        self.decoder = decoder or bench.decoder(name)
        self._clock = bench.clock

    @property
    def num_nodes(self) -> int:
        """Of its tree."""
        return self.decoder.tree.num_nodes

    def run(self, prompt_ids: Sequence[int], config: GenerationConfig) -> Run:
        """Generate as a stream; a piece that brought tokens is an emission."""
        decoder, clock = self.decoder, self._clock
        # "auto" is resolved outside the measured time.
        tree = decoder.tree_of(config, len(prompt_ids))
        emission_s: list[float] = []
        counts: list[int] = [0]
        began = clock()
        stream = decoder.stream(list(prompt_ids), config=config)
        for _piece in stream:
            now, count = in_microseconds(clock() - began), stream.num_new_tokens
            # The last piece is text that was held back; it brings no token.
            if count > counts[-1]:
                emission_s.append(now)
                counts.append(count)
        e2e_s = in_microseconds(clock() - began)
        result = stream.result
        assert result is not None
        return Run(
            token_ids=result.token_ids,
            finish_reason=result.finish_reason,
            num_nodes=tree.num_nodes,
            max_depth=tree.max_depth,
            per_step_accepted=tuple(after - before - 1 for before, after in pairwise(counts[1:])),
            emission_s=tuple(emission_s),
            e2e_s=e2e_s,
        )


def rows_of_more_heads(
    trees: Sequence[str], bench: Workbench, options: argparse.Namespace
) -> list[DecoderRow]:
    """The trees again with every further head that --more-heads names, on the same model.

    Raises:
        ValueError: a folder holds no heads, those of another model, or a name stands twice.
    """
    folders = listed(options.more_heads or "")
    names = [Path(folder).name for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"heads are named {', '.join(names)}: give folders with different names")
    loaded = LoadedTarget(bench.model, bench.tokenizer, options.model)
    rows: list[DecoderRow] = []
    for name, folder in zip(names, folders, strict=True):
        found = load_heads(folder, loaded)
        assert found is not None  # only "auto" and None give none
        other = replace(bench, heads=found.heads, values=found.values)
        rows += [DecoderRow(tree, other, heads_name=name) for tree in trees if tree != PLAIN]
    return rows


def recorded(
    folder: RunFolder, key: str, row: str, prompt_id: str, measure: Callable[[], Run]
) -> Run:
    """The run that the folder holds under this key, measured and kept if it holds none.

    ``row`` names it for `compare`: the row, and what else runs of one prompt differ in."""
    record = folder.get(key)
    if record is None:
        record = {"row": row, "prompt": prompt_id, "run": measure().to_dict()}
        folder.put(key, record)
    return Run.from_dict(record["run"])
