"""All commands beside the three scripts."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec

from mtsql.config import user_errors
from mtsql.errors import UserError

COMMANDS = {
    "explain": ("mtsql.extras.explain", "one GRPO step: its trajectories, rewards, advantages, tokens"),
    "ablate": ("mtsql.extras.ablate", "a grid of trainings and evaluations, with a table of differences"),
    "plot": ("mtsql.extras.plot", "the metrics of several runs over one another"),
    "view": ("mtsql.extras.viewer", "trajectories with their loss mask in colour, or as a page"),
    "reproduce": ("reproduce", "a suite of experiments of the papers, the quick start among them"),
    "chat": ("mtsql.extras.chat.__main__", "ask a database questions, in the terminal or in a browser"),
    "benchmark": ("mtsql.toy.benchmark", "write the embedded benchmark"),
    "pretrained": ("mtsql.pretrained", "make the folder of a small base model"),
    "plan": ("mtsql.extras.planner", "what fits on a GPU"),
    "curriculum": ("mtsql.extras.curriculum", "count how often each question is solved, for levels of GRPO"),
    "merge": ("mtsql.extras.merge", "put an adapter into its base"),
    "export": ("mtsql.extras.export", "trajectories as token ids and labels, for other trainers"),
}


def main() -> None:
    """Run a command's module as the main one, as `python -m mtsql.<module>` does; alone, list them."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        listed = "\n".join(f"  {name:<12}{what}" for name, (_, what) in COMMANDS.items())
        print(f"usage: mtsql COMMAND ...   (mtsql COMMAND --help says more)\n\n{listed}")
        return
    if name not in COMMANDS:
        raise UserError(f"mtsql {name} is unknown; choose from {', '.join(COMMANDS)}")
    sys.argv = [f"mtsql {name}", *sys.argv[2:]]
    spec = find_spec(COMMANDS[name][0])
    sys.modules["__main__"] = module = module_from_spec(spec)
    module.__name__ = "__main__"
    exec(spec.loader.get_code(spec.name), vars(module))


def command() -> None:
    """The command."""
    user_errors(main)


if __name__ == "__main__":
    command()
