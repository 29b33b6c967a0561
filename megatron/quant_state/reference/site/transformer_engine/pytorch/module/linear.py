# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``Linear``: y = x W^T + b, quantized inside an autocast region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch.distributed import get_distributed_world_size
from transformer_engine.pytorch.module._common import WeightGradStore, cast_if_needed, refuse
from transformer_engine.pytorch.module._linear_function import LinearArguments, LinearFunction
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, Quantizer

_INPUT, _WEIGHT, _GRAD_OUTPUT = 0, 1, 0


class LinearBase(TransformerEngineBaseModule):
    """Parameters and call of one weight; what comes before the product is the subclass's.

    The parameters are ``weight`` [out_features, in_features] and, with ``bias``, ``bias``
    [out_features], divided by the tensor parallel size along the split dimension.
    """

    def _setup(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: Any,
        tp_size: int,
        get_rng_state_tracker: Callable[[], Any] | None,
        rng_tracker_name: str | None,
        bias: bool,
        return_bias: bool,
        params_dtype: torch.dtype | None,
        parallel_mode: str | None,
        delay_wgrad_compute: bool,
        ub_name: str | None,
    ) -> None:
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = rng_tracker_name
        self.save_original_input = False
        self.ub_name = ub_name
        self.wgrad_store: WeightGradStore = WeightGradStore(delay_wgrad_compute)
        self.tp_size = tp_size if tp_group is None else get_distributed_world_size(tp_group)
        if tp_group is not None or tp_size == 1:
            self.set_tensor_parallel_group(tp_group)
        if parallel_mode not in ("row", "column", None):
            raise AssertionError(f"parallel_mode {parallel_mode} not supported")
        self.parallel_mode = parallel_mode
        self.in_features = in_features // self.tp_size if parallel_mode == "row" else in_features
        self.out_features = (
            out_features // self.tp_size if parallel_mode == "column" else out_features
        )
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.params_dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        # The bias is added after the reduction over ranks, so the product does not take it.
        self.gemm_bias_unfused_add = parallel_mode == "row" and self.apply_bias
        self.weight_names = ["weight"]
        self.bias_names = ["bias"]

    def _register_linear_parameters(
        self, device: Any, init_method: Callable[[torch.Tensor], Any] | None
    ) -> None:
        size = (self.out_features, self.in_features)
        self.register_parameter(
            "weight",
            torch.nn.Parameter(torch.empty(*size, device=device, dtype=self.params_dtype)),
            init_fn=init_method,
            get_rng_state_tracker=self.get_rng_state_tracker,
            fp8_meta_index=_WEIGHT,
        )
        if self.use_bias:
            bias = torch.empty(self.out_features, device=device, dtype=self.params_dtype)
            self.register_parameter("bias", torch.nn.Parameter(bias), init_fn=torch.nn.init.zeros_)
        else:
            self.bias = torch.empty(0, dtype=self.params_dtype, device=device)

    def _finish_parameters(self, device: Any) -> None:
        if FP8GlobalStateManager.with_fp8_parameters():
            self.init_fp8_metadata()
        deferred = torch.device(device).type == "meta"
        self.reset_parameters(defer_init=deferred)
        if self.wgrad_store.delay_wgrad_compute():
            for name, param in self.named_parameters():
                if name in ("weight", "bias"):
                    param.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize, and mark the parameters for tensor parallelism."""
        super().reset_parameters(defer_init=defer_init)
        if defer_init:
            return
        set_tensor_parallel_attributes(self.weight, 1 if self.parallel_mode == "row" else 0)
        if self.use_bias and self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[union-attr]
        elif self.use_bias and self.parallel_mode == "column":
            set_tensor_parallel_attributes(self.bias, 0)

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        weight = self.weight
        if isinstance(weight, QuantizedTensor) and not self.fp8:
            return [weight.dequantize()]
        return [weight]

    def _get_weight_quantizers(self) -> list[Quantizer | None]:
        if not self.fp8 and not self.fp8_calibration:
            return [None]
        quantizer = self.quantizers["scaling_fwd"][_WEIGHT]
        quantizer.internal = True
        return [quantizer]

    def _product(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None,
        skip_update_flag: torch.Tensor | None,
    ) -> torch.Tensor:
        grad_enabled = torch.is_grad_enabled()
        (weight,) = self._get_weight_tensors()
        (weight_quantizer,) = self._get_weight_quantizers()
        bias = self.bias if self.apply_bias and not self.gemm_bias_unfused_add else None
        input_quantizer = grad_output_quantizer = None
        # TE hands out no quantizers without FP8, so calibration alone observes nothing.
        if self.fp8:
            input_quantizer = self.quantizers["scaling_fwd"][_INPUT]
            input_quantizer.internal = True
        if self.fp8 and grad_enabled:
            grad_output_quantizer = self.quantizers["scaling_bwd"][_GRAD_OUTPUT]
            grad_output_quantizer.internal = True
        cache = is_first_microbatch is not None
        assert self.activation_dtype is not None
        arguments = LinearArguments(
            fp8=self.fp8,
            activation_dtype=self.activation_dtype,
            is_grad_enabled=grad_enabled,
            input_requires_grad=inp.requires_grad,
            weight_requires_grad=weight.requires_grad,
            is_first_microbatch=is_first_microbatch,
            weight_workspace=self._fp8_workspaces.get("weight") if cache else None,
            cache_weight=cache,
            skip_update_flag=skip_update_flag,
            save_original_input=self.save_original_input,
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
            wgrad_store=self.wgrad_store if self.wgrad_store.delay_wgrad_compute() else None,
            input_quantizer=input_quantizer,
            weight_quantizer=weight_quantizer,
            grad_output_quantizer=grad_output_quantizer,
        )
        if grad_enabled:
            out = LinearFunction.apply(weight, inp, bias, arguments)
        else:
            out = LinearFunction.forward(None, weight, inp, bias, arguments)
        if arguments.new_workspace is not None:
            self._fp8_workspaces["weight"] = arguments.new_workspace.detach()
            arguments.new_workspace = None
        return out  # type: ignore[no-any-return]

    def _with_bias(self, out: torch.Tensor) -> Any:
        """Add the bias that the product did not, or hand it back."""
        assert self.activation_dtype is not None
        if self.gemm_bias_unfused_add:
            out = out + cast_if_needed(self.bias, self.activation_dtype)
        if self.return_bias:
            return out, cast_if_needed(self.bias, self.activation_dtype)
        return out

    def backward_dw(self) -> None:
        """Compute the delayed weight gradient; it replaces ``.grad`` unless fused."""
        if not self.need_backward_dw():
            return
        (wgrad, bgrad), _ = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = wgrad.to(self.weight.dtype)
        if self.use_bias and bgrad is not None and self.bias.grad is None:
            self.bias.grad = bgrad.to(self.bias.dtype)
        self._trigger_wgrad_accumulation_and_reduce_hooks()


def set_tensor_parallel_attributes(tensor: torch.Tensor, dimension: int) -> None:
    """Mark a parameter as split along a dimension; Megatron's optimizer reads it."""
    tensor.tensor_model_parallel = True  # type: ignore[attr-defined]
    tensor.partition_dim = dimension  # type: ignore[attr-defined]
    tensor.partition_stride = 1  # type: ignore[attr-defined]


