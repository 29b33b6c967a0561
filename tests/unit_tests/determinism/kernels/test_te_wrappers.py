# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Megatron's wrappers over Transformer Engine's kernels: bytes of the gradient, call by call.

Without a GPU ``tests/unit_tests/test_weight_cache.py`` holds the same of the reference engine.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from megatron.core.extensions import transformer_engine as wrappers
from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig, RecipeConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import fp8_autocast
from transformer_engine.pytorch.fp8 import fp8_model_init

from megatron.quant_state import Installation, install, weights_changed
from megatron.quant_state.first_microbatch import _resolve_is_first_microbatch
from tests.gpu import gpt
from tests.gpu.gpt import DEVICE, REAL, FP8GlobalStateManager, probe, same_bits, torch

pytestmark = pytest.mark.gpu

HIDDEN = 256 if REAL else 32
TOKENS = 256 if REAL else 64
M_SPLITS = [TOKENS // 2, TOKENS // 2]
DTYPE = torch.bfloat16 if REAL else torch.float32
KINDS = (
    "TELinear",
    "TEColumnParallelLinear",
    "TERowParallelLinear",
    "TELayerNormColumnParallelLinear",
    "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear",
)
RECIPES: dict[str, Any] = {
    "tensorwise": recipes.Float8CurrentScaling,
    "blockwise": recipes.Float8BlockScaling,
    "delayed": recipes.DelayedScaling,
}
PRECISIONS = ("bf16", "tensorwise", "blockwise", "delayed", "recipe", "fp8_param")


@pytest.fixture(autouse=True)
def _fresh_process_state() -> Iterator[None]:
    gpt.initialize()
    gpt.reset()
    # Products this small take longer on several threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gpt.reset()


def config_of(precision: str, **fields: Any) -> TransformerConfig:
    if precision == "recipe":
        fields["quant_recipe"] = RecipeConfig([], {})
    elif precision != "bf16":
        fields["fp8"] = "hybrid" if precision != "blockwise" else "e4m3"
        fields["fp8_recipe"] = "tensorwise" if precision == "fp8_param" else precision
        fields["fp8_param"] = precision == "fp8_param"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        add_bias_linear=False,
        use_cpu_initialization=not REAL,
        params_dtype=DTYPE,
        bf16=REAL,
        gradient_accumulation_fusion=True,
        **{key: value for key, value in fields.items() if key != "delay_wgrad_compute"},
    )
    # The config wants a whole schedule for it; a linear alone does not.
    config.delay_wgrad_compute = fields.get("delay_wgrad_compute", False)
    return config


def rule(recipe: dict[str, Any], evaluation: dict[str, Any] | None = None) -> QuantizationConfig:
    values: dict[str, Any] = {
        "transformer_engine_config_type": "TEQuantizationParams",
        "training_recipe": recipe,
    }
    if evaluation is not None:
        values["evaluation_recipe"] = evaluation
    return QuantizationConfig(values, MatchContext("a", None), "a")


QUANTIZE = {"fp8_quantization_recipe": "tensorwise", "override_nonquantized_autocast": True}
#: A rule that forces BF16 is a rule too.
KEEP_BF16 = {"override_quantized_autocast": True}
NOTHING = {"override_quantized_autocast": False}


