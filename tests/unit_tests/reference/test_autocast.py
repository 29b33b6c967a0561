# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Autocast regions: nesting, what is restored, and the amaxes and scales of delayed scaling."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit_tests.reference.engine import (
    FEATURES,
    TOKENS,
    FP8GlobalStateManager,
    Layer,
    quantized,
    random,
    recipe_of,
    recipes,
    te,
    torch,
)

E4M3_MAX, E5M2_MAX = 448.0, 57344.0
PICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def seen() -> tuple[bool, Any]:
    return FP8GlobalStateManager.is_fp8_enabled(), FP8GlobalStateManager.get_fp8_recipe()


class TestNesting:
    def test_an_inner_region_rules_until_it_is_left(self) -> None:
        outer, inner = recipe_of("tensorwise"), recipe_of("blockwise")
        assert seen()[0] is False
        with te.autocast(enabled=True, recipe=outer):
            assert seen() == (True, outer)
            with te.autocast(enabled=True, recipe=inner):
                assert seen() == (True, inner)
            assert seen() == (True, outer)
            with te.autocast(enabled=False):
                assert seen()[0] is False
            assert seen() == (True, outer)
        assert seen()[0] is False

    def test_a_layer_follows_the_innermost_region(self) -> None:
        layer, inp = Layer(), random(TOKENS, FEATURES)
        with quantized("tensorwise"):
            with te.autocast(enabled=False):
                plain = layer(inp, None)
            rounded = layer(inp, None)
        assert torch.equal(plain, layer(inp, None))
        assert not torch.equal(rounded, plain)

    def test_an_exception_restores_the_outer_state(self) -> None:
        outer = recipe_of("tensorwise")
        with te.autocast(enabled=True, recipe=outer):
            with pytest.raises(ValueError, match="inside"), quantized("blockwise"):
                raise ValueError("inside")
            assert seen() == (True, outer)
        assert FP8GlobalStateManager.quantization_state.autocast_depth == 0

    def test_one_instance_can_be_entered_again_but_not_inside_itself(self) -> None:
        region = te.autocast(enabled=True, recipe=recipe_of("tensorwise"))
        for _ in range(2):
            with region:
                assert seen()[0] is True
        with region, pytest.raises(RuntimeError, match="more than once concurrently"):
            region.__enter__()
        assert seen()[0] is False

    def test_the_first_module_is_marked_by_the_outermost_region_only(self) -> None:
        first = FP8GlobalStateManager.is_first_fp8_module
        with quantized("delayed"):
            assert [first(), first()] == [True, False]
            with quantized("delayed"):
                assert first() is False
        with quantized("delayed"), quantized("delayed"):
            assert first() is True

    def test_leaving_an_inner_region_restores_the_mark(self) -> None:
        with quantized("delayed"):
            with quantized("delayed"):
                assert FP8GlobalStateManager.is_first_fp8_module() is True
            assert FP8GlobalStateManager.is_first_fp8_module() is True

    def test_the_older_name(self) -> None:
        recipe = recipe_of("tensorwise")
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            assert seen() == (True, recipe)
        assert seen()[0] is False


def forward_scale(layer: Layer) -> torch.Tensor:
    scale: torch.Tensor = layer.module.fp8_meta["scaling_fwd"].scale
    return scale[:2].clone().cpu()


