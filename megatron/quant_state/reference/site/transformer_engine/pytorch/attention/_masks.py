# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Which keys a query must not see."""

from __future__ import annotations

from typing import Any

import torch

_KINDS = {
    "no_mask",
    "causal",
    "padding",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
}


def attention_mask_for(
    kind: str,
    given: Any,
    queries: int,
    keys: int,
    *,
    window: tuple[int, int] | None,
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None] | None,
) -> torch.Tensor | None:
    """The mask of a call, True where a key is hidden, or None where all are seen.

    Args:
        kind: TE's ``attn_mask_type``.
        given: A mask that broadcasts to [b, heads, queries, keys], read by the padding kinds and
            ``arbitrary``.
        queries: Number of queries.
        keys: Number of keys.
        window: Keys seen to the left and to the right, -1 for no limit.
        cu_seqlens: Starts of the packed sequences, for queries and keys.

    Raises:
        NotImplementedError: For a kind that TE does not have.
    """
    if kind not in _KINDS:
        raise NotImplementedError(f"attn_mask_type={kind!r}")
    hidden: torch.Tensor | None = None
    query = torch.arange(queries).unsqueeze(1)
    key = torch.arange(keys).unsqueeze(0)
    shift = keys - queries if "bottom_right" in kind else 0
    if "causal" in kind:
        hidden = key > query + shift
    if window is not None and tuple(window) not in ((-1, -1), (-1, 0)):
        left, right = window
        if left >= 0:
            hidden = _either(hidden, key < query + shift - left)
        if right >= 0:
            hidden = _either(hidden, key > query + shift + right)
    if cu_seqlens is not None and cu_seqlens[0] is not None:
        starts = cu_seqlens[0]
        key_starts = starts if cu_seqlens[1] is None else cu_seqlens[1]
        segment = torch.bucketize(query, starts[1:-1].to(query.dtype), right=True)
        key_segment = torch.bucketize(key, key_starts[1:-1].to(key.dtype), right=True)
        hidden = _either(hidden, segment != key_segment)
    if given is not None and ("padding" in kind or kind == "arbitrary"):
        if isinstance(given, tuple):
            given = given[1]
        hidden = _either(hidden, given)
    return hidden


def _either(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    return second if first is None else first | second
