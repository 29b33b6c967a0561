# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The products of a group of experts and their gradients, for ``GroupedLinear``.

Models TE 2.20, the split-quantize path of ``_GroupedLinear`` in
``pytorch/module/grouped_linear.py``. Shapes: input [M, K] with the experts' rows one after the
other, weights [N, K], output [M, N]. Rounding is done for the whole group at once, each expert as a
segment of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transformer_engine.pytorch.module._common import WeightGradStore, cast_if_needed
from transformer_engine.pytorch.module._linear_function import (
    check_saves_original,
    set_weight_usage,
)
from transformer_engine.pytorch.module._weight import MainGrad, quantize_weights
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, Quantizer

_ALIGNMENT = 16


@dataclass
class GroupedArguments:
    """What one call needs beside its tensors; ``new_workspaces`` is an output, one an expert."""

    m_splits: list[int]
    fp8: bool
    activation_dtype: torch.dtype
    is_grad_enabled: bool
    input_requires_grad: bool
    weights_require_grad: bool
    use_bias: bool
    is_first_microbatch: bool | None
    workspaces: list[QuantizedTensor | None]
    cache_weight: bool
    skip_update_flag: torch.Tensor | None
    save_original_input: bool
    fuse_wgrad_accumulation: bool
    wgrad_store: WeightGradStore
    input_quantizers: Sequence[Quantizer]
    weight_quantizers: Sequence[Quantizer]
    grad_output_quantizers: Sequence[Quantizer]
    new_workspaces: Sequence[QuantizedTensor | None] = ()


