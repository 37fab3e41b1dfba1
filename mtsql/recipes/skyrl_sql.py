"""SkyRL-SQL, the recipe: prompt (appendix A, D.1, D.2), observations, reward (section 4.1), settings (5).

What it shares with SQL-Trail, with the choices that hold for both, is in tagged.py. Choices of its own:

- Turns: section 4 says 4 in training, section 5 says 5 in training and in evaluation. The default is 5: four
  queries, which --max-interactions counts, and the solution after them.
- Format: section 4.1 asks for thoughts, for <sql> in each turn and for a <solution>. Here each message needs a
  thought and one action, and a solution at once is valid, as it has to be in the single-turn baseline. The
  released code looks at the joined text instead (github.com/NovaSky-AI/SkyRL, skyrl-gym: one solution, a thought
  somewhere, and one after each observation). An episode out of turns or tokens has no solution: -1.
- EX is the project's, with the order of rows where the gold SQL has ORDER BY; the released code compares sets.
- Section 4 says that the agent is told the number of its turns, but the prompt of appendix A does not hold it.
  As in the released code, each observation says it.
- The table is the frame of the paper's example, its rules as wide as its columns; NULL is shown as None.
  Appendix A lost the line that starts the example and the words "I will": both are in D. The line is
  SQL-Trail's here, with one that ends the example. The released code shows results without column names. The answer
  to an invalid action is ours.
- Without a schema (D.1) the sentence that describes the schema is left out. The single-turn prompt is ours.
- Rollouts are sampled with temperature 0.6 and with top_p 1, not 0.95: the loss needs the log-probabilities
  of the distribution that was sampled from.
- The number of steps (35 of 256 questions) is not set here; learning rate, questions in a step and samples of
  a question are the defaults already. KL, clip and normalisation are not given ("GRPO"): none, 0.2, 1/|M_i|.
  There is no warm start: the temperature would hold for its rollouts too.
- D.2 evaluates thinking models at temperature 0.6; evaluate.py answers greedily, and samples at 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtsql.agent.trajectory import Trajectory
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.recipes.rewards import Decode, RewardFunction, Rewards, chosen_weights, ex_em, keeps_format
from mtsql.recipes.tagged import ONLY_WHAT_IS_ASKED, TaggedRecipe, TaskTexts, task_text
from mtsql.sql.score import Scorer

INVALID = "Your previous action is invalid. Keep to the format of thinking and SQL tool, and try again."
OVERVIEW = "You are a data science expert. Below, you are provided with {given}a natural language question."
SCHEMA_NOTE = (
    "This schema describes the database's structure, including tables, columns, primary keys, foreign keys, "
    "and any relevant relationships or constraints."
)
NO_SCHEMA = (
    "You are not provided with the database schema and the table names. You need to figure out the database "
    "structure by yourself with the table names."
)
THINK_FIRST = (
    "Before generating the final SQL query, please think through the steps of how to write the query. It should "
    "include detailed considerations such as analisying questions, summarizing relevant findings, brainstorming "
    "new ideas, verifying the accuracy of the current steps, refining any errors, thinking of how to call SQL "
    "tools, and revisiting previous steps."
)
THOUGHT_RULE = (
    "Conduct thinking inside <think>...</think> blocks every time you get new observation or information."
)
SOLUTION_RULE = "you MUST directly provide the final SQL query solution inside <solution>...</solution>."
QUESTION = """Question: how many pigs are in the farm?
Database Schema:
Table: animals
- id (INTEGER, PRIMARY KEY)
- species (TEXT)
- age (INTEGER)
- name (TEXT)
"""
FIRST_THOUGHT = (
    "<think>I am querying how many pigs are in the farm. I will begin by checking if the 'animals' table exists "
    "and contains entries with species = 'pig'.</think>"
)
QUERY = """<sql>SELECT COUNT(*) FROM animals WHERE species = 'pig';</sql>
<observation>
+----------+
| COUNT(*) |
+----------+
| 12       |
+----------+
</observation>"""
SECOND_THOUGHT = (
    "<think>The result indicates that there are 12 pigs in the farm. Since the question asks for how many pigs, "
    "I can now output the final SQL as the solution.</think>"
)
SOLUTION = "<solution>SELECT COUNT(*) FROM animals WHERE species = 'pig';</solution>"
ONLY_THOUGHT = "<think>The question asks how many pigs there are: I count animals of that species.</think>"


def make_recipe(options: PromptOptions) -> TaggedRecipe:
    """SkyRL-SQL's prompts, tags and observations, as the options say."""
    return TaggedRecipe(options, ("think",), task, frame, INVALID)


def task(options: PromptOptions, example: Example, schema: Schema, multi_turn: bool) -> str:
    """The prompt of appendix A, with table names only as in D.1, with native thinking as in D.2."""
    names_only = options.schema == "names"
    given = "" if names_only else "a database schema and "
    shown = options.schema_text(schema)
    steps = [FIRST_THOUGHT, QUERY, SECOND_THOUGHT] if multi_turn else [ONLY_THOUGHT]
    texts = TaskTexts(
        overview=OVERVIEW.format(given=given),
        schema_text=f"{NO_SCHEMA} {shown}" if names_only else f"{shown}\n{SCHEMA_NOTE}",
        instructions=[*ONLY_WHAT_IS_ASKED, THINK_FIRST],
        thought_rule=THOUGHT_RULE,
        solution_rule=SOLUTION_RULE,
        blocks=[QUESTION, *steps, SOLUTION],
        bullet="-",
    )
    return task_text(options, example, multi_turn, texts)


def frame(cells: list[list[str]]) -> str:
    """A table between rules (appendix A); `cells` are a header and rows of the same length."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = "+".join(["", *("-" * (width + 2) for width in widths), ""])
    header, *rows = (
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells
    )
    return "\n".join([rule, header, rule, *rows, *([rule] if rows else [])])


@dataclass(frozen=True)
class RewardWeights:
    """What an invalid format and a right answer in a valid format earn (section 4.1); a wrong one earns 0."""

    invalid: float = -1.0
    ex: float = 1.0


PRESETS = {"paper": RewardWeights()}


def reward(trajectory: Trajectory, example: Example, scorer: Scorer, weights: RewardWeights) -> Rewards:
    """-1 for an invalid format, else 1 for a right answer and 0 for a wrong one (section 4.1)."""
    ex, em = ex_em(trajectory, example, scorer)
    valid = keeps_format(trajectory)
    total = weights.ex * ex if valid else weights.invalid
    return Rewards(ex, em, total, {"format": float(valid)})


def make_reward(given: str, scorer: Scorer, decode: Decode, options: PromptOptions) -> RewardFunction:
    """The reward with the weights that `given` names, as `chosen_weights` reads it."""
    _, weights = chosen_weights(PRESETS, given)
    return lambda trajectory, example: reward(trajectory, example, scorer, weights)
