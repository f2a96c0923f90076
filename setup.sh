#!/usr/bin/env bash
# Makes .venv with everything for a machine without a GPU (Python 3.11, 3.12 or 3.13, no other need). Safe to run again.
#   ./setup.sh && .venv/bin/asyncgrpo demo
set -euo pipefail
cd "$(dirname "$0")"
for python in ${PYTHON:-python3.11 python3.12 python3.13} ""; do
    "$python" -c "import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))" 2>/dev/null && break
done
if [ -z "$python" ]; then
    echo "error: ${PYTHON:-this machine} has no Python 3.11, 3.12 or 3.13 with venv; on Ubuntu 24.04: apt install python3.12-venv" >&2
    exit 1
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
# torch first and with its own requirements: where only its CUDA build is on offer, that needs its libraries.
.venv/bin/python -m pip install --quiet --no-compile torch==2.13.0
.venv/bin/python -m pip install --quiet --no-compile --no-deps -r requirements/cpu.txt
if ! .venv/bin/python -m pip install --quiet --no-compile --no-deps -r requirements/gym.txt 2>/dev/null; then
    echo "reasoning-gym is left out: one of its packages needs a C compiler. Everything else is there." >&2
fi
.venv/bin/python -m pip install --quiet --no-deps ./packaging/cpu-shims -e .
# An SGLang engine imports thousands of modules at its start: compiled once here, by all cores, it starts in half the time.
.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
