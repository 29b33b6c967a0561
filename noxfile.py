# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The version matrix: every supported megatron-core over one torch per Python, and the wheel.

An environment with torch takes gigabytes and megatron-core a few megabytes. So there is one base
environment per Python, and another megatron-core is a folder that comes first on the path.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import bootstrap  # noqa: E402

nox.options.default_venv_backend = "none"
nox.options.sessions = ["tests"]

#: megatron-core: the Pythons it is tried on, best first.
MATRIX = {
    "0.16.1": ("3.11", "3.10"),
    "0.17.1": ("3.12",),
    "0.18.2": ("3.12",),
    "0.19.2": ("3.12",),
}
#: `nox -t older` is what CI runs after `make test`, which has run the newest.
TAGS = {version: ["older"] for version in list(MATRIX)[:-1]}


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


def last_line(session: nox.Session, python: str, code: str, **env: str) -> str:
    """Returns the last line that `code` prints."""
    printed = session.run(python, "-c", code, env=env, silent=True, log=False)
    return str(printed).strip().splitlines()[-1]


def overlay(session: nox.Session, python: str, megatron_core: str) -> str:
    """Returns the folder that holds this megatron-core, nothing where the base has it already."""
    code = "from importlib.metadata import version; print(version('megatron-core'))"
    if last_line(session, python, code, PYTHONPATH="") == megatron_core:
        return ""
    folder = ROOT / ".nox" / f"mcore-{megatron_core}"
    if not folder.exists():
        # Filled beside its place, so that an interrupted run leaves nothing that looks whole.
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        wanted = f"megatron-core=={megatron_core}"
        session.run(*pip, "--no-deps", "--target", str(part), wanted)
        part.rename(folder)
    return str(folder)


@nox.session
@nox.parametrize("megatron_core", [nox.param(v, id=v, tags=TAGS.get(v, [])) for v in MATRIX])
def tests(session: nox.Session, megatron_core: str) -> None:
    """The unit tests in a reference-engine process; what follows -- goes to pytest."""
    python = base_python(session, MATRIX[megatron_core])
    env = {"PYTHONPATH": overlay(session, python, megatron_core), "PYTHONDONTWRITEBYTECODE": "1"}
    code = "import megatron.core as m, sys, torch; print(m.__version__, m.__path__[0], sys.version)"
    found, path, python_version = last_line(session, python, code, **env).split()[:3]
    # From 0.18 on it adds the commit of the repository that it lies in, "0.19.2+50b3258".
    if found.split("+")[0] != megatron_core:
        session.error(f"megatron-core {megatron_core} was asked for and {path} has {found}")
    session.log(f"Python {python_version}, megatron-core {found} in {os.path.relpath(path, ROOT)}")
    # A path among the arguments replaces the whole suite.
    named = any((ROOT / word.split("::")[0]).exists() for word in session.posargs)
    where = () if named else ("tests/unit_tests",)
    engine = (python, "-m", "megatron.quant_state.reference", "-m", "pytest", "-m", "not gpu")
    session.run(*engine, *where, *session.posargs, env=env)


@nox.session
def wheel(session: nox.Session) -> None:
    """Installs the built wheel into an environment outside the tree and rehearses there.

    What follows -- replaces `rehearse deepseek-v3-mtp2`.
    """
    python = base_python(session, ("3.12",))
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    with tempfile.TemporaryDirectory() as outside:
        session.run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", outside, str(ROOT))
        built = next(Path(outside).glob("*.whl"))
        check_content(session, built)
        fresh = Path(outside) / "venv"
        session.run(python, "-m", "venv", "--without-pip", str(fresh))
        fresh_python = str(fresh / "bin" / "python")
        session.run(*pip, "--python", fresh_python, "install", "--quiet", "--no-deps", str(built))
        # The dependencies, torch among them, are the base's. A folder that a .pth file names has
        # no .pth files read, so the base's editable install stays out of it.
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        shared = last_line(session, python, ask)
        (Path(last_line(session, fresh_python, ask)) / "shared.pth").write_text(f"{shared}\n")
        with session.chdir(outside):
            ask = "import megatron.quant_state, megatron.core; print(megatron.quant_state.__file__)"
            found = last_line(session, fresh_python, ask, PYTHONPATH="")
            if not Path(found).resolve().is_relative_to(fresh.resolve()):
                session.error(f"{found} hides the wheel")
            script = str(fresh / "bin" / "quant-state")
            session.run(script, "--version", env={"PYTHONPATH": ""})
            arguments = session.posargs or ["rehearse", "deepseek-v3-mtp2"]
            session.run(script, *arguments, env={"PYTHONPATH": ""})


def check_content(session: nox.Session, built: Path) -> None:
    """Fails where a file of the package, data included, is missing in the wheel."""
    package = ROOT / "megatron" / "quant_state"
    files = {str(path.relative_to(ROOT)) for path in package.rglob("*") if path.is_file()}
    missing = files - set(zipfile.ZipFile(built).namelist())
    missing = {name for name in missing if "__pycache__" not in name}
    if missing:
        session.error(f"{built.name} lacks {', '.join(sorted(missing))}")
    session.log(f"{built.name} has all {len(zipfile.ZipFile(built).namelist())} files")
