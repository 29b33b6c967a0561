# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``GroupedLinear``: one linear layer an expert, over rows sorted by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch.distributed import get_distributed_world_size
from transformer_engine.pytorch.module._common import WeightGradStore, cast_if_needed, refuse
from transformer_engine.pytorch.module._grouped_function import GroupedArguments, GroupedFunction
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.linear import capture_flags
from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, Quantizer


class GroupedLinear(TransformerEngineBaseModule):
    """Parameters ``weight{i}`` [out_features, in_features]; ``bias{i}`` [out_features]."""

    def __init__(
        self,
        num_gemms: int,
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
        device: Any = "cpu",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__(name)
        refuse(
            "GroupedLinear",
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_ag=ub_overlap_ag,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            use_grouped_tensor=use_grouped_tensor,
        )
        self.num_gemms = num_gemms
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.ub_name = ub_name
        self.save_original_input = save_original_input
        self.single_grouped_weight = False
        self.single_grouped_bias = False
        self.use_grouped_tensor = False
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = rng_tracker_name
        self.wgrad_store: WeightGradStore = WeightGradStore(delay_wgrad_compute)
        self.tp_size = tp_size if tp_group is None else get_distributed_world_size(tp_group)
        if tp_group is not None or tp_size == 1:
            self.set_tensor_parallel_group(tp_group)
        if self.tp_size > 1 and bias:
            raise ValueError("GroupedLinear doesn't support bias when TP > 1.")
        if parallel_mode not in ("row", "column", None):
            raise ValueError(f"parallel_mode {parallel_mode!r} not supported.")
        self.parallel_mode = parallel_mode
        self.in_features = in_features // self.tp_size if parallel_mode == "row" else in_features
        self.out_features = (
            out_features // self.tp_size if parallel_mode == "column" else out_features
        )
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.params_dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self._register(device, init_method)
        if self.primary_weights_in_fp8:
            self.init_fp8_metadata(num_gemms=num_gemms)
        self.reset_parameters(defer_init=torch.device(device).type == "meta")
        if delay_wgrad_compute:
            for param in self.parameters():
                param.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def _register(self, device: Any, init_method: Callable[[torch.Tensor], Any] | None) -> None:
        options: dict[str, Any] = {"device": device, "dtype": self.params_dtype}
        for index in range(self.num_gemms):
            weight = torch.empty(self.out_features, self.in_features, **options)
            self.register_parameter(
                f"weight{index}",
                torch.nn.Parameter(weight),
                init_fn=init_method,
                get_rng_state_tracker=self.get_rng_state_tracker,
                fp8_meta_index=1 + 3 * index,
            )
            if self.use_bias:
                self.register_parameter(
                    f"bias{index}",
                    torch.nn.Parameter(torch.empty(self.out_features, **options)),
                    init_fn=torch.nn.init.zeros_,
                )
            else:
                setattr(self, f"bias{index}", torch.empty(0, **options))

    def set_meta_tensor(self, fwd: bool, recipe: Any) -> None:
        """Refuses tensor parallelism under current scaling, as TE does."""
        if recipe.float8_current_scaling() and self.tp_size > 1:
            raise ValueError("GroupedLinear doesn't support TP > 1 with Float8 current scaling.")
        super().set_meta_tensor(fwd, recipe)

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        if not self.fp8:
            weights = [
                weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
                for weight in weights
            ]
        return weights

    def _get_bias_tensors(self) -> list[torch.Tensor]:
        return [getattr(self, f"bias{index}") for index in range(self.num_gemms)]

    def _get_weight_quantizers(self) -> list[Quantizer | None]:
        if not self.fp8 and not self.fp8_calibration and not self.primary_weights_in_fp8:
            return [None] * self.num_gemms
        quantizers = self.quantizers["scaling_fwd"][1::3]
        for quantizer in quantizers:
            quantizer.internal = not self.primary_weights_in_fp8
        return list(quantizers)

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Any,
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> Any:
        """Apply each expert's layer to its rows.

        Args:
            inp: [M, ..., in_features], sorted by expert.
            m_splits: Rows of each expert: a list, or an int tensor [num_gemms]; zeros are fine.
            is_first_microbatch: See ``Linear.forward``; the workspaces are ``weight{i}``.
            out: Refused where it is given.
            dgrad_out: Refused where it is given.

        Returns:
            [M, ..., out_features], with a list of biases beside it if the layer returns them.
        """
        if out is not None or dgrad_out is not None:
            raise NotImplementedError("the reference engine takes no output buffers")
        splits = [int(size) for size in m_splits]
        if len(splits) != self.num_gemms:
            raise ValueError(
                f"Shape of splits tensor (({len(splits)},)) does not match number of GEMMs "
                f"({self.num_gemms})."
            )
        flag, skip = capture_flags(is_first_microbatch)
        inp = self.prepare_forward(inp, num_gemms=self.num_gemms)
        try:
            self.record_call(is_first_microbatch)
            result = self._products(inp, splits, flag, skip)
        finally:
            self.end_forward()
        if self.return_bias:
            assert self.activation_dtype is not None
            dtype = self.activation_dtype
            return result, [cast_if_needed(bias, dtype) for bias in self._get_bias_tensors()]
        return result

    def _products(
        self,
        inp: torch.Tensor,
        m_splits: list[int],
        is_first_microbatch: bool | None,
        skip_update_flag: torch.Tensor | None,
    ) -> torch.Tensor:
        grad_enabled = torch.is_grad_enabled()
        weights = self._get_weight_tensors()
        weight_quantizers: Any = self._get_weight_quantizers()
        input_quantizers: Any = ()
        grad_output_quantizers: Any = ()
        if self.fp8:
            input_quantizers = self.quantizers["scaling_fwd"][0::3]
            grad_output_quantizers = self.quantizers["scaling_bwd"][0::2]
        cache = is_first_microbatch is not None
        names = [f"weight{index}" for index in range(self.num_gemms)]
        assert self.activation_dtype is not None
        arguments = GroupedArguments(
            m_splits=m_splits,
            fp8=self.fp8,
            activation_dtype=self.activation_dtype,
            is_grad_enabled=grad_enabled,
            input_requires_grad=inp.requires_grad,
            weights_require_grad=weights[0].requires_grad,
            use_bias=self.apply_bias,
            is_first_microbatch=is_first_microbatch,
            workspaces=[self._fp8_workspaces.get(name) if cache else None for name in names],
            cache_weight=cache,
            skip_update_flag=skip_update_flag,
            save_original_input=self.save_original_input,
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
            wgrad_store=self.wgrad_store,
            input_quantizers=input_quantizers,
            weight_quantizers=weight_quantizers,
            grad_output_quantizers=grad_output_quantizers,
        )
        tensors = (*weights, *self._get_bias_tensors())
        if grad_enabled:
            out = GroupedFunction.apply(inp, arguments, *tensors)
        else:
            out = GroupedFunction.forward(None, inp, arguments, *tensors)
        for name, workspace in zip(names, arguments.new_workspaces, strict=False):
            if workspace is not None:
                self._fp8_workspaces[name] = workspace.detach()
        arguments.new_workspaces = ()
        return out  # type: ignore[no-any-return]

    def backward_dw(self) -> None:
        """Compute the oldest delayed weight gradients; they replace ``.grad`` unless fused."""
        store = self.wgrad_store
        if not self.need_backward_dw() or store.context is None or store.context.empty():
            return
        (wgrads, bgrads), _ = store.pop()
        if not self.fuse_wgrad_accumulation:
            for index, wgrad in enumerate(wgrads):
                weight = getattr(self, f"weight{index}")
                weight.grad = wgrad.to(weight.dtype)
        if self.use_bias and bgrads is not None:
            for index, bgrad in enumerate(bgrads):
                bias = getattr(self, f"bias{index}")
                if bias.grad is None:
                    bias.grad = bgrad.to(bias.dtype)
        self._trigger_wgrad_accumulation_and_reduce_hooks()
