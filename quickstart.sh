#!/usr/bin/env bash
# The recipe in small on the embedded benchmark: benchmark, warm start, GRPO, evaluation.
# Everything lands in runs/toy; parts that are finished there are not done again.
. "$(dirname "$0")/setup_environment.sh"
exec .venv/bin/python reproduce.py --suite quick --out runs/toy "$@"
