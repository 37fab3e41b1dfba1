"""The words of the toy benchmark, from words.toml, which says what entries mean, and words_unseen.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from sqlglot.dialects.sqlite import SQLite


def _read(name: str) -> dict:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


_WORDS = re.compile(r"[a-z]+")
_KNOWN, _UNSEEN = _read("words.toml"), _read("words_unseen.toml")
ADJECTIVES: Mapping[str, Sequence[str]] = _KNOWN["adjectives"] | _UNSEEN["adjectives"]
PERSONS = ("person", "person_unseen")  # the kinds of label that people say "who" of


def _pools(source: dict) -> dict[str, tuple[str, Sequence[str]]]:
    """The lists of values in a file: kind -> form and values. A title is two words."""
    titles = list(map(" ".join, product(source["titles"]["first"], source["titles"]["second"])))
    pools = {("title_unseen" if source is _UNSEEN else "title"): ("label", titles)}
    for section, form in (("labels", "label"), ("proper", "proper"), ("common", "common")):
        pools |= {kind: (form, values) for kind, values in source[section].items()}
    return pools


_POOLS = _pools(_KNOWN) | _pools(_UNSEEN)


@dataclass(frozen=True)
class ColumnWords:
    """A column before it is placed in a database: possible names, ways to say it, its values.

    `form` is "amount" or "year", whose values lie within `bounds`, "label" (values that occur once in a
    table), "proper" (people write them with a capital) or "common"; the latter three are drawn from
    `values`. `kind` is that of the word file, "" for invented words.
    """

    names: Sequence[str]
    phrases: Sequence[str]
    kind: str
    form: str
    bounds: Sequence[int] = ()
    values: Sequence[str] = ()


@dataclass(frozen=True)
class EntityWords:
    """An entity before it is placed in a database; its foreign key, if any, points to the entity `parent`.

    `person` says whether people say "who" of it.
    """

    singular: str
    plural: str
    columns: tuple[ColumnWords, ...]
    parent: str | None = None
    person: bool = False


def _column(entry: dict) -> ColumnWords:
    """A column as a file has it."""
    form, values = _POOLS.get(entry["kind"], (entry["kind"], ()))
    return ColumnWords(**entry, form=form, values=values)


def _entity(entry: dict, shared: Mapping[str, dict]) -> EntityWords:
    """An entity as a file has it; a column may be the name of one of the `shared` columns."""
    columns = (shared[column] if isinstance(column, str) else column for column in entry["columns"])
    made = tuple(map(_column, columns))
    return EntityWords(**entry | {"columns": made}, person=made[0].kind in PERSONS)


def taken_words() -> frozenset[str]:
    """What an invented word must not be, in lower case.

    Words of both files, those with which questions are asked and queries are written, and SQL's own.
    """
    asking = ("dialogue", "followup", "asked_anew", "query", "database")
    code = " ".join((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8") for name in asking)
    return frozenset(
        _WORDS.findall(f"{_KNOWN} {_UNSEEN} {code} {' '.join(SQLite.Tokenizer.KEYWORDS)}".lower())
    )


def known_words() -> list[str]:
    """The words of the known themes, in lower case, once each: what invented words are to look like."""
    return sorted(set(_WORDS.findall(str(_KNOWN).lower())))


def themes(unseen: bool = False) -> dict[str, list[EntityWords]]:
    """The themes of all splits, or of `test_themes` alone: name -> its entities, parents before children."""
    source = _UNSEEN if unseen else _KNOWN
    return {
        name: [_entity(entity, source["columns"]) for entity in entities]
        for name, entities in source["themes"].items()
    }
