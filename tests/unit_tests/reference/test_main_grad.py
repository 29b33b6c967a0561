# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``is_first_microbatch`` and ``weight.main_grad``: overwritten, added to, or written later."""

from __future__ import annotations

import pytest

from tests.unit_tests.reference.engine import (
    KINDS,
    NAMES,
    TOKENS,
    Layer,
    quantized,
    recipe_of,
    te,
    torch,
)

PRECISIONS = ("bf16", *NAMES)


def after_a_step(
    kind: str, name: str, *flags: bool | None, start: float = 0.0, parameters: bool = False
) -> torch.Tensor:
    """main_grads of a new layer after one step, from a start value."""
    if parameters:
        with te.quantized_model_init(enabled=True, recipe=recipe_of(name)):
            layer = Layer(kind)
    else:
        layer = Layer(kind)
    layer.fill(start)
    layer.step(name, *flags)
    return layer.main_grads


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
class TestFlag:
    def test_true_overwrites(self, kind: str, name: str) -> None:
        clean = after_a_step(kind, name, True)
        assert clean.abs().amin(dim=0).sum() > 0
        assert torch.equal(after_a_step(kind, name, True, start=1.0), clean)

    @pytest.mark.parametrize("flag", [None, False])
    def test_none_and_false_accumulate(self, kind: str, name: str, flag: bool | None) -> None:
        clean = after_a_step(kind, name, True)
        assert torch.equal(after_a_step(kind, name, flag), clean)
        added = after_a_step(kind, name, flag, start=1.0)
        torch.testing.assert_close(added, clean + 1.0, rtol=1e-5, atol=1e-5)

    def test_of_two_calls_the_first_survives_alone(self, kind: str, name: str) -> None:
        """Backward runs in reverse: the second call is added, then the first overwrites it."""
        first = after_a_step(kind, name, True)
        lost = after_a_step(kind, name, True, False)
        right = after_a_step(kind, name, False, False)
        assert torch.equal(lost, first)
        assert (right - first).norm() > 0.5 * right.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_for_quantized_parameters_the_flag_decides_as_well(kind: str, name: str) -> None:
    clean = after_a_step(kind, name, True, parameters=True)
    assert torch.equal(after_a_step(kind, name, True, start=1.0, parameters=True), clean)
    added = after_a_step(kind, name, False, start=1.0, parameters=True)
    torch.testing.assert_close(added, clean + 1.0, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_overwrite_main_grad_overrides_the_flag(kind: str, flag: bool | None) -> None:
    layer = Layer(kind)
    layer.fill(1.0)
    for weight in layer.weights:
        weight.overwrite_main_grad = True
    layer.step("bf16", flag)
    assert torch.equal(layer.main_grads, after_a_step(kind, "bf16", True))


@pytest.mark.parametrize("kind", KINDS)
class TestDummy:
    def test_autograd_gets_none_without_megatrons_mark(self, kind: str) -> None:
        layer = Layer(kind)
        layer.step("bf16", True)
        assert all(weight.grad is None for weight in layer.weights)

    def test_the_mark_is_set_and_a_dummy_handed_out(self, kind: str) -> None:
        layer = Layer(kind)
        for weight in layer.weights:
            weight.grad_added_to_main_grad = False
        layer.step("bf16", True)
        for weight in layer.weights:
            assert weight.grad_added_to_main_grad is True
            assert weight.grad.shape == weight.shape
            assert weight.grad.dtype == weight.dtype

    def test_a_dummy_of_zeros_where_it_is_asked_for(self, kind: str) -> None:
        layer = Layer(kind)
        for weight in layer.weights:
            weight.grad_added_to_main_grad = False
            weight.zero_out_wgrad = True
        layer.step("bf16", True)
        assert all(not weight.grad.any() for weight in layer.weights)


@pytest.mark.parametrize("kind", KINDS)
def test_unfused_gradients_go_to_grad(kind: str) -> None:
    layer = Layer(kind, fuse_wgrad_accumulation=False)
    layer.step("bf16", True, False)
    assert not layer.main_grads.any()
    right = after_a_step(kind, "bf16", False, False)
    grads = torch.stack([weight.grad.float() for weight in layer.weights])
    torch.testing.assert_close(grads, right, rtol=2e-2, atol=0.5)


@pytest.mark.parametrize("name", ["bf16", "tensorwise"])
@pytest.mark.parametrize("kind", KINDS)
class TestDelayedWgrad:
    def test_it_is_written_by_backward_dw(self, kind: str, name: str) -> None:
        layer = Layer(kind, delay_wgrad_compute=True)
        called = []
        layer.module.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(True))
        layer.fill(1.0)
        layer.step(name, True)
        assert (layer.main_grads == 1.0).all()
        assert not called
        layer.module.backward_dw()
        assert called == [True]
        assert torch.equal(layer.main_grads, after_a_step(kind, name, True))
        assert all(weight.skip_backward_post_hook for weight in layer.weights)

    def test_the_queue_runs_in_the_order_of_the_backwards(self, kind: str, name: str) -> None:
        """Of two calls the second's backward came first, so the first call overwrites it again."""
        layer = Layer(kind, delay_wgrad_compute=True)
        layer.step(name, True, False)
        layer.module.backward_dw()
        layer.module.backward_dw()
        assert torch.equal(layer.main_grads, after_a_step(kind, name, True))


@pytest.mark.parametrize("name", ["bf16", "tensorwise", "blockwise", "delayed"])
def test_experts_without_tokens(name: str) -> None:
    """Their main_grad is zeroed by True and left alone by False; the others are as ever."""
    gradients = {}
    for flag in (True, False):
        layer = Layer("GroupedLinear")
        layer.splits = [0, TOKENS]
        layer.fill(1.0)
        layer.step(name, flag)
        gradients[flag] = layer.main_grads
        assert torch.isfinite(gradients[flag]).all()
    assert not gradients[True][0].any()
    assert (gradients[False][0] == 1.0).all()
    torch.testing.assert_close(gradients[False][1], gradients[True][1] + 1.0, rtol=1e-5, atol=1e-5)


def test_a_weight_without_main_grad_is_an_error() -> None:
    layer = Layer()
    del layer.module.weight.main_grad
    with pytest.raises(AttributeError, match="main_grad"):
        layer.step("bf16", True)


def test_a_gradient_is_that_of_plain_torch() -> None:
    """Negative control of the helpers: an unquantized layer computes x W^T and its gradients."""
    layer = Layer()
    weight = layer.module.weight.detach().float().requires_grad_()
    inp = torch.linspace(-1, 1, TOKENS * 128, device=weight.device).view(TOKENS, 128).bfloat16()
    inp.requires_grad_()
    plain = inp.detach().float().requires_grad_()
    with quantized("bf16"):
        out = layer(inp, False)
    expected = plain @ weight.t()
    gradient = torch.ones_like(out)
    out.backward(gradient)
    expected.backward(gradient.float())
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(inp.grad.float(), plain.grad, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(layer.module.weight.main_grad, weight.grad, rtol=1e-2, atol=1e-2)


def test_of_a_group_the_first_weights_attribute_counts() -> None:
    for marked, overwritten in ((0, True), (1, False)):
        layer = Layer("GroupedLinear")
        layer.fill(1.0)
        layer.weights[marked].overwrite_main_grad = True
        layer.step("bf16", False)
        clean = after_a_step("GroupedLinear", "bf16", True)
        assert torch.equal(layer.main_grads, clean) is overwritten
