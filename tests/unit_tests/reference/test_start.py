# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Where a process of the engine imports from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.quant_state import reference

# A line of its own, among what libraries print.
WHERE = """\
import megatron.core, transformer_engine
print("found", megatron.core.__path__[0], transformer_engine.__file__, sep="|")
"""
START = """\
import sys
from megatron.quant_state import reference
sys.exit(reference.start(sys.argv[1:]).wait())
"""


def run(arguments: list[str], folder: Path) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_a_checkout_in_the_working_directory_is_not_what_runs(tmp_path: Path) -> None:
    import megatron.core

    script = tmp_path / "elsewhere" / "where.py"
    script.parent.mkdir()
    script.write_text(WHERE)
    core = tmp_path / "checkout" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise RuntimeError('the checkout was imported')\n")
    # -P: like the console script, the parent does not look in the working directory.
    printed = run(["-P", "-c", START, str(script)], tmp_path / "checkout")
    (found,) = [line.split("|") for line in printed.splitlines() if line.startswith("found|")]
    assert found[1] == str(megatron.core.__path__[0])
    assert found[2].startswith(str(Path(reference.__file__).parent / "site"))
    # The control: started by hand, the checkout is what runs.
    by_hand = run(["-m", "megatron.quant_state.reference", str(script)], tmp_path / "checkout")
    assert "the checkout was imported" in by_hand
