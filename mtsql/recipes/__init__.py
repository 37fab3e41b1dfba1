"""One paper, one recipe: its prompts and tags, its observations and protocol, its rewards.

A recipe is the module `mtsql.recipes.<name>` with

- `make_recipe(options)`: a `mtsql.agent.env.Recipe` for a `mtsql.recipes.prompt_options.PromptOptions`,
- `make_reward(rewards, scorer, decode, turns)`: the function from (trajectory, example) to `Rewards` that
  --rewards names; `turns` are the model messages of an episode, `decode` gives the text of token ids.

The paper's settings are configs/<name>.toml, max_interactions among them; MTSQL-R1's are the options' defaults.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

RECIPES = ("mtsql_r1", "skyrl_sql", "sql_trail", "mtir_sql")


def load_recipe(name: str) -> ModuleType:
    """The module of one of RECIPES."""
    return import_module(f"mtsql.recipes.{name}")
