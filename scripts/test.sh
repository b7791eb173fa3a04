#!/usr/bin/env bash
# All tests of a clean clone. The real SGLang and vLLM are installed first, so that no test's time limit holds a download;
# where they cannot be had, their tests are skipped and say so. A failed test is never run again: one that fails sometimes
# is a fault to be found.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
for peer in sglang vllm; do
  echo "test: installing $peer into its own environment (minutes on the first run)"
  "$python" scripts/peers/install.py "$peer" || echo "test: $peer cannot be installed here; its tests will be skipped" >&2
done
exec "$python" -m pytest -m "not soak" --durations=15 tests
