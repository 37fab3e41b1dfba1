#!/usr/bin/env bash
# Makes the virtual environment, installs, and runs the linter and all tests.
. "$(dirname "$0")/setup_environment.sh"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest "$@"