def capture_flags(is_first_microbatch: bool | None) -> tuple[bool | None, torch.Tensor | None]:
    """Flag and skip tensor of a call: under capture the tensor decides, the flag is False."""
    if not FP8GlobalStateManager.fp8_graph_capturing():
        return is_first_microbatch, None
    skip = FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor
    return (is_first_microbatch if skip is None else False), skip


class Linear(LinearBase):
    """A linear layer, column- or row-parallel or neither."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cpu",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        refuse(
            "Linear",
            parameters_split=parameters_split,
            symmetric_ar_type=symmetric_ar_type,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
        )
        self._setup(
            in_features,
            out_features,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group,
            tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            delay_wgrad_compute=delay_wgrad_compute,
            ub_name=ub_name,
        )
        self.save_original_input = save_original_input
        self._register_linear_parameters(device, init_method)
        self._finish_parameters(device)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Apply the layer.

        Args:
            inp: [..., in_features].
            is_first_microbatch: None quantizes the weight for this call alone; True quantizes it
                and keeps it; False reuses it. With fused accumulation, True overwrites
                ``main_grad``.
            fp8_output: Refused where it is set.
            fp8_grad: Refused where it is set.

        Returns:
            [..., out_features], with the bias beside it if the layer returns its bias.
        """
        refuse("Linear.forward", fp8_output=fp8_output, fp8_grad=fp8_grad)
        flag, skip = capture_flags(is_first_microbatch)
        inp = self.prepare_forward(inp)
        try:
            self.record_call(is_first_microbatch)
            out = self._product(inp, flag, skip)
        finally:
            self.end_forward()
        return self._with_bias(out)
