# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``tensor_parallel.checkpoint`` replays in the precision of its forward, bit for bit.

Each body runs with the layer and, as its negative control, without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit_tests.tensor_parallel import regions
from tests.unit_tests.tensor_parallel.regions import (
    HIDDEN,
    KINDS,
    PRECISIONS,
    QUANTIZED,
    RECIPES,
    TOKENS,
    FP8GlobalStateManager,
    Layers,
    Precision,
    Way,
    check_same,
    checkpoint,
    installed_or_failing,
    is_first,
    phase,
    plain,
    random,
    te_state,
    tensor_parallel,
    torch,
    train,
    truth,
)

pytestmark = [] if regions.IS_REFERENCE else [pytest.mark.gpu]

LAYER = pytest.mark.parametrize("layer", ["installed", "uninstalled"])
PRECISION = pytest.mark.parametrize("precision", PRECISIONS, ids=str)
RECIPE = pytest.mark.parametrize("precision", QUANTIZED, ids=str)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    with regions.fresh_state():
        yield


def leaf(seed: int = 3) -> torch.Tensor:
    return random(TOKENS, HIDDEN, seed=seed).requires_grad_()


class Watch:
    """A function of a region that notes TE's state in each of its calls."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        enabled, calibrating, recipe, group, _, _ = FP8GlobalStateManager.get_autocast_state()
        self.seen.append(
            {
                "enabled": enabled,
                "calibrating": calibrating,
                "recipe": recipe if enabled else None,
                "group": group,
                "phase": phase(),
                "first": is_first(),
                "grad": torch.is_grad_enabled(),
            }
        )
        return 2 * x


class TestState:
    @LAYER
    @RECIPE
    def test_the_replay_sees_the_forwards_state(self, precision: Precision, layer: str) -> None:
        assert precision.recipe is not None
        with installed_or_failing(layer, "phase"):
            watch, recipe = Watch(), RECIPES[precision.recipe]()
            group = object()
            with regions.fp8_autocast(True, True, recipe, group):
                out = checkpoint(watch, leaf())
                assert phase() == (False, False), "phase"
            before = te_state()
            out.sum().backward()
            forward, replay = watch.seen
            assert forward["phase"] == (True, False), "phase of the forward"
            assert replay["phase"] == (True, True), "phase of the replay"
            assert not forward["grad"]
            assert replay["grad"]
            for seen in (forward, replay):
                assert seen["enabled"]
                assert seen["calibrating"]
                assert seen["recipe"] is recipe
                assert seen["group"] is group
                assert seen["first"]
            assert te_state() == before

    def test_and_none_where_there_was_none(self, installed: Any) -> None:
        watch = Watch()
        checkpoint(watch, leaf()).sum().backward()
        assert [seen["enabled"] for seen in watch.seen] == [False, False]
        assert [seen["phase"] for seen in watch.seen] == [(False, False)] * 2

    @LAYER
    def test_a_backward_inside_another_autocast(self, layer: str) -> None:
        with installed_or_failing(layer, "recipe"):
            watch = Watch()
            recipe, other = RECIPES["tensorwise"](), RECIPES["delayed"]()
            with regions.fp8_autocast(True, fp8_recipe=recipe):
                out = checkpoint(watch, leaf())
            with regions.fp8_autocast(True, fp8_recipe=other):
                before = te_state()
                out.sum().backward()
                assert te_state() == before
            assert watch.seen[1]["recipe"] is recipe, "recipe of the replay"

    @LAYER
    def test_forward_and_backward_called_directly(self, layer: str) -> None:
        """Without autograd's engine, as a test or another checkpoint may call them."""

        class Context:
            def save_for_backward(self, *tensors: torch.Tensor) -> None:
                self.saved_tensors = tensors

        function = tensor_parallel.random.CheckpointFunction
        with installed_or_failing(layer, "replay"):
            watch, context, x = Watch(), Context(), leaf()
            with Precision("tensorwise").autocast():
                out = function.forward(context, watch, False, x)
            before = te_state()
            grads = function.backward(context, torch.ones_like(out))
            assert watch.seen[1]["enabled"], "replay without autocast"
            assert te_state() == before
            assert torch.equal(grads[2], torch.full_like(x, 2))

    @LAYER
    def test_each_replay_gets_the_flag_of_its_own_forward(self, layer: str) -> None:
        """Backward replays the last region first; TE's list would give it the first one's flag."""
        with installed_or_failing(layer, "flags"):
            precision = Precision("tensorwise")
            layers = Layers(precision, ("TELinear",))
            first, second = Watch(), Watch()
            with precision.autocast():
                x = checkpoint(first, leaf())
                # Takes the flag.
                x = layers.run(x)
                x = checkpoint(second, x)
            x.sum().backward()
            flags = [[seen["first"] for seen in watch.seen] for watch in (first, second)]
            assert flags == [[True, True], [False, False]], "flags"


