# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Real Megatron wrappers on the reference engine: the right gradient, the current weights."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import importlib
import inspect
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule

from megatron.quant_state import Installation, install, weights_changed
from megatron.quant_state.build import build_model
from megatron.quant_state.model import load_model
from tests.unit_tests.wrappers import (
    HIDDEN,
    KINDS,
    PRECISIONS,
    RECIPES,
    TOKENS,
    FP8GlobalStateManager,
    RecipeConfig,
    TransformerConfig,
    autocast,
    call,
    change_weights,
    equal,
    fp8_autocast,
    fresh_engine,
    main_grads,
    microbatch,
    model_of,
    never_overwriting,
    quantizing_rule,
    random,
    reference,
    rule,
    torch,
    train,
    truth,
    weights_of,
    wrapper_of,
)

# By name: the package shows a function where the submodule `install` was.
weight_cache = importlib.import_module("megatron.quant_state.weight_cache")

CACHING = ("tensorwise", "blockwise", "delayed", "recipe")


@pytest.fixture(autouse=True)
def _fresh_engine() -> Iterator[None]:
    with fresh_engine():
        yield


def evaluate(model: Any, precision: str, seed: int = 7) -> torch.Tensor:
    """A forward without gradients, which no schedule drives."""
    with torch.no_grad(), autocast(precision):
        return call(model.layer, random(TOKENS, HIDDEN, seed=seed))


def uncached(model: Any, precision: str, seed: int = 7) -> torch.Tensor:
    """The same by a call that quantizes for itself alone; leaves flag and cache as they are."""
    layer = model.layer
    layer.disable_parameter_transpose_cache = True
    flag = layer.is_first_microbatch
    try:
        return evaluate(model, precision, seed)
    finally:
        layer.disable_parameter_transpose_cache = False
        layer.is_first_microbatch = flag


def zero_main_grads(model: Any) -> None:
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)


