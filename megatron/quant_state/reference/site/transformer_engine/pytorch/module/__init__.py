# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The modules."""

from __future__ import annotations

from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule as TransformerEngineBaseModule,
)
from transformer_engine.pytorch.module.fp8_padding import Fp8Padding as Fp8Padding
from transformer_engine.pytorch.module.fp8_unpadding import Fp8Unpadding as Fp8Unpadding
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear as GroupedLinear
from transformer_engine.pytorch.module.layernorm import LayerNorm as LayerNorm
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear as LayerNormLinear
from transformer_engine.pytorch.module.linear import Linear as Linear
from transformer_engine.pytorch.module.rmsnorm import RMSNorm as RMSNorm
