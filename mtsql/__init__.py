"""mtsql: multi-turn text-to-SQL agents trained by self-taught warm start and GRPO (MTSQL-R1)."""
