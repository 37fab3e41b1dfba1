"""Ways of asking that only the split test_themes has: what speakers usually say, said otherwise.

The words that carry the meaning stay (highest, average, above, at least, each, sort, without, add), since a
model that was trained from nothing cannot know others; the sentences around them are new.
"""

from __future__ import annotations

import re

# Whole sentences: how speakers begin and end them, and how they are said here. The first that fits holds.
SENTENCES = {
    r"How many are there\?": r"Tell me how many there are.",
    r"How many (.+) does each (.+) have\?": r"Tell me how many \1 each \2 has.",
    r"How many (.+) are there for each (.+)\?": r"Per \2, tell me how many \1 there are.",
    r"How many (.+) are there\?": r"Tell me how many \1 there are.",
    r"Which (.+) are they\?": r"Tell me which \1 they are.",
    r"Which (.+)\?": r"Tell me which \1.",
    r"What (?:is|are) (.+)\?": r"Could you tell me \1?",
    r"What about (.+)\?": r"Try \1.",
    r"How about (.+) instead\?": r"Take \1 instead.",
    r"The same for (.+), please\.": r"Repeat that for \1.",
    r"Find (.+)\.": r"Could you find \1 for me?",
    r"I am looking for (.+)\.": r"We are after \1.",
    r"List (.+)\.": r"Write down \1, please.",
    r"Show (.+)\.": r"I want to see \1.",
    r"Give me (.+)\.": r"Can I have \1?",
    r"Count (.+)\.": r"Could you count \1?",
    r"For (every|each) (.+), (list|count) (.+)\.": r"Go through \1 \2 and \3 \4.",
    r"Only (.+)\.": r"Restrict this to \1.",
    r"Keep just (.+)\.": r"I care about \1 alone.",
    r"Now only (.+)\.": r"From here on \1, nothing else.",
    r"Can you narrow that to (.+)\?": r"Would you limit that to \1?",
    r"Now show (.+) instead\.": r"Switch to \1.",
    r"And if we take only (.+)\?": r"Suppose we take only \1.",
    r"And for (.+)\?": r"Do that for \1.",
    r"And the ones (.+)\?": r"Then the ones \1.",
    r"And (.+)\?": r"I also wonder about \1.",
    r"Sort them by (.+)\.": r"Would you sort them by \1?",
    r"Order these by (.+)\.": r"Would you order these by \1?",
    r"Name (.+)\.": r"Pick \1.",
    r"Break their number down by (.+)\.": r"I want their number broken down by \1.",
    r"Those (.+)\?": r"Just those \1, please.",
    r"Leave out (.+)\.": r"Would you leave out \1?",
    r"Without (.+)\.": r"Now all of it without \1.",
    r"Add (.+)\.": r"Would you add \1?",
    r"Also include (.+)\.": r"Would you also include \1?",
}
# Within them: conditions.
PHRASES = {r"\bwhose (.+?) is (not )?": r"whose \1 says \2", r"\bwith (?!the )": "having "}


def asked_anew(question: str) -> str:
    """The question in other words. Raises ValueError for a way of asking that has none here."""
    for known, new in SENTENCES.items():
        if re.fullmatch(known, question):
            said = re.fullmatch(known, question).expand(new)
            break
    else:
        raise ValueError(f"no other way to ask {question!r}")
    for known, new in PHRASES.items():
        said = re.sub(known, new, said)
    return said
