# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A model's twin: every structural field kept, every width cut, for one process on a CPU.

Which rule a module gets, what surrounds it, how often it is called and what is recomputed follow
from structure alone, so the twin shows what the full model would do. Numbers of this file:

    hidden 64, head 16, up to 16 heads, FFN 128, expert FFN 64, 8 experts top 2 in 4 groups,
    LoRA 32 (query) and 16 (key and value), vocabulary 128, sequence 32, one sample a microbatch.

All are multiples of 16, as FP8 GEMMs want, and of 32 where 32-element blocks may be in play. For
real kernels each is 8 times as wide, as blocks of 128 want.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron.quant_state.model import ModelDescription

__all__ = ["FUSED_KERNELS", "Change", "Twin", "build_twin"]

_HIDDEN = 64
_HEAD = 16
_MOST_HEADS = 16
_FFN = 128
_EXPERT_FFN = 64
_EXPERTS, _TOPK, _GROUPS = 8, 2, 4
_VOCAB = 128
_SEQUENCE = 32
_TOKENS_PER_CHUNK = 8

#: Widths that are wider for real kernels; how many there are of something stays.
_WIDER_ON_GPU = (
    "hidden_size",
    "kv_channels",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "vocab_size",
    "seq_length",
)
_GPU_SCALE = 8

_WIDTH = "width decides nothing, and a small one is fast"
_DTYPE = "bf16 GEMMs are slow on a CPU; which weights are quantized does not depend on it"
_PARALLEL = "the twin trains in one process, where gradients are bit-equal to the parallel run's"
_KERNEL = "needs a fused GPU kernel; the unfused path calls the same linears"

#: Fields that pick a kernel of the real Transformer Engine or of CUDA, and what the twin sets.
FUSED_KERNELS: dict[str, Any] = {
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_permute_fusion_into_hybridep": False,
    "apply_rope_fusion": False,
    "fused_single_qkv_rope": False,
    "fused_residual_rmsnorm": False,
    "use_te_activation_func": False,
    "activation_func_fp8_input_store": False,
    "batch_invariant_mode": False,
    "symmetric_ar_type": None,
}

_GPU_OPTIMIZERS = ("adaptive_muon", "dist_muon", "lion", "muon", "soap")

_CUDA_GRAPHS: dict[str, Any] = {
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "cuda_graph_scope": None,
    "cuda_graph_modules": None,
    "inference_cuda_graph_scope": None,
    "cpu_offloading": False,
    "fine_grained_activation_offloading": False,
}

_OVERLAP: dict[str, Any] = {
    "overlap_moe_expert_parallel_comm": False,
    "ep_overlap_early_attn_memory_release": False,
    "overlap_dispatch_backward_with_experts_wgrad": False,
    "delay_wgrad_compute": False,
    "defer_embedding_wgrad_compute": False,
    "tp_comm_overlap": False,
    "cp_comm_type": None,
    "hierarchical_context_parallel_sizes": None,
    "hybrid_context_parallel": False,
    "microbatch_group_size_per_vp_stage": None,
    "moe_router_topk_limited_devices": None,
    "moe_enable_deepep": False,
    "tensor_parallel_num_weight_shards": None,
    "expert_tensor_parallel_num_weight_shards": None,
    "gtp_weight_remat_size": 1,
    "expert_gtp_weight_remat_size": 1,
}

_OP_FUSER: dict[str, Any] = {
    "use_transformer_engine_op_fuser": False,
    "moe_single_grouped_weight": False,
    "moe_single_grouped_bias": False,
    "moe_mlp_glu_interleave_size": None,
    "moe_expert_rank_capacity_factor": None,
    "moe_paged_stash": False,
}


@dataclass(frozen=True)
class Change:
    """One field that the twin has otherwise; None for a field that was left at its default."""

    field: str
    full: Any
    twin: Any
    reason: str


@dataclass(frozen=True)
class Twin:
    """The small model and what was changed to get it.

    Attributes:
        description: of the twin; locations are those of the full model's fields.
        changes: in a fixed order.
    """

    description: ModelDescription
    changes: tuple[Change, ...]


def build_twin(
    description: ModelDescription,
    *,
    keep_pipeline: bool = False,
    keep_widths: bool = False,
    on_gpu: bool = False,
) -> Twin:
    """The twin of a model; no width is ever made larger.

    Args:
        description: the full model.
        keep_pipeline: keep the pipeline split, for a plan of each stage; a run wants one process.
        keep_widths: cut nothing, only fit one process: the full model's shapes, on the meta device.
        on_gpu: for real kernels: wider, and in the precision that the model says.

    Raises:
        InputError: a width is not a number.
    """
    cutter = _Cutter(description, on_gpu)
    if not keep_widths:
        _cut_attention(cutter)
        _cut_mlp_and_experts(cutter)
    _fit_one_process(cutter, keep_pipeline)
    return cutter.twin()


