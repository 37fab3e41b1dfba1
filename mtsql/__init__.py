"""mtsql: multi-turn text-to-SQL agents trained by self-taught warm start and GRPO (MTSQL-R1)."""

import logging

# On import it asks for an optional kernel package, which nothing here needs.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
