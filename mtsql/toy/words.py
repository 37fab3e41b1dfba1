"""The words of the toy benchmark, from words.toml beside this file, which says what its entries mean."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

_WORDS = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))
_TITLES = list(map(" ".join, product(_WORDS["titles"]["first"], _WORDS["titles"]["second"])))
LABELS: Mapping[str, Sequence[str]] = {**_WORDS["labels"], "title": _TITLES}
PROPER: Mapping[str, Sequence[str]] = _WORDS["proper"]
COMMON: Mapping[str, Sequence[str]] = _WORDS["common"]
ADJECTIVES: Mapping[str, Sequence[str]] = _WORDS["adjectives"]


@dataclass(frozen=True)
class ColumnWords:
    """A column before it is placed in a database: possible names, ways to say it, kind of value.

    `bounds` are the least and the largest amount or year; other kinds have none.
    """

    names: Sequence[str]
    phrases: Sequence[str]
    kind: str
    bounds: Sequence[int] = ()


@dataclass(frozen=True)
class EntityWords:
    """An entity before it is placed in a database; its foreign key, if any, points to the entity `parent`."""

    singular: str
    plural: str
    columns: tuple[ColumnWords, ...]
    parent: str | None = None

    @property
    def person(self) -> bool:
        """Whether people say "who" of it."""
        return self.columns[0].kind == "person"


def _column(entry: str | dict) -> ColumnWords:
    """A column as the file has it, or the shared column of this name."""
    return ColumnWords(**(_WORDS["columns"][entry] if isinstance(entry, str) else entry))


def _entity(entry: dict) -> EntityWords:
    return EntityWords(**entry | {"columns": tuple(map(_column, entry["columns"]))})


def themes() -> dict[str, list[EntityWords]]:
    """All themes: name -> its entities, parents before children."""
    return {name: list(map(_entity, entities)) for name, entities in _WORDS["themes"].items()}
