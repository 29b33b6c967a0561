# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Quantized tensors and their quantizers, at TE's import path."""

from __future__ import annotations

from transformer_engine.pytorch.quantized_tensor import QuantizedTensor as QuantizedTensor
from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensorStorage as QuantizedTensorStorage,
)
from transformer_engine.pytorch.quantized_tensor import Quantizer as Quantizer
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
    Float8BlockQuantizer as Float8BlockQuantizer,
)
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
    Float8BlockwiseQTensor as Float8BlockwiseQTensor,
)
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer,
)
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer as Float8Quantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor as Float8Tensor
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer as MXFP8Quantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor as MXFP8Tensor
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer as NVFP4Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor as NVFP4Tensor
