# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Scaled dot-product attention, with the precision of FP8 attention where a recipe asks for it.

Plain PyTorch in fp32. Under a recipe with ``fp8_dpa`` or ``fp8_mha``, query, key and value are
rounded before the product and the output's gradient before its own, per tensor: with the delayed
scales of this module for delayed scaling, with current scaling for every other recipe. TE also
rounds the probabilities, their gradient and the output; that is left out, and MXFP8 blocks are not
modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F

from transformer_engine.pytorch._recipe_state import get_fp8_torch_dtype
from transformer_engine.pytorch.attention._masks import attention_mask_for
from transformer_engine.pytorch.distributed import get_distributed_world_size
from transformer_engine.pytorch.module._common import refuse
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, in_backward
from transformer_engine.pytorch.quantized_tensor import Quantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

# Slots of the module's quantizers, as TE numbers them.
_QKV, _GRAD_OUTPUT = 0, 0


class DotProductAttention(TransformerEngineBaseModule):
    """softmax(q k^T scale) v for heads that share keys and values in groups."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        refuse(
            "DotProductAttention",
            softcap=softcap,
            softmax_type=None if softmax_type == "vanilla" else softmax_type,
        )
        self.tp_size = tp_size if tp_group is None else get_distributed_world_size(tp_group)
        self.set_tensor_parallel_group(tp_group)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.hidden_size_per_attention_head_k = (
            kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        )
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type.replace(",", "_")
        self.window_size = window_size
        self.get_rng_state_tracker = get_rng_state_tracker
        self.layer_number = layer_number
        self.attention_type = attention_type
        self.cp_group = cp_group
        self.cp_comm_type = cp_comm_type
        self.softmax_type = softmax_type
        self.softmax_scale = (
            1.0 / math.sqrt(self.hidden_size_per_attention_head_k)
            if softmax_scale is None
            else softmax_scale
        )
        self.return_max_logit = return_max_logit

    def set_context_parallel_group(self, cp_group: Any, *_: Any) -> None:
        """Take the group; a computation over more than one rank is refused."""
        self.cp_group = cp_group

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        return []

    def _get_weight_quantizers(self) -> list[Quantizer | None]:
        return []

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Attend.

        Args:
            query_layer: [s, b, heads, d] for ``sbhd``, [b, s, heads, d] for ``bshd``, [t, heads, d]
                for ``thd``.
            key_layer: The same with the groups' count of heads.
            value_layer: As the key; its width may differ.
            attention_mask: True where a key must not be seen, broadcast to [b, heads, sq, skv].
            qkv_format: Overrides the constructor's.
            cu_seqlens_q: Starts of the packed sequences, [n + 1], for ``thd``.
            cu_seqlens_kv: The same for keys.
            attn_mask_type: Overrides the constructor's.
            window_size: Overrides the constructor's.
            core_attention_bias_type: ``no_bias`` or ``post_scale_bias``.
            core_attention_bias: Added to the scaled scores.
            **others: Padded starts, lengths and hints for kernels, which need nothing here.

        Returns:
            The heads joined, [s, b, heads * dv] and alike; with ``return_max_logit`` the largest
            score of each head beside it.
        """
        if self.cp_group is not None and get_distributed_world_size(self.cp_group) > 1:
            raise NotImplementedError("the reference engine computes on one context parallel rank")
        if core_attention_bias_type not in ("no_bias", "post_scale_bias"):
            raise NotImplementedError(f"core_attention_bias_type={core_attention_bias_type!r}")
        inputs = (query_layer, key_layer, value_layer)
        with self.prepare_forward_ctx(query_layer, num_gemms=3, allow_non_contiguous=True):
            quantizers = self._attention_quantizers()
            if quantizers is not None or (in_backward() and self._asked_for_fp8_attention()):
                self.record_call(None, quantized=quantizers is not None)
            if quantizers is not None:
                inputs = tuple(_Round.apply(part, quantizers[0]) for part in inputs)
            layout = qkv_format or self.qkv_format
            heads_first = [_heads_first(part, layout) for part in inputs]
            query, key, value = (part.to(torch.float32) for part in heads_first)
            mask = attention_mask_for(
                (attn_mask_type or self.attn_mask_type).replace(",", "_"),
                attention_mask,
                query.shape[2],
                key.shape[2],
                window=window_size or self.window_size,
                cu_seqlens=(cu_seqlens_q, cu_seqlens_kv) if layout == "thd" else None,
            )
            out, scores = self._attend(query, key, value, mask, core_attention_bias)
            out = _heads_last(out.to(query_layer.dtype), layout)
            if quantizers is not None:
                out = _RoundGradient.apply(out, quantizers[1])
        if self.return_max_logit:
            return out, scores.amax(dim=(0, 2, 3))
        return out

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[b, h, sq, d], [b, g, skv, d], [b, g, skv, dv] to [b, h, sq, dv] and the scores."""
        if key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        scores = (query @ key.transpose(2, 3)) * self.softmax_scale
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        probabilities = torch.softmax(scores, dim=-1)
        if self.attention_dropout and self.training:
            tracker = self.get_rng_state_tracker
            with tracker().fork() if tracker is not None else nullcontext():
                probabilities = F.dropout(probabilities, self.attention_dropout)
        return probabilities @ value, scores

    def _attention_quantizers(self) -> tuple[Quantizer, Quantizer] | None:
        """Quantizers of the inputs and of the output's gradient; None without FP8 attention."""
        if not self.fp8 or not self._asked_for_fp8_attention():
            return None
        recipe = self.fp8_meta["recipe"]
        if recipe.delayed():
            forward = self.quantizers["scaling_fwd"][_QKV]
            backward = self.quantizers["scaling_bwd"][_GRAD_OUTPUT]
        else:
            forward = Float8CurrentScalingQuantizer(get_fp8_torch_dtype(recipe, True))
            backward = Float8CurrentScalingQuantizer(get_fp8_torch_dtype(recipe, False))
        forward.set_usage(rowwise=True, columnwise=False)
        backward.set_usage(rowwise=True, columnwise=False)
        return forward, backward

    def _asked_for_fp8_attention(self) -> bool:
        """Whether the recipe of the module's last quantized call asks for FP8 attention."""
        recipe = self.fp8_meta.get("recipe")
        return recipe is not None and (recipe.fp8_dpa or recipe.fp8_mha)

    def prepare_forward(self, inp: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attention splits heads over ranks by itself; no parameter's dtype could clash."""
        tp_size = self.tp_size
        self.fast_setattr("tp_size", 1)
        try:
            return super().prepare_forward(inp, *args, **kwargs)
        finally:
            self.fast_setattr("tp_size", tp_size)


def _heads_first(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """[b, heads, s, d] of a layout; ``thd`` is one batch."""
    if layout == "sbhd":
        return tensor.permute(1, 2, 0, 3)
    if layout == "bshd":
        return tensor.transpose(1, 2)
    if layout == "thd":
        return tensor.transpose(0, 1).unsqueeze(0)
    raise NotImplementedError(f"qkv_format={layout!r}")


def _heads_last(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Undo ``_heads_first`` and join the heads."""
    if layout == "sbhd":
        return tensor.permute(2, 0, 1, 3).flatten(2)
    if layout == "bshd":
        return tensor.transpose(1, 2).flatten(2)
    return tensor.squeeze(0).transpose(0, 1).flatten(1)


def _rounded(tensor: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    matrix = tensor.detach().reshape(-1, tensor.shape[-1]).to(torch.float32).contiguous()
    rowwise, _ = quantizer.round(matrix, None, None)
    assert rowwise is not None
    return rowwise.to(tensor.dtype).view(tensor.shape)


class _Round(torch.autograd.Function):
    """Round the values, pass the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:  # type: ignore[override]
        return _rounded(tensor, quantizer)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class _RoundGradient(torch.autograd.Function):
    """Pass the values, round the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:  # type: ignore[override]
        ctx.quantizer = quantizer
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _rounded(gradient, ctx.quantizer), None
