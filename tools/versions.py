# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Prints the versions that are supported and the ones that are installed here."""

from __future__ import annotations

import platform
from importlib import metadata

from megatron.quant_state.package_info import PACKAGE_NAME, SUPPORTED, __version__


def installed_version(distribution: str) -> str:
    if distribution == "python":
        return platform.python_version()
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    print(f"{PACKAGE_NAME} {__version__}")
    for name, (lowest, highest) in SUPPORTED.items():
        supported = f"{lowest} to {highest}"
        print(f"  {name:<20} {supported:<20} here: {installed_version(name)}")
    print(f"  {'torch':<20} {'any that these take':<20} here: {installed_version('torch')}")


if __name__ == "__main__":
    main()
