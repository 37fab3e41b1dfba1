"""Themes of invented words: a known theme with every name, noun and value replaced by one that nobody uses.

A model that meets no other words than those of a dozen themes learns a list. With a part of its training
databases about words like "pandor" and "chuble", new in each database, it has to find a question's word in
the schema, and a value in the question, copy both, and pass over what it does not know.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mtsql.toy.words import ColumnWords, EntityWords, known_words, taken_words

KEPT = ("number", "of", "id")  # words of grammar in the names and phrases of columns
LENGTHS = range(4, 10)  # letters of an invented word
POOL, LABELS = 12, 24  # values of an invented list; of one that names entities, of which a table has up to 16


class Inventor:
    """Invents words letter by letter: each follows the two before it as often as in the known words."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.following: dict[str, list[str]] = {}
        for word in known_words():
            for at, letter in enumerate(f"{word}."):
                self.following.setdefault(f"..{word}"[at : at + 2], []).append(letter)
        self.taken = set(taken_words())

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
        """A theme with other words: the same word of `entities` becomes the same word everywhere."""
        renamed: dict[str, str] = {}
        pools: dict[str, Sequence[str]] = {}

        def rename(text: str) -> str:
            """Every word of a noun, name or phrase but for those of grammar; a plural stays one."""
            for word in re.findall(r"[a-z]+", text):
                if word not in renamed:
                    renamed[word] = word if word in KEPT else self.word()
            return re.sub(r"[a-z]+", lambda found: renamed[found[0]], text)

        def column(known: ColumnWords) -> ColumnWords:
            values: Iterable[str] = known.values
            if values:
                if known.kind not in pools:
                    pools[known.kind] = self._pool(known)
                values = pools[known.kind]
            names, phrases = ([rename(text) for text in texts] for texts in (known.names, known.phrases))
            return replace(known, names=names, phrases=phrases, kind="", values=tuple(values))

        for entity in entities:
            renamed[entity.plural] = rename(entity.singular) + "s"
        return [
            replace(
                entity,
                singular=rename(entity.singular),
                plural=rename(entity.plural),
                parent=entity.parent and rename(entity.parent),
                columns=tuple(map(column, entity.columns)),
            )
            for entity in entities
        ]

    def asked(self, question: str) -> str:
        """A question with words around it that mean nothing, in half of the cases: not all words matter."""
        if self.rng.random() < 0.5:
            return question
        before, behind = self.rng.choice(((1, 0), (2, 0), (3, 0), (0, 1), (0, 2), (1, 1), (2, 1)))
        words = [self.word() for _ in range(before)]
        if words:
            question = " ".join([words[0].capitalize(), *words[1:], question[0].lower() + question[1:]])
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
