# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A weight's quantized form (made, refreshed or reused) and its gradient (written or added).

Models TE 2.20: ``quantize_weight`` and ``get_dummy_wgrad`` in ``pytorch/module/base.py``, and the
accumulation rules at the end of the backward of its linear modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from transformer_engine import reference
from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
)

_dummy_wgrads: dict[tuple[Any, ...], torch.Tensor] = {}


def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """What autograd is handed where the gradient went to ``main_grad``.

    TE leaves it uninitialized; here it is NaN, so that any read of it shows. A dummy of zeros (a
    tied embedding) waits in autograd for the weight's other gradient, and TE's one buffer for each
    shape keeps its zeros meanwhile; so zeros have a buffer of their own here.

    Args:
        shape: Shape of the weight.
        dtype: Its dtype.
        zero: Fill with zeros instead, as TE does for ``zero_out_wgrad``.

    Returns:
        One buffer for each shape, dtype and filling, detached.
    """
    key = (*shape, dtype, zero)
    if key not in _dummy_wgrads:
        _dummy_wgrads[key] = torch.empty(tuple(shape), dtype=dtype)
    return _dummy_wgrads[key].fill_(0.0 if zero else float("nan")).detach()


def is_workspace_valid(workspace: QuantizedTensorStorage, quantizer: Quantizer) -> bool:
    """Whether a cached workspace holds the directions that the quantizer now wants.

    TE asks this of per-tensor FP8 (its column-wise copy, on Hopper), MXFP8 and NVFP4, not of
    blockwise FP8, which makes the missing copy when it is needed.
    """
    from transformer_engine.pytorch.tensor import (
        Float8BlockQuantizer,
        MXFP8Quantizer,
        NVFP4Quantizer,
    )

    if isinstance(quantizer, Float8BlockQuantizer):
        return True
    if quantizer.columnwise_usage and workspace._columnwise is None:
        return False
    if isinstance(quantizer, (MXFP8Quantizer, NVFP4Quantizer)):
        return not (quantizer.rowwise_usage and workspace._rowwise is None)
    return True


def quantize_weight(
    *,
    tensor: torch.Tensor,
    quantizer: Quantizer,
    workspace: QuantizedTensor | None = None,
    update_workspace: bool = True,
    skip_update_flag: torch.Tensor | None = None,
    cache: bool = False,
    **_: Any,
) -> tuple[QuantizedTensorStorage, QuantizedTensor | None]:
    """The quantized form of a weight.

    Args:
        tensor: The weight; one that is quantized already is returned.
        quantizer: Its quantizer, with the usages of this call.
        workspace: What is cached; ignored where it lacks a direction.
        update_workspace: Quantize anew into it.
        skip_update_flag: [1]; under capture, guards an update that is always issued.
        cache: Whether the caller keeps a workspace that is made here.

    Returns:
        What the product reads, and the workspace to keep, if one was made for it.
    """
    counters = reference.counters
    counters.weights_used.add(id(tensor))
    if isinstance(tensor, QuantizedTensor):
        tensor.update_usage(
            rowwise_usage=quantizer.rowwise_usage or None,
            columnwise_usage=quantizer.columnwise_usage or None,
        )
        return tensor, None
    if workspace is not None and not is_workspace_valid(workspace, quantizer):
        workspace = None
    if workspace is not None:
        if update_workspace or skip_update_flag is not None:
            workspace.quantize_(tensor, noop_flag=skip_update_flag)
        if not workspace._filled:
            counters.empty_reads += 1
        elif workspace._source is not None and not torch.equal(workspace._source, tensor):
            counters.stale_reads += 1
        return workspace, None
    counters.weight_quantizations += 1
    if not cache:
        return quantizer.quantize(tensor), None
    internal = quantizer.internal
    quantizer.internal = False
    made = quantizer.quantize(tensor)
    quantizer.internal = internal
    made._source = tensor.detach().clone()
    return made, made


