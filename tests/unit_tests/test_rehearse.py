# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Rehearsals of a tiny GPT by real workers, and what is made of what workers leave behind."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.quant_state import commands, reference
from megatron.quant_state.errors import InputError, WorkerError
from megatron.quant_state.megatron_config import megatron_version
from megatron.quant_state.model import load_model
from megatron.quant_state.rehearse import Rehearsal, WrongGradient, rehearse
from megatron.quant_state.reporters import json_report

FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}

TINY = """\
vocab_size: 128
seq_length: 32
position_embedding_type: rope
transformer_config:
  num_layers: 1
  hidden_size: 64
  ffn_hidden_size: 128
  num_attention_heads: 4
  add_bias_linear: false
  gradient_accumulation_fusion: true
  fp8: hybrid
  fp8_recipe: tensorwise
"""
STEPS = 2

MTP_LAYER = "mtp.layers.0.mtp_model_layer"
#: By the field that a Megatron needs for it: overrides with which modules repeat, the parameters
#: whose gradient is then lost, and the linears of the model.
REPEATS = {
    "mlp_chunks_for_training": (
        ["mlp_chunks_for_training=4"],
        {"decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight"},
        4,
    ),
    "mtp_use_repeated_layer": (
        ["mtp_num_layers=2", "mtp_use_repeated_layer=true"],
        {
            "mtp.layers.0.eh_proj.weight",
            f"{MTP_LAYER}.self_attention.linear_qkv.weight",
            f"{MTP_LAYER}.self_attention.linear_proj.weight",
            f"{MTP_LAYER}.mlp.linear_fc1.weight",
            f"{MTP_LAYER}.mlp.linear_fc2.weight",
        },
        9,
    ),
}

RECIPE = """\
configs:
  block:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: blockwise, override_nonquantized_autocast: true}
matchers:
  all: {type: glob, pattern: "*linear_*", config: block, enabled: true}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where rehearsals keep what they need for a while."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


# --- real workers -----------------------------------------------------------------------------


@dataclasses.dataclass
class Repeated:
    """A rehearsal of a model whose modules repeat, and what it said while it ran."""

    rehearsal: Rehearsal
    lost: set[str]
    linears: int
    progress: list[tuple[str, int]]


@pytest.fixture(scope="module", params=list(REPEATS))
def repeated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Repeated:
    if request.param not in FIELDS:
        pytest.skip(f"megatron-core {megatron_version()} has no {request.param}")
    overrides, lost, linears = REPEATS[request.param]
    path = tmp_path_factory.mktemp("repeated") / "tiny.yaml"
    path.write_text(TINY)
    progress: list[tuple[str, int]] = []
    rehearsal = rehearse(
        load_model(str(path), overrides), STEPS, lambda run, step: progress.append((run, step))
    )
    return Repeated(rehearsal, lost, linears, progress)


def test_the_release_loses_gradient_in_every_step(repeated: Repeated) -> None:
    wrong = repeated.rehearsal.release.wrong
    for step in range(1, STEPS + 1):
        assert {item.name for item in wrong if item.step == step} == repeated.lost
    assert len(wrong) == STEPS * len(repeated.lost)
    assert all(0.1 < item.relative_error < 1 for item in wrong)


def test_quant_state_is_exact_and_quantizes_no_more_than_needed(repeated: Repeated) -> None:
    rehearsal = repeated.rehearsal
    assert rehearsal.verdict == "exact"
    assert rehearsal.truth_is_checked is True
    assert rehearsal.quant_state.wrong == ()
    for run in (rehearsal.release, rehearsal.quant_state):
        assert run.weight_quantizations_least == STEPS * repeated.linears
        assert run.weight_quantizations == run.weight_quantizations_least
        assert run.stale_reads == 0
        assert len(run.losses) == STEPS
        assert all(math.isfinite(loss) and loss > 0 for loss in run.losses)
        assert run.seconds_per_step > 0
    # Both follow the truth's gradients, so they have the truth's weights in every step.
    assert rehearsal.release.losses == rehearsal.quant_state.losses
    assert rehearsal.release.losses[0] != rehearsal.release.losses[1]


def test_progress_counts_the_steps_of_every_run(repeated: Repeated) -> None:
    for run in ("truth", "no_cache", "release", "quant_state"):
        assert [step for name, step in repeated.progress if name == run] == [0, 1, 2]
    assert len(repeated.progress) == 4 * (STEPS + 1)


def test_json_of_a_rehearsal(repeated: Repeated) -> None:
    found = json.loads(json_report.render_rehearsal(repeated.rehearsal))
    assert found["schema"] == "quant-state/rehearsal/1"
    assert found["model"] == "tiny"
    assert found["verdict"] == "exact"
    assert found["versions"]["megatron-core"] == megatron_version()
    assert set(found["runs"]) == {"release", "quant_state"}
    for run in found["runs"].values():
        assert {
            "parameters",
            "wrong",
            "weight_quantizations",
            "weight_quantizations_least",
            "stale_reads",
            "seconds_per_step",
        } <= set(run)
        assert isinstance(run["parameters"], int)
        assert run["parameters"] >= 12
    assert found["runs"]["quant_state"]["wrong"] == []
    wrong = found["runs"]["release"]["wrong"]
    assert {tuple(item) for item in wrong} == {("name", "step", "relative_error")}
    assert {item["name"] for item in wrong} == repeated.lost


def test_a_recipe_alone(tmp_path: Path) -> None:
    """Before 0.19 the release keeps the weights of step 1 for ever; the layer never does."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    model = tmp_path / "tiny.yaml"
    model.write_text(TINY)
    recipe = str(tmp_path / "recipe.yaml")
    rehearsal = rehearse(load_model(str(model), ["fp8=null"], recipe=recipe), STEPS)
    assert rehearsal.verdict == "exact"
    assert rehearsal.quant_state.stale_reads == 0
    # The linears of the layer in both steps.
    assert rehearsal.quant_state.weight_quantizations == STEPS * 4
    assert rehearsal.quant_state.weight_quantizations_least == STEPS * 4
    is_rearmed = tuple(map(int, megatron_version().split(".")[:2])) >= (0, 19)
    assert (rehearsal.release.stale_reads == 0) is is_rearmed
    assert (rehearsal.release.weight_quantizations == STEPS * 4) is is_rearmed
    assert {item.step for item in rehearsal.release.wrong} == (set() if is_rearmed else {2})


