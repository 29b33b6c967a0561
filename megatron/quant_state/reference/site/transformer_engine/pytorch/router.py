# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Fused routing, which the engine does not have: Megatron refuses ``moe_router_fusion`` on None."""

from __future__ import annotations

fused_topk_with_score_function = None
fused_compute_score_for_moe_aux_loss = None
fused_moe_aux_loss = None
