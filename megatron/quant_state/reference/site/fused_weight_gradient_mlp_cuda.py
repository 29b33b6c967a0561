# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A CPU stand-in for Apex's fused weight gradient, which Megatron's own linear layers call.

``megatron/core/tensor_parallel/layers.py`` demands it for ``gradient_accumulation_fusion``; it
always adds.
"""

from __future__ import annotations

import torch


def wgrad_gemm_accum_fp32(
    total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Add grad_output^T total_input to ``main_grad``, in place.

    Args:
        total_input: [..., K].
        grad_output: [..., N].
        main_grad: [N, K].
    """
    inputs = total_input.reshape(-1, total_input.shape[-1]).to(torch.float32)
    gradients = grad_output.reshape(-1, grad_output.shape[-1]).to(torch.float32)
    main_grad.add_(gradients.t() @ inputs)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