def quantize_weights(
    tensors: Sequence[torch.Tensor],
    quantizers: Sequence[Quantizer],
    workspaces: Sequence[QuantizedTensor | None],
    *,
    update_workspace: bool,
    skip_update_flag: torch.Tensor | None,
    cache: bool,
) -> tuple[list[QuantizedTensorStorage], list[QuantizedTensor | None]]:
    """``quantize_weight`` for the experts of a group, in one rounding where all are made anew.

    The weights have one shape and their quantizers one class and the same usages, so the values are
    those of one rounding each.
    """
    made_anew = not any(isinstance(tensor, QuantizedTensor) for tensor in tensors) and all(
        workspace is None or not is_workspace_valid(workspace, quantizer)
        for workspace, quantizer in zip(workspaces, quantizers, strict=True)
    )
    if not made_anew:
        pairs = [
            quantize_weight(
                tensor=tensor,
                quantizer=quantizer,
                workspace=workspace,
                update_workspace=update_workspace,
                skip_update_flag=skip_update_flag,
                cache=cache,
            )
            for tensor, quantizer, workspace in zip(tensors, quantizers, workspaces, strict=True)
        ]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    reference.counters.weights_used.update(id(tensor) for tensor in tensors)
    reference.counters.weight_quantizations += len(tensors)
    sources = [tensor.detach() for tensor in tensors]
    quantizers[0].check_shape(sources[0].shape)
    stacked = torch.cat(sources).to(torch.float32)
    lengths = [len(source) for source in sources]
    rowwise, columnwise = quantizers[0].round(stacked, quantizers, lengths)
    # Copies: a view would keep the whole group alive in each of its experts.
    rows = (
        [None] * len(tensors)
        if rowwise is None
        else [part.clone() for part in rowwise.split(lengths)]
    )
    if columnwise is rowwise:
        columns = rows
    else:
        columns = (
            [None] * len(tensors)
            if columnwise is None
            else [part.clone() for part in columnwise.split(lengths)]
        )
    results: list[QuantizedTensorStorage] = []
    for source, quantizer, row, column in zip(sources, quantizers, rows, columns, strict=True):
        result: Any = QuantizedTensorStorage()
        if cache:
            result = quantizer.tensor_class(source.shape, source.dtype, device=source.device)
            result._source = source.clone()
        result._fill(row, column, quantizer)
        results.append(result)
    return results, [result if cache else None for result in results]  # type: ignore[misc]


class MainGrad:
    """Where the gradient of one weight goes, and how: decided at the forward, used at the backward.

    Args:
        weight: The parameter.
        is_first_microbatch: The flag of the call.
        overwrite_main_grad: What Megatron-FSDP marks a weight with: overwrite whatever the flag.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        is_first_microbatch: bool | None,
        overwrite_main_grad: bool,
    ) -> None:
        self._weight = weakref.ref(weight)
        self._overwrite = bool(is_first_microbatch) or overwrite_main_grad
        if hasattr(weight, "__fsdp_param__"):
            self._get: Callable[[], torch.Tensor] = weight.get_main_grad
        else:
            self._get = lambda: weight.main_grad  # type: ignore[attr-defined, no-any-return]

    def fetch(self) -> torch.Tensor:
        """The buffer.

        Raises:
            AttributeError: If the weight has none.
        """
        main_grad = self._get()
        weight = self._weight()
        assert weight is not None, "weight was removed while fuse_wgrad_accumulation=True"
        weight.main_grad = main_grad  # type: ignore[attr-defined]
        return main_grad

    def write(self, main_grad: torch.Tensor, wgrad: torch.Tensor) -> None:
        """Add to the buffer, or overwrite it."""
        if self._overwrite and not reference.is_never_overwrite():
            main_grad.copy_(wgrad)
        else:
            main_grad.add_(wgrad)

    def dummy(self) -> torch.Tensor | None:
        """What autograd gets: a dummy where Megatron's DDP wants one, else nothing."""
        weight = self._weight()
        assert weight is not None
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        zero = bool(getattr(weight, "zero_out_wgrad", False))
        return get_dummy_wgrad(list(weight.shape), weight.dtype, zero=zero)
