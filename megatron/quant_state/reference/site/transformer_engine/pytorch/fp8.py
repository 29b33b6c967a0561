# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The older path of what is in ``quantization``, which Megatron still imports."""

from __future__ import annotations

from transformer_engine.pytorch.quantization import FP8GlobalStateManager as FP8GlobalStateManager
from transformer_engine.pytorch.quantization import RecipeState as RecipeState
from transformer_engine.pytorch.quantization import autocast as autocast
from transformer_engine.pytorch.quantization import fp8_autocast as fp8_autocast
from transformer_engine.pytorch.quantization import fp8_model_init as fp8_model_init
from transformer_engine.pytorch.quantization import get_default_fp8_recipe as get_default_fp8_recipe
from transformer_engine.pytorch.quantization import quantized_model_init as quantized_model_init
