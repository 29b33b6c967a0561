# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Builds real Megatron objects from a model description: config, GPTModel, DDP, optimizer.

Runs in a worker process, on the CPU engine or with the real Transformer Engine; torch and Megatron
are imported by the functions, never by this module. What one Megatron version has and another has
not is found out from fields and signatures. A description that Megatron refuses is an InputError
with the place in the user's file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from megatron.quant_state.field_values import field_types
from megatron.quant_state.megatron_config import (
    build_transformer_config,
    check_model,
    checked_fields,
    load_recipe,
    refused,
)
from megatron.quant_state.model import ModelDescription

__all__ = [
    "build_ddp",
    "build_model",
    "build_optimizer",
    "build_transformer_config",
    "check_model",
    "connect_schedule",
    "initialize_single_process",
    "load_recipe",
]


def build_model(
    description: ModelDescription,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pg_collection: Any | None = None,
    device: str = "cpu",
) -> Any:
    """The GPTModel of the description, with the layer specs that Megatron's own builder picks.

    Rules of the recipe reach the modules through GPTModel itself: its constructor walks the
    modules and calls ``finish_init`` (every release from 0.16.1 to 0.19.2).

    Args:
        description: the full model or its twin.
        pre_process: with the embedding.
        post_process: with the output layer.
        vp_stage: the virtual pipeline stage, where there are several.
        pg_collection: process groups; None for the ones of ``parallel_state``.
        device: ``cpu``, ``cuda``, or ``meta`` for shapes alone, which costs no memory.

    Returns:
        GPTModel, in training mode, its parameters on ``device``.

    Raises:
        InputError: as :func:`build_transformer_config`, and what the modules refuse.
    """
    import torch
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = build_transformer_config(description, device=device)
    arguments: dict[str, Any] = {
        "vocab_size": description.vocab_size,
        "max_sequence_length": description.seq_length,
        "share_embeddings_and_output_weights": description.share_embeddings_and_output_weights,
        "position_embedding_type": description.position_embedding_type,
        "rotary_percent": description.rotary_percent,
        "rotary_base": description.rotary_base,
        "rope_scaling": description.rope_scaling,
        "rope_scaling_factor": description.rope_scaling_factor,
        "seq_len_interpolation_factor": description.seq_len_interpolation_factor,
    }
    with refused(description), torch.device(device):
        layer_spec = _layer_spec(config, vp_stage)
        model = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec,
            mtp_block_spec=_mtp_spec(config, layer_spec, vp_stage),
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **arguments,
        )
    # Some modules ask for the current device by name.
    return model.to(device)


def build_ddp(model: Any, description: ModelDescription) -> Any:
    """The model in Megatron's DistributedDataParallel, behind Float16Module in half precision.

    Args:
        model: a GPTModel; its parameters get ``main_grad``, a view of DDP's gradient buffer.
        description: its ``ddp`` fields are used; the bucket size follows ``megatron.training``.

    Raises:
        InputError: a ``ddp`` field that this Megatron has not or refuses.
    """
    from megatron.core import tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.transformer.module import Float16Module

    values = checked_fields(description, "ddp", DistributedDataParallelConfig)
    for name in ("use_megatron_fsdp", "use_custom_fsdp"):
        if values.get(name):
            raise description.error(f"{name}: only DistributedDataParallel is built", f"ddp.{name}")
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    config = model.config
    with refused(description):
        ddp_config = DistributedDataParallelConfig(**values)
        if not ddp_config.overlap_grad_reduce:
            ddp_config.bucket_size = None
        elif ddp_config.bucket_size is None:
            ddp_config.bucket_size = 40_000_000
        layout = _param_layout(model, ddp_config, DistributedDataParallel)
        if config.bf16 or config.fp16:
            model = Float16Module(config, model)
        return DistributedDataParallel(config, ddp_config, model, **layout)


