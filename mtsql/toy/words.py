"""The words of the toy benchmark, from words.toml, which says what entries mean, and words_unseen.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path


def _read(name: str) -> dict:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


_KNOWN, _UNSEEN = _read("words.toml"), _read("words_unseen.toml")
_TITLES, _UNSEEN_TITLES = (
    list(map(" ".join, product(of["titles"]["first"], of["titles"]["second"]))) for of in (_KNOWN, _UNSEEN)
)
LABELS: Mapping[str, Sequence[str]] = (
    _KNOWN["labels"] | {"title": _TITLES} | _UNSEEN["labels"] | {"title_unseen": _UNSEEN_TITLES}
)
PROPER: Mapping[str, Sequence[str]] = _KNOWN["proper"] | _UNSEEN["proper"]
COMMON: Mapping[str, Sequence[str]] = _KNOWN["common"] | _UNSEEN["common"]
ADJECTIVES: Mapping[str, Sequence[str]] = _KNOWN["adjectives"] | _UNSEEN["adjectives"]


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
        return self.columns[0].kind in ("person", "person_unseen")


def _entity(entry: dict, shared: Mapping[str, dict]) -> EntityWords:
    """An entity as a file has it; a column may be the name of one of the `shared` columns."""
    columns = (shared[column] if isinstance(column, str) else column for column in entry["columns"])
    return EntityWords(**entry | {"columns": tuple(ColumnWords(**column) for column in columns)})


def themes(unseen: bool = False) -> dict[str, list[EntityWords]]:
    """The themes of all splits, or of `test_themes` alone: name -> its entities, parents before children."""
    source = _UNSEEN if unseen else _KNOWN
    return {
        name: [_entity(entity, source["columns"]) for entity in entities]
        for name, entities in source["themes"].items()
    }
