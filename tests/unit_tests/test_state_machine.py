# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""One wrapper in whatever order a training loop, an evaluation and a user may drive it.

Calls may be recomputed: in a region, in a region of a region, replayed in any order, interrupted.

Beside it runs a plain model: the same weights, quantized anew in every call and kept nowhere. After
every step the gradients, the outputs (so the weights used) and the flag must be those of the plain
model, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

from contextlib import nullcontext

from megatron.core import tensor_parallel
from transformer_engine.pytorch.distributed import (
    activation_recompute_forward,
    in_fp8_activation_recompute_phase,
)
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

from megatron.quant_state import Installation, weights_changed
from tests.unit_tests import wrappers
from tests.unit_tests.wrappers import (
    HIDDEN,
    KINDS,
    RECIPES,
    TOKENS,
    RecipeConfig,
    fp8_autocast,
    fresh_engine,
    random,
    reference,
    torch,
)

TENSORWISE = {"fp8_quantization_recipe": "tensorwise"}
EVERYWHERE = {"override_nonquantized_autocast": True}
RULES: dict[str, Any] = {
    "none": None,
    "quantizing": wrappers.rule(TENSORWISE, **EVERYWHERE),
    "training only": wrappers.rule(TENSORWISE, {}, **EVERYWHERE),
    "evaluation only": wrappers.rule({}, TENSORWISE, **EVERYWHERE),
    "bf16": wrappers.rule({}),
}
#: What the config has set, and the rule that the wrapper got.
CONFIGS = [
    ("bf16", "none"),
    ("fp8", "none"),
    *((config, name) for config in ("fp8+recipe", "recipe") for name in RULES),
]
SEEDS = st.integers(0, 2**16)