class TestExact:
    """Output, input gradient, main_grad, scales and amaxes of three steps."""

    @LAYER
    @PRECISION
    def test_one_region(self, precision: Precision, layer: str) -> None:
        right = truth(lambda: train(precision, lambda layers, x: layers.run(x)))
        with installed_or_failing(layer, "input gradient"):
            check_same(train(precision, lambda layers, x: checkpoint(layers.run, x)), right)

    @LAYER
    @pytest.mark.parametrize("kind", KINDS)
    @RECIPE
    def test_each_kind_of_linear(self, precision: Precision, kind: str, layer: str) -> None:
        right = truth(
            lambda: train(precision, lambda layers, x: layers.run(x), kinds=(kind,), steps=2)
        )
        with installed_or_failing(layer, "input gradient"):
            found = train(
                precision, lambda layers, x: checkpoint(layers.run, x), kinds=(kind,), steps=2
            )
            check_same(found, right)

    @LAYER
    @RECIPE
    def test_regions_and_a_linear_between_them(self, precision: Precision, layer: str) -> None:
        """The first region owns the reduction of backward's amaxes, the others none."""

        def forward(layers: Layers, x: torch.Tensor, way: Way) -> torch.Tensor:
            x = way(lambda x: layers.run(x, 0, 1), x)
            x = layers.run(x, 2)
            return way(lambda x: layers.run(x, 3), x)

        kinds = ("TELinear", "TELinear", "TELayerNormColumnParallelLinear", "TELinear")
        right = truth(
            lambda: train(precision, lambda layers, x: forward(layers, x, plain), kinds=kinds)
        )
        with installed_or_failing(layer, "input gradient"):
            found = train(precision, lambda layers, x: forward(layers, x, checkpoint), kinds=kinds)
            check_same(found, right)

    @LAYER
    def test_a_region_of_fp8_attention_before_the_first_linear(self, layer: str) -> None:
        """Attention stashes scales, and never takes the first-module flag."""
        recipe = RECIPES["delayed"](fp8_dpa=True)

        def run(way: Way) -> list[dict[str, torch.Tensor]]:
            layers = Layers(Precision("delayed"), ("TELinear",))
            attention = regions.te.DotProductAttention(2, HIDDEN // 2, attn_mask_type="causal")

            def attend(x: torch.Tensor) -> torch.Tensor:
                heads = x.view(-1, 1, 2, HIDDEN // 2)
                out: torch.Tensor = attention(heads, heads, heads).view(x.shape)
                return out

            results = []
            for step in range(3):
                x = leaf(step)
                with regions.fp8_autocast(True, fp8_recipe=recipe):
                    out = way(lambda x: layers.run(x), way(attend, x))
                (out * random(TOKENS, HIDDEN, seed=step)).sum().backward()
                results.append({"input gradient": x.grad, **layers.main_grads(), **layers.scales()})
            return results

        right = truth(lambda: run(plain))
        assert any("scaling_bwd scale" in k and (v != 1).any() for k, v in right[-1].items())
        with installed_or_failing(layer, "input gradient"):
            check_same(run(checkpoint), right)

    @LAYER
    def test_a_region_in_bf16_before_the_first_quantized_linear(self, layer: str) -> None:
        """Which takes the first-module flag, whatever ran in BF16 before it."""

        def forward(layers: Layers, x: torch.Tensor, way: Way) -> torch.Tensor:
            def bf16(x: torch.Tensor) -> torch.Tensor:
                with regions.fp8_autocast(False):
                    return layers.run(x, 0)

            return way(lambda x: layers.run(x, 1), way(bf16, x))

        precision, kinds = Precision("delayed"), ("TELinear",) * 2
        right = truth(lambda: train(precision, lambda m, x: forward(m, x, plain), kinds=kinds))
        with installed_or_failing(layer, "input gradient"):
            check_same(train(precision, lambda m, x: forward(m, x, checkpoint), kinds=kinds), right)

    @LAYER
    def test_a_module_whose_own_recipe_is_delayed(self, layer: str) -> None:
        """In a tensorwise autocast, so that nothing tells before the first call."""

        def forward(layers: Layers, x: torch.Tensor, way: Way) -> torch.Tensor:
            def function(x: torch.Tensor) -> torch.Tensor:
                x = layers.run(x, 0)
                with Precision("delayed").autocast():
                    return layers.run(x, 1)

            # The second region replays first, and its scales are not the first one's.
            return way(function, way(function, x))

        precision, kinds = Precision("tensorwise"), ("TELinear",) * 2
        right = truth(lambda: train(precision, lambda m, x: forward(m, x, plain), kinds=kinds))
        with installed_or_failing(layer, "input gradient"):
            check_same(train(precision, lambda m, x: forward(m, x, checkpoint), kinds=kinds), right)
            assert te_state()["stashed"] == []

    @pytest.mark.parametrize("way", [plain, checkpoint])
    def test_without_quantization_nothing_changes(self, installed: Any, way: Way) -> None:
        precision = Precision(None)
        right = truth(lambda: train(precision, lambda layers, x: layers.run(x)))
        check_same(train(precision, lambda layers, x: way(layers.run, x)), right)


class TestAmaxes:
    """Delayed scaling reduces once a step and direction."""

    @staticmethod
    def reductions(way: Way, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        calls: list[bool] = []
        reduce = FP8GlobalStateManager.reduce_and_update_fp8_tensors

        def counting(forward: bool = True) -> None:
            calls.append(forward)
            reduce(forward=forward)

        monkeypatch.setattr(FP8GlobalStateManager, "reduce_and_update_fp8_tensors", counting)

        def forward(layers: Layers, x: torch.Tensor) -> torch.Tensor:
            for number in range(3):
                x = way(lambda x, n=number: layers.run(x, n, n + 1), x)
            return x

        train(Precision("delayed"), forward, kinds=("TELinear",) * 4, steps=1, microbatches=1)
        monkeypatch.undo()
        return calls

    def test_as_often_as_without_recompute(
        self, installed: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.reductions(plain, monkeypatch) == [True, False]
        assert self.reductions(checkpoint, monkeypatch) == [True, False]

    def test_tes_own_checkpoint_reduces_more_often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The negative control: what a replay under a plain autocast and phase does."""
        assert len(self.reductions(regions.te_checkpoint, monkeypatch)) > 2


class TestNesting:
    @LAYER
    @pytest.mark.parametrize("outer", [checkpoint, regions.te_checkpoint])
    @PRECISION
    def test_a_region_inside_a_region(self, precision: Precision, outer: Way, layer: str) -> None:
        """Inside TE's own, which reduces amaxes in each replay, all is as with TE's own alone."""

        def forward(layers: Layers, x: torch.Tensor, outer: Way, inner: Way) -> torch.Tensor:
            def function(x: torch.Tensor) -> torch.Tensor:
                x = layers.run(x, 0)
                x = inner(lambda x: layers.run(x, 1, 2), x)
                # A repeat, with other scales under delayed scaling than its first call had.
                x = inner(lambda x: layers.run(x, 2), x)
                return layers.run(x, 3)

            return outer(function, x)

        kinds = ("TELinear", "TELayerNormColumnParallelLinear", "TELinear", "TELinear")
        ours = outer is checkpoint
        options: dict[str, Any] = {"kinds": kinds}
        right_outer = plain if ours else outer
        right = truth(
            lambda: train(precision, lambda m, x: forward(m, x, right_outer, plain), **options)
        )
        with installed_or_failing(layer, "input gradient"):
            found = train(precision, lambda m, x: forward(m, x, outer, checkpoint), **options)
            check_same(found, right)
            assert te_state()["firsts"] == []
            assert te_state()["stashed"] == []
            assert phase() == (False, False)

    @LAYER
    @RECIPE
    def test_three_deep(self, precision: Precision, layer: str) -> None:
        def forward(layers: Layers, x: torch.Tensor, way: Way) -> torch.Tensor:
            def outer(x: torch.Tensor) -> torch.Tensor:
                return layers.run(way(middle, x), 2)

            def middle(x: torch.Tensor) -> torch.Tensor:
                return way(lambda x: layers.run(x, 0, 1), layers.run(x, 0))

            return way(outer, x)

        kinds = ("TELinear",) * 3
        right = truth(lambda: train(precision, lambda m, x: forward(m, x, plain), kinds=kinds))
        with installed_or_failing(layer, "input gradient"):
            check_same(train(precision, lambda m, x: forward(m, x, checkpoint), kinds=kinds), right)
            assert te_state()["stashed"] == []

    @LAYER
    @pytest.mark.parametrize("depth", [1, 2])
    @PRECISION
    def test_checkpoint_without_output_inside_a_region(
        self, precision: Precision, depth: int, layer: str
    ) -> None:
        """One step: under delayed scaling its own replay reduces amaxes, with a region or not."""

        def forward(layers: Layers, x: torch.Tensor, outer: Way, inner: Way) -> torch.Tensor:
            def function(x: torch.Tensor) -> torch.Tensor:
                x = layers.run(x, 0)
                x = inner(lambda x: layers.run(x, 1), x)
                return layers.run(x, 2)

            if depth == 2:
                return outer(lambda x: layers.run(outer(function, x), 3), x)
            return outer(function, x)

        inner = regions.without_output_plain
        options: dict[str, Any] = {"kinds": ("TELinear",) * 4, "steps": 1, "microbatches": 1}
        right = truth(lambda: train(precision, lambda m, x: forward(m, x, plain, inner), **options))
        right = [{k: v for k, v in step.items() if "scaling" not in k} for step in right]
        with installed_or_failing(layer, "input gradient"):
            inner = regions.checkpoint_without_output
            found = train(precision, lambda m, x: forward(m, x, checkpoint, inner), **options)
            found = [{k: v for k, v in step.items() if "scaling" not in k} for step in found]
            check_same(found, right)
            assert te_state()["firsts"] == []
            assert te_state()["stashed"] == []

    @LAYER
    @pytest.mark.parametrize(
        "inner", [checkpoint, regions.te_checkpoint, regions.checkpoint_without_output]
    )
    def test_the_outer_phase_and_flag_survive(self, inner: Way, layer: str) -> None:
        with installed_or_failing(layer, "phase"):
            before, after = Watch(), Watch()

            def function(x: torch.Tensor) -> torch.Tensor:
                return after(inner(lambda x: x * 3, before(x)))

            with Precision("tensorwise").autocast():
                out = checkpoint(function, leaf())
                assert is_first()
            out.sum().backward()
            for watch in (before, after):
                assert [seen["phase"] for seen in watch.seen] == [(True, False), (True, True)], (
                    "phase"
                )
                assert [seen["first"] for seen in watch.seen] == [True, True]
            assert te_state()["firsts"] == []


class Interrupted(Exception):
    pass


class TestExceptions:
    @LAYER
    @RECIPE
    def test_in_a_replay(self, precision: Precision, layer: str) -> None:
        """And the replay that follows finds everything as it was."""

        def forward(layers: Layers, x: torch.Tensor, way: Way) -> torch.Tensor:
            return way(lambda x: layers.run(x, 0, 1), x)

        kinds = ("TELinear",) * 2
        right = truth(lambda: train(precision, lambda m, x: forward(m, x, plain), kinds=kinds))
        with installed_or_failing(layer, "input gradient"):

            def interrupted(layers: Layers, x: torch.Tensor) -> torch.Tensor:
                calls: list[tuple[bool, bool]] = []

                def raising(x: torch.Tensor) -> torch.Tensor:
                    x = layers.run(x, 0)
                    calls.append(phase())
                    if len(calls) == 2:
                        assert calls == [(True, False), (True, True)], "input gradient, phase"
                        raise Interrupted
                    return layers.run(x, 1)

                # Its amaxes would count; the forward of both must see the same scales.
                scales, out = layers.scales(), forward(layers, x, checkpoint)
                broken = checkpoint(raising, x.detach().requires_grad_())
                before = te_state()
                moved = layers.scales()
                with pytest.raises(Interrupted):
                    broken.sum().backward()
                assert te_state() == before
                check_same([layers.scales()], [moved])
                del scales
                return out

            check_same(train(precision, interrupted, kinds=kinds), right)
            assert te_state()["stashed"] == []

    @LAYER
    @RECIPE
    def test_in_a_forward(self, precision: Precision, layer: str) -> None:
        with installed_or_failing(layer, "phase"):
            layers = Layers(precision, ("TELinear",))
            seen: list[tuple[bool, bool]] = []

            def raising(x: torch.Tensor) -> torch.Tensor:
                checkpoint(layers.run, x)
                seen.append(phase())
                raise Interrupted

            with precision.autocast():
                before = te_state()
                with pytest.raises(Interrupted):
                    checkpoint(raising, leaf())
                assert te_state() == before
            assert seen == [(True, False)], "phase"

    @pytest.mark.parametrize("layer", ["installed", "uninstalled"])
    def test_an_unpaired_replay_of_tes_leaves_the_phase(self, layer: str) -> None:
        region = regions.distributed.activation_recompute_forward
        with installed_or_failing(layer, "phase"):
            with pytest.raises(IndexError), region(True, True):
                pytest.fail("the region was entered")
            assert phase() == (False, False), "phase"


class TestOrders:
    @LAYER
    @PRECISION
    def test_microbatches_in_flight(self, precision: Precision, layer: str) -> None:
        """1F1B with two microbatches of warm-up: F F F B F B B B."""

        def run(way: Way) -> list[dict[str, torch.Tensor]]:
            layers = Layers(precision, ("TELayerNormColumnParallelLinear", "TELinear"))
            results = []
            for step in range(2):
                for parameter in layers.parameters():
                    parameter.main_grad.zero_()
                layers.set_is_first_microbatch()
                inputs, waiting = [], []
                for action in "FFFBFBBB":
                    if action == "F":
                        size = 1 + len(inputs)
                        x = (size * random(TOKENS, HIDDEN, seed=len(inputs))).requires_grad_()
                        inputs.append(x)
                        with precision.autocast():
                            out = way(lambda x: layers.run(x, 0), x)
                            waiting.append(way(lambda x: layers.run(x, 1), out))
                    else:
                        out = waiting.pop(0)
                        (out * random(TOKENS, HIDDEN, seed=70 + len(waiting))).sum().backward()
                grads = {f"input gradient {n}": x.grad for n, x in enumerate(inputs)}
                results.append({**grads, **layers.main_grads(), **layers.scales()})
                layers.change_weights(step)
            return results

        right = truth(lambda: run(plain))
        with installed_or_failing(layer, "input gradient"):
            check_same(run(checkpoint), right)

    @LAYER
    @PRECISION
    def test_a_retained_graph_twice(self, precision: Precision, layer: str) -> None:
        def run(way: Way) -> list[dict[str, torch.Tensor]]:
            layers = Layers(precision, ("TELinear", "TELinear"))
            layers.set_is_first_microbatch()
            x = leaf()
            with precision.autocast():
                out = way(lambda x: layers.run(way(lambda x: layers.run(x, 0), x), 1), x)
            out.backward(random(TOKENS, HIDDEN, seed=1), retain_graph=True)
            first = {"input gradient": x.grad.clone(), **layers.main_grads()}
            with precision.autocast():
                layers.run(7 * leaf())
            out.backward(random(TOKENS, HIDDEN, seed=2))
            last = {"input gradient": x.grad, **layers.main_grads(), **layers.scales()}
            return [first, last]

        right = truth(lambda: run(plain))
        with installed_or_failing(layer, "input gradient"):
            check_same(run(checkpoint), right)

    @LAYER
    @PRECISION
    def test_checkpoint_then_reuse(self, precision: Precision, layer: str) -> None:
        """The sequence of the cases: forward A (armed), forward B, backward B, backward A."""

        def run(way: Way) -> list[dict[str, torch.Tensor]]:
            layers = Layers(precision, ("TELinear",))
            results = []
            for step in range(3):
                for parameter in layers.parameters():
                    parameter.main_grad.zero_()
                layers.set_is_first_microbatch()
                inputs = [leaf(step), (5 * leaf(step + 9).detach()).requires_grad_()]
                outs = []
                for x in inputs:
                    with precision.autocast():
                        outs.append(way(layers.run, x))
                for out in reversed(outs):
                    (out * random(TOKENS, HIDDEN, seed=8)).sum().backward()
                results.append(
                    {
                        **{f"output {n}": out.detach() for n, out in enumerate(outs)},
                        **{f"input gradient {n}": x.grad for n, x in enumerate(inputs)},
                        **layers.main_grads(),
                        **layers.scales(),
                    }
                )
                layers.change_weights(step)
            return results

        right = truth(lambda: run(plain))
        if regions.IS_REFERENCE:
            from transformer_engine.reference import counters

            counters.reset()
        with installed_or_failing(layer, "input gradient"):
            check_same(run(checkpoint), right)
            if regions.IS_REFERENCE:
                assert (counters.stale_reads, counters.empty_reads) == (0, 0)

    # It does, and a replay changes it back.
    @pytest.mark.filterwarnings("ignore:Recipe type changed")
    @LAYER
    @pytest.mark.parametrize(
        ("precision", "other"),
        [
            *((precision, "unquantized") for precision in PRECISIONS),
            # Quantized parameters refuse another recipe than their own.
            *((precision, "another recipe") for precision in QUANTIZED),
        ],
        ids=str,
    )
    def test_a_module_that_ran_otherwise_meanwhile(
        self, precision: Precision, other: str, layer: str
    ) -> None:
        """TE takes the module's own state for the ambient one, in a replay."""
        others = {"tensorwise": "blockwise", "blockwise": "tensorwise", "delayed": "tensorwise"}
        assert precision.recipe is not None
        between = Precision(None if other == "unquantized" else others[precision.recipe])

        def run(way: Way, *, meanwhile: bool) -> list[dict[str, torch.Tensor]]:
            layers = Layers(precision, ("TELinear",))
            for linear in layers.linears:
                linear.disable_parameter_transpose_cache = True
            x = leaf()
            with precision.autocast():
                out = way(layers.run, x)
            if meanwhile:
                with torch.no_grad(), between.autocast():
                    layers.run(random(TOKENS, HIDDEN, seed=4))
            out.backward(random(TOKENS, HIDDEN, seed=5))
            return [{"output": out.detach(), "input gradient": x.grad, **layers.main_grads()}]

        right = truth(lambda: run(plain, meanwhile=False))
        with installed_or_failing(layer, "input gradient"):
            check_same(run(checkpoint, meanwhile=True), right)


class TestArguments:
    @LAYER
    @RECIPE
    def test_outputs_that_are_no_tensors(self, precision: Precision, layer: str) -> None:
        def forward(layers: Layers, x: torch.Tensor) -> torch.Tensor:
            def function(x: torch.Tensor, factor: None) -> tuple[Any, ...]:
                return None, layers.run(x), "name", factor

            nothing, out, name, factor = tensor_parallel.checkpoint(function, False, x, None)
            assert (nothing, name, factor) == (None, "name", None)
            return out

        right = truth(lambda: train(precision, lambda layers, x: layers.run(x)))
        with installed_or_failing(layer, "input gradient"):
            check_same(train(precision, forward), right)

    @LAYER
    @PRECISION
    def test_distributed_saved_activations(self, precision: Precision, layer: str) -> None:
        def forward(layers: Layers, x: torch.Tensor) -> torch.Tensor:
            # The region's input is cut in place, so it must not be the leaf.
            out: torch.Tensor = tensor_parallel.checkpoint(layers.run, True, x * 1)
            return out

        right = truth(lambda: train(precision, lambda layers, x: layers.run(x * 1)))
        with installed_or_failing(layer, "input gradient"):
            check_same(train(precision, forward), right)

    @RECIPE
    def test_an_input_without_gradient_has_no_replay(
        self, installed: Any, precision: Precision
    ) -> None:
        """Nothing wants a gradient of the region, so nothing may be kept for one."""
        layers = Layers(precision, ("TELinear",))
        watch = Watch()
        with precision.autocast():
            out = checkpoint(lambda x: layers.run(watch(x)), leaf().detach())
        assert not out.requires_grad
        assert watch.seen[0]["phase"] == (False, False)
        assert te_state()["stashed"] == []


class TestEvaluation:
    @pytest.mark.parametrize("gradients", [False, True])
    @PRECISION
    def test_it_leaves_nothing_behind(
        self, installed: Any, precision: Precision, gradients: bool
    ) -> None:
        """With gradients on, the same body sees that there is a region."""
        layers = Layers(precision, ("TELinear",))
        watch = Watch()
        layers.eval()
        with torch.set_grad_enabled(gradients), precision.autocast():
            before = te_state()
            out = checkpoint(lambda x: layers.run(watch(x)), leaf())
            assert te_state()["firsts"] == before["firsts"]
            assert te_state()["stashed"] == []
        (seen,) = watch.seen
        assert seen["phase"] == (gradients, False)
        # Amaxes move with each call, even in an evaluation.
        if precision.recipe != "delayed":
            with torch.no_grad(), precision.autocast():
                assert torch.equal(out, layers.run(2 * leaf()))

    @LAYER
    @RECIPE
    def test_between_forward_and_backward(self, precision: Precision, layer: str) -> None:
        def run(way: Way) -> list[dict[str, torch.Tensor]]:
            layers = Layers(precision, ("TELinear", "TELinear"))
            layers.set_is_first_microbatch()
            x = leaf()
            with precision.autocast():
                out = way(layers.run, x)
            layers.eval()
            with torch.no_grad(), precision.autocast():
                evaluated = way(layers.run, 9 * leaf())
            layers.train()
            out.backward(random(TOKENS, HIDDEN, seed=5))
            found = {"evaluated": evaluated, "input gradient": x.grad}
            return [{**found, **layers.main_grads(), **layers.scales()}]

        right = truth(lambda: run(plain))
        with installed_or_failing(layer, "input gradient"):
            check_same(run(checkpoint), right)