SABOTAGED = """\
import sys
from megatron.quant_state import train, weight_cache
weight_cache.refresh_weight_cache = lambda *_: None
sys.exit(train.main(sys.argv[1:]))
"""


def test_a_layer_that_does_not_refresh_is_found_out(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "sabotaged.py"
    script.write_text(SABOTAGED)
    start = reference.start

    def start_sabotaged(arguments: Any, **popen: Any) -> Any:
        if arguments[-1] == "quant_state":
            arguments = [str(script), *arguments[2:]]
        return start(arguments, **popen)

    monkeypatch.setattr(reference, "start", start_sabotaged)
    assert commands.main(["rehearse", tiny, "--steps", "2", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "wrong"
    run = found["runs"]["quant_state"]
    # The first call of all quantizes, and nothing does afterwards.
    assert run["weight_quantizations"] == 4
    assert run["weight_quantizations_least"] == STEPS * 4
    assert run["stale_reads"] > 0
    assert {item["step"] for item in run["wrong"]} == {2}
    assert found["runs"]["release"]["wrong"] == []


def test_what_megatron_refuses_in_a_worker_has_its_place(
    tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.yaml"
    # The twin has four heads, so the full model alone is refused.
    path.write_text(TINY.replace("num_attention_heads: 4", "num_attention_heads: 5"))
    assert commands.main(["rehearse", str(path), "--set", "tensor_model_parallel_size=2"]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    (line,) = [line for line in streams.err.splitlines() if not line.startswith("rehearse:")]
    assert line.startswith("quant-state: error: --set tensor_model_parallel_size=2: ")
    assert "must be a multiple of tensor_model_parallel_size" in line
    path.write_text(TINY + "  recompute_granularity: full\n")
    assert commands.main(["rehearse", str(path)]) == 2
    (line,) = [
        line
        for line in capsys.readouterr().err.splitlines()
        if not line.startswith(("rehearse:", "["))
    ]
    assert line.startswith(f"quant-state: error: {path}:13:3: recompute_granularity: megatron-core")
    assert 'recompute_method must be "block" or "uniform"' in line
    assert list(temporary.iterdir()) == []


def test_every_run_checks_the_full_model(tiny: str, tmp_path: Path) -> None:
    """Else the words of a refusal would depend on which of two processes is faster."""
    full = load_model(tiny, ["tensor_model_parallel_size=3"])
    given = {"full": full.to_dict(), "twin": load_model(tiny).to_dict(), "steps": 1}
    (tmp_path / "job.json").write_text(json.dumps(given))
    worker = reference.start(
        ["-m", "megatron.quant_state.train", str(tmp_path), "no_cache"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    # Not communicate(), which closes stdin, and that ends a worker.
    code = worker.wait(timeout=300)
    said = worker.communicate()[0]
    assert code == 2, said
    (event,) = (tmp_path / "no_cache" / "events.jsonl").read_text().splitlines()
    assert json.loads(event)["event"] == "refused"
    assert "multiple of tensor_model_parallel_size" in json.loads(event)["error"]["message"]


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A dead orphan may wait for the machine's first process to take notice.
    return state not in "ZX"


def none_running(pids: Iterable[int]) -> bool:
    return not any(map(is_running, pids))


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not in {seconds} s")


# Ctrl-C reaches a process that a shell started in the background only if that asks for it.
COMMAND = """\
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from megatron.quant_state.commands import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "quant-state: interrupted"),
        (signal.SIGTERM, 143, None),
        (signal.SIGKILL, -9, None),
    ],
)
def test_a_signal_ends_the_workers_too(
    tiny: str, temporary: Path, number: signal.Signals, code: int, said: str | None
) -> None:
    command = subprocess.Popen(
        # So many steps that no worker ends by itself.
        [sys.executable, "-c", COMMAND, "rehearse", tiny, "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    workers: list[int] = []
    try:
        workers = wait_for(lambda: len(found := children(command.pid)) == 2 and found)
        assert len(list(temporary.iterdir())) == 1
        command.send_signal(number)
        out, err = command.communicate(timeout=60)
        # Nobody kills the workers of a killed command, nor one that was about to start.
        wait_for(lambda: none_running(workers), seconds=120)
    finally:
        command.kill()
        for pid in filter(is_running, workers):
            os.kill(pid, signal.SIGKILL)
    assert command.returncode == code
    assert out == ""
    assert err.splitlines() == ["rehearse: starting", *([said] if said else [])]
    assert number == signal.SIGKILL or list(temporary.iterdir()) == []


# --- workers that leave what a test wants --------------------------------------------------------

PRELUDE = """\
import json, os, signal, sys, time
from pathlib import Path
import numpy

out = Path(sys.argv[1]) / sys.argv[2]
out.mkdir()
(Path(__file__).parent / f"{sys.argv[2]}.pid").write_text(str(os.getpid()))
events = (out / "events.jsonl").open("w", buffering=1)

def write(**values):
    events.write(json.dumps(values) + "\\n")

def built(weights="w"):
    write(event="built", parameters=[["a", 2], ["b", 3]], weights=weights, versions={"torch": "9"})

def step(number, *gradient, **values):
    numpy.save(out / f"step{number}.npy", numpy.array(gradient, dtype=numpy.float32))
    counts = dict.fromkeys(["weight_quantizations", "weight_quantizations_least"], 3)
    counts |= {"stale_reads": 0, "empty_reads": 0, "seconds": 0.25 * number, "loss": 1.0 / number}
    write(event="step", step=number, **{**counts, **values})

"""
RIGHT = "built(); step(1, 1, 2, 3, 4, 5); step(2, 1, 1, 0, 3, 4)"


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives each run a script; ``RIGHT`` where none is given."""

    def use(**scripts: str) -> None:
        def start(arguments: list[str], **popen: Any) -> subprocess.Popen[str]:
            assert arguments[:2] == ["-m", "megatron.quant_state.train"]
            file = tmp_path / f"{arguments[-1]}.py"
            file.write_text(PRELUDE + scripts.get(arguments[-1], RIGHT))
            command = [sys.executable, str(file), *arguments[2:]]
            return subprocess.Popen(command, text=True, **popen)

        monkeypatch.setattr(reference, "start", start)

    return use


def pids(tmp_path: Path) -> dict[str, int]:
    return {path.stem: int(path.read_text()) for path in tmp_path.glob("*.pid")}


def test_sums_and_means(tiny: str, workers: Callable[..., None], tmp_path: Path) -> None:
    workers(
        release=RIGHT.replace("4, 5)", "4, 5, stale_reads=2, empty_reads=1)"),
        quant_state=RIGHT.replace("3, 4)", "3, 4, weight_quantizations=7)"),
    )
    rehearsal = rehearse(load_model(tiny, num_microbatches=3), STEPS)
    assert rehearsal.verdict == "exact"
    assert (rehearsal.model, rehearsal.steps, rehearsal.num_microbatches) == ("tiny", 2, 3)
    assert rehearsal.versions == {"torch": "9"}
    assert (rehearsal.release.stale_reads, rehearsal.quant_state.stale_reads) == (3, 0)
    assert rehearsal.release.weight_quantizations == 6
    assert rehearsal.quant_state.weight_quantizations == 10
    assert rehearsal.quant_state.weight_quantizations_least == 6
    for run in (rehearsal.release, rehearsal.quant_state):
        assert (run.parameters, run.wrong) == (2, ())
        assert (run.losses, run.seconds_per_step) == ((1.0, 0.5), 0.375)
    assert set(pids(tmp_path)) == {"truth", "no_cache", "release", "quant_state"}


@pytest.mark.parametrize(
    ("step2", "wrong"),
    [
        # The last bit of one element.
        ("1, 1, 0, 3, numpy.nextafter(numpy.float32(4), numpy.float32(5))", ("b", 2**-21 / 5)),
        ("1, 1, -0.0, 3, 4", ("b", 0.0)),
        ("4, 5, 0, 3, 4", ("a", 5 / math.sqrt(2))),
        ("1, numpy.inf, 0, 3, 4", ("a", math.inf)),
        ("1, numpy.nan, 0, 3, 4", ("a", math.nan)),
    ],
)
def test_any_other_byte_is_wrong(
    tiny: str, workers: Callable[..., None], step2: str, wrong: tuple[str, float]
) -> None:
    workers(quant_state=f"built(); step(1, 1, 2, 3, 4, 5); step(2, {step2})")
    rehearsal = rehearse(load_model(tiny), STEPS)
    assert rehearsal.verdict == "wrong"
    assert rehearsal.release.wrong == ()
    (found,) = rehearsal.quant_state.wrong
    assert (found.name, found.step) == (wrong[0], 2)
    assert found.relative_error == pytest.approx(wrong[1], rel=1e-12, abs=0, nan_ok=True)


def test_errors_against_a_truth_of_zero(tiny: str, workers: Callable[..., None]) -> None:
    zero = "built(); step(1, 0, 0, 3, 4, 5)"
    workers(
        truth=zero,
        no_cache=zero,
        release="built(); step(1, 0, 1e-30, 3, 4, 5)",
        quant_state="built(); step(1, 0, numpy.nan, 3, 4, 5)",
    )
    rehearsal = rehearse(load_model(tiny), 1)
    assert rehearsal.release.wrong == (WrongGradient("a", 1, math.inf),)
    assert math.isnan(rehearsal.quant_state.wrong[0].relative_error)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_truth_that_is_not_finite_is_no_truth(
    tiny: str, workers: Callable[..., None], tmp_path: Path, value: str
) -> None:
    diverged = f"built(); step(1, 1, 2, 3, 4, 5); step(2, 1, 2, 3, 4, numpy.{value})"
    workers(**dict.fromkeys(["truth", "no_cache", "release", "quant_state"], diverged))
    with pytest.raises(InputError, match=r"^--set optimizer.lr=9: the main_grad of b .* step 2 "):
        rehearse(load_model(tiny, ["optimizer.lr=9"]), STEPS)
    assert set(pids(tmp_path)) == {"truth", "no_cache"}


def test_a_truth_that_depends_on_its_cache_is_no_truth(
    tiny: str, workers: Callable[..., None]
) -> None:
    workers(no_cache=RIGHT.replace("3, 4)", "3, 5)"))
    rehearsal = rehearse(load_model(tiny), STEPS)
    assert rehearsal.truth_is_checked is False
    assert rehearsal.quant_state.wrong == ()
    assert rehearsal.verdict == "wrong"


@pytest.mark.parametrize(
    ("overrides", "checked"),
    [
        (["fp8_recipe=delayed"], None),
        (["fp8_recipe=blockwise"], True),
        (["fp8=null", "fp8_recipe=delayed"], True),
    ],
)
def test_delayed_scaling_without_a_cache_is_another_computation(
    tiny: str,
    workers: Callable[..., None],
    tmp_path: Path,
    overrides: list[str],
    checked: bool | None,
) -> None:
    workers()
    assert rehearse(load_model(tiny, overrides), STEPS).truth_is_checked is checked
    assert ("no_cache" in pids(tmp_path)) is (checked is True)


def test_delayed_is_what_fp8_means_without_a_recipe(
    tmp_path: Path, workers: Callable[..., None]
) -> None:
    path = tmp_path / "delayed.yaml"
    path.write_text(TINY.replace("  fp8_recipe: tensorwise\n", ""))
    workers()
    assert rehearse(load_model(str(path)), STEPS).truth_is_checked is None


@pytest.mark.parametrize("run", ["no_cache", "release", "quant_state"])
def test_runs_that_start_from_other_weights_are_not_compared(
    tiny: str, workers: Callable[..., None], run: str
) -> None:
    workers(**{run: RIGHT.replace("built()", "built('other')")})
    with pytest.raises(WorkerError, match=f"'truth' and '{run}' did not start from equal weights"):
        rehearse(load_model(tiny), STEPS)


FOREVER = "time.sleep(1000)"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "built(); raise ZeroDivisionError('a fault of ours')",
            r"'no_cache' ended with exit code 1 after 0 of 2 steps\. (?s:.*)Error: a fault of .*$",
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            r"the run 'no_cache' was killed by signal 9\. Its last lines:$",
        ),
        ("sys.exit(0)", "the run 'no_cache' ended with exit code 0 after 0 of 2 steps"),
        (
            "built(); step(1, 1, 2, 3, 4, 5)",
            "the run 'no_cache' ended with exit code 0 after 1 of 2 steps",
        ),
        (
            r"sys.stdout.buffer.write(b'out of memory \xff\n'); sys.stdout.flush(); sys.exit(3)",
            "ended with exit code 3 after 0 of 2 steps. Its last lines:\n  out of memory \ufffd",
        ),
    ],
)
def test_a_worker_that_dies(
    tiny: str,
    workers: Callable[..., None],
    tmp_path: Path,
    temporary: Path,
    script: str,
    message: str,
) -> None:
    workers(truth=FOREVER, no_cache=script)
    with pytest.raises(WorkerError, match=message):
        rehearse(load_model(tiny), STEPS)
    assert none_running(pids(tmp_path).values())
    assert list(temporary.iterdir()) == []


def test_a_dead_worker_is_no_verdict(
    tiny: str, workers: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    workers(quant_state="sys.exit('bang')")
    assert commands.main(["rehearse", tiny, "--steps", "2"]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "quant-state: error: the run 'quant_state' ended with exit code 1 " in streams.err
    assert streams.err.endswith("\n  bang\n")


def test_a_refusal_ends_the_other_worker(
    tiny: str, workers: Callable[..., None], tmp_path: Path, temporary: Path
) -> None:
    location = {"file": "tiny.yaml", "line": 3, "column": 1}
    refused = {"message": "no such thing", "location": location}
    workers(
        truth=f"write(event='refused', error={refused!r}); sys.exit(2)",
        no_cache=FOREVER,
    )
    with pytest.raises(InputError, match=r"^tiny\.yaml:3:1: no such thing$"):
        rehearse(load_model(tiny), STEPS)
    wait_for(lambda: "truth" in pids(tmp_path))
    assert none_running(pids(tmp_path).values())
    assert list(temporary.iterdir()) == []


def test_an_interrupt_ends_both_workers(
    tiny: str, workers: Callable[..., None], tmp_path: Path, temporary: Path
) -> None:
    workers(truth=f"built(); {FOREVER}", no_cache=f"built(); {FOREVER}")

    def interrupt(run: str, step: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rehearse(load_model(tiny), STEPS, interrupt)
    assert pids(tmp_path)
    assert none_running(pids(tmp_path).values())
    assert list(temporary.iterdir()) == []


def test_an_event_that_is_half_written_waits(tiny: str, workers: Callable[..., None]) -> None:
    halves = """\
def write(**values):
    text = json.dumps(values)
    for part in (text[:9], text[9:] + chr(10)):
        time.sleep(0.3)
        events.write(part)
        events.flush()

"""
    seen: list[tuple[str, int]] = []
    workers(truth=halves + RIGHT)
    rehearse(load_model(tiny), STEPS, lambda run, step: seen.append((run, step)))
    assert [step for run, step in seen if run == "truth"] == [0, 1, 2]


def test_two_workers_at_a_time_with_one_thread_each(
    tiny: str, workers: Callable[..., None]
) -> None:
    """The release reads the truth's gradients, so the truth has ended before it starts."""
    check = (
        "assert os.environ['OMP_NUM_THREADS'] == os.environ['MKL_NUM_THREADS'] == '1'\n"
        f"assert (out.parent / 'truth/step{STEPS}.npy').exists() is (sys.argv[2] in "
        "('release', 'quant_state')), 'order'\n"
    )
    slow_truth = f"time.sleep(0.5); {RIGHT}"
    others = dict.fromkeys(["no_cache", "release", "quant_state"], check + RIGHT)
    workers(truth=slow_truth, **others)
    assert rehearse(load_model(tiny), STEPS).verdict == "exact"