# --- the gradient -----------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_main_grad_exact(installed: Installation, kind: str, precision: str, calls: int) -> None:
    steps = train(model_of(kind, precision), precision, calls)
    installed.uninstall()
    right = truth(kind, precision, calls)
    weights = len(weights_of(model_of(kind, precision)))
    quantized = 0 if precision in ("bf16", "fp8_param") else weights
    for step, expected in zip(steps, right, strict=True):
        assert equal(step["main_grads"], expected["main_grads"])
        assert equal(step["outputs"], expected["outputs"])
        assert equal(step["scales"], expected["scales"])
        assert step["quantizations"] == quantized
        assert step["stale_reads"] == 0
    assert not equal(steps[0]["main_grads"], steps[1]["main_grads"])


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_main_grad_of_the_release(kind: str, precision: str, calls: int) -> None:
    """The negative control: wrong exactly where a module repeats, in BF16 in the first step."""
    steps = train(model_of(kind, precision), precision, calls)
    right = truth(kind, precision, calls)
    wrong = [not equal(a["main_grads"], b["main_grads"]) for a, b in zip(steps, right, strict=True)]
    assert wrong == [calls > 1, calls > 1 and precision != "bf16"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_armed_call_accumulates(kind: str, precision: str) -> None:
    right = truth(kind, precision, 1, steps=1, start=0.5)
    release = train(model_of(kind, precision), precision, 1, steps=1, start=0.5)
    with install():
        steps = train(model_of(kind, precision), precision, 1, steps=1, start=0.5)
    assert equal(steps[0]["main_grads"], right[0]["main_grads"])
    assert not equal(release[0]["main_grads"], right[0]["main_grads"])


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_layers_of_a_quantized_model_exact(kind: str) -> None:
    """What first_last_layers_bf16 does: the model is quantized, no autocast is on here."""

    def run(arm: Callable[[Any], None]) -> list[Any]:
        steps = train(model_of(kind, "tensorwise"), "bf16", 2, arm=arm)
        assert [step["quantizations"] for step in steps] == [0, 0]
        return [step["main_grads"] for step in steps]

    with never_overwriting():
        right = run(lambda model: model.set_is_first_microbatch())
    release = run(lambda model: model.set_is_first_microbatch())
    with install():
        steps = run(lambda model: model.set_is_first_microbatch())
    assert all(map(equal, steps, right))
    assert not any(map(equal, release, right))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_that_forces_bf16_exact(kind: str) -> None:
    def run() -> tuple[Any, list[Any]]:
        model = model_of(kind, "tensorwise", quant_recipe=RecipeConfig([], {}))
        model.layer.finish_init(rule({}))
        reference.record_calls(True)
        steps = train(model, "tensorwise", 2)
        assert {call.precision for call in reference.calls} == {"bf16"}
        return model, [step["main_grads"] for step in steps]

    with never_overwriting():
        _, right = run()
    _, release = run()
    with install():
        model, steps = run()
    assert {call.is_first_microbatch for call in reference.calls} == {None}
    assert model.layer.is_first_microbatch is True
    assert all(map(equal, steps, right))
    assert not any(map(equal, release, right))


def test_a_recipe_of_another_class_exact(installed: Installation) -> None:
    """TE clears its cache by itself then, whatever was refreshed before."""

    def run() -> list[torch.Tensor]:
        model = model_of("TELinear", "tensorwise")
        microbatch(model, "tensorwise", 2, 1)
        change_weights(model, 3)
        zero_main_grads(model)
        model.set_is_first_microbatch()
        with pytest.warns(UserWarning, match="Recipe type changed"):
            microbatch(model, "blockwise", 2, 2)
        return main_grads(model)

    steps = run()
    assert reference.counters.stale_reads == 0
    installed.uninstall()
    with never_overwriting():
        assert equal(steps, run())


# --- the flag ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_hands_none_does_not_disarm(kind: str) -> None:
    def flag_after() -> Any:
        model = model_of(kind, "tensorwise", disable_parameter_transpose_cache=True)
        microbatch(model, "tensorwise", 1, 1)
        assert model.layer._fp8_workspaces == {}
        return model.layer.is_first_microbatch

    assert flag_after() is False
    with install():
        assert flag_after() is True


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_in_bf16_leaves_the_refresh_to_training(kind: str) -> None:
    """A rule that quantizes training alone; the evaluation comes first after a weight change."""

    def stale_reads() -> int:
        model = model_of(kind, "recipe")
        recipe = {"fp8_quantization_recipe": "tensorwise"}
        model.layer.finish_init(rule(recipe, {}, override_nonquantized_autocast=True))
        microbatch(model, "recipe", 1, 1)
        change_weights(model, 5)
        model.layer.is_first_microbatch = True
        reference.counters.reset()
        model.eval()
        evaluate(model, "recipe")
        model.train()
        microbatch(model, "recipe", 1, 2)
        return int(reference.counters.stale_reads)

    assert stale_reads() > 0
    with install():
        assert stale_reads() == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "tensorwise"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_leaves_the_flag_as_it_was(
    installed: Installation, kind: str, precision: str, armed: bool, error: type[BaseException]
) -> None:
    model = model_of(kind, precision)
    microbatch(model, precision, 1, 1)
    change_weights(model, 3)
    zero_main_grads(model)
    model.layer.is_first_microbatch = armed

    def raising(*_: Any) -> None:
        raise error("inside the call")

    with pytest.raises(error, match="inside the call"), monkeypatched(model.layer, raising):
        microbatch(model, precision, 1, 2)
    assert model.layer.is_first_microbatch is armed
    reference.counters.reset()
    weights_changed(model)
    microbatch(model, precision, 2, 2)
    assert reference.counters.stale_reads == 0
    installed.uninstall()
    again = model_of(kind, precision)
    change_weights(again, 3)
    with never_overwriting():
        microbatch(again, precision, 2, 2)
    assert equal(main_grads(model), main_grads(again))


class monkeypatched:
    """``record_call`` of one module, which TE's forward begins with, for a while."""

    def __init__(self, module: Any, replacement: Callable[..., Any]) -> None:
        self.module = module
        self.replacement = replacement

    def __enter__(self) -> None:
        self.module.__dict__["record_call"] = self.replacement

    def __exit__(self, *_: Any) -> None:
        del self.module.__dict__["record_call"]


# --- in place or dropped ----------------------------------------------------------------------


@pytest.mark.parametrize("precision", [*CACHING, "mxfp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_refresh_in_place_keeps_the_workspaces(
    installed: Installation, kind: str, precision: str
) -> None:
    model = model_of(kind, precision)
    microbatch(model, precision, 1, 1)
    before = dict(model.layer._fp8_workspaces)
    buffers = {name: work._rowwise.data_ptr() for name, work in before.items()}
    values = {name: work._rowwise.clone() for name, work in before.items()}
    assert sorted(before) == sorted(weights_of(model))
    change_weights(model, 3)
    model.set_is_first_microbatch()
    reference.counters.reset()
    microbatch(model, precision, 2, 2)
    after = model.layer._fp8_workspaces
    for name, work in after.items():
        assert work is before[name]
        assert work._rowwise.data_ptr() == buffers[name]
        assert not torch.equal(work._rowwise, values[name])
    assert reference.counters.stale_reads == 0
    assert reference.counters.weight_quantizations == len(before)


@pytest.mark.parametrize("precision", [*CACHING, "mxfp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_dropped_where_the_last_call_wanted_no_column_wise_copy(
    installed: Installation, kind: str, precision: str
) -> None:
    model = model_of(kind, precision)
    evaluate(model, precision)
    before = dict(model.layer._fp8_workspaces)
    assert sorted(before) == sorted(weights_of(model))
    change_weights(model, 3)
    model.set_is_first_microbatch()
    reference.counters.reset()
    microbatch(model, precision, 2, 2)
    after = model.layer._fp8_workspaces
    assert all(work is not before[name] for name, work in after.items())
    assert reference.counters.stale_reads == 0
    assert reference.counters.weight_quantizations == len(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_refresh_without_gradients_keeps_what_a_backward_still_needs(kind: str) -> None:
    def run() -> None:
        model = model_of(kind, "mxfp8")
        microbatch(model, "mxfp8", 1, 1)
        weights_changed(model)
        x = random(TOKENS, HIDDEN, seed=1).requires_grad_()
        with autocast("mxfp8"):
            out = call(model.layer, x)
        weights_changed(model)
        evaluate(model, "mxfp8")
        out.sum().backward()

    with pytest.raises(RuntimeError, match="column-wise values are asked for"):
        run()
    with install():
        run()


@pytest.mark.parametrize(
    "work",
    [
        SimpleNamespace(quantize_=None),
        SimpleNamespace(_quantizer=None, quantize_=None),
        SimpleNamespace(_quantizer=SimpleNamespace(rowwise_usage=True, columnwise_usage=True)),
    ],
    ids=["quantizer unknown", "no quantizer", "cannot be rewritten"],
)
def test_a_workspace_of_an_unknown_kind_is_dropped(work: Any) -> None:
    weight = torch.zeros(2, 2)
    module = SimpleNamespace(_fp8_workspaces={"weight": work}, _parameters={"weight": weight})
    weight_cache.refresh_weight_cache(module, True)
    assert module._fp8_workspaces == {}


def test_a_workspace_of_no_parameter_is_dropped_with_the_others() -> None:
    model = model_of("TELinear", "tensorwise")
    microbatch(model, "tensorwise", 1, 1)
    workspaces = model.layer._fp8_workspaces
    workspaces["other"] = workspaces["weight"]
    weight_cache.refresh_weight_cache(model.layer, True)
    assert workspaces == {}


# --- capture ----------------------------------------------------------------------------------


def capturing(precision: str) -> Any:
    """An autocast region that a CUDA graph captures, as far as TE's state goes."""
    return fp8_autocast(enabled=True, fp8_recipe=RECIPES[precision](), _graph=True)


def captured(kind: str, precision: str = "tensorwise") -> Any:
    """A model whose layer was captured with a skip tensor, after a warm-up."""
    model = model_of(kind, precision)
    microbatch(model, precision, 1, 1)
    model.set_is_first_microbatch()
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)
    reference.record_calls(True)
    with capturing(precision):
        call(model.layer, random(TOKENS, HIDDEN, seed=1).requires_grad_()).sum().backward()
    assert [call.is_first_microbatch for call in reference.calls] == [False]
    return model


@pytest.mark.parametrize("precision", ["tensorwise", "mxfp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_module_is_never_dropped(
    installed: Installation, kind: str, precision: str
) -> None:
    model = captured(kind, precision)
    before = dict(model.layer._fp8_workspaces)
    buffers = {name: work._columnwise.data_ptr() for name, work in before.items()}
    # A module that nothing captured is dropped after this.
    evaluate(model, precision)
    for seed, run in enumerate([evaluate, lambda *_: microbatch(model, precision, 2, 2)]):
        change_weights(model, seed)
        model.set_is_first_microbatch()
        reference.counters.reset()
        run(model, precision)
        assert reference.counters.stale_reads == 0
        for name, work in model.layer._fp8_workspaces.items():
            assert work is before[name]
            assert work._columnwise.data_ptr() == buffers[name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_module_is_refreshed_before_a_call_in_bf16_too(
    installed: Installation, kind: str
) -> None:
    model = captured(kind)
    before = {name: work._rowwise.clone() for name, work in model.layer._fp8_workspaces.items()}
    change_weights(model, 1)
    model.set_is_first_microbatch()
    evaluate(model, "bf16")
    assert model.layer.is_first_microbatch is False
    for name, work in model.layer._fp8_workspaces.items():
        assert not torch.equal(work._rowwise, before[name])
        assert torch.equal(work._source, weights_of(model)[name])


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_module_that_cannot_be_refreshed_is_refused(
    installed: Installation, kind: str
) -> None:
    model = captured(kind)
    workspaces = model.layer._fp8_workspaces
    before = dict(workspaces)
    list(before.values())[-1]._quantizer = None
    model.set_is_first_microbatch()
    message = rf"{kind} was captured in a CUDA graph, .*{', '.join(before)}.* disable_parameter_tr"
    with pytest.raises(RuntimeError, match=message):
        microbatch(model, "tensorwise", 1, 2)
    assert workspaces == before
    assert model.layer.is_first_microbatch is True


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_without_a_skip_tensor_hands_none(kind: str) -> None:
    def run() -> tuple[list[Any], Any]:
        model = model_of(kind, "tensorwise")
        microbatch(model, "tensorwise", 1, 1)
        model.set_is_first_microbatch()
        reference.record_calls(True)
        for _ in range(2):
            with capturing("tensorwise"):
                call(model.layer, random(TOKENS, HIDDEN, seed=1))
        return [call.is_first_microbatch for call in reference.calls], model

    # What the release bakes in: the first graph overwrites, the second never sees new weights.
    assert run()[0] == [True, False]
    with install():
        flags, model = run()
        # An armed module hands None under capture, and so does one that is not armed.
        assert flags == [None, None]
        assert model.layer.is_first_microbatch is True
        evaluate(model, "tensorwise")
        with capturing("tensorwise"):
            call(model.layer, random(TOKENS, HIDDEN, seed=1))
        assert reference.calls[-1].is_first_microbatch is None
        assert model.layer.is_first_microbatch is False


# --- overwrite_main_grad ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_overwrite_main_grad_is_said_once(
    installed: Installation,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(weight_cache, "_said_overwrite_main_grad", False)
    model = model_of(kind, "tensorwise")
    train(model, "tensorwise", 2)
    assert caplog.records == []
    name, weight = list(weights_of(model).items())[-1]
    weight.overwrite_main_grad = True
    train(model, "tensorwise", 2)
    train(model, "tensorwise", 2)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{kind}.{name} has overwrite_main_grad set")


# --- copies, and classes that were swapped ------------------------------------------------------


def _world() -> Any:
    return torch.distributed.group.WORLD


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.fixture
def _copies_name_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's modules hold process groups, which nobody can copy; a copy takes the same."""
    group = torch.distributed.ProcessGroup
    monkeypatch.setitem(copyreg.dispatch_table, group, lambda _: (_world, ()))


@pytest.mark.usefixtures("_copies_name_process_groups")
# The release's other wrappers hold lambdas and local functions, which pickle refuses.
@pytest.mark.parametrize(
    ("kind", "duplicate"), [*((kind, copy.deepcopy) for kind in KINDS), ("TELinear", pickled)]
)
@pytest.mark.parametrize("armed", [True, False])
def test_copies_exact(
    installed: Installation, kind: str, armed: bool, duplicate: Callable[[Any], Any]
) -> None:
    model = model_of(kind, "tensorwise")
    microbatch(model, "tensorwise", 1, 1)
    if armed:
        model.set_is_first_microbatch()
    twin = duplicate(model)
    assert twin.layer is not model.layer
    assert twin.layer.is_first_microbatch is armed
    # Each has a flag and a cache of its own.
    change_weights(twin, 3)
    twin.set_is_first_microbatch()
    assert model.layer.is_first_microbatch is armed
    zero_main_grads(twin)
    reference.counters.reset()
    microbatch(twin, "tensorwise", 2, 2)
    assert reference.counters.stale_reads == 0
    assert torch.equal(evaluate(model, "tensorwise"), uncached(model, "tensorwise"))
    installed.uninstall()
    again = model_of(kind, "tensorwise")
    change_weights(again, 3)
    with never_overwriting():
        microbatch(again, "tensorwise", 2, 2)
    assert equal(main_grads(twin), main_grads(again))


@pytest.mark.usefixtures("_copies_name_process_groups")
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copy_of_a_captured_module_stays_captured(
    installed: Installation, duplicate: Callable[[Any], Any]
) -> None:
    twin = duplicate(captured("TELinear"))
    before = dict(twin.layer._fp8_workspaces)
    evaluate(twin, "tensorwise")
    twin.set_is_first_microbatch()
    evaluate(twin, "tensorwise")
    assert before["weight"] is twin.layer._fp8_workspaces["weight"]


@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_swapped_class_exact(kind: str, own_forward: bool) -> None:
    """Megatron-FSDP swaps the class of what it wraps."""

    def swapped() -> Any:
        model = model_of(kind, "tensorwise")
        base = type(model.layer)

        def forward(self: Any, *args: Any) -> Any:
            return base.forward(self, *args)

        body = {"forward": forward} if own_forward else {}
        model.layer.__class__ = type(f"Sharded{kind}", (base,), body)
        return model

    right = truth(kind, "tensorwise", 2)
    release = train(swapped(), "tensorwise", 2)
    with install():
        steps = train(swapped(), "tensorwise", 2)
    for step, wrong, expected in zip(steps, release, right, strict=True):
        assert equal(step["main_grads"], expected["main_grads"])
        assert not equal(wrong["main_grads"], expected["main_grads"])


# --- weights that change outside a schedule ------------------------------------------------------


@pytest.mark.parametrize("precision", CACHING)
@pytest.mark.parametrize("kind", KINDS)
def test_late_module(kind: str, precision: str) -> None:
    """`late_module` of the cases: it is armed at the next step like every other."""

    def stale_reads() -> int:
        model = model_of(kind, precision)
        train(model, precision, 1, steps=1)
        model.late = wrapper_of(kind, model.config)
        if precision == "recipe":
            model.late.finish_init(quantizing_rule())
        late = SimpleNamespace(layer=model.late)
        zero_main_grads(model.late)
        microbatch(late, precision, 1, 1)
        change_weights(late, 3)
        model.set_is_first_microbatch()
        reference.counters.reset()
        microbatch(late, precision, 1, 2)
        return int(reference.counters.stale_reads)

    assert stale_reads() > 0
    with install():
        assert stale_reads() == 0


@pytest.mark.parametrize("precision", CACHING)
@pytest.mark.parametrize("kind", KINDS)
def test_load_between_steps(kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_between_steps` of the cases: a forward outside any schedule uses what was loaded."""

    # Scales of delayed scaling are a pickle.
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")

    def stale_reads() -> int:
        model = model_of(kind, precision)
        train(model, precision, 2, steps=1)
        state = model.state_dict()
        for name in weights_of(model):
            state[f"layer.{name}"] = random(HIDDEN, HIDDEN, seed=77)
        reference.counters.reset()
        model.load_state_dict(state)
        current = uncached(model, precision)
        assert torch.equal(evaluate(model, precision), current) is not_stale
        return int(reference.counters.stale_reads)

    not_stale = False
    assert stale_reads() > 0
    not_stale = True
    with install():
        assert stale_reads() == 0


@pytest.mark.parametrize("precision", CACHING)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_changed(installed: Installation, kind: str, precision: str) -> None:
    model = model_of(kind, precision)
    train(model, precision, 2, steps=1)
    current = uncached(model, precision)
    assert not torch.equal(evaluate(model, precision), current)
    weights_changed([model])
    assert torch.equal(evaluate(model, precision), current)
    assert model.layer.is_first_microbatch is False


# --- a GPT whose modules repeat, driven by Megatron's schedule ----------------------------------

GPT = """\
vocab_size: 128
seq_length: 64
position_embedding_type: rope
transformer_config:
  num_layers: 1
  hidden_size: 64
  ffn_hidden_size: 128
  num_attention_heads: 4
  gradient_accumulation_fusion: true
  add_bias_linear: false
"""
CONFIG_FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}
MTP = ("mtp_num_layers=2", "mtp_use_repeated_layer=true")
SELECTIVE = ("recompute_granularity=selective", "recompute_modules=[core_attn, mlp]")
FULL = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
#: By name: the field without which nothing repeats, for older releases; and the overrides.
ALL_STRUCTURES = {
    "chunks": ("mlp_chunks_for_training", ("mlp_chunks_for_training=4",)),
    "mtp": ("mtp_use_repeated_layer", MTP),
    "mtp-selective": ("mtp_use_repeated_layer", (*MTP, *SELECTIVE)),
    "mtp-full": ("mtp_use_repeated_layer", (*MTP, *FULL)),
}
STRUCTURES = {
    name: overrides for name, (field, overrides) in ALL_STRUCTURES.items() if field in CONFIG_FIELDS
}
#: Whether the release's own set_is_first_microbatch arms a quant_recipe-only model (0.19 on).
ARMS_RECIPES = "quant_recipe" in inspect.getsource(MegatronModule.set_is_first_microbatch)
GPT_PRECISIONS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "tensorwise": ("fp8=hybrid", "fp8_recipe=tensorwise"),
    "blockwise": ("fp8=e4m3", "fp8_recipe=blockwise"),
    "fp8_param": ("fp8=hybrid", "fp8_recipe=tensorwise", "fp8_param=true"),
    "recipe": (),
}


def gpt_of(path: Path, structure: str, precision: str, *overrides: str) -> Any:
    """A GPT of real layers; every weight has ``main_grad``."""
    path.write_text(GPT)
    torch.manual_seed(1)
    wanted = (*STRUCTURES[structure], *GPT_PRECISIONS[precision], *overrides)
    description = load_model(str(path), list(wanted))
    model = build_model(description)
    if precision == "recipe":
        model.config.quant_recipe = RecipeConfig([], {})
        for layer in linears(model).values():
            layer.finish_init(quantizing_rule())
    return model


def linears(model: Any) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "disable_parameter_transpose_cache")
    }


def train_gpt(model: Any, *, by_hand: bool = False, steps: int = 2) -> list[dict[str, Any]]:
    """main_grad of every TE linear after each step of two microbatches."""
    tokens = torch.randint(128, (2, 65), generator=torch.Generator().manual_seed(0))

    def forward_step(batches: Any, chunk: Any) -> Any:
        row = next(batches)[None]
        positions = torch.arange(64)[None]
        mask = torch.ones(1, 64)
        out = chunk(row[:, :-1], positions, None, labels=row[:, 1:], loss_mask=mask)
        return out, lambda loss: (loss.mean(), {"loss": loss.detach().mean()})

    results = []
    for step in range(steps):
        zero_main_grads(model)
        if by_hand:
            weights_changed(model)
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(tokens),
            model=model,
            num_microbatches=2,
            seq_length=64,
            micro_batch_size=1,
            forward_only=False,
        )
        results.append(
            {name: layer.weight.main_grad.clone() for name, layer in linears(model).items()}
        )
        with torch.no_grad():
            for index, layer in enumerate(linears(model).values()):
                weight = layer.weight
                weight.add_(0.05 * random(*weight.shape, seed=100 * step + index))
    return results


def differing(left: dict[str, Any], right: dict[str, Any]) -> set[str]:
    assert left.keys() == right.keys()
    return {name for name in left if not torch.equal(left[name], right[name])}


def mtp_takes_padding_mask() -> bool:
    """Whether MTP can be recomputed at all; 0.18.2 fails on a padding_mask of its own."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as Layer

    hands = "padding_mask" in Layer.forward.__code__.co_varnames
    parameters = inspect.signature(Layer._checkpointed_forward).parameters
    return not hands or "padding_mask" in parameters or "kwargs" in parameters


@pytest.mark.parametrize("precision", GPT_PRECISIONS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_gpt_exact(tmp_path: Path, structure: str, precision: str) -> None:
    """Rows of the measured table: exact with the layer, and wrong in the release."""

    def gpt(*overrides: str) -> Any:
        return gpt_of(tmp_path / "gpt.yaml", structure, precision, *overrides)

    if structure == "mtp-full" and not mtp_takes_padding_mask():
        pytest.skip("this megatron-core hands its MTP recompute an argument that it does not take")
    no_cache = train_gpt(gpt("disable_parameter_transpose_cache=true"))
    with never_overwriting():
        right = train_gpt(gpt(), by_hand=True)
    release = train_gpt(gpt())
    with install():
        steps = train_gpt(gpt())
    part = "mlp." if structure == "chunks" else "mtp."
    everything = set(linears(gpt()))
    for number, (step, wrong, expected, cross) in enumerate(
        zip(steps, release, right, no_cache, strict=True)
    ):
        assert differing(step, expected) == set()
        assert differing(cross, expected) == set()
        lost = differing(wrong, expected)
        if number and precision == "recipe" and not ARMS_RECIPES:
            # Never armed again: after the first step every weight is the first step's for ever.
            assert lost == everything
            continue
        # A layer that is recomputed as a whole is spared: its replay finds the flag False.
        loses = structure != "mtp-full" and (number == 0 or precision != "bf16")
        assert bool(lost) is loses
        assert all(part in name for name in lost)
    if structure in ("chunks", "mtp"):
        repeated = {name for name in everything if part in name}
        assert differing(release[0], right[0]) == repeated
