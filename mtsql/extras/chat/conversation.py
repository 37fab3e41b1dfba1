"""One dialogue: questions to an agent over a database, with the agent's own answers as its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mtsql.agent.env import Environment, Episode
from mtsql.agent.tools import MEMORY_RETRIEVE
from mtsql.agent.trajectory import Status, Trajectory, trajectory_record
from mtsql.data.datasets import Example, HistoryTurn
from mtsql.data.schema import Schema
from mtsql.errors import UserError
from mtsql.extras.chat.introspect import relevant_part
from mtsql.recipes.prompt_options import compact_result
from mtsql.report.records import RESULT_CHARACTERS
from mtsql.sql.execute import ExecutionResult

Play = Callable[[Sequence[Episode]], object]  # plays episodes to their ends, as `rollout` does
ENDINGS = {
    Status.OUT_OF_INTERACTIONS: "it used up its interactions without an answer",
    Status.OUT_OF_TOKENS: "its response was cut by a token limit",
    Status.MALFORMED_CALL: "it called a tool in a form that cannot be read",
    Status.NO_ACTION: "it wrote no SQL",
}


@dataclass(frozen=True)
class Event:
    """Something that the agent did (an ActionType), saw or recalled, or a `note` about the question.

    `passed` is the verdict of a check.
    """

    kind: str
    text: str = ""
    passed: bool | None = None


Show = Callable[[Event], None]


def show_steps(show: Show) -> Callable[[Trajectory], None]:
    """The function that shows what a trajectory did and saw since it was last called, an SQL once."""
    acted, seen, shown = 0, 0, ""

    def told(trajectory: Trajectory) -> None:
        nonlocal acted, seen, shown
        for action in trajectory.actions[acted:]:
            sql = action.sql or ""
            show(Event(str(action.type), sql if sql != shown else "", action.passed))
            shown = sql
        for observation in trajectory.observations[seen:]:
            recalled = observation.tool == MEMORY_RETRIEVE
            show(Event("recall" if recalled else "observe", observation.text))
        acted, seen = len(trajectory.actions), len(trajectory.observations)

    return told


@dataclass(frozen=True)
class Answer:
    """What came of a question; `result` is that of `sql`, which is None if there is no answer: `problem`."""

    question: str
    sql: str | None
    result: ExecutionResult | None
    problem: str
    trajectory: Trajectory


@dataclass
class Conversation:
    """A dialogue. `play` runs episodes; `environment` has the database's schema under its name."""

    environment: Environment
    schema: Schema
    play: Play
    seed: int = 0
    answers: list[Answer] = field(default_factory=list)

    @property
    def history(self) -> tuple[HistoryTurn, ...]:
        """The questions so far with the agent's own SQL."""
        return tuple(HistoryTurn(answer.question, answer.sql) for answer in self.answers)

    def ask(self, question: str, show: Show) -> Answer:
        """Answer a question, showing each step; raises UserError, and forgets it, if it does not fit."""
        number = len(self.answers)
        example = Example(f"00000/{number}", "00000", self.schema.db_id, number, question, "", self.history)
        asked = [turn.question for turn in self.history] + [question]
        schema = relevant_part(self.schema, asked, lambda part: bool(self._episode(example, part)))
        episode = self._episode(example, schema)
        if episode is None:
            raise UserError(
                f"the question is too long with the dialogue so far and table {schema.tables[0].name} alone; "
                "take questions back with :undo, or raise --max-prompt-tokens"
            )
        if schema is not self.schema:
            shown = f"{len(schema.tables)} of {len(self.schema.tables)} tables fit into the prompt"
            names = ", ".join(table.name for table in schema.tables)
            show(Event("note", f"{shown}, those that the question seems to be about: {names}"))
        trajectory, episode.told = episode.trajectory, show_steps(show)
        try:
            self.play([episode])
            sql = trajectory.answer_sql
            result = None if sql is None else self.environment.executor.execute(self.schema.path, sql)
        except FileNotFoundError:
            raise UserError(f"{self.schema.path} is gone; put it back, and ask again") from None
        problem = ENDINGS.get(trajectory.status, "")
        self.answers.append(Answer(question, sql, result, problem, trajectory))
        return self.answers[-1]

    def _episode(self, example: Example, schema: Schema) -> Episode | None:
        """The episode with so much of the schema in its prompt, None if the prompt is too long."""
        environment = replace(self.environment, schemas={schema.db_id: schema})
        (episode,) = environment.episodes(example, [self.seed + example.turn_index])
        return episode if episode.trajectory.status is None else None

    def undo(self) -> str | None:
        """Forget the last question; returns it, None if there is none."""
        return self.answers.pop().question if self.answers else None

    def records(self) -> list[dict]:
        """The dialogue as rows of a file of trajectories, for mtsql.extras.viewer."""
        decode, db_id = self.environment.tokens.tokenizer.decode, self.schema.db_id
        return [
            trajectory_record(answer.trajectory, decode)
            | {"question": answer.question, "db_id": db_id, "turn_index": turn}
            | {"answer_result": answer.result and compact_result(answer.result, RESULT_CHARACTERS)}
            for turn, answer in enumerate(self.answers)
        ]
