#!/usr/bin/env bash
# All tests of a clean clone, with the time each part took.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
exec "$python" -m pytest -m "not soak" --durations=15 tests
