# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Replays in another precision than their forward: compared, and reported by a rehearsal."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

from transformer_engine import reference

from megatron.quant_state.commands import main
from megatron.quant_state.model import load_model
from megatron.quant_state.rehearse import Rehearsal, rehearse
from megatron.quant_state.replays import Replay, replays_in_another_precision
from megatron.quant_state.reporters import html, json_report, table
from megatron.quant_state.reporters.rehearsal import replay_rows, summary_rows, verdict_sentence

LINEAR, ATTENTION, UNNAMED = object(), object(), object()
NAMES = {id(LINEAR): "linear", id(ATTENTION): "attention"}


def call(module: object, precision: str, *, grad: bool, backward: bool) -> Any:
    return reference.Call(module, precision, None, False, grad, True, backward)


def region(module: object, precision: str) -> Any:
    return call(module, precision, grad=False, backward=False)


def replay(module: object, precision: str) -> Any:
    return call(module, precision, grad=True, backward=True)


def plain(module: object, precision: str) -> Any:
    return call(module, precision, grad=True, backward=False)


def found(*calls: Any) -> list[Replay]:
    return replays_in_another_precision(calls, NAMES, 3)


class TestComparison:
    def test_nothing_to_say(self) -> None:
        assert found() == []
        assert found(plain(LINEAR, "bf16"), plain(LINEAR, "tensorwise")) == []
        assert found(region(LINEAR, "tensorwise"), replay(LINEAR, "tensorwise")) == []
        # An evaluation, or a teacher: nothing replays it.
        assert found(region(LINEAR, "tensorwise")) == []

    def test_another_precision(self) -> None:
        calls = (region(LINEAR, "tensorwise"), replay(LINEAR, "bf16")) * 2
        assert found(*calls) == [Replay("linear", 3, "tensorwise", "bf16", 2)]

    def test_modules_are_kept_apart_and_named(self) -> None:
        calls = (
            region(ATTENTION, "delayed"),
            region(LINEAR, "delayed"),
            region(UNNAMED, "delayed"),
            replay(UNNAMED, "bf16"),
            replay(LINEAR, "delayed"),
            replay(ATTENTION, "bf16"),
        )
        assert found(*calls) == [Replay("attention", 3, "delayed", "bf16", 1)]

    def test_backward_replays_in_another_order(self) -> None:
        calls = [region(LINEAR, "bf16"), region(LINEAR, "blockwise")]
        assert found(*calls, replay(LINEAR, "blockwise"), replay(LINEAR, "bf16")) == []
        assert found(*calls, replay(LINEAR, "bf16"), replay(LINEAR, "bf16")) == [
            Replay("linear", 3, "blockwise", "bf16", 1)
        ]

    def test_calls_outside_of_a_region_excuse_nothing(self) -> None:
        calls = (plain(LINEAR, "bf16"), region(LINEAR, "mxfp8"), replay(LINEAR, "bf16"))
        assert found(*calls) == [Replay("linear", 3, "mxfp8", "bf16", 1)]

    def test_an_inner_forward_in_a_replay_counts_for_neither(self) -> None:
        inner = call(LINEAR, "tensorwise", grad=False, backward=True)
        calls = (region(LINEAR, "tensorwise"), inner)
        assert found(*calls, replay(LINEAR, "tensorwise")) == []
        assert found(*calls, replay(LINEAR, "bf16")) == [
            Replay("linear", 3, "tensorwise", "bf16", 1)
        ]

    def test_a_checkpoint_that_is_not_reentrant(self) -> None:
        assert found(plain(LINEAR, "tensorwise"), replay(LINEAR, "tensorwise")) == []
        assert found(plain(LINEAR, "tensorwise"), replay(LINEAR, "bf16")) == [
            Replay("linear", 3, "tensorwise", "bf16", 1)
        ]


TINY = """\
architecture: gpt
vocab_size: 128
seq_length: 32
position_embedding_type: rope
transformer_config:
  num_layers: 2
  hidden_size: 64
  ffn_hidden_size: 128
  num_attention_heads: 4
  add_bias_linear: false
  bf16: true
  gradient_accumulation_fusion: true
  fp8: hybrid
  fp8_recipe: tensorwise
num_microbatches: 2
"""
CORE_ATTN = ["recompute_granularity=selective", "recompute_modules=[core_attn]"]
FP8_ATTENTION = ["fp8_dot_product_attention=true"]
CORE_ATTENTIONS = [f"decoder.layers.{layer}.self_attention.core_attention" for layer in (0, 1)]


def rehearsed(folder: Path, *overrides: str) -> Rehearsal:
    path = folder / "tiny.yaml"
    path.write_text(TINY)
    return rehearse(load_model(str(path), list(overrides)), 2)


