# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``LayerNormLinear``: a norm and a linear layer in one module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from transformer_engine.pytorch.module._common import refuse
from transformer_engine.pytorch.module._normalization import normalize
from transformer_engine.pytorch.module.linear import LinearBase, capture_flags


class LayerNormLinear(LinearBase):
    """``layer_norm_weight`` (and ``layer_norm_bias`` for LayerNorm), then ``weight`` and ``bias``.

    TE differentiates both in one function; here the norm is PyTorch's, so the order in which hooks
    see the two may differ, the values not.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cpu",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        # Megatron sets this before TE's constructor runs, for a sharded weight.
        rng_tracker_name = self.__dict__.get("rng_tracker_name")
        super().__init__(name)
        refuse(
            "LayerNormLinear",
            parameters_split=parameters_split,
            symmetric_ar_type=symmetric_ar_type,
            return_layernorm_output_gathered=return_layernorm_output_gathered,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
        )
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise AssertionError("Unsupported normalization type!")
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
        self.normalization = normalization
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        one = 0.0 if zero_centered_gamma else 1.0
        self.register_parameter(
            "layer_norm_weight",
            torch.nn.Parameter(
                torch.empty(self.in_features, device=device, dtype=self.params_dtype)
            ),
            init_fn=partial(torch.nn.init.constant_, val=one),
        )
        if normalization == "LayerNorm":
            self.register_parameter(
                "layer_norm_bias",
                torch.nn.Parameter(
                    torch.empty(self.in_features, device=device, dtype=self.params_dtype)
                ),
                init_fn=torch.nn.init.zeros_,
            )
        else:
            self.layer_norm_bias = None
        self._register_linear_parameters(device, init_method)
        self._finish_parameters(device)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize, and mark the norm's parameters for sequence parallelism."""
        super().reset_parameters(defer_init=defer_init)
        if defer_init:
            return
        for param in (self.layer_norm_weight, self.layer_norm_bias):
            if param is not None:
                param.sequence_parallel = self.sequence_parallel  # type: ignore[union-attr]

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Normalize and apply the layer; see ``Linear.forward``."""
        refuse("LayerNormLinear.forward", fp8_output=fp8_output, fp8_grad=fp8_grad)
        flag, skip = capture_flags(is_first_microbatch)
        inp = self.prepare_forward(inp)
        try:
            self.record_call(is_first_microbatch)
            assert self.activation_dtype is not None
            normed = normalize(
                inp.to(self.activation_dtype),
                self.layer_norm_weight,
                self.layer_norm_bias,
                self.eps,
                self.zero_centered_gamma,
                self.normalization,
            )
            out = self._product(normed, flag, skip)
        finally:
            self.end_forward()
        out = self._with_bias(out)
        if not self.return_layernorm_output:
            return out
        return (*out, normed) if isinstance(out, tuple) else (out, normed)
