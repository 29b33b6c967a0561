# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``RMSNorm`` at TE's import path."""

from __future__ import annotations

from transformer_engine.pytorch.module._normalization import RMSNorm as RMSNorm