@pytest.fixture(scope="module")
def core_attn(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    return rehearsed(tmp_path_factory.mktemp("core_attn"), *CORE_ATTN, *FP8_ATTENTION)


def test_the_release_replays_core_attention_in_bf16(core_attn: Rehearsal) -> None:
    run = core_attn.release
    assert list(run.replays_in_another_precision) == [
        Replay(name, step, "tensorwise", "bf16", 2) for step in (1, 2) for name in CORE_ATTENTIONS
    ]
    # The gradient that comes out of the attention is another one, for all that lies before it.
    wrong = {item.name for item in run.wrong}
    assert "decoder.layers.1.self_attention.linear_qkv.weight" in wrong
    assert "embedding.word_embeddings.weight" in wrong
    assert "decoder.layers.1.mlp.linear_fc1.weight" not in wrong


def test_quant_state_does_not(core_attn: Rehearsal) -> None:
    assert core_attn.quant_state.replays_in_another_precision == ()
    assert core_attn.quant_state.wrong == ()
    assert core_attn.truth_is_checked is True
    assert core_attn.verdict == "exact"


def test_recompute_changes_no_bit_of_the_truth(core_attn: Rehearsal, tmp_path: Path) -> None:
    """Without any recompute the losses are those: every gradient went through the optimizer."""
    without = rehearsed(tmp_path, *FP8_ATTENTION)
    assert without.release.replays_in_another_precision == ()
    assert without.quant_state.losses == core_attn.quant_state.losses


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(CORE_ATTN, id="no FP8 attention"),
        pytest.param([*CORE_ATTN, *FP8_ATTENTION, "fp8_recipe=blockwise"], id="blockwise"),
        pytest.param(["recompute_granularity=selective", "recompute_modules=[mlp]"], id="mlp"),
    ],
)
def test_where_the_release_is_right(overrides: list[str], tmp_path: Path) -> None:
    rehearsal = rehearsed(tmp_path, *overrides)
    assert rehearsal.release.replays_in_another_precision == ()
    assert rehearsal.release.wrong == ()
    assert rehearsal.verdict == "exact"


def test_reports(core_attn: Rehearsal) -> None:
    text = table.render_rehearsal(core_attn)
    folded = "decoder.layers.[0-1].self_attention.core_attention"
    (line,) = [line for line in text.splitlines() if folded in line]
    assert line.split() == [folded, "x2", "tensorwise", "bf16", "8"]
    assert "release: replays in another precision than the forward's" in text
    assert "with quant_state: replays" not in text
    (row,) = [row for row in summary_rows(core_attn) if "another precision" in row[0]]
    assert row[1:] == ("2", "0")
    values = json.loads(json_report.render_rehearsal(core_attn))
    assert values["runs"]["quant_state"]["replays_in_another_precision"] == []
    assert values["runs"]["release"]["replays_in_another_precision"][0] == {
        "module": CORE_ATTENTIONS[0],
        "step": 1,
        "forward": "tensorwise",
        "replay": "bf16",
        "calls": 2,
    }
    page = html.render_rehearsal(core_attn)
    assert f"<code>{folded}</code>" in page
    assert "<h2>release: replays in another precision than the forward's</h2>" in page
    assert "with quant_state: replays" not in page
    assert "replays 2 modules in another precision than their forward's" in verdict_sentence(
        core_attn
    )


def test_rows_are_folded_by_what_happened(core_attn: Rehearsal) -> None:
    replays = (
        Replay("layers.0.fc", 1, "delayed", "bf16", 1),
        Replay("layers.1.fc", 1, "delayed", "blockwise", 1),
        Replay("layers.2.fc", 1, "delayed", "bf16", 3),
        Replay("layers.2.fc", 2, "delayed", "bf16", 4),
    )
    run = dataclasses.replace(core_attn.release, replays_in_another_precision=replays)
    rows = [dataclasses.astuple(row) for row in replay_rows(run)]
    assert rows == [
        ("layers.[0,2].fc", 2, "delayed", "bf16", 8),
        ("layers.1.fc", 1, "delayed", "blockwise", 1),
    ]


def test_a_replay_in_another_precision_is_a_wrong_verdict(
    core_attn: Rehearsal,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exact gradients do not excuse it: another input may show the difference."""
    run = dataclasses.replace(
        core_attn.quant_state,
        replays_in_another_precision=core_attn.release.replays_in_another_precision,
    )
    bad = dataclasses.replace(core_attn, quant_state=run)
    assert bad.verdict == "wrong"
    assert verdict_sentence(bad).startswith("wrong: 2 modules are replayed in another precision")
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    module = sys.modules["megatron.quant_state.rehearse"]
    for result, code in ((bad, 1), (core_attn, 0)):
        monkeypatch.setattr(module, "rehearse", lambda *_, engine, result=result: result)
        assert main(["rehearse", str(path)]) == code
        assert verdict_sentence(result)[:40] in capsys.readouterr().out