def build_optimizer(model_chunks: Sequence[Any], description: ModelDescription) -> Any:
    """Megatron's optimizer for DDP-wrapped chunks; precision and sharding follow model and DDP.

    Raises:
        InputError: an ``optimizer`` field that this Megatron has not or refuses, or one that
            contradicts the model's precision or DDP's sharding.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config, ddp_config = model_chunks[0].config, model_chunks[0].ddp_config
    values = checked_fields(description, "optimizer", OptimizerConfig)
    follows = {
        "bf16": config.bf16,
        "fp16": config.fp16,
        "params_dtype": config.params_dtype,
        "use_distributed_optimizer": ddp_config.use_distributed_optimizer,
        "overlap_param_gather": ddp_config.overlap_param_gather,
    }
    known = field_types(OptimizerConfig)
    for name, value in follows.items():
        if name in values and values[name] != value:
            message = f"{name}: {values[name]} contradicts the model and ddp, which say {value}"
            raise description.error(message, f"optimizer.{name}")
        if name in known:
            values[name] = value
    with refused(description):
        return get_megatron_optimizer(OptimizerConfig(**values), list(model_chunks))


def connect_schedule(model_chunks: Sequence[Any], optimizer: Any | None = None) -> None:
    """Give the chunks' config what a schedule calls, as Megatron's training loop does.

    Changes the config in place: loss scaling, the gradient's all-reduce and its overlap.
    """
    from megatron.core.distributed import finalize_model_grads

    config, ddp_config = model_chunks[0].config, model_chunks[0].ddp_config

    def one_or_list(functions: list[Callable[..., Any]]) -> Any:
        return functions[0] if len(functions) == 1 else functions

    if optimizer is not None:
        config.grad_scale_func = optimizer.scale_loss
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = one_or_list([chunk.no_sync for chunk in model_chunks])
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        config.param_sync_func = one_or_list([chunk.start_param_sync for chunk in model_chunks])
    config.finalize_model_grads_func = finalize_model_grads


def initialize_single_process(seed: int = 1234) -> None:
    """torch.distributed and Megatron's parallel state for one process; harmless when repeated.

    Uses an in-memory store, so that no port is opened. Seeds Megatron's RNG tracker each time.
    """
    import torch
    from megatron.core import parallel_state, tensor_parallel

    if not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.version.cuda and _has_gpu() else "gloo"
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    function = tensor_parallel.model_parallel_cuda_manual_seed
    # TE's tracker is the one that a process without CUDA can have.
    options = {"inference_rng_tracker": True} if not _has_gpu() else {}
    known = inspect.signature(function).parameters
    function(seed, **{name: value for name, value in options.items() if name in known})


def _has_gpu() -> bool:
    import torch

    # Not is_available(), which the CPU engine may answer for a CUDA that it stands in for.
    count = getattr(torch._C, "_cuda_getDeviceCount", None)
    return count is not None and count() > 0


def _layer_spec(config: Any, vp_stage: int | None) -> Any:
    """The decoder's spec, chosen as ``megatron.training.models.gpt`` (0.19.2) chooses it."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    use_te = config.transformer_impl == "transformer_engine"
    if config.experimental_attention_variant is not None:
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

        build = variants.get_transformer_block_with_experimental_attention_variant_spec
        return build(config=config, vp_stage=vp_stage)
    if config.num_moe_experts is not None:
        return specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=use_te,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
            vp_stage=vp_stage,
        )
    return _dense_layer_spec(config, use_te)


def _dense_layer_spec(config: Any, use_te: bool) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    # Since 0.17 the *_spec functions take anything and hand it to these.
    name = "transformer_engine" if use_te else "local"
    build = getattr(specs, f"get_gpt_layer_{'with_' if use_te else ''}{name}_spec")
    inner = getattr(specs, f"get_gpt_layer_{'with_' if use_te else ''}{name}_submodules", build)
    known = inspect.signature(inner).parameters
    wanted = {
        "num_experts": config.num_moe_experts,
        "normalization": config.normalization,
        "use_te_op_fuser": getattr(config, "use_transformer_engine_op_fuser", False),
    }
    for field_name in (
        "moe_grouped_gemm",
        "qk_layernorm",
        "multi_latent_attention",
        "qk_l2_norm",
        "use_kitchen",
        "use_te_activation_func",
        "use_kitchen_attention",
        "kitchen_attention_backend",
        "mla_down_proj_fusion",
        "use_grouped_gemm_for_dense_mlp",
    ):
        if hasattr(config, field_name):
            wanted[field_name] = getattr(config, field_name)
    return build(**{key: value for key, value in wanted.items() if key in known})


def _mtp_spec(config: Any, layer_spec: Any, vp_stage: int | None) -> Any | None:
    if config.mtp_num_layers is None:
        return None
    from megatron.core.models.gpt import gpt_layer_specs as specs

    use_te = config.transformer_impl == "transformer_engine"
    if config.experimental_attention_variant is None:
        # Not the stage's own last layer: a stage may hold MTP and no decoder layer.
        layer_spec = specs.get_gpt_decoder_layer_specs(
            config,
            use_transformer_engine=use_te,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
        )
        if not isinstance(layer_spec, list):
            layer_spec = layer_spec.layer_specs
        layer_spec = layer_spec[-1]
    return specs.get_gpt_mtp_block_spec(
        config, layer_spec, use_transformer_engine=use_te, vp_stage=vp_stage
    )


def _param_layout(model: Any, ddp_config: Any, ddp_class: type) -> dict[str, Any]:
    """The distributed optimizer's layout, in releases where DDP takes it from its caller."""
    if not ddp_config.use_distributed_optimizer:
        return {}
    if "full_param_layout" not in inspect.signature(ddp_class).parameters:
        return {}
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    layout = DistributedOptimizer.compute_full_param_layout(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        ddp_config.bucket_size,
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        ddp_config,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(),
    )
    return {"full_param_layout": layout}
