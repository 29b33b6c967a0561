# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The older path of the per-tensor FP8 classes, which Megatron still imports."""

from __future__ import annotations

from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor as Float8Tensor
