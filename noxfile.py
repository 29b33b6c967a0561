# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The version matrix: every supported megatron-core over one torch per Python.

An environment with torch takes gigabytes and megatron-core a few megabytes. So there is one base
environment per Python, and another megatron-core is a folder that comes first on the path.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import bootstrap  # noqa: E402

nox.options.default_venv_backend = "none"
nox.options.stop_on_first_error = False

#: megatron-core: the Pythons it is tried on, best first.
MATRIX = {
    "0.16.1": ("3.11", "3.10"),
    "0.17.1": ("3.12",),
    "0.18.2": ("3.12",),
    "0.19.2": ("3.12",),
}


def base_python(session: nox.Session, versions: tuple[str, ...]) -> str:
    """Returns the interpreter of the shared environment for the first Python that there is."""
    try:
        version = bootstrap.find_python(versions)[1]
        # .venv is 3.12 wherever there is one, and its torch serves all sessions of that Python.
        if version == "3.12":
            return str(bootstrap.ensure(ROOT / ".venv"))
        folder = ROOT / f".venv-py{version.replace('.', '')}"
        return str(bootstrap.ensure(folder, (version,), "test"))
    except bootstrap.BootstrapError as error:
        session.error(str(error))


def overlay(session: nox.Session, python: str, megatron_core: str) -> str | None:
    """Returns the folder that holds this megatron-core, None where the base has it already."""
    ask = "from importlib.metadata import version; print(version('megatron-core'))"
    has = session.run(python, "-c", ask, silent=True, log=False)
    if has and has.strip() == megatron_core:
        return None
    folder = ROOT / ".nox" / f"mcore-{megatron_core}"
    if not folder.exists():
        # Filled beside its place, so that an interrupted run leaves nothing that looks whole.
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        wanted = f"megatron-core=={megatron_core}"
        session.run(
            *(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--target", str(part), wanted),
        )
        part.rename(folder)
    return str(folder)


@nox.session
@nox.parametrize("megatron_core", list(MATRIX), ids=list(MATRIX))
def tests(session: nox.Session, megatron_core: str) -> None:
    """The unit tests in a reference-engine process; arguments after -- go to pytest."""
    python = base_python(session, MATRIX[megatron_core])
    folder = overlay(session, python, megatron_core)
    env = {"PYTHONPATH": folder or "", "PYTHONDONTWRITEBYTECODE": "1"}
    ask = "import importlib.metadata as m, megatron.core as c; print(c.__version__, c.__path__[0])"
    found = (session.run(python, "-c", ask, env=env, silent=True, log=False) or "").split()[-2:]
    if not found or found[0] != megatron_core:
        session.error(f"megatron-core {megatron_core} was asked for and {found} is what imports")
    session.log(f"megatron-core {found[0]} from {os.path.relpath(found[1], ROOT)}")
    engine = (python, "-m", "megatron.quant_state.reference", "-m", "pytest")
    session.run(*engine, "tests/unit_tests", "-m", "not gpu", *session.posargs, env=env)


@nox.session
def wheel(session: nox.Session) -> None:
    """Builds the wheel and rehearses from it alone, outside the tree."""
    python = base_python(session, ("3.12",))
    with tempfile.TemporaryDirectory() as outside:
        pip = (python, "-m", "pip", "--disable-pip-version-check")
        session.run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", outside, str(ROOT))
        built = next(Path(outside).glob("*.whl"))
        target = Path(outside) / "installed"
        session.run(*pip, "install", "--quiet", "--no-deps", "--target", str(target), str(built))
        with session.chdir(outside):
            env = {"PYTHONPATH": str(target)}
            where = "import megatron.quant_state as q; print(q.__file__)"
            found = session.run(python, "-c", where, env=env, silent=True, log=False) or ""
            if not found.strip().startswith(str(target)):
                session.error(f"the tree at {found.strip()} hides the wheel")
            model = session.posargs or ["deepseek-v3-mtp2"]
            session.run(python, "-m", "megatron.quant_state", "rehearse", *model, env=env)
