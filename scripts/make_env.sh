#!/usr/bin/env bash
# make_env.sh PYTHON VENV: the project's environment, with the CPU build of torch.
set -euo pipefail
python=$1 venv=$2
command -v "$python" >/dev/null || { echo "missing: $python (set PYTHON=... to a Python 3.11 or newer)" >&2; exit 2; }
"$python" - <<'PY' || { echo "missing: Python 3.11 or newer; $python is $("$python" -V) (set PYTHON=...)" >&2; exit 2; }
import sys
sys.exit(sys.version_info < (3, 11))
PY
"$python" -c 'import venv, ensurepip' 2>/dev/null || { echo "missing: the venv module (Debian: apt-get install python3-venv)" >&2; exit 2; }
command -v g++ >/dev/null || command -v clang++ >/dev/null || echo "note: no C++ compiler: the slower torch kernels will serve (Debian: apt-get install g++)" >&2
[ -x "$venv/bin/python" ] || { echo "env: creating $venv"; "$python" -m venv "$venv"; }
echo "env: installing torch (CPU build; 200 MB)"
"$venv/bin/python" -m pip install -q --disable-pip-version-check -r constraints-cpu.txt
echo "env: installing forebay with its engine and test requirements"
"$venv/bin/python" -m pip install -q --disable-pip-version-check -c constraints-cpu.txt -e '.[dev]'
touch "$venv/.installed"
