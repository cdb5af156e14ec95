"""Models of random weights: their text is decided, so that rounding cannot change it."""

import pytest
import torch

from specdeft.bench.random_model import random_heads, random_model

PROMPT = torch.tensor([[70, 9, 33, 404, 250, 12, 12, 77]])


def test_every_token_calls_for_one_next_token_by_a_wide_margin():
    model, _ = random_model("random:llama-tiny", torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        logits = model(PROMPT).logits[0]
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 0.25 * best[:, 0].max()
    # The output layer holds the embeddings 401 places on, past the special ids 0 to 2.
    expected = 3 + (PROMPT[0] - 3 + 401) % (512 - 3)
    assert torch.equal(logits.argmax(-1), expected)


def test_sixteen_bits_give_the_same_text_and_it_does_not_end():
    texts = []
    for dtype in (torch.float32, torch.bfloat16):
        model, _ = random_model("random:llama-tiny", dtype, torch.device("cpu"))
        out = model.generate(
            PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=60, do_sample=False
        )
        texts.append(out[0, PROMPT.shape[1] :].tolist())
    assert texts[0] == texts[1]
    assert len(texts[0]) == 60
    assert min(texts[0]) >= 3


def test_random_heads_fit_and_an_unknown_shape_is_refused():
    model, _ = random_model("random:llama-tiny", torch.bfloat16, torch.device("cpu"))
    heads = random_heads(model)
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="there is no shape 'gpt': give random: and llama-3-8b"):
        random_model("random:gpt", torch.float32, torch.device("cpu"))
