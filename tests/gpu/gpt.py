# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A real GPT, built by Megatron, trained by Megatron's schedule and optimizer, and read out.

One process trains many models one after the other. On a GPU ``transformer_engine`` is Transformer
Engine; without one it is the reference engine and the model is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch  # First: it loads libraries that Transformer Engine links to.

pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")


try:
    from transformer_engine import reference as probe

    REAL = False
except ImportError:
    from megatron.quant_state import te_probe as probe  # type: ignore[no-redef]

    REAL = True
    if not torch.cuda.is_available():
        pytest.skip("Transformer Engine needs a GPU to run", allow_module_level=True)
    probe.provide_fused_weight_gradient()
    probe.install()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig, RecipeConfig
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megatron.quant_state import build, install, weights_changed
from megatron.quant_state.model import ModelDescription, load_model

DEVICE = "cuda" if REAL else "cpu"
SMALL = (
    "seq_length=32",
    "vocab_size=128",
    "hidden_size=64",
    "ffn_hidden_size=128",
    "bf16=false",
)
YAML = Path(__file__).parent / "gpt.yaml"
SEED = 1234
RUNS = ("truth", "release", "quant_state")

MTP = ("mtp_num_layers=2", "mtp_use_repeated_layer=true")
CHUNKS = ("mlp_chunks_for_training=4",)
SELECTIVE = ("recompute_granularity=selective", "recompute_modules=[core_attn, mlp]")
FULL = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
MOE = (
    "num_moe_experts=4",
    "moe_router_topk=2",
    "moe_ffn_hidden_size=256" if REAL else "moe_ffn_hidden_size=64",
    "moe_grouped_gemm=true",
    "moe_token_dispatcher_type=alltoall",
    "moe_router_load_balancing_type=none",
    "moe_router_dtype=fp32",
)
DISTRIBUTED = (
    "ddp.use_distributed_optimizer=true",
    "ddp.overlap_grad_reduce=true",
    "ddp.overlap_param_gather=true",
)
PRECISION: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "tensorwise": ("fp8=hybrid", "fp8_recipe=tensorwise"),
    "blockwise": ("fp8=e4m3", "fp8_recipe=blockwise"),
    "delayed": ("fp8=hybrid", "fp8_recipe=delayed"),
    "fp8_param": ("fp8=hybrid", "fp8_recipe=tensorwise", "fp8_param=true"),
    # quant_recipe alone, with fp8 unset: every linear matches one rule.
    "recipe": (),
}


@dataclass
class Step:
    """What a step left behind.

    Attributes:
        main_grads: by parameter name, copies, fp32.
        loss: mean over the microbatches.
        quantizations, least: weight quantizations counted, and one a weight that was used.
    """

    main_grads: dict[str, torch.Tensor]
    loss: float
    quantizations: int = 0
    least: int = 0


@dataclass
class Model:
    """A model in training. ``chunks`` are DDP-wrapped, ``modules`` are what they wrap."""

    description: ModelDescription
    chunks: list[Any]
    modules: list[Any]
    optimizer: Any
    evaluations: list[float] = field(default_factory=list)

    @property
    def module(self) -> Any:
        return self.modules[0]

    def named_parameters(self) -> dict[str, Any]:
        return {
            (f"{index}.{name}" if len(self.modules) > 1 else name): parameter
            for index, module in enumerate(self.modules)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }


def initialize(**sizes: int) -> None:
    """Process group (of one, unless a launcher started several) and Megatron's parallel state."""
    if not torch.distributed.is_initialized():
        build.initialize_single_process(SEED)
    if sizes or not parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes)
    torch.manual_seed(SEED)
    options = {"te_rng_tracker": True} if REAL else {"inference_rng_tracker": True}
    tensor_parallel.model_parallel_cuda_manual_seed(SEED, force_reset_rng=True, **options)


def reset() -> None:
    """Process-wide state of libraries, back to that of a fresh process."""
    FP8GlobalStateManager.reset()
    MTPLossLoggingHelper.tracker = {}
    probe.never_overwrite(False)
    probe.counters.reset()
    if REAL:
        probe.forget()
        torch.cuda.set_stream(torch.cuda.default_stream())


def describe(*overrides: str) -> ModelDescription:
    """The base model with overrides."""
    return load_model(str(YAML), [*(() if REAL else SMALL), *overrides])


def build_trained(description: ModelDescription, *, recipe: bool = False, **kinds: Any) -> Model:
    """Model, DDP and optimizer, from the same seed every time.

    Args:
        description: the base model with overrides.
        recipe: give every linear a rule that quantizes it tensorwise, whatever surrounds it.
        kinds: as ``build.build_model``; ``stages`` makes that many chunks.
    """
    initialize()
    stages = kinds.pop("stages", [kinds])
    modules = [build.build_model(description, device=DEVICE, **options) for options in stages]
    if recipe:
        for module in modules:
            module.config.quant_recipe = RecipeConfig([], {})
            for layer in linears(module).values():
                layer.finish_init(_rule())
    chunks = [build.build_ddp(module, description) for module in modules]
    optimizer = build.build_optimizer(chunks, description)
    build.connect_schedule(chunks, optimizer)
    return Model(description, chunks, modules, optimizer)


