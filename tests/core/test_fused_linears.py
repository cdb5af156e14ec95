"""Sibling projections answer from one product inside a forward; the model stays stock around it."""

from typing import Any

import pytest
import torch
from torch import nn

from specdeft.decoder import SpecDecoder
from specdeft.fused_linears import _MOST_JOINED_ROWS, FusedLinears
from tests.core.tiny import FAMILIES, ByteTokenizer, hf_greedy, prompt_ids, tiny_model

# Projections of these families that stand beside others: q, k, v and gate, up in 4 layers; phi3
# has them joined already, the experts of gpt-oss are no linear layers.
GROUPS = dict.fromkeys(FAMILIES, 8) | {"phi3": 0, "gpt-oss": 4}


class Recorder(nn.Module):
    """A module with siblings of which the product is counted."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(6, 4, bias=bias)
        self.up_proj = nn.Linear(6, 3, bias=bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate_proj(x), self.up_proj(x)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_projections_of_every_family_are_found(family: str) -> None:
    model = tiny_model(family)
    assert FusedLinears(model, model.lm_head).num_groups == GROUPS[family]


@pytest.mark.parametrize("bias", [False, True])
def test_joined_gives_the_same_values_from_one_weight(bias: bool) -> None:
    module, x = Recorder(bias=bias), torch.randn(5, 6)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    expected = module(x)
    siblings = FusedLinears(module, nn.Identity())
    with siblings.installed():
        products = module(x)
        assert products[0].data_ptr() + 4 * products[0].element_size() == products[1].data_ptr()
    for given, wanted in zip(products, expected, strict=True):
        torch.testing.assert_close(given, wanted)
    # Outside, the layers are themselves again, with their own values and no more memory.
    for given, wanted in zip(module(x), expected, strict=True):
        assert torch.equal(given, wanted)
    for parameter, value in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert len(storages) == (2 if bias else 1)


def test_many_rows_are_multiplied_apart_and_lie_together() -> None:
    module, x = Recorder(bias=True), torch.randn(_MOST_JOINED_ROWS + 1, 6)
    expected = module(x)
    with FusedLinears(module, nn.Identity()).installed():
        few, many = module(x[:_MOST_JOINED_ROWS]), module(x)
    for part, product, wanted in zip(few, many, expected, strict=True):
        assert product.is_contiguous()
        assert not part.is_contiguous()
        torch.testing.assert_close(product, wanted)
        torch.testing.assert_close(part, wanted[:_MOST_JOINED_ROWS])


def test_a_second_decoder_of_a_model_joins_nothing_again() -> None:
    module = Recorder()
    FusedLinears(module, nn.Identity())
    address = module.gate_proj.weight.data_ptr()
    with FusedLinears(module, nn.Identity()).installed():
        assert module.gate_proj.weight.data_ptr() == address


def test_weights_that_moved_are_joined_again() -> None:
    module, x = Recorder(), torch.randn(2, 6)
    siblings = FusedLinears(module, nn.Identity())
    module.double()
    module.up_proj.weight = nn.Parameter(torch.ones(3, 6, dtype=torch.float64))
    with siblings.installed():
        gate, up = module(x.double())
    torch.testing.assert_close(gate, x.double() @ module.gate_proj.weight.T)
    torch.testing.assert_close(up, x.double().sum(1, keepdim=True).expand(2, 3))


@pytest.mark.parametrize("kind", ["hook", "other class", "other width", "missing", "one bias"])
def test_what_is_not_plain_is_left_alone(kind: str) -> None:
    module: Any = Recorder()
    if kind == "hook":
        module.up_proj.register_forward_hook(lambda *_arguments: None)
    elif kind == "other class":
        module.up_proj = nn.Sequential(nn.Linear(6, 3))
    elif kind == "other width":
        module.up_proj = nn.Linear(5, 3, bias=False)
    elif kind == "missing":
        del module.up_proj
    else:
        module.up_proj = nn.Linear(6, 3)
    assert FusedLinears(module, nn.Identity()).num_groups == 0


def test_an_error_inside_leaves_the_layers_their_own() -> None:
    module, x = Recorder(), torch.randn(2, 6)
    siblings = FusedLinears(module, nn.Identity())

    def interrupted() -> None:
        with siblings.installed():
            module.gate_proj(x)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "forward" not in module.gate_proj.__dict__
    with siblings.installed():  # nothing is left over from the unfinished forward
        assert module(2 * x)[1].allclose((2 * x) @ module.up_proj.weight.T)


def test_a_saved_and_reloaded_model_is_the_same(tmp_path: Any) -> None:
    model = tiny_model("llama")
    expected = hf_greedy(model, prompt_ids(7), 12)
    SpecDecoder(model, ByteTokenizer()).generate(prompt_ids(7), max_new_tokens=4)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert hf_greedy(again, prompt_ids(7), 12) == expected == hf_greedy(model, prompt_ids(7), 12)


@pytest.mark.parametrize("compile", [False, True])
def test_one_row_in_sixteen_bits_takes_our_kernel(
    compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, here interpreted: siblings and single layers, alone and in a traced graph."""
    pytest.importorskip("triton")
    import specdeft.kernels.one_row_linear as ours

    calls: list[int] = []
    kernel = ours.one_row_linear

    def counted(x: torch.Tensor, weight: torch.Tensor, tile: Any) -> torch.Tensor:
        calls.append(len(weight))
        return kernel(x, weight, tile)

    monkeypatch.setattr(ours, "one_row_linear", counted)
    monkeypatch.setattr(
        "specdeft.fused_linears._is_for_our_kernel", lambda weight: weight.dtype == torch.float16
    )
    module: Any = Recorder().half()
    module.down_proj = nn.Linear(6, 5, bias=False).half()
    module.biased = nn.Linear(6, 5).half()
    linears = FusedLinears(module, nn.Identity())

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [*module(x), module.down_proj(x), module.biased(x)]

    torch._dynamo.reset()
    function = torch.compile(run, backend="eager", fullgraph=True) if compile else run
    for num_rows, expected_calls in ((1, [7, 5]), (2, [])):
        x = torch.randn(1, num_rows, 6).half()
        expected = run(x.double().half())  # outside: the stock layers
        calls.clear()
        with linears.installed():
            found = function(x)
        assert calls == expected_calls
        for given, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(given, wanted, rtol=2e-3, atol=2e-3)