class _Cutter:
    """Changes copies of a description's fields, and records each change."""

    def __init__(self, description: ModelDescription, on_gpu: bool = False) -> None:
        self.description = description
        self.on_gpu = on_gpu
        self.changes: list[Change] = []
        self.top: dict[str, Any] = {}
        names = ("transformer_config", "parallel", "ddp", "optimizer")
        self.sections = {name: dict(getattr(description, name)) for name in names}
        self.config = self.sections["transformer_config"]

    def width(self, name: str, default: int | None = None) -> int | None:
        """The field's value, its default where it was not given."""
        value = self.config.get(name)
        if value is None and name not in self.config:
            value = default
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.description.error(f"{name}: expected an integer, found '{value}'", name)
        return value

    def set(self, name: str, value: Any, reason: str, section: str = "transformer_config") -> None:
        """Give a field another value, or with None its default; silent where nothing changes."""
        fields = self.sections[section]
        if value is None and fields.get(name) is None:
            return
        if name in fields and fields[name] == value and type(fields[name]) is type(value):
            return
        prefix = "" if section == "transformer_config" else f"{section}."
        self.changes.append(Change(prefix + name, fields.get(name), value, reason))
        fields[name] = value
        if value is None:
            del fields[name]

    def cut(self, name: str, most: int, default: int | None = None, reason: str = _WIDTH) -> None:
        """Lower a width to ``most``; one that is smaller, null or absent stays."""
        value, most = self.width(name, default), self.widest(name, most)
        if value is not None and value > most:
            self.set(name, most, reason)

    def widest(self, name: str, most: int) -> int:
        """``most`` as the engine wants it."""
        return most * _GPU_SCALE if self.on_gpu and name in _WIDER_ON_GPU else most

    def switch(self, values: dict[str, Any], reason: str) -> None:
        """Set those of ``values`` that were given."""
        for name, value in values.items():
            if self.config.get(name) is not None:
                self.set(name, value, reason)

    def cut_top(self, name: str, most: int) -> None:
        value, most = getattr(self.description, name), self.widest(name, most)
        if value > most:
            self.top[name] = most
            self.changes.append(Change(name, value, most, _WIDTH))

    def twin(self) -> Twin:
        changed: dict[str, Any] = {**self.top, **self.sections}
        description = replace(self.description, **changed)
        return Twin(description, tuple(self.changes))

    @property
    def block(self) -> int:
        """Elements that a quantization block may span along a width that FP8 or FP4 divides."""
        config = self.config
        blocks_of_32 = config.get("fp8_recipe") == "mxfp8" or self.description.recipe is not None
        return 32 if blocks_of_32 else 16


