# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The linear product and its gradients, for ``Linear`` and ``LayerNormLinear``.

Models TE 2.20, ``_linear_forward_impl`` and ``_linear_backward_impl`` in
``pytorch/module/linear.py``, on one rank. Shapes: input [..., K], weight [N, K], output [..., N];
products are fp32 whatever the dtype, since bf16 products are slow on a CPU, and the result is
rounded to the activation dtype once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from transformer_engine.pytorch.distributed import (
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from transformer_engine.pytorch.module._common import (
    WeightGradStore,
    assert_dim_for_fp8_exec,
    cast_if_needed,
)
from transformer_engine.pytorch.module._weight import MainGrad, quantize_weight
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, Quantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer


@dataclass
class LinearArguments:
    """What one call needs beside its tensors.

    ``new_workspace`` is an output: the workspace that the module shall keep.
    """

    fp8: bool
    activation_dtype: torch.dtype
    is_grad_enabled: bool
    input_requires_grad: bool
    weight_requires_grad: bool
    is_first_microbatch: bool | None
    weight_workspace: QuantizedTensor | None
    cache_weight: bool
    skip_update_flag: torch.Tensor | None
    save_original_input: bool
    fuse_wgrad_accumulation: bool
    wgrad_store: WeightGradStore | None
    input_quantizer: Quantizer | None
    weight_quantizer: Quantizer | None
    grad_output_quantizer: Quantizer | None
    new_workspace: QuantizedTensor | None = None


def set_weight_usage(
    quantizers: list[Quantizer], is_grad_enabled: bool, input_requires_grad: bool
) -> None:
    """Directions a weight needs: a column-wise copy for a dgrad, or for the dgrad of a replay."""
    columnwise = is_grad_enabled and input_requires_grad
    if not columnwise:
        columnwise = (
            is_fp8_activation_recompute_enabled() and not in_fp8_activation_recompute_phase()
        )
    for quantizer in quantizers:
        quantizer.set_usage(rowwise=True, columnwise=columnwise)


def check_saves_original(save_original_input: bool, quantizer: Quantizer | None) -> None:
    """Refuse to quantize an input twice whose scale may move in between.

    Raises:
        ValueError: Under delayed scaling.
    """
    if save_original_input and isinstance(quantizer, Float8Quantizer):
        raise ValueError("DelayedScaling recipe is not supported with save_original_input")


def requantize_input(quantizer: Quantizer, inp: torch.Tensor) -> Any:
    """Column-wise values of an input that was saved unquantized."""
    quantizer.set_usage(rowwise=quantizer.columnwise_from_rowwise, columnwise=True)
    return quantizer.quantize(inp)


def first_fp8_module() -> bool:
    """Whether this module's backward reduces amaxes; a replay leaves the answer to the next."""
    state = FP8GlobalStateManager.quantization_state
    before = state.is_first_fp8_module
    first = FP8GlobalStateManager.is_first_fp8_module()
    if in_fp8_activation_recompute_phase():
        state.is_first_fp8_module = before
    return first


def _float(tensor: torch.Tensor) -> torch.Tensor:
    """[..., K] as [M, K] fp32."""
    return cast_if_needed(tensor.reshape(-1, tensor.shape[-1]), torch.float32)


def _forward(
    ctx: Any,
    weight: torch.Tensor,
    inp: torch.Tensor,
    bias: torch.Tensor | None,
    args: LinearArguments,
) -> torch.Tensor:
    if inp.shape[-1] != weight.shape[-1]:
        raise AssertionError("GEMM not possible")
    dtype = args.activation_dtype
    needs_input = args.is_grad_enabled and args.weight_requires_grad
    saved_input: torch.Tensor | None = inp if needs_input else None
    quantized_weight: Any = None
    if args.fp8:
        quantizer = args.input_quantizer
        assert quantizer is not None
        assert args.weight_quantizer is not None
        if needs_input:
            check_saves_original(args.save_original_input, quantizer)
        assert_dim_for_fp8_exec(inp, weight)
        quantizer.set_usage(rowwise=True, columnwise=needs_input and not args.save_original_input)
        quantized_input = quantizer.quantize(cast_if_needed(inp, dtype))
        operand = quantized_input._rowwise
        if needs_input and not args.save_original_input:
            saved_input = quantized_input._columnwise
        weight_quantizer = args.weight_quantizer
        if isinstance(weight, QuantizedTensor):
            weight_quantizer = weight._quantizer
        else:
            set_weight_usage([weight_quantizer], args.is_grad_enabled, args.input_requires_grad)
        quantized_weight, args.new_workspace = quantize_weight(
            tensor=weight,
            quantizer=weight_quantizer,
            workspace=args.weight_workspace,
            update_workspace=args.is_first_microbatch is not False,
            skip_update_flag=args.skip_update_flag,
            cache=args.cache_weight,
        )
        quantized_weight.update_usage(rowwise_usage=True)
        weight_operand = quantized_weight._rowwise
        if bias is not None and dtype == torch.float32:
            # FP8 products take no fp32 bias.
            bias = bias.to(torch.bfloat16)
    else:
        operand = _float(cast_if_needed(inp, dtype))
        weight_operand = _float(cast_if_needed(weight, dtype))
    out = operand @ weight_operand.t()
    if bias is not None:
        out += bias.to(torch.float32)
    if ctx is not None:
        ctx.args = args
        ctx.quantized_weight = quantized_weight
        ctx.input_shape = inp.shape
        ctx.use_bias = bias is not None
        ctx.input_is_quantized = args.fp8 and not args.save_original_input
        ctx.save_for_backward(saved_input, weight)
        ctx.main_grad = None
        if args.fuse_wgrad_accumulation and args.weight_requires_grad:
            overwrite = bool(getattr(weight, "overwrite_main_grad", False))
            ctx.main_grad = MainGrad(weight, args.is_first_microbatch, overwrite)
        ctx.reduce = args.fp8 and any(ctx.needs_input_grad) and first_fp8_module()
    return cast_if_needed(out, dtype).view(*inp.shape[:-1], weight.shape[0])


class LinearFunction(torch.autograd.Function):
    """``apply(weight, inp, bias, arguments)``; without grad ``forward(None, ...)``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        weight: torch.Tensor,
        inp: torch.Tensor,
        bias: torch.Tensor | None,
        args: LinearArguments,
    ) -> torch.Tensor:
        with torch.no_grad():
            return _forward(ctx, weight, inp, bias, args)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:  # type: ignore[override]
        args: LinearArguments = ctx.args
        saved_input, weight = ctx.saved_tensors
        main_grad = ctx.main_grad.fetch() if ctx.main_grad is not None else None
        gradient = grad_output.reshape(-1, grad_output.shape[-1])
        grad_bias = grad_input = wgrad = None
        if args.fp8:
            quantizer = args.grad_output_quantizer
            assert quantizer is not None
            columnwise = ctx.use_bias or args.weight_requires_grad
            quantizer.set_usage(rowwise=True, columnwise=columnwise)
            quantized = quantizer.quantize(gradient)
            rows, columns = quantized._rowwise, quantized._columnwise
        else:
            rows = columns = _float(gradient)
        delayed = args.wgrad_store is not None and args.wgrad_store.delay_wgrad_compute()
        if ctx.use_bias and (args.fp8 or not delayed or not args.weight_requires_grad):
            grad_bias = cast_if_needed(_float(gradient).sum(dim=0), args.activation_dtype)
        if args.input_requires_grad:
            if args.fp8:
                ctx.quantized_weight.update_usage(columnwise_usage=True)
                operand = ctx.quantized_weight._columnwise
            else:
                operand = _float(cast_if_needed(weight, args.activation_dtype))
            grad_input = cast_if_needed(rows @ operand, args.activation_dtype)
            grad_input = grad_input.view(ctx.input_shape)
        if args.weight_requires_grad:
            if args.fp8 and not ctx.input_is_quantized:
                assert args.input_quantizer is not None
                saved_input = requantize_input(args.input_quantizer, saved_input)._columnwise
            elif not args.fp8:
                saved_input = _float(cast_if_needed(saved_input, args.activation_dtype))

            def compute(inputs: torch.Tensor, gradients: torch.Tensor) -> Any:
                product = gradients.t() @ inputs
                bias = gradients.sum(dim=0) if ctx.use_bias and not args.fp8 else None
                if main_grad is not None:
                    ctx.main_grad.write(main_grad, product)
                    return main_grad, bias
                return cast_if_needed(product, args.activation_dtype), bias

            if delayed:
                assert args.wgrad_store is not None
                args.wgrad_store.put([saved_input, columns], compute)
            else:
                wgrad, _ = compute(saved_input, columns)
            if ctx.main_grad is not None:
                wgrad = ctx.main_grad.dummy()
        if ctx.reduce and not FP8GlobalStateManager.fp8_graph_capturing():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return wgrad, grad_input, grad_bias, None
