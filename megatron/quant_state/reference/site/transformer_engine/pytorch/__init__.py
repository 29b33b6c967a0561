# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""PyTorch bindings, at TE's names."""

from __future__ import annotations

from transformer_engine.pytorch import distributed as distributed
from transformer_engine.pytorch import fp8 as fp8
from transformer_engine.pytorch import module as module
from transformer_engine.pytorch import ops as ops
from transformer_engine.pytorch import quantization as quantization
from transformer_engine.pytorch import tensor as tensor
from transformer_engine.pytorch.attention import DotProductAttention as DotProductAttention
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker as CudaRNGStatesTracker
from transformer_engine.pytorch.distributed import checkpoint as checkpoint
from transformer_engine.pytorch.module import Fp8Padding as Fp8Padding
from transformer_engine.pytorch.module import Fp8Unpadding as Fp8Unpadding
from transformer_engine.pytorch.module import GroupedLinear as GroupedLinear
from transformer_engine.pytorch.module import LayerNorm as LayerNorm
from transformer_engine.pytorch.module import LayerNormLinear as LayerNormLinear
from transformer_engine.pytorch.module import Linear as Linear
from transformer_engine.pytorch.module import RMSNorm as RMSNorm
from transformer_engine.pytorch.quantization import autocast as autocast
from transformer_engine.pytorch.quantization import fp8_autocast as fp8_autocast
from transformer_engine.pytorch.quantization import fp8_model_init as fp8_model_init
from transformer_engine.pytorch.quantization import quantized_model_init as quantized_model_init
from transformer_engine.pytorch.quantized_tensor import QuantizedTensor as QuantizedTensor
