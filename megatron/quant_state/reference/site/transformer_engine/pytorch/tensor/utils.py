# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What Megatron's distributed optimizer asks of quantized parameters.

The engine keeps values, not codes: a parameter's bytes in Megatron's buffer are reserved and never
read. That is enough for one rank, where the gather of parameters moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.quantized_tensor import QuantizedTensor


def replace_raw_data(tensor: QuantizedTensor, new_raw_data: torch.Tensor) -> None:
    """Place a parameter's codes in a buffer, uint8, of which the engine only keeps hold."""
    if new_raw_data.dtype != torch.uint8:
        raise ValueError(
            "The data types of raw data don't match: "
            f"old dtype={torch.uint8}, new dtype={new_raw_data.dtype}"
        )
    tensor._raw_data = new_raw_data  # type: ignore[attr-defined]


def cast_master_weights_to_fp8(
    model_weights: Sequence[QuantizedTensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Any = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Quantize fp32 master weights into the parameters, through the parameters' own dtype.

    Raises:
        NotImplementedError: For a shard that is not the whole parameter.
    """
    if fsdp_shard_model_weights is not None:
        raise NotImplementedError("the reference engine does not shard quantized parameters")
    for model, master, offset in zip(model_weights, master_weights, start_offsets, strict=True):
        if master is None:
            continue
        if offset or master.numel() != model.numel():
            raise NotImplementedError("the reference engine does not shard quantized parameters")
        model.quantize_(master.detach().to(model.dtype).view(model.shape))


def post_all_gather_processing(model_weights: Any) -> None:
    """Make the column-wise copies that derive from what was gathered."""
    if isinstance(model_weights, torch.Tensor):
        model_weights = [model_weights]
    for weight in model_weights:
        if isinstance(weight, QuantizedTensor) and weight._quantizer.columnwise_from_rowwise:
            weight.update_usage(columnwise_usage=True)