def _rule() -> QuantizationConfig:
    values = {
        "transformer_engine_config_type": "TEQuantizationParams",
        "training_recipe": {
            "fp8_quantization_recipe": "tensorwise",
            "override_nonquantized_autocast": True,
        },
    }
    return QuantizationConfig(values, MatchContext("a", None), "a")


def linears(module: Any) -> dict[str, Any]:
    """Megatron's TE linear wrappers by path."""
    return {
        name: child
        for name, child in module.named_modules()
        if hasattr(child, "disable_parameter_transpose_cache")
    }


def batches(description: ModelDescription, seed: int) -> Iterator[torch.Tensor]:
    """Tokens of microbatches, [1, seq_length + 1], int64; others on each data-parallel rank."""
    rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(seed + 1000 * rank)
    shape = (1, description.seq_length + 1)
    while True:
        yield torch.randint(description.vocab_size, shape, generator=generator).to(DEVICE)


def forward_step(data: Iterator[torch.Tensor], chunk: Any) -> Any:
    tokens = next(data)
    length = tokens.shape[1] - 1
    positions = torch.arange(length, device=DEVICE)[None]
    mask = torch.ones(1, length, device=DEVICE)
    out = chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:], loss_mask=mask)
    return out, lambda losses: (losses.mean(), {"loss": losses.detach().float().mean()})


def run_schedule(model: Model, seed: int, *, forward_only: bool = False) -> float:
    """One pass of Megatron's schedule over a step's microbatches; the mean loss."""
    description = model.description
    data: Any = [batches(description, seed) for _ in model.chunks]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if len(data) > 1 else data[0],
        model=model.chunks if len(data) > 1 else model.chunks[0],
        num_microbatches=description.num_microbatches,
        seq_length=description.seq_length,
        micro_batch_size=description.micro_batch_size,
        forward_only=forward_only,
    )
    losses = [float(report["loss"]) for report in reports]
    return sum(losses) / len(losses) if losses else 0.0


def train_step(model: Model, step: int, right: Step | None = None, arm: bool = False) -> Step:
    """One optimizer step.

    Args:
        model: trained in place.
        step: counted from 1; decides the tokens.
        right: gradients for the optimizer, in place of the model's own, so that the error of a
            step is its own.
        arm: arm every module by hand, which some releases forget.
    """
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()
    if arm:
        weights_changed(model.chunks)
    probe.counters.reset()
    loss = run_schedule(model, step)
    named = model.named_parameters()
    found = Step(
        {name: parameter.main_grad.detach().float().clone() for name, parameter in named.items()},
        loss,
        probe.counters.weight_quantizations,
        len(probe.counters.weights_used),
    )
    if right is not None:
        for name, parameter in named.items():
            parameter.main_grad.copy_(right.main_grads[name])
    model.optimizer.step()
    return found


@contextmanager
def running(run: str) -> Iterator[None]:
    """What a run needs around it: the layer, or the switch that makes it the truth."""
    reset()
    if run in ("truth", "unfused"):
        probe.never_overwrite(run == "truth")
    with install() if run == "quant_state" else nullcontext():
        yield
    reset()


def train(
    run: str,
    *overrides: str,
    precision: str = "bf16",
    steps: int = 2,
    right: list[Step] | None = None,
    between: Callable[[Model, int], None] = lambda model, step: None,
    build_it: Callable[..., Model] = build_trained,
) -> list[Step]:
    """Train a new model in one of the ways.

    Args:
        run: ``truth``: the release's own cache, refreshed every step, never overwriting;
            ``no_cache``: the release without any cache; ``release``; ``quant_state``: the layer.
        overrides: over the base model and the precision.
        precision: a key of ``PRECISION``.
        steps: optimizer steps.
        right: as :func:`train_step`.
        between: called after each step with its number.
        build_it: makes the model from the description.
    """
    extra = ("disable_parameter_transpose_cache=true",) if run == "no_cache" else ()
    with running(run):
        description = describe(*PRECISION[precision], *overrides, *extra)
        model = build_it(description, recipe=precision == "recipe")
        results = []
        for step in range(1, steps + 1):
            given = right[step - 1] if right is not None else None
            results.append(train_step(model, step, given, arm=run == "truth"))
            between(model, step)
        return results


def wrong(found: list[Step], right: list[Step]) -> list[set[str]]:
    """Names of the gradients whose bytes differ, step by step."""
    return [
        {
            name
            for name, gradient in expected.main_grads.items()
            if not same_bits(step.main_grads[name], gradient)
        }
        for step, expected in zip(found, right, strict=True)
    ]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit, signs of zeros and NaNs included."""
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())
