"""One file a paper: its prompts and tags, its rewards, its settings."""
