"""The target: a stock Hugging Face causal language model, called without its own cache.

The model is called with explicit positions, no mask and no cache object; the attention function
registered here under the name ``specdeft`` stores the new keys and values in the KV tree and runs
our kernels on it. The model object stays stock: the attention choice is set for the duration of a
call and restored after it, so ``model.generate`` works at any time as if we were not there.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch import library as torch_library
from transformers import AttentionInterface, PreTrainedModel

from specdeft.compiling import compiled, room_for_forms
from specdeft.fused_linears import FusedLinears
from specdeft.kv_tree import KVShape

ATTENTION_NAME = "specdeft"
# Rotations that read nothing but positions; the others look at the longest one on the host.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


class LayerAttention(Protocol):
    """What a forward hands to every attention layer: stores k and v, returns the attention."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: "AttentionOptions"
    ) -> Tensor:
        """q [B, N, Hq, D], k and v [B, N, Hkv, D] -> [B, N, Hq, D]."""


class AttentionOptions(NamedTuple):
    """How one layer scores: scale, sliding window in tokens, logit softcap, sink logits [Hq]."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class TargetOutput(NamedTuple):
    """logits [B, N or 1, V] and the hidden state the output layer read, [B, N or 1, hidden]."""

    logits: Tensor
    hidden: Tensor


class _Ambient(threading.local):
    """Which attention the forward running in this thread uses (transformers has no other way that
    also survives compilation: an object among the keywords would be traced)."""

    attention: LayerAttention | None = None
    next_layer: int = 0


_ambient = _Ambient()
_forward_lock = threading.Lock()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  always None: no mask is registered for our name
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_ignored: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every layer: q [B, Hq, N, D], k and v [B, Hkv, N, D]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if torch.compiler.is_compiling():
        return attend_op(q, k, v, s_aux, scale, sliding_window, softcap), None
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    return _attend_next(q, k, v, options, int(module.layer_idx)), None  # type: ignore[arg-type]


@torch_library.custom_op("specdeft::attend", mutates_args=())
def attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """`LayerAttention.attend` of the running forward, as one opaque node of a compiled graph.

    The pool it writes is touched by nothing else in the graph, so the write is not declared. The
    layer is counted, not named: layers that differ in a number would be compiled one by one.
    """
    options = AttentionOptions(scale, window, softcap, sinks)
    return _attend_next(q, k, v, options).contiguous()


@attend_op.register_fake
def _(q: Tensor, *_others: Any) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _attend_next(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, expected: int | None = None
) -> Tensor:
    """The attention of the layer whose turn it is: layers run in order, each once a forward."""
    if _ambient.attention is None:
        raise RuntimeError(
            "the attention 'specdeft' was called outside a SpecDecoder: select 'sdpa' or 'eager' "
            "for this model"
        )
    layer, _ambient.next_layer = _ambient.next_layer, _ambient.next_layer + 1
    if expected is not None and expected != layer:
        raise RuntimeError(
            f"layer {expected} attends where layer {layer} should: a model whose layers do not "
            "follow one another is not supported"
        )
    return _ambient.attention.attend(layer, q, k, v, options)


class TargetModel:
    """A stock causal LM with the properties speculation needs.

    Raises:
        ValueError: the model is not a decoder-only LM, or its attention means something ours does
            not compute (ALiBi, linear attention, cross attention).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        _refuse_unsupported(model)
        AttentionInterface.register(ATTENTION_NAME, _attention)
        self.model = model
        self.config = model.config.get_text_config()
        self.output_layer: nn.Module = model.get_output_embeddings()
        self.embedding: nn.Module = model.get_input_embeddings()
        self.shape = _kv_shape(self.config)
        self.num_query_heads: int = self.config.num_attention_heads
        self.vocab_size: int = int(self.output_layer.weight.shape[0])
        self.hidden_size: int = int(self.config.hidden_size)
        self.max_context: int = _max_context(self.config)
        self._linears = FusedLinears(model, self.output_layer)
        self._compiled: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    @property
    def device(self) -> torch.device:
        """Where the hidden states and logits come out."""
        return self.output_layer.weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states and the cache."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def sees_all(self) -> bool:
        """Whether plain attention is all that its layers do: no windows, no softcap, no sinks."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            kinds = ["sliding_attention"] if getattr(self.config, "sliding_window", None) else []
        softcap = getattr(self.config, "attn_logit_softcapping", None)
        return "sliding_attention" not in kinds and softcap is None

    @property
    def is_compiled(self) -> bool:
        """Whether tree forwards are fused by torch.compile."""
        return bool(self._compiled)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention: LayerAttention,
        *,
        rows: Tensor | None = None,
        fused: bool = True,
    ) -> TargetOutput:
        """One forward of [B, N] tokens at [B, N] positions; ``attention`` owns the cache.

        Args:
            input_ids: [B, N] int64.
            position_ids: [B, N] int64, absolute.
            attention: stores the new keys and values and attends, layer by layer.
            rows: [M] int64, of which tokens logits and hidden states are wanted (of a prompt the
                last one's); None: of all.
            fused: use the compiled layers, if there are any; a prompt does not.
        """
        forwards = self._compiled if fused and rows is None else []
        with self._our_attention(attention), self._linears.installed(), _exchanged(forwards):
            return self._tapped_forward(input_ids, position_ids, rows)

    def compile(self) -> None:
        """Fuse the pointwise work of later tree forwards by torch.compile.

        Every layer of a kind shares one compiled form: seconds per tree size instead of a minute.

        Raises:
            ValueError: the model keeps its layers where they are not found.
        """
        layers = getattr(self.model.base_model, "layers", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) != self.shape.num_layers:
            raise ValueError(
                f"{type(self.model).__name__} has no list of {self.shape.num_layers} layers that "
                "could be compiled one by one: use compile=False"
            )
        edges = [module for module in self._edges() if isinstance(module, nn.Module)]
        self._compiled = [(module, compiled(module.forward)) for module in (*layers, *edges)]

    def _edges(self) -> Iterator[Any]:
        """What runs before and after the layers, where it is found: rotations and the last norm."""
        base = self.model.base_model
        rotation = getattr(base, "rotary_emb", None)
        if getattr(rotation, "rope_type", None) in _FIXED_ROPE:
            yield rotation
        yield getattr(base, "norm", None)

    def _tapped_forward(
        self, input_ids: Tensor, position_ids: Tensor, rows: Tensor | None
    ) -> TargetOutput:
        keep = {"logits_to_keep": rows} if rows is not None and self._keeps_logits else {}
        hidden: list[Tensor] = []
        with self._tapped(hidden):
            logits = self.model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, **keep
            ).logits
        if rows is not None and not keep:
            return TargetOutput(logits.index_select(1, rows), hidden[0].index_select(1, rows))
        return TargetOutput(logits, hidden[0])

    @contextmanager
    def _our_attention(self, attention: LayerAttention) -> Iterator[None]:
        if _ambient.attention is not None:
            raise RuntimeError("a forward is already running in this thread: forwards do not nest")
        with _forward_lock:  # the attention choice of a model is seen by all threads
            yield from self._exchange_attention(attention)

    def _exchange_attention(self, attention: LayerAttention) -> Iterator[None]:
        configs = {id(config): config for config in (self.model.config, self.config)}.values()
        before = [config._attn_implementation_internal for config in configs]
        try:
            _ambient.attention, _ambient.next_layer = attention, 0
            for config in configs:
                config._attn_implementation_internal = ATTENTION_NAME
            yield
        finally:
            _ambient.attention = None
            for config, implementation in zip(configs, before, strict=True):
                config._attn_implementation_internal = implementation

    @contextmanager
    def _tapped(self, hidden: list[Tensor]) -> Iterator[None]:
        """The input of the output layer is the hidden state after the final norm."""
        handle = self.output_layer.register_forward_pre_hook(
            lambda _module, arguments: hidden.append(arguments[0])
        )
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def _exchanged(forwards: list[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Modules run other forwards within it."""
    for module, forward in forwards:
        module.__dict__["forward"] = forward
    try:
        with room_for_forms() if forwards else nullcontext():
            yield
    finally:
        for module, _forward in forwards:
            del module.__dict__["forward"]


def _max_context(config: Any) -> int:
    """Positions that the model can be at.

    Long RoPE turns all tokens of a forward by other angles as soon as one of them stands past the
    original context: a drafted node or another sequence of the batch would change the text. So
    only positions before it are allowed.
    """
    longest = int(getattr(config, "max_position_embeddings", 0) or 2**31 - 1)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    originals = [
        kind.get("original_max_position_embeddings", longest)
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    return min(longest, *map(int, originals)) if originals else longest


def _kv_shape(config: Any) -> KVShape:
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return KVShape(int(config.num_hidden_layers), int(heads), int(head_dim))


def _refuse_unsupported(model: PreTrainedModel) -> None:
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} is not a decoder-only causal language model: load one with "
            "AutoModelForCausalLM"
        )
    text = config.get_text_config()
    if getattr(text, "alibi", False) or getattr(text, "position_embedding_type", "") == "alibi":
        raise ValueError(
            f"{name} uses ALiBi, whose bias follows the row number and not the tree depth: choose "
            "a model with rotary or learned positions"
        )
    kinds = set(getattr(text, "layer_types", None) or ())
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(
            f"{name} has layers of type {', '.join(unknown)}: only full_attention and "
            "sliding_attention layers can be verified as a tree"
        )
    if not _uses_registry(model):
        raise ValueError(
            f"{name} does not take its attention from transformers' AttentionInterface: choose a "
            "model family that does (Llama, Qwen, Mistral, Gemma, Phi and most current ones)"
        )


def _uses_registry(model: PreTrainedModel) -> bool:
    return bool(
        getattr(model, "_supports_attention_backend", False)
        or getattr(model.base_model, "_supports_attention_backend", False)
    )
