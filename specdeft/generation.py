"""One generation as it runs: steps of a batch in, kept tokens and text pieces out, then results."""

from collections.abc import Callable, Iterator, Sequence

from specdeft.reply import Reply
from specdeft.result import GenerationResult
from specdeft.run_state import RunState
from specdeft.step_trees import StepTrees


class Generation:
    """Iterating yields pieces of text, one per reply; ``results`` is there once it is exhausted.

    Attributes:
        results: the outcomes in the order of the replies, None while it runs.
    """

    def __init__(
        self,
        replies: Sequence[Reply],
        state: RunState,
        *,
        trees: StepTrees,
        clock: Callable[[], float],
    ) -> None:
        """Args: the replies, one per sequence of the state; the tree of a step by the most tokens
        that any reply may still keep; seconds."""
        self.results: list[GenerationResult] | None = None
        self._replies = list(replies)
        self._state = state
        self._trees = trees
        self._clock = clock
        self._num_nodes = 1
        self._paused_s = 0.0
        self._decode_s = [0.0] * len(self._replies)

    @property
    def num_new_tokens(self) -> int:
        """Tokens kept so far, of all replies."""
        return sum(len(reply.text.token_ids) for reply in self._replies)

    def __iter__(self) -> Iterator[list[str]]:
        try:
            yield from self._run()
        finally:
            self._state.stepper.finish()
            self._state.cache.clear()

    def _run(self) -> Iterator[list[str]]:
        stepper, going = self._state.stepper, dict(enumerate(self._replies))
        began = self._clock()
        self._state.read_prompts()
        for reply, token in zip(self._replies, self._state.batch.root.tolist(), strict=True):
            reply.begin(token)
        started = self._clock()
        self._retire(going, started)
        yield from self._show()
        while going:
            while stepper.num_pending <= stepper.lead:
                self._launch()
            emitted = stepper.collect()
            drafted = self._trees.observe(sum(len(emitted[row]) for row in going) / len(going))
            for row, token_ids in enumerate(emitted):
                if row in going:
                    going[row].go_on(token_ids, drafted=drafted)
            self._retire(going, started)
            yield from self._show()
        last_pieces = [reply.text.finish() for reply in self._replies]
        self.results = [
            reply.result(self._num_nodes, started - began, decode_s)
            for reply, decode_s in zip(self._replies, self._decode_s, strict=True)
        ]
        yield last_pieces

    def _launch(self) -> None:
        tree = self._trees(max(reply.num_tokens_left for reply in self._replies))
        self._num_nodes = max(self._num_nodes, tree.num_nodes)
        self._state.stepper.launch(tree)

    def _retire(self, going: dict[int, Reply], started: float) -> None:
        """Take the replies that ended out of the batch."""
        ended = [row for row, reply in going.items() if reply.reason]
        for row in ended:
            del going[row]
            self._decode_s[row] = self._clock() - started - self._paused_s
        if ended and going:
            self._state.stepper.retire(ended)

    def _show(self) -> Iterator[list[str]]:
        # The consumer's own time is not decoding time.
        shown = self._clock()
        yield [reply.text.take() for reply in self._replies]
        self._paused_s += self._clock() - shown