def model_of(kind: str, precision: str, **fields: Any) -> Any:
    """A MegatronModule whose ``layer`` is one wrapper, [hidden, hidden] a weight."""
    config = config_of(precision, **fields)
    common: dict[str, Any] = {
        "config": config,
        "init_method": functools.partial(torch.nn.init.normal_, std=0.1),
        "bias": False,
        "skip_bias_add": False,
    }
    if "Grouped" in kind:
        common |= {"is_expert": True}
        sizes: tuple[int, ...] = (len(M_SPLITS), HIDDEN, HIDDEN)
    else:
        sizes = (HIDDEN, HIDDEN)
        common |= {
            "TELinear": {"parallel_mode": "duplicated", "skip_weight_param_allocation": False},
            "TERowParallelLinear": {"input_is_parallel": True, "is_expert": False},
        }.get(kind, {"gather_output": False, "is_expert": False})
    torch.manual_seed(1)
    quantized = precision == "fp8_param"
    with fp8_model_init(enabled=quantized, recipe=RECIPES["tensorwise"]() if quantized else None):
        layer = getattr(wrappers, kind)(*sizes, **common)
    if precision == "recipe":
        layer.finish_init(rule(QUANTIZE))
    model = MegatronModule(config)
    model.layer = layer
    with torch.no_grad():
        for index, weight in enumerate(weights_of(model).values()):
            weight.copy_(random(HIDDEN, HIDDEN, seed=500 + index) * 0.1)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device=DEVICE)
    return model


def autocast(precision: str, **options: Any) -> AbstractContextManager[Any]:
    if precision in ("bf16", "recipe"):
        return nullcontext()
    name = "tensorwise" if precision == "fp8_param" else precision
    return fp8_autocast(enabled=True, fp8_recipe=RECIPES[name](), **options)


def weights_of(model: Any) -> dict[str, Any]:
    named = model.layer.named_parameters()
    return {name: weight for name, weight in named if name.startswith("weight")}


def random(*shape: int, seed: int) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DTYPE).to(DEVICE)


def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = layer(x, M_SPLITS)[0] if hasattr(layer, "num_gemms") else layer(x)[0]
    return out


def microbatch(model: Any, precision: str, calls: int, seed: int) -> torch.Tensor:
    """The layer's output is its next input, as in a repeated layer; then one backward."""
    x = random(TOKENS, HIDDEN, seed=seed).requires_grad_()
    with autocast(precision):
        for _ in range(calls):
            x = call(model.layer, x)
    x.backward(random(TOKENS, HIDDEN, seed=seed + 1000))
    return x.detach()


def train(model: Any, precision: str, calls: int, *, arm: bool = False) -> list[torch.Tensor]:
    """main_grads, [weights, out, in], after each of two steps of two microbatches."""
    found = []
    for step in range(2):
        for parameter in model.parameters():
            parameter.main_grad.zero_()
        model.set_is_first_microbatch()
        if arm:
            weights_changed(model)
        for index in range(2):
            microbatch(model, precision, calls, 10 * step + index)
            if model.config.delay_wgrad_compute:
                for _ in range(calls):
                    model.layer.backward_dw()
        weights = weights_of(model).values()
        found.append(torch.stack([weight.main_grad for weight in weights]))
        with torch.no_grad():
            for index, weight in enumerate(weights):
                weight.add_(random(HIDDEN, HIDDEN, seed=100 + 10 * step + index) * 0.1)
    return found


def truth(kind: str, precision: str, calls: int, **fields: Any) -> list[torch.Tensor]:
    probe.never_overwrite(True)
    try:
        return train(model_of(kind, precision, **fields), precision, calls, arm=True)
    finally:
        gpt.reset()


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[bool]:
    return [same_bits(a, b) for a, b in zip(left, right, strict=True)]


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_main_grad_exact(kind: str, precision: str, calls: int) -> None:
    right = truth(kind, precision, calls)
    release = train(model_of(kind, precision), precision, calls)
    gpt.reset()
    with install():
        found = train(model_of(kind, precision), precision, calls)
    assert equal(found, right) == [True, True]
    # The negative control: the release is wrong exactly where the module repeats.
    repeats = calls > 1
    assert equal(release, right) == [not repeats, not repeats or precision == "bf16"]


@pytest.mark.parametrize("precision", ["bf16", "tensorwise", "blockwise"])
@pytest.mark.parametrize("kind", KINDS)
def test_delayed_wgrad_exact(kind: str, precision: str) -> None:
    """``delay_wgrad_compute``: the flag of each call is that of its forward."""
    right = truth(kind, precision, 2, delay_wgrad_compute=True)
    release = train(model_of(kind, precision, delay_wgrad_compute=True), precision, 2)
    gpt.reset()
    with install():
        found = train(model_of(kind, precision, delay_wgrad_compute=True), precision, 2)
    assert equal(found, right) == [True, True]
    assert equal(release, right) == [False, precision == "bf16"]
    assert equal(truth(kind, precision, 2), right) == [True, True]


