#!/usr/bin/env python3
# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Makes or refreshes the environment that the project's commands run in; standard library only.

Run by whatever `python3` there is (3.8 or newer), it finds the Python that the environment is made
of, and leaves at once when nothing changed since the last time. It may be interrupted anywhere:
the next run keeps what is whole and repairs the rest. Exit 2 says what is missing.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PREFERRED = ("3.12", "3.11", "3.10")
#: What decides the content of an environment: a change of one of them means installing again.
INPUTS = ("pyproject.toml", "constraints.txt", "megatron/quant_state/package_info.py")
LIMITS = (
    "That is limited: megatron-core ends at 0.16.1 there, without mtp_use_repeated_layer and "
    "mlp_chunks_for_training, so deepseek-v3-mtp2 and the tests of newer releases cannot run"
)
HEARTBEAT_S = 5.0
STARTED = time.monotonic()


class BootstrapError(Exception):
    """Something that this script needs is missing; the message says what to do."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


def output_of(*command: str) -> str:
    """Returns what `command` prints, nothing where it is missing or fails."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, text=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def version_of(python: str | Path, imports: str) -> str:
    """Returns the "X.Y" of an interpreter that runs and can import `imports`, else nothing."""
    code = f"import sys, {imports}; print('%d.%d' % sys.version_info[:2])"
    return output_of(str(python), "-c", code)


def python_candidates(version: str) -> Iterator[str]:
    """Yields paths that may be a Python `version`, best first; whether they run is not known."""
    # Not sys.executable: inside an environment that is the one that may have to be made anew.
    yield getattr(sys, "_base_executable", sys.executable)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield os.path.join(folder, f"python{version}")
    # A pyenv shim runs only the versions that are switched on; the others lie behind it.
    for root in (output_of("pyenv", "root"), os.path.expanduser("~/.pyenv")):
        if root:
            yield from sorted(glob.glob(f"{root}/versions/{version}.*/bin/python{version}"))[::-1]


def find_python(versions: Sequence[str]) -> tuple[str, str, list[str]]:
    """Finds the first of `versions` that runs and can make environments.

    Returns:
        The interpreter, its "X.Y", and those that go by a wanted name and cannot be used.

    Raises:
        BootstrapError: there is none.
    """
    unusable: list[str] = []
    for version in versions:
        for candidate in dict.fromkeys(python_candidates(version)):
            if version_of(candidate, "venv, ensurepip") == version:
                return candidate, version, unusable
            if candidate.endswith(f"/python{version}") and os.access(candidate, os.X_OK):
                runs = version_of(candidate, "os")
                unusable.append(f"{candidate} {'lacks venv or ensurepip' if runs else 'fails'}")
    raise BootstrapError(
        f"no Python {' or '.join(versions)} that can make an environment is on the PATH or behind "
        f"pyenv ({'; '.join(unusable) or 'none goes by that name'}). Install one, on Debian with "
        "its -venv package, or name it: make PYTHON=/path/to/python ..."
    )


