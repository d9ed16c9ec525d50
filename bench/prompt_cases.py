"""Token sequences of the benchmarks' cases, for what starts behind the tokenizer."""

from __future__ import annotations

import re

import numpy as np

# Tokens of a prompt that it shares with no other, where a case says no more.
_TAIL = 21


def prompts(case: str, vocabulary: int, seed: int = 0) -> list[np.ndarray]:
    """Token sequences of a case: random ids with the lengths and the sharing of the request it is named after.

    case: `example`; `noul_N`, one prompt of N tokens; `choice_CxN`, C prompts of N tokens that differ in the last
        21; `root_N`, one of N; `root_N_tails_C`, C prompts of 21 tokens after N that they share. ValueError otherwise.
    """
    draw = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return draw.integers(0, vocabulary, count).astype(np.int32)

    if case == "example":
        # 7 prompts, 539 tokens, the longest 82, 277 distinct rows: a routing of 3, a yes or no, an urgency of 3.
        root, routing, refund, urgency = tokens(30), tokens(21), tokens(16), tokens(20)
        found = [np.concatenate([root, routing, tokens(length)]) for length in (31, 29, 27)]
        found.append(np.concatenate([root, refund, tokens(23)]))
        return found + [np.concatenate([root, urgency, tokens(length)]) for length in (28, 27, 25)]
    named = re.fullmatch(r"(?:noul|root)_(\d+)|choice_(\d+)x(\d+)|root_(\d+)_tails_(\d+)", case)
    if named is None:
        raise ValueError(f"no case is named {case!r}")
    single, choices, length, shared, tails = (int(number or 0) for number in named.groups())
    if single:
        return [tokens(single)]
    root = tokens(shared or length - _TAIL)
    return [np.concatenate([root, tokens(_TAIL)]) for _ in range(tails or choices)]
