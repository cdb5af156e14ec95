"""Rows to learn from: labels by a hand-made example, borders never crossed, hidden states right."""

from __future__ import annotations

import torch

from specdeft.heads.documents import from_lists
from specdeft.heads.features import IGNORED, extract, rows_of
from specdeft.heads.target import Target


def test_rows_of_a_hand_made_example() -> None:
    #                 prompt     answer          prompt  answer
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 0, 0, 0, 0, 0]])
    learn = torch.tensor(
        [[False, False, True, True, True, False, True, True], [False, True, True] + [True] * 5]
    )
    where, root, labels = rows_of(tokens, learn, torch.tensor([8, 3]), num_heads=3)
    X = IGNORED
    assert where.tolist() == [[0, 1], [0, 2], [0, 3], [0, 5], [0, 6], [1, 0], [1, 1]]
    assert root.tolist() == [12, 13, 14, 16, 17, 21, 22]
    assert labels.tolist() == [
        [13, 14, X],  # 15 is the user's
        [14, X, X],
        [X, X, X],
        [17, X, X],
        [X, X, X],
        [22, X, X],  # the padding is never learnt, whatever its mask says
        [X, X, X],
    ]


def test_padding_and_neighbours_do_not_change_a_row(target: Target) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in (9, 4, 6)]
    learn = [[i > 1 for i in range(len(row))] for row in ids]
    together = extract(target.model, from_lists(ids, learn), 2)
    assert together.document.tolist() == sorted(together.document.tolist(), key=[1, 2, 0].index)
    for number, (row, flags) in enumerate(zip(ids, learn, strict=True)):
        alone = extract(target.model, from_lists([row], [flags]), 2)
        mine = together.document == number
        assert torch.equal(together.root[mine], alone.root)
        assert torch.equal(together.labels[mine], alone.labels)
        torch.testing.assert_close(together.hidden[mine], alone.hidden, atol=1e-5, rtol=1e-5)


def test_the_hidden_state_is_what_the_output_layer_reads(target: Target) -> None:
    ids = [5, 9, 30, 41, 7]
    rows = extract(target.model, from_lists([ids], [[True] * 5]), 1)
    logits = target.model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(target.model.lm_head(rows.hidden), logits[:-1], atol=1e-5, rtol=1e-5)
    assert rows.num_known().tolist() == [1, 1, 1, 0]
