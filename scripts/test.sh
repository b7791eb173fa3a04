#!/usr/bin/env bash
# All tests of a clean clone. The real SGLang and vLLM are installed first, so that no test's time limit holds a download;
# where they cannot be had, their tests are skipped and say so.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
for peer in sglang vllm; do
  echo "test: installing $peer into its own environment (minutes on the first run)"
  "$python" scripts/peers/install.py "$peer" || echo "test: $peer cannot be installed here; its tests will be skipped" >&2
done
"$python" -m pytest -m "not soak" --durations=15 tests
code=$?
if [ "$code" = 1 ]; then
  # Real servers on two cores: a test that fails only in company is named above, and decided by a run on its own.
  echo "test: the tests that failed above are run once more, on their own"
  "$python" -m pytest -m "not soak" --last-failed -rf tests
  code=$?
fi
exit "$code"