@pytest.mark.parametrize("precision", ["tensorwise", "blockwise", "delayed", "recipe"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_refresh_keeps_the_bytes_of_the_release(kind: str, precision: str) -> None:
    """One call a microbatch: outputs and cached copies are those of TE's own refresh."""

    def run() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        gpt.reset()
        model = model_of(kind, precision)
        outputs = []
        for step in range(3):
            weights_changed(model)
            outputs += [microbatch(model, precision, 1, 2 * step + index) for index in range(2)]
            with torch.no_grad():
                for weight in weights_of(model).values():
                    weight.mul_(1.5)
        return outputs, [copy.dequantize() for copy in model.layer._fp8_workspaces.values()]

    release_outputs, release_copies = run()
    with install():
        outputs, copies = run()
    assert all(map(torch.equal, outputs, release_outputs))
    assert copies
    assert all(map(torch.equal, copies, release_copies))


@pytest.mark.parametrize("kind", KINDS)
class TestResolve:
    """``_resolve_is_first_microbatch`` on a real linear."""

    @pytest.mark.parametrize("ambient", [False, True])
    def test_without_a_recipe_the_config_decides(self, kind: str, ambient: bool) -> None:
        for precision, expected in (("bf16", None), ("tensorwise", True), ("delayed", True)):
            layer = model_of(kind, precision).layer
            assert _resolve_is_first_microbatch(layer, layer.config, ambient) is expected
            layer.is_first_microbatch = False
            later = None if expected is None else False
            assert _resolve_is_first_microbatch(layer, layer.config, ambient) is later
            layer.disable_parameter_transpose_cache = True
            assert _resolve_is_first_microbatch(layer, layer.config, ambient) is None

    def test_a_rule_decides_in_training_and_in_evaluation(self, kind: str) -> None:
        layer = model_of(kind, "recipe").layer
        config = layer.config
        rules = (
            (rule(QUANTIZE), True, (True, True), (True, True)),
            (rule(KEEP_BF16), True, (None, None), (None, None)),
            (rule(NOTHING), True, (None, True), (None, True)),
            (rule(QUANTIZE, KEEP_BF16), True, (True, True), (None, None)),
            (rule(KEEP_BF16, QUANTIZE), True, (None, None), (True, True)),
        )
        for quantization, flag, training, evaluation in rules:
            layer.finish_init(quantization)
            layer.is_first_microbatch = flag
            for mode, expected in ((True, training), (False, evaluation)):
                layer.train(mode)
                found = tuple(
                    _resolve_is_first_microbatch(layer, config, ambient)
                    for ambient in (False, True)
                )
                assert found == expected

    def test_the_answer_is_what_the_call_does(self, kind: str) -> None:
        """A call that hands None leaves no copy behind, and one that hands a flag leaves one."""
        for quantization, cached in ((rule(QUANTIZE), True), (rule(KEEP_BF16), False)):
            model = model_of(kind, "recipe")
            model.layer.finish_init(quantization)
            with install():
                microbatch(model, "recipe", 1, 1)
            assert bool(model.layer._fp8_workspaces) is cached
            assert model.layer.is_first_microbatch is not cached


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_leaves_the_flag(installed: Installation, kind: str) -> None:
    model = model_of(kind, "tensorwise")
    with pytest.raises(Exception, match=r".+"), autocast("tensorwise"):
        call(model.layer, random(TOKENS, HIDDEN // 2, seed=1))
    assert model.layer.is_first_microbatch is True
    gpt.reset()
    microbatch(model, "tensorwise", 1, 1)
    assert model.layer.is_first_microbatch is False


# Delayed scaling is left out: a refresh takes the scales of its time, in the release too.
@pytest.mark.parametrize("precision", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_without_gradients_before_a_backward(kind: str, precision: str) -> None:
    """The column-wise half of a copy, which a waiting backward reads, outlives the refresh."""

    def run(evaluate: bool) -> torch.Tensor:
        gpt.reset()
        model = model_of(kind, precision)
        x = random(TOKENS, HIDDEN, seed=1).requires_grad_()
        with autocast(precision):
            out = call(model.layer, x)
        if evaluate:
            for _ in range(2):
                weights_changed(model)
                with torch.no_grad(), autocast(precision):
                    call(model.layer, random(TOKENS, HIDDEN, seed=2))
        out.backward(random(TOKENS, HIDDEN, seed=3))
        assert x.grad is not None
        return x.grad

    with install():
        assert same_bits(run(True).float(), run(False).float())


@pytest.mark.skipif(not REAL, reason="needs CUDA graphs")
@pytest.mark.parametrize("precision", ["tensorwise", "blockwise", "delayed"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "Grouped" not in kind])
def test_a_captured_wrapper_exact(kind: str, precision: str) -> None:
    """Two microbatches a step are replays of one graph, the refresh guarded on the GPU."""

    def run(run_name: str) -> list[torch.Tensor]:
        gpt.reset()
        probe.never_overwrite(run_name == "truth")
        model = model_of(kind, precision)
        microbatch(model, precision, 2, 77)
        for parameter in model.parameters():
            parameter.main_grad.zero_()
        static_x = random(TOKENS, HIDDEN, seed=1).requires_grad_()
        static_gradient = random(TOKENS, HIDDEN, seed=2)
        stream = torch.cuda.Stream()
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)

        def twice() -> torch.Tensor:
            x = static_x
            with autocast(precision, _graph=True):
                for _ in range(2):
                    x = call(model.layer, x)
            return x

        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                twice().backward(static_gradient)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        model.set_is_first_microbatch()
        with torch.cuda.graph(graph):
            twice().backward(static_gradient)
        copies = dict(model.layer._fp8_workspaces)
        found = []
        for step in range(3):
            for parameter in model.parameters():
                parameter.main_grad.zero_()
            model.set_is_first_microbatch()
            for index in range(2):
                FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(index > 0)
                with torch.no_grad():
                    static_x.copy_(random(TOKENS, HIDDEN, seed=10 * step + index))
                graph.replay()
            if run_name == "quant_state" and step == 0:
                # Beside the graph: an eager call refreshes in place what the graph reads.
                with torch.no_grad(), autocast(precision):
                    call(model.layer, static_x)
            weights = weights_of(model).values()
            found.append(torch.stack([weight.main_grad for weight in weights]))
            with torch.no_grad():
                for weight in weights:
                    weight.mul_(1.25)
        if run_name == "quant_state":
            assert all(model.layer._fp8_workspaces[key] is copies[key] for key in copies)
        return found

    right = run("truth")
    with install():
        found = run("quant_state")
    if precision == "delayed":
        # The eager call beside the graph is an observation of its own.
        found, right = found[:1], right[:1]
    assert all(equal(found, right))
    assert not same_bits(right[0], torch.zeros_like(right[0]))


def test_a_deepcopy_has_a_cache_of_its_own(installed: Installation) -> None:
    model = model_of("TELinear", "tensorwise")
    microbatch(model, "tensorwise", 1, 1)
    workspaces = model.layer._fp8_workspaces
    twin = copy.copy(model.layer)
    twin._fp8_workspaces = dict(workspaces)
    with torch.no_grad():
        model.layer.weight.mul_(2)
    weights_changed(model)
    with torch.no_grad(), autocast("tensorwise"):
        new = call(model.layer, random(TOKENS, HIDDEN, seed=5))
        again = call(model.layer, random(TOKENS, HIDDEN, seed=5))
    assert same_bits(new.float(), again.float())