class TestDelayedScaling:
    @pytest.mark.parametrize("algorithm", ["max", "most_recent"])
    @pytest.mark.parametrize("margin", [0, 2])
    def test_scales_follow_the_history(self, algorithm: str, margin: int) -> None:
        """Against plain Python: the largest amax of the last L steps, or the last one."""
        length = 3
        recipe = recipes.DelayedScaling(
            margin=margin, amax_history_len=length, amax_compute_algo=algorithm
        )
        layer = Layer()
        amaxes: dict[str, list[float]] = {"input": [], "weight": [], "gradient": []}
        for step, factor in enumerate((1.0, 8.0, 0.5, 0.25, 0.125, 0.125)):
            inp = (random(TOKENS, FEATURES, seed=step) * factor).requires_grad_()
            gradient = random(TOKENS, FEATURES, seed=50 + step) * factor
            with te.autocast(enabled=True, recipe=recipe):
                out = layer(inp, True)
            out.backward(gradient)
            for key, tensor in (("input", inp), ("weight", layer.module.weight)):
                amaxes[key].append(float(tensor.detach().abs().max()))
            amaxes["gradient"].append(float(gradient.abs().max()))
            window = 1 if algorithm == "most_recent" else length
            largest = {key: max(values[-window:]) for key, values in amaxes.items()}
            expected = [E4M3_MAX / largest[key] / 2**margin for key in ("input", "weight")]
            torch.testing.assert_close(forward_scale(layer), torch.tensor(expected))
            backward = layer.module.fp8_meta["scaling_bwd"].scale[0].cpu()
            wanted = torch.tensor(E5M2_MAX / largest["gradient"] / 2**margin)
            torch.testing.assert_close(backward, wanted)
        history = layer.module.fp8_meta["scaling_fwd"].amax_history[:, 0].cpu()
        assert history.tolist() == [0.0, *amaxes["input"][1 - length :]]

    def test_an_amax_of_zero_leaves_the_scale(self) -> None:
        layer = Layer()
        zero = torch.zeros_like(random(TOKENS, FEATURES))
        with quantized("delayed"):
            layer(zero, True)
        assert forward_scale(layer)[0] == 1.0
        assert forward_scale(layer)[1] != 1.0

    def test_only_the_outermost_region_updates(self) -> None:
        layer = Layer()
        with quantized("delayed"):
            with quantized("delayed"):
                layer(random(TOKENS, FEATURES), True)
            assert forward_scale(layer).tolist() == [1.0, 1.0]
        assert forward_scale(layer).tolist() != [1.0, 1.0]

    def test_without_grad_nothing_is_updated(self) -> None:
        layer = Layer()
        with torch.no_grad(), quantized("delayed"):
            layer(random(TOKENS, FEATURES), True)
        assert forward_scale(layer).tolist() == [1.0, 1.0]

    @pytest.mark.parametrize("unfused", ["0", "1"])
    def test_a_reused_weight_records_no_amax(
        self, monkeypatch: pytest.MonkeyPatch, unfused: str
    ) -> None:
        """TE's fused update leaves a slot alone that recorded nothing; the unfused one moves it."""
        monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", unfused)
        layer, histories = Layer(), []
        for flag in (True, False):
            with te.autocast(enabled=True, recipe=recipes.DelayedScaling(amax_history_len=4)):
                layer(random(TOKENS, FEATURES), flag)
            histories.append(layer.module.fp8_meta["scaling_fwd"].amax_history[:, :2].tolist())
        amax = float(layer.module.weight.detach().abs().max())
        inp = float(random(TOKENS, FEATURES).abs().max())
        assert histories[0] == [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [inp, amax]]
        moved = [amax, 0.0] if unfused == "1" else [0.0, amax]
        assert histories[1] == [[0.0, 0.0], [0.0, 0.0], [inp, moved[0]], [inp, moved[1]]]

    def test_a_calibrating_region_rounds_and_observes_nothing(self) -> None:
        """TE 2.20 hands a linear no quantizers without FP8, so there is nothing to calibrate."""
        layer, inp = Layer(), random(TOKENS, FEATURES)
        with te.autocast(enabled=False, calibrating=True, recipe=recipe_of("delayed")):
            out = layer(inp, None)
        assert layer.module.fp8_calibration is True
        assert torch.equal(out, layer(inp, None))
        assert not layer.module.fp8_meta["scaling_fwd"].amax_history.any()

    def test_a_longer_history_is_an_error(self) -> None:
        """``adjust_amax_history_length`` of 2.20.2 hands forward's buffer backward's history."""
        layer = Layer()
        with te.autocast(enabled=True, recipe=recipes.DelayedScaling(amax_history_len=4)):
            layer(random(TOKENS, FEATURES), True)
        assert layer.module.fp8_meta["scaling_fwd"].amax_history.shape[0] == 4
        longer = te.autocast(enabled=True, recipe=recipes.DelayedScaling(amax_history_len=8))
        with pytest.raises(RuntimeError, match="Expected 2 elements, Found 3"), longer:
            layer(random(TOKENS, FEATURES), True)
        assert layer.module.fp8_meta["scaling_fwd"].amax_history.shape[0] == 8


def test_extra_state_of_delayed_scaling_is_refused_unless_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, other = Layer(), Layer(seed=1)
    layer.step("delayed", True)
    monkeypatch.delenv(PICKLE, raising=False)
    with pytest.raises(RuntimeError, match=PICKLE):
        other.module.load_state_dict(layer.module.state_dict())


def test_extra_state_carries_the_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PICKLE, "1")
    layer, other = Layer(), Layer(seed=1)
    layer.step("delayed", True)
    other.module.load_state_dict(layer.module.state_dict())
    for key in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(other.module.fp8_meta[key].scale, layer.module.fp8_meta[key].scale)
        history = layer.module.fp8_meta[key].amax_history
        assert torch.equal(other.module.fp8_meta[key].amax_history, history)
    inp = random(TOKENS, FEATURES, seed=9)
    with quantized("delayed"):
        assert torch.equal(other(inp, None), layer(inp, None))
