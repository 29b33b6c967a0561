#!/usr/bin/env python3
# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Table of what passed, from the JUnit files of `run_gpu_suite.sh`; standard library only.

`python3 tools/gpu_table.py OUT GROUP [GROUP ...]` ends with 1 where a group failed or left no file.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def row(out: Path, group: str) -> tuple[list[str], bool, list[str]]:
    """Cells, whether all is well, and the names of what failed."""
    file = out / f"{group}.xml"
    if not file.exists():
        return [group, "-", "-", "-", "-", "did not end"], False, []
    suite = ElementTree.parse(file).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    seconds = f"{float(suite.get('time', 0)):.0f} s"
    names = [
        f"{case.get('classname', '')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    ran = total - skipped
    word = "FAILED" if bad else "passed" if ran else "skipped"
    cells = [group, str(ran - bad), str(bad), str(skipped), seconds, word]
    return cells, not bad, names


def versions() -> str:
    import torch
    import transformer_engine
    from megatron.core import package_info

    gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return (
        f"{gpu}, torch {torch.__version__}, transformer-engine {transformer_engine.__version__}, "
        f"megatron-core {package_info.__version__}"
    )


def main(arguments: list[str]) -> int:
    out, groups = Path(arguments[0]), [name for name in arguments[1:] if name != "benchmarks"]
    rows = [row(out, group) for group in groups]
    for _, _, names in rows:
        for name in names:
            print(f"FAILED {name}")
    print(versions())
    print(f"{'group':<12}{'passed':>8}{'failed':>8}{'skipped':>9}{'time':>8}  result")
    for cells, _, _ in rows:
        group, passed, failed, skipped, seconds, word = cells
        print(f"{group:<12}{passed:>8}{failed:>8}{skipped:>9}{seconds:>8}  {word}")
    return 0 if all(well for _, well, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
