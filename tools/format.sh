#!/usr/bin/env bash
# Rewrites the tree in the house format: import order and safe lint fixes first, layout last.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
"$python" -m ruff check --fix --exit-zero .
"$python" -m ruff format .
