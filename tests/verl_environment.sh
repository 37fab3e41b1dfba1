#!/usr/bin/env bash
# The test of the bridge to verl with the real class, in an environment of its own (FOLDER, some 3 GB): verl 0.9.1
# wants transformers < 5.11 and fails to name what its import needs beside.
#
#     bash tests/verl_environment.sh FOLDER
set -eu
folder=${1:?"give a folder for the environment"}
mkdir -p "$folder" && folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.."
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet torch==2.13.0 verl==0.9.1 cachetools uvicorn fastapi orjson \
    sqlglot==30.30.0 tqdm matplotlib safetensors bitsandbytes==0.50.2 pytest pytest-xdist filelock
exec "$folder/bin/python" -m pytest tests/test_bridges.py -k "verl or message"
