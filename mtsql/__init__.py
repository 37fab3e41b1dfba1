"""mtsql: multi-turn text-to-SQL agents trained by self-taught warm start and GRPO (MTSQL-R1)."""

import io
import logging
import os
import sys

# On import it asks for an optional kernel package, which nothing here needs.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# Lengths change all the time: without it the allocator's pieces fit nothing. It is read when CUDA starts.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

# Threads of OpenMP wait for one another at each product. If they wait by spinning for long, other work on the
# machine makes all of them crawl. It is read when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# What a terminal or a pipe without UTF-8 cannot show is shown as a number.
for _stream in (sys.stdout, sys.stderr):
    if isinstance(_stream, io.TextIOWrapper) and _stream.errors in ("strict", "surrogateescape"):
        _stream.reconfigure(errors="backslashreplace")