def _cut_attention(cutter: _Cutter) -> None:
    hidden = cutter.width("hidden_size") or 0
    heads = cutter.width("num_attention_heads") or 1
    groups = cutter.width("num_query_groups")
    if cutter.width("kv_channels") is None:
        # Megatron derives it from the two widths that are about to change.
        if hidden // heads > cutter.widest("kv_channels", _HEAD):
            cutter.set("kv_channels", cutter.widest("kv_channels", _HEAD), _WIDTH)
        elif hidden > cutter.widest("hidden_size", _HIDDEN) or heads > 4:
            cutter.set("kv_channels", hidden // heads, "kept from hidden_size / heads")
    cutter.cut("kv_channels", _HEAD)
    cutter.cut("hidden_size", _HIDDEN)
    if groups is None or groups >= heads:
        cutter.cut("num_attention_heads", 4)
        if groups is not None:
            cutter.cut("num_query_groups", min(4, heads))
    elif heads > 4:
        ratio = max(1, heads // max(1, groups))
        kept = min(ratio, _MOST_HEADS)
        fewer = min(groups, 2 if 2 * kept <= _MOST_HEADS else 1)
        why = f"{_WIDTH}; the number of heads a query group is kept"
        why = why if kept == ratio else f"{_WIDTH}; at most {_MOST_HEADS} heads a query group"
        cutter.cut("num_attention_heads", fewer * kept, reason=why)
        cutter.cut("num_query_groups", fewer, reason=why)
    if cutter.description.multi_latent_attention:
        cutter.cut("q_lora_rank", 32, default=512)
        cutter.cut("kv_lora_rank", cutter.block, default=512)
        cutter.cut("qk_head_dim", _HEAD, default=128)
        cutter.cut("qk_pos_emb_head_dim", cutter.block, default=64)
        cutter.cut("v_head_dim", _HEAD, default=128)
    if cutter.config.get("experimental_attention_variant") is not None:
        for name in ("linear_key_head_dim", "linear_value_head_dim"):
            cutter.cut(name, _HEAD, default=128)
        keys = cutter.width("linear_num_key_heads", 16) or 16
        values = cutter.width("linear_num_value_heads", 32) or 32
        cutter.cut("linear_num_key_heads", 2, default=16)
        cutter.cut("linear_num_value_heads", min(keys, 2) * max(1, values // keys), default=32)
        for name, most in (("dsa_indexer_n_heads", 2), ("dsa_indexer_head_dim", 32)):
            cutter.cut(name, most)
        cutter.cut("dsa_indexer_topk", 8)


def _cut_mlp_and_experts(cutter: _Cutter) -> None:
    hidden = cutter.description.transformer_config.get("hidden_size")
    cutter.cut("ffn_hidden_size", _FFN)
    widest = cutter.widest("ffn_hidden_size", _FFN)
    if cutter.width("ffn_hidden_size") is None and isinstance(hidden, int) and 4 * hidden > widest:
        cutter.set("ffn_hidden_size", widest, _WIDTH)
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        cutter.cut(name, _EXPERT_FFN)
    cutter.cut("moe_latent_size", 32)
    experts = cutter.width("num_moe_experts")
    if experts is not None and experts > _EXPERTS:
        groups = cutter.width("moe_router_num_groups")
        cutter.set("num_moe_experts", _EXPERTS, _WIDTH)
        cutter.cut("moe_router_topk", _TOPK, default=2)
        topk = cutter.width("moe_router_topk", 2) or 1
        if groups is not None:
            # As many groups as divide the experts, at most as many chosen as experts are.
            fewer = next(n for n in (_GROUPS, 2, 1) if n <= groups)
            cutter.cut("moe_router_num_groups", fewer)
            cutter.cut("moe_router_group_topk", min(topk, fewer))
    cutter.cut_top("vocab_size", _VOCAB)
    chunks = cutter.width("mlp_chunks_for_training", 1) or 1
    cutter.cut_top("seq_length", max(_SEQUENCE, _TOKENS_PER_CHUNK * chunks))
    cutter.cut_top("micro_batch_size", 1)


def _fit_one_process(cutter: _Cutter, keep_pipeline: bool) -> None:
    for name, value in list(cutter.sections["parallel"].items()):
        if keep_pipeline and ("pipeline" in name):
            continue
        default: Any = None
        if isinstance(value, bool):
            default = False
        elif name.endswith("_size") and not name.startswith(("virtual", "expert_tensor")):
            default = 1
        cutter.set(name, default, _PARALLEL, "parallel")
    if not cutter.on_gpu:
        _fit_precision(cutter)
    cutter.switch(_OVERLAP, _PARALLEL)
    if cutter.config.get("moe_token_dispatcher_type") == "flex":
        cutter.set("moe_token_dispatcher_type", "alltoall", "flex needs DeepEP or HybridEP")
    cutter.switch(FUSED_KERNELS, _KERNEL)
    if cutter.config.get("cross_entropy_fusion_impl") == "te":
        cutter.set("cross_entropy_fusion_impl", "native", _KERNEL)
    cutter.switch(_CUDA_GRAPHS, "there are no CUDA graphs and nothing to offload on a CPU")
    fused_mlp = "the twin runs the linears; a fused MLP is not seen by Megatron's wrappers at all"
    cutter.switch(_OP_FUSER, fused_mlp)
    _fit_ddp_and_optimizer(cutter)


def _fit_precision(cutter: _Cutter) -> None:
    optimizer = cutter.sections["optimizer"]
    for name in ("bf16", "fp16", "enable_autocast"):
        if cutter.config.get(name):
            cutter.set(name, False, _DTYPE)
    for name in ("params_dtype", "pipeline_dtype", "autocast_dtype"):
        if cutter.config.get(name) is not None:
            cutter.set(name, "fp32", _DTYPE)
    for name in ("bf16", "fp16"):
        if optimizer.get(name):
            cutter.set(name, False, _DTYPE, "optimizer")
    if "params_dtype" in optimizer:
        cutter.set("params_dtype", "fp32", _DTYPE, "optimizer")


def _fit_ddp_and_optimizer(cutter: _Cutter) -> None:
    ddp, optimizer = cutter.sections["ddp"], cutter.sections["optimizer"]
    for name, value in (("num_distributed_optimizer_instances", 1), ("nccl_ub", False)):
        if name in ddp:
            cutter.set(name, value, _PARALLEL, "ddp")
    for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload", "optimizer_cuda_graph"):
        if optimizer.get(name):
            cutter.set(name, False, "needs Transformer Engine's own Adam", "optimizer")
    if optimizer.get("optimizer") in _GPU_OPTIMIZERS:
        reason = "the gradient does not depend on the optimizer of its own step"
        cutter.set("optimizer", "adam", reason, "optimizer")
