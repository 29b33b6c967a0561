# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Names that Megatron's wrappers of fusible operations mention. Building one is refused."""

from __future__ import annotations

from typing import Any

import torch


class FusibleOperation(torch.nn.Module):
    """Base of the operations."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "transformer_engine (reference engine) has no fusible operations: set use_transformer_"
            "engine_op_fuser, use_te_activation_func and fused_residual_rmsnorm to False"
        )


class Sequential(FusibleOperation):
    """A sequence of operations."""
