# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Attention."""

from __future__ import annotations

from transformer_engine.pytorch.attention.dot_product_attention import (
    DotProductAttention as DotProductAttention,
)
