"""Dialogues from SParC- and CoSQL-format files (the toy benchmark is written in the same format)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One question of a dialogue with its gold SQL. `index` counts from 0."""

    question: str
    gold_sql: str
    db_id: str
    index: int


@dataclass(frozen=True)
class Dialogue:
    """A sequence of questions over one database."""

    id: str
    db_id: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class HistoryTurn:
    """An earlier question as the agent may know it; `sql` is None with history "questions"."""

    question: str
    sql: str | None


@dataclass(frozen=True)
class Example:
    """One turn to answer, with its history."""

    id: str
    dialogue_id: str
    db_id: str
    turn_index: int
    question: str
    gold_sql: str
    history: tuple[HistoryTurn, ...]