def _round(
    values: torch.Tensor, quantizers: Sequence[Quantizer], m_splits: list[int]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    for length in m_splits:
        if length:
            quantizers[0].check_shape((length, values.shape[-1]))
    return quantizers[0].round(values.contiguous(), quantizers, m_splits)


def _check_alignment(m_splits: list[int], *sizes: int) -> None:
    """Refuse what cuBLASLt's FP8 products refuse.

    Raises:
        ValueError: If a dimension of a product is no multiple of 16.
    """
    for size in (*m_splits, *sizes):
        if size % _ALIGNMENT:
            raise ValueError(
                f"FP8 execution of a grouped linear requires dimensions divisible by {_ALIGNMENT},"
                f" got m_splits={m_splits} and features {sizes}; pad the tokens of each expert"
            )


def _grouped_product(
    rows: torch.Tensor, operands: Sequence[torch.Tensor], m_splits: list[int], width: int
) -> torch.Tensor:
    """[M, A] times one [A, width] an expert."""
    out = rows.new_empty(rows.shape[0], width)
    for part, operand, result in zip(
        rows.split(m_splits), operands, out.split(m_splits), strict=True
    ):
        if len(part):
            torch.mm(part, operand, out=result)
    return out


def _forward(
    ctx: Any,
    inp: torch.Tensor,
    args: GroupedArguments,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
) -> torch.Tensor:
    dtype = args.activation_dtype
    matrix = inp.reshape(-1, inp.shape[-1])
    values = cast_if_needed(cast_if_needed(matrix, dtype), torch.float32)
    needs_input = args.is_grad_enabled and args.weights_require_grad
    if needs_input and args.fp8:
        check_saves_original(args.save_original_input, args.input_quantizers[0])
    saved_input: torch.Tensor | None = matrix if needs_input else None
    quantized_weights: list[Any] = []
    if args.fp8:
        _check_alignment(args.m_splits, *weights[0].shape)
        for quantizer in args.input_quantizers:
            quantizer.set_usage(
                rowwise=True, columnwise=needs_input and not args.save_original_input
            )
        operand, columnwise = _round(values, args.input_quantizers, args.m_splits)
        if needs_input and not args.save_original_input:
            saved_input = columnwise
        weight_quantizers = list(args.weight_quantizers)
        if isinstance(weights[0], QuantizedTensor):
            weight_quantizers = [weight._quantizer for weight in weights]  # type: ignore[attr-defined]
        else:
            set_weight_usage(weight_quantizers, args.is_grad_enabled, args.input_requires_grad)
        quantized_weights, args.new_workspaces = quantize_weights(
            weights,
            weight_quantizers,
            args.workspaces,
            update_workspace=args.is_first_microbatch is not False,
            skip_update_flag=args.skip_update_flag,
            cache=args.cache_weight,
        )
        for weight in quantized_weights:
            weight.update_usage(rowwise_usage=True)
        weight_operands = [weight._rowwise.t() for weight in quantized_weights]
        if args.use_bias and dtype == torch.float32:
            biases = [bias.to(torch.bfloat16) for bias in biases]
    else:
        operand = values
        weight_operands = [
            cast_if_needed(cast_if_needed(weight, dtype), torch.float32).t() for weight in weights
        ]
    assert operand is not None
    out = _grouped_product(operand, weight_operands, args.m_splits, weights[0].shape[0])
    if args.use_bias:
        for part, bias in zip(out.split(args.m_splits), biases, strict=True):
            part += bias.to(torch.float32)
    if ctx is not None:
        ctx.args = args
        ctx.quantized_weights = quantized_weights
        ctx.input_shape = inp.shape
        ctx.save_for_backward(saved_input, *weights)
        ctx.main_grads = None
        if args.fuse_wgrad_accumulation and args.weights_require_grad:
            # The first expert's mark decides for all.
            overwrite = bool(getattr(weights[0], "overwrite_main_grad", False))
            ctx.main_grads = [
                MainGrad(weight, args.is_first_microbatch, overwrite) for weight in weights
            ]
        needs_grad = args.input_requires_grad or args.weights_require_grad
        ctx.reduce = args.fp8 and needs_grad and FP8GlobalStateManager.is_first_fp8_module()
    return cast_if_needed(out, dtype).view(-1, *inp.shape[1:-1], weights[0].shape[0])


class GroupedFunction(torch.autograd.Function):
    """``apply(inp, arguments, *weights, *biases)``; biases are one a weight, empty without bias."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, inp: torch.Tensor, args: GroupedArguments, *weights_and_biases: torch.Tensor
    ) -> torch.Tensor:
        count = len(args.m_splits)
        with torch.no_grad():
            return _forward(ctx, inp, args, weights_and_biases[:count], weights_and_biases[count:])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:  # type: ignore[override]
        args: GroupedArguments = ctx.args
        m_splits = args.m_splits
        saved_input, *weights = ctx.saved_tensors
        count = len(m_splits)
        buffers = [grad.fetch() for grad in ctx.main_grads] if ctx.main_grads is not None else None
        matrix = grad_output.reshape(-1, grad_output.shape[-1])
        gradient = cast_if_needed(matrix, torch.float32)
        rows: torch.Tensor | None = gradient
        columns: torch.Tensor | None = gradient
        if args.fp8:
            rows, columns = _round(gradient, args.grad_output_quantizers, m_splits)
        delayed = args.wgrad_store.delay_wgrad_compute() and args.weights_require_grad
        grad_biases: list[torch.Tensor | None] = [None] * count
        if args.use_bias and (args.fp8 or not delayed):
            grad_biases = [
                part.sum(dim=0).to(args.activation_dtype) for part in gradient.split(m_splits)
            ]
        grad_input = None
        if args.input_requires_grad:
            if args.fp8:
                for weight in ctx.quantized_weights:
                    weight.update_usage(columnwise_usage=True)
                operands = [weight._columnwise for weight in ctx.quantized_weights]
            else:
                operands = [
                    cast_if_needed(cast_if_needed(weight, args.activation_dtype), torch.float32)
                    for weight in weights
                ]
            assert rows is not None
            product = _grouped_product(rows, operands, m_splits, weights[0].shape[1])
            grad_input = cast_if_needed(product, args.activation_dtype).view(ctx.input_shape)
        wgrads: list[torch.Tensor | None] = [None] * count
        if args.weights_require_grad:
            if args.fp8 and args.save_original_input:
                for quantizer in args.input_quantizers:
                    quantizer.set_usage(rowwise=quantizer.columnwise_from_rowwise, columnwise=True)
                original = cast_if_needed(saved_input, torch.float32)
                _, saved_input = _round(original, args.input_quantizers, m_splits)
            elif not args.fp8:
                saved_input = cast_if_needed(saved_input, args.activation_dtype)
            saved_input = cast_if_needed(saved_input, torch.float32)

            def compute(inputs: torch.Tensor, gradients: torch.Tensor) -> Any:
                results = []
                parts = zip(inputs.split(m_splits), gradients.split(m_splits), strict=True)
                for index, (part, part_gradient) in enumerate(parts):
                    product = part_gradient.t() @ part
                    if ctx.main_grads is not None and buffers is not None:
                        ctx.main_grads[index].write(buffers[index], product)
                    else:
                        results.append(cast_if_needed(product, args.activation_dtype))
                biases = None
                if args.use_bias and not args.fp8:
                    biases = [part.sum(dim=0) for part in gradients.split(m_splits)]
                return results, biases

            if delayed:
                args.wgrad_store.put([saved_input, columns], compute)
            else:
                assert columns is not None
                results, _ = compute(saved_input, columns)
                wgrads[: len(results)] = results
            if ctx.main_grads is not None:
                wgrads = [grad.dummy() for grad in ctx.main_grads]
        if ctx.reduce:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return grad_input, None, *wgrads, *(grad_biases if args.use_bias else [None] * count)
