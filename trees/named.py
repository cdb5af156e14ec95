"""Token trees with names: published ones kept as data, and small chains.

A name is only a shortcut. Two projects ship different trees under one name, so what identifies a
tree is its `content_hash`.

Source of deft-32, deft-64 and deft-128: repository LINs-lab/DeFT, folder dataset/generation, MIT
licence, (c) 2025 LINs Lab @ Westlake University. deft-64 is also Medusa's published tree of 63
paths for Vicuna-7B.
"""

from __future__ import annotations

from functools import cache

from specdeft.trees.token_tree import TokenTree

# A rank path as its digits: "012" is rank 0 of head 0, then rank 1 of head 1, rank 2 of head 2.
_DEFT_32 = """
0 00 000 0000 0001 001 0010 01 010 011 1 10 100 101 11 110 111 2 20 200 201 21 210 211 3
30 300 301 31 310 311
"""

_DEFT_64 = """
0 00 000 0000 0001 001 002 003 004 005 006 007 008 009 01 010 011 012 02 020 021 03 030
04 040 05 050 06 060 07 070 08 09 1 10 100 101 11 12 13 14 15 16 2 20 200 21 22 3 30 31
4 40 5 50 6 60 7 70 8 80 9 90
"""

_DEFT_128 = """
0 00 000 0000 0001 0002 0003 001 0010 0011 0012 0013 002 0020 0021 0022 0023 003 0030
0031 0032 0033 01 010 0100 0101 0102 0103 011 0110 0111 012 013 02 020 021 022 023 03
030 031 032 033 1 10 100 101 102 103 11 110 111 112 113 12 120 121 122 123 13 130 131
132 133 2 20 200 201 202 203 21 210 211 212 213 22 220 221 222 223 23 230 231 232 233 3
30 300 301 302 303 31 310 311 312 313 32 320 321 322 323 33 330 331 332 333 4 40 400 401
402 403 41 410 411 412 413 42 420 421 422 423 43 430 431 432 433
"""

_PATHS = {"deft-32": _DEFT_32, "deft-64": _DEFT_64, "deft-128": _DEFT_128}
_CHAINS = {"chain-4": 4}

NAMED_TREES: tuple[str, ...] = (*_CHAINS, *_PATHS)


@cache
def named_tree(name: str) -> TokenTree:
    """The tree of this name. Raises ValueError listing the names when there is none."""
    if name in _CHAINS:
        return TokenTree.chain(_CHAINS[name])
    if name in _PATHS:
        return TokenTree.from_paths([tuple(map(int, path)) for path in _PATHS[name].split()])
    raise ValueError(f"there is no tree named {name!r}; the names are {', '.join(NAMED_TREES)}")
