"""Verdicts on one predicted SQL: execution match, exact match, clause F1, hardness."""

from __future__ import annotations

from mtsql.data.schema import Schema
from mtsql.sql.execute import Executor, execution_match
from mtsql.sql.hardness import hardness
from mtsql.sql.match import clause_f1, exact_set_match
from mtsql.sql.parse import SqlParseError, SqlSchema, foreign_key_map, parse_sql


class Scorer:
    """Scores predictions over the databases of one dataset."""

    def __init__(self, schemas: dict[str, Schema], executor: Executor) -> None:
        self.executor = executor
        self.paths = {db: schema.path for db, schema in schemas.items()}
        self.schemas = {db: SqlSchema.from_database(schema.path) for db, schema in schemas.items()}
        self.foreign_keys = {db: foreign_key_map(schema.entry) for db, schema in schemas.items()}

    def ex(self, db_id: str, gold: str, predicted: str | None) -> bool:
        """Execution match (section 3.3.2, R_EX), as the official evaluator defines it."""
        return execution_match(self.executor, self.paths[db_id], gold, predicted)

    def em(self, db_id: str, gold: str, predicted: str | None) -> bool:
        """Exact set match: the official EM, which the authors' code also rewards."""
        return exact_set_match(gold, predicted, self.schemas[db_id], self.foreign_keys[db_id])

    def gold_problem(self, db_id: str, gold: str) -> str | None:
        """Why a gold SQL cannot be scored against (it does not run, or does not parse), or None."""
        try:
            parse_sql(gold, self.schemas[db_id])
            execution_match(self.executor, self.paths[db_id], gold, gold)
            clause_f1(gold, gold, self.schemas[db_id])
        except (SqlParseError, ValueError) as error:
            return str(error)
        return None

    def clause_f1(self, db_id: str, gold: str, predicted: str) -> float:
        """Mean F1 over SELECT, WHERE, JOIN, GROUP, ORDER (section 3.3.2)."""
        return clause_f1(gold, predicted, self.schemas[db_id])

    def hardness(self, db_id: str, gold: str) -> str:
        """easy, medium, hard or extra, by the gold SQL."""
        return hardness(gold, self.schemas[db_id])
