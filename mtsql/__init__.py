"""mtsql: multi-turn text-to-SQL agents trained by self-taught warm start and GRPO (MTSQL-R1)."""

import logging
import os

# On import it asks for an optional kernel package, which nothing here needs.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# Lengths change all the time: without it the allocator's pieces fit nothing. It is read when CUDA starts.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