class Wrapper(RuleBasedStateMachine):
    """A wrapper under test and the plain model, driven in lockstep."""

    checks: ClassVar[frozenset[str]] = frozenset(
        {"gradient", "weight used", "flag", "precision of a replay"}
    )

    @initialize(
        kind=st.sampled_from(KINDS),
        config=st.sampled_from(CONFIGS),
        precision=st.sampled_from(("tensorwise", "blockwise")),
    )
    def build(self, kind: str, config: tuple[str, str], precision: str) -> None:
        self.config, self.rule_name = config
        fields: dict[str, Any] = {}
        if "recipe" in self.config:
            fields["quant_recipe"] = RecipeConfig([], {})
        base = precision if "fp8" in self.config else "bf16"
        self.model = wrappers.model_of(kind, base, **fields)
        self.plain = wrappers.model_of(kind, base, disable_parameter_transpose_cache=True, **fields)
        for model in (self.model, self.plain):
            if RULES[self.rule_name] is not None:
                model.layer.finish_init(RULES[self.rule_name])
        self.recipe = RECIPES[precision]
        self.ambient = "fp8" in self.config
        self.training = True
        self.armed = True
        # Whether a cache may be old, which the user has not said yet.
        self.changed = False
        #: Of the wrapper and of the plain model, and whether the autocast was on in a region.
        self.losses: list[tuple[tuple[Any, Any], bool | None]] = []
        reference.counters.reset()

    def tracked(self, ambient: bool | None = None) -> bool:
        """Design section 3, for the few cases that are driven here."""
        ambient = self.ambient if ambient is None else ambient
        if "recipe" not in self.config:
            return self.config == "fp8"
        return {
            "none": ambient,
            "quantizing": True,
            "training only": self.training,
            "evaluation only": not self.training,
            "bf16": False,
        }[self.rule_name]

    def autocast(self) -> Any:
        if not self.ambient:
            return nullcontext()
        return fp8_autocast(enabled=True, fp8_recipe=self.recipe())

    def run(
        self, model: Any, x: torch.Tensor, times: int, regions: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """Calls one after the other; then the same in a region, and the next region around it."""

        def calls(x: torch.Tensor, depth: int) -> torch.Tensor:
            for _ in range(regions[depth - 1] if depth else times):
                x = wrappers.call(model.layer, x)
            if depth == len(regions):
                return x
            # The plain model keeps its activations.
            if model is self.plain:
                return calls(x, depth + 1)
            recomputed: torch.Tensor = tensor_parallel.checkpoint(
                lambda x: calls(x, depth + 1), False, x
            )
            return recomputed

        with torch.set_grad_enabled(self.training), self.autocast():
            return calls(x, 0)

    @rule()
    def arm(self) -> None:
        self.model.set_is_first_microbatch()
        self.armed |= self.config != "bf16"
        self.changed = False

    @rule()
    def say_that_weights_changed(self) -> None:
        weights_changed(self.model)
        self.armed = True
        self.changed = False

    @precondition(lambda self: not self.changed)
    @rule(times=st.integers(1, 4), seed=SEEDS)
    def call(self, times: int, seed: int) -> None:
        self.calls(times, (), seed)

    @precondition(lambda self: not self.changed)
    @rule(times=st.integers(1, 3), seed=SEEDS)
    def region(self, times: int, seed: int) -> None:
        self.calls(0, (times,), seed)

    @precondition(lambda self: not self.changed)
    @rule(times=st.tuples(*[st.integers(0, 2)] * 2, st.integers(1, 2)), seed=SEEDS)
    def region_in_region(self, times: tuple[int, int, int], seed: int) -> None:
        self.calls(times[0], times[1:], seed)

    def calls(self, times: int, regions: tuple[int, ...], seed: int) -> None:
        outputs = []
        for model in (self.model, self.plain):
            x = random(TOKENS, HIDDEN, seed=seed).requires_grad_()
            outputs.append(self.run(model, x, times, regions))
        if "weight used" in self.checks:
            assert torch.equal(*outputs), "weight used"
        if self.training:
            weight = random(TOKENS, HIDDEN, seed=seed + 1)
            left, right = ((out * weight).sum() for out in outputs)
            self.losses.append(((left, right), self.ambient if regions else None))
        if self.tracked():
            self.armed = False

    @precondition(lambda self: not self.changed)
    @rule(seed=SEEDS)
    def exception_in_a_call(self, seed: int) -> None:
        def raising(_: Any) -> None:
            raise InterruptedError("inside the call")

        # TE's forward begins with it.
        self.model.layer.__dict__["record_call"] = raising
        try:
            with pytest.raises(InterruptedError, match="inside the call"):
                self.run(self.model, random(TOKENS, HIDDEN, seed=seed).requires_grad_(), 1)
        finally:
            del self.model.layer.__dict__["record_call"]

    @rule(training=st.booleans())
    def train_or_evaluate(self, training: bool) -> None:
        self.training = training
        self.model.train(training)
        self.plain.train(training)

    @rule(ambient=st.booleans())
    def autocast_on_or_off(self, ambient: bool) -> None:
        self.ambient = ambient

    # A module that is switched to evaluation picks another recipe, in a replay as well.
    def replayable(self) -> bool:
        return self.training or all(ambient is None for _, ambient in self.losses)

    @precondition(lambda self: self.losses and self.replayable())
    @rule()
    def backward(self) -> None:
        for losses in zip(*(pair for pair, _ in self.losses), strict=True):
            torch.stack(losses).sum().backward()
        for _, ambient in self.losses:
            self.replayed(ambient)
        self.losses = []

    @precondition(lambda self: self.losses and self.replayable())
    @rule(data=st.data())
    def replay(self, data: Any) -> None:
        """Backward of one of the microbatches in flight, not of the last alone."""
        pair, ambient = self.losses.pop(data.draw(st.integers(0, len(self.losses) - 1)))
        for loss in pair:
            loss.backward()
        self.replayed(ambient)

    def replayed(self, ambient: bool | None) -> None:
        """A replay is a call like any other for the flag, with the autocast of its forward."""
        if ambient is not None and self.tracked(ambient):
            self.armed = False

    @precondition(lambda self: self.training and not self.changed)
    @rule(seed=SEEDS)
    def replay_with_an_exception(self, seed: int) -> None:
        phases = []

        def function(x: torch.Tensor) -> torch.Tensor:
            phases.append(in_fp8_activation_recompute_phase())
            x = wrappers.call(self.model.layer, x)
            if len(phases) == 2:
                raise InterruptedError("inside the replay")
            return x

        x = random(TOKENS, HIDDEN, seed=seed).requires_grad_()
        with self.autocast():
            out = tensor_parallel.checkpoint(function, False, x)
        with pytest.raises(InterruptedError, match="inside the replay"):
            out.sum().backward()
        if "precision of a replay" in self.checks:
            assert phases == [False, self.ambient], "precision of a replay"
        if self.tracked():
            self.armed = False

    # A weight that moves below a pending backward is an error of the loop, whatever the cache.
    @precondition(lambda self: not self.losses)
    @rule()
    def optimizer_step(self) -> None:
        for model in (self.model, self.plain):
            for weight in wrappers.weights_of(model).values():
                # The sign keeps weights moving, and sizes that FP8 holds.
                weight.data.mul_(0.9).add_(weight.main_grad.sign(), alpha=-0.05)
                weight.main_grad.zero_()
        self.changed = True

    @precondition(lambda self: not self.losses)
    @rule(seed=SEEDS)
    def load_weights(self, seed: int) -> None:
        for model in (self.model, self.plain):
            state = model.state_dict()
            for index, name in enumerate(wrappers.weights_of(model)):
                state[f"layer.{name}"] = 0.1 * random(HIDDEN, HIDDEN, seed=seed + index)
            model.load_state_dict(state)
        # Nobody has to say so: the next call finds it out.
        self.armed = True
        self.changed = False

    @invariant()
    def gradient(self) -> None:
        if "gradient" in self.checks:
            right = wrappers.main_grads(self.plain)
            assert wrappers.equal(wrappers.main_grads(self.model), right), "gradient"

    @invariant()
    def weight_used(self) -> None:
        if "weight used" in self.checks:
            assert reference.counters.stale_reads == 0, "weight used"
            assert reference.counters.empty_reads == 0, "weight used"

    @invariant()
    def recompute_state(self) -> None:
        assert not in_fp8_activation_recompute_phase()
        assert activation_recompute_forward._is_first_fp8_module == []
        assert FP8GlobalStateManager.get_autocast_state()[0] is False

    @invariant()
    def flag(self) -> None:
        if "flag" in self.checks:
            assert self.model.layer.is_first_microbatch is self.armed, "flag"


@pytest.fixture(autouse=True)
def _fresh_engine() -> Iterator[None]:
    with fresh_engine():
        yield


SETTINGS = settings(
    max_examples=500,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_any_order_exact(installed: Installation) -> None:
    run_state_machine_as_test(Wrapper, settings=SETTINGS)


@pytest.mark.parametrize("check", sorted(Wrapper.checks))
def test_the_release_fails(check: str) -> None:
    """The negative control, for each of the checks on its own."""

    class OneCheck(Wrapper):
        checks = frozenset({check})

    without_shrinking = settings(
        SETTINGS, max_examples=1000, phases=[Phase.generate], database=None, print_blob=False
    )
    with pytest.raises(AssertionError, match=check):
        run_state_machine_as_test(OneCheck, settings=without_shrinking)
