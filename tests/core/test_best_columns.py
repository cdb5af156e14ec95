"""The largest columns, whichever way they are found."""

import pytest
import torch

from specdeft import best_columns


@pytest.mark.parametrize("compile", [False, True])
def test_on_a_gpu_the_best_columns_come_from_our_kernel(
    compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As there, here interpreted; more columns than the kernel finds come from the other way."""
    pytest.importorskip("triton")
    import specdeft.kernels.top_columns as ours

    calls: list[int] = []
    kernel = ours.top_columns

    def counted(logits: torch.Tensor, k: int) -> torch.Tensor:
        calls.append(k)
        return kernel(logits, k)

    monkeypatch.setattr(ours, "top_columns", counted)
    logits = torch.randn(2, 3, 2000)
    torch._dynamo.reset()
    function = (
        torch.compile(best_columns.best_columns, backend="eager", fullgraph=True)
        if compile
        else best_columns.best_columns
    )
    for on_gpu, k, expected_calls in ((False, 4, []), (True, 4, [4]), (True, 40, [4])):
        monkeypatch.setattr(best_columns, "_is_for_our_kernel", lambda _logits, _is=on_gpu: _is)
        assert torch.equal(function(logits, k), logits.topk(k).indices)
        assert calls == expected_calls
    assert best_columns._MOST_COLUMNS == ours.MOST_COLUMNS
