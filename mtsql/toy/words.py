"""The words of the toy benchmark, known, unseen and invented.

words.toml, which says what entries mean, has those of train, dev and test, words_unseen.toml those of
test_themes, questions.toml those with which one asks.

A model that meets no other words than those of a dozen themes learns a list. With a part of its training
databases about words like "pandor" and "chuble", new in each database, it has to find a question's word in
the schema, and a value in the question, copy both, and pass over what it does not know.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path


def _read(name: str) -> dict:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


_WORD = re.compile(r"[a-z]+")
_KNOWN, _UNSEEN, ASKING = _read("words.toml"), _read("words_unseen.toml"), _read("questions.toml")
ADJECTIVES: dict[str, list[str]] = _KNOWN["adjectives"] | _UNSEEN["adjectives"]
PERSONS = ("person", "person_unseen")  # the kinds of label that people say "who" of
KEPT = ("number", "of", "id")  # words of grammar in the names and phrases of columns
LENGTHS = range(4, 10)  # letters of an invented word
POOL, LABELS = 12, 24  # values of an invented list; of one that names entities, of which a table has up to 16


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
    columns: Sequence[ColumnWords]
    parent: str | None = None
    person: bool = False


def themes(unseen: bool = False) -> dict[str, list[EntityWords]]:
    """The themes of all splits, or of `test_themes` alone: name -> its entities, parents before children."""
    source = _UNSEEN if unseen else _KNOWN
    titles = {kind: [*map(" ".join, product(*words.values()))] for kind, words in source["titles"].items()}
    pools = {"label": source["labels"] | titles, "proper": source["proper"], "common": source["common"]}

    def column(entry: dict | str) -> ColumnWords:
        entry = source["columns"][entry] if isinstance(entry, str) else entry
        kind = entry["kind"]
        form = next((form for form, lists in pools.items() if kind in lists), kind)
        return ColumnWords(**entry, form=form, values=pools.get(form, {}).get(kind, ()))

    def entity(entry: dict) -> EntityWords:
        columns = [column(words) for words in entry["columns"]]
        return EntityWords(**entry | {"columns": columns}, person=columns[0].kind in PERSONS)

    return {name: [entity(entry) for entry in entries] for name, entries in source["themes"].items()}


class Inventor:
    """Invents words letter by letter: each follows the two before it as often as in the known words."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.following: dict[str, list[str]] = defaultdict(list)
        for word in sorted(set(_WORD.findall(str(_KNOWN).lower()))):
            for at, letter in enumerate(f"{word}."):
                self.following[f"..{word}"[at : at + 2]].append(letter)
        self.taken = set(_WORD.findall(f"{_KNOWN} {_UNSEEN} {ASKING['taken']['words']}".lower()))

    def word(self) -> str:
        """A new word, in lower case: none that means something, and none that it has given before.

        It does not end in an s, so that another s makes its plural.
        """
        while True:
            word = ".."
            while word == ".." or (word[-1] != "." and len(word) < LENGTHS.stop + 2):  # ".." and one too long
                word += self.rng.choice(self.following[word[-2:]])
            word = word.strip(".")
            if len(word) in LENGTHS and word[-1] != "s" and not {word, f"{word}s"} & self.taken:
                self.taken.add(word)
                return word

    def theme(self, entities: Sequence[EntityWords]) -> list[EntityWords]:
        """A theme with other words: the same word of `entities` becomes the same word everywhere.

        Words of grammar stay, and a plural stays one.
        """
        renamed = defaultdict(self.word, zip(KEPT, KEPT, strict=True))
        pools: dict[str, Sequence[str]] = {}

        def rename(text: str) -> str:
            return _WORD.sub(lambda found: renamed[found[0]], text)

        def column(known: ColumnWords) -> ColumnWords:
            if known.values and known.kind not in pools:
                pools[known.kind] = self._pool(known)
            names, phrases = ([rename(text) for text in texts] for texts in (known.names, known.phrases))
            return replace(known, names=names, phrases=phrases, kind="", values=pools.get(known.kind, ()))

        def entity(known: EntityWords) -> EntityWords:
            columns, parent = (
                [column(words) for words in known.columns],
                known.parent and rename(known.parent),
            )
            return EntityWords(rename(known.singular), rename(known.plural), columns, parent, known.person)

        for known in entities:
            renamed[known.plural] = rename(known.singular) + "s"
        return [entity(known) for known in entities]

    def asked(self, question: str) -> str:
        """A question with words around it that mean nothing, in half of the cases: not all words matter."""
        if self.rng.random() < 0.5:
            return question
        before, behind = self.rng.choice(((1, 0), (2, 0), (3, 0), (0, 1), (0, 2), (1, 1), (2, 1)))
        if before:
            words = " ".join(self.word() for _ in range(before)).capitalize()
            question = f"{words} {question[0].lower()}{question[1:]}"
        return " ".join([question[:-1], *(self.word() for _ in range(behind))]) + question[-1]

    def _pool(self, known: ColumnWords) -> list[str]:
        """Values in place of a column's: labels of as many words as its own, others of one.

        Others may be stored by their first letter, so no two of a pool share it.
        """
        if known.form == "label":
            count = len(known.values[0].split())
            return [" ".join(self.word().capitalize() for _ in range(count)) for _ in range(LABELS)]
        values: dict[str, str] = {}
        while len(values) < POOL:
            word = self.word()
            values.setdefault(word[0], word)
        return [word.capitalize() if known.form == "proper" else word for word in values.values()]