@contextlib.contextmanager
def only_one_at_a_time() -> Iterator[None]:
    """Keeps two commands from installing into one environment."""
    lock_path = ROOT / ".cache" / "bootstrap.lock"
    lock_path.parent.mkdir(exist_ok=True)
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another command is making the environment, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_bare(folder: Path, python: str, version: str, made_at: str) -> None:
    """Makes an environment with nothing but pip, or keeps the one that is there if it works."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "pyvenv.cfg").exists():
            raise BootstrapError(f"{folder} is no virtual environment: move it away, run again")
        found = version_of(folder / "bin" / "python", "pip")
        moved = made_at not in ("", str(folder))
        if found == version and not moved:
            return
        why = f"was made at {made_at}" if moved else f"is of Python {found}" if found else "fails"
        say(f"{folder.name} {why}: making it anew")
    say(f"making {folder.name} of {python}")
    command = [python, "-m", "venv", "--clear", str(folder)]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
        raise BootstrapError(f"{python} could not make {folder}, see above")


def forget_damaged(site: Path) -> list[str]:
    """Makes pip install again what an interrupted pip left in pieces, and returns the names.

    pip trusts whatever has metadata, so a distribution whose recorded files are not all there in
    full is one that it has to be made to forget. `~` marks what an upgrade had moved aside.
    """
    for leftover in site.glob("~*"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    damaged = [info for info in sorted(site.glob("*.dist-info")) if not is_whole(info, site)]
    for info in damaged:
        shutil.rmtree(info)
    return [info.name[: -len(".dist-info")] for info in damaged]


def is_whole(info: Path, site: Path) -> bool:
    try:
        with (info / "RECORD").open(newline="") as lines:
            # Bytecode comes and goes by itself.
            rows = [r for r in csv.reader(lines) if len(r) == 3 and not r[0].endswith(".pyc")]
        sizes = [(os.stat(os.path.join(site, name)).st_size, size) for name, _, size in rows]
    except OSError:
        return False
    return all(not recorded or found == int(recorded) for found, recorded in sizes)


def install(folder: Path, extra: str) -> None:
    """Installs the tree, editable; shows every few seconds where pip is, explains its failure."""
    log = folder / "pip.log"
    options = "--disable-pip-version-check install --no-input --progress-bar off -c constraints.txt"
    command = [str(folder / "bin" / "python"), "-m", "pip", *options.split(), "-e", f".[{extra}]"]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    process.wait(HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    say(f"  {last_step(log)}")
        except BaseException:
            # Also on Ctrl-C: pip must not go on alone beside the next run.
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        raise BootstrapError(explain(log))


def last_step(log: Path) -> str:
    """Returns the last line of pip's that says what it is at, shortened."""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if re.match(r"\s*(Collecting|Downloading|Using cached|Preparing|Installing) ", line):
            return textwrap.shorten(line, 90, placeholder=" ...")
    return "asking the package index"


def explain(log: Path) -> str:
    """Turns pip's last words into what to do."""
    text = log.read_text(errors="replace")
    why = "pip failed"
    if "No space left on device" in text:
        why = "the disk is full (about 8 GB are needed): free some space or set TMPDIR"
    elif re.search("Failed to establish|name resolution|Timeout|ProxyError|SSLError", text):
        why = "the package index cannot be reached: look at the network and pip's settings"
    tail = "\n".join(f"    {line}" for line in text.splitlines()[-12:])
    return f"{why}. Its last lines, the rest is in {log}:\n{tail}"


def ensure(folder: Path, versions: Sequence[str] = PREFERRED, extra: str = "dev") -> Path:
    """Makes `folder` the environment for this tree, with an extra of pyproject.toml.

    Returns:
        Its interpreter, of the first of `versions` that there is.

    Raises:
        BootstrapError: Python, disk or network are missing.
    """
    stamp = folder / "quant-state.stamp"
    digest = hashlib.sha256(b"\n".join((ROOT / name).read_bytes() for name in INPUTS)).hexdigest()
    wanted = f"{folder}\n{extra}\n{digest}\n"

    def stamped() -> str:
        return stamp.read_text() if stamp.exists() else ""

    def is_ready(version: str) -> bool:
        return (folder / "bin" / f"python{version}").exists() and stamped() == wanted

    if is_ready(versions[0]):
        return folder / "bin" / "python"
    python, version, unusable = find_python(versions)
    for line in unusable:
        say(f"passed over: {line}")
    if versions == PREFERRED and version != versions[0]:
        say(f"no usable Python {versions[0]}, going on with {version}. {LIMITS}")
    with only_one_at_a_time():
        if not is_ready(version):
            make_bare(folder, python, version, stamped().split("\n")[0])
            stamp.unlink(missing_ok=True)
            damaged = forget_damaged(folder / "lib" / f"python{version}" / "site-packages")
            if damaged:
                say(f"an earlier run broke off, repairing {', '.join(damaged)}")
            say(f"installing into {folder.name} (about 5 GB the first time, then seconds)")
            install(folder, extra)
            stamp.write_text(wanted)
            say(f"{folder.name} is ready (Python {version})")
    return folder / "bin" / "python"


def main() -> int:
    """Returns the exit status: 0 ready, 2 something is missing, 130 interrupted."""
    try:
        ensure(ROOT / ".venv")
    except (BootstrapError, OSError) as error:
        print(f"bootstrap: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nbootstrap: interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
