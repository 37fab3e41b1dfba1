#!/usr/bin/env bash
# Makes the virtual environment, installs, and runs the linter and all tests.
REQUIREMENTS="requirements.txt requirements-bridges.txt"
. "$(dirname "$0")/setup_environment.sh"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# One process a core, each with one thread; a file's tests stay together and share its fixtures.
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder "$@"
