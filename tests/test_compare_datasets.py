"""Tables 5 and 6: counted by hand, and the paper's numbers from the real dev sets."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from mtsql.config import read_options
from mtsql.experiments.compare_datasets import DatasetsConfig, main

SHARED = Path(__file__).parents[2] / "shared" / "data"


def table_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    main(read_options(DatasetsConfig, "", words))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_two_made_sets_counted_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "database" / "zoo").mkdir(parents=True)
    with sqlite3.connect(tmp_path / "database" / "zoo" / "zoo.sqlite") as connection:
        connection.executescript("create table cat (id integer, age integer); create table dog (id integer)")
    names, columns = ["cat", "dog"], [[-1, "*"], [0, "id"], [0, "age"], [1, "id"]]
    entry = {"db_id": "zoo", "table_names": names, "table_names_original": names, "column_names": columns}
    entry |= {"column_names_original": columns, "column_types": ["text"] + ["number"] * 3}
    entry |= {"primary_keys": [], "foreign_keys": []}
    (tmp_path / "tables.json").write_text(json.dumps([entry, entry | {"db_id": "gone"}]))

    def write(name: str, *dialogues: tuple[str, list[tuple[str, str]]]) -> str:
        rows = [
            {"database_id": database, "interaction": [{"utterance": u, "query": q} for u, q in turns]}
            for database, turns in dialogues
        ]
        (tmp_path / name).write_text(json.dumps(rows))
        return str(tmp_path / name)

    first = write(
        "a.json",
        ("zoo", [("How many cats?", "SELECT count(*) FROM cat"), ("Old CATS?", "SELECT id FROM cat")]),
        ("zoo", [("Both", "SELECT id FROM cat WHERE age > 1 AND id IN (SELECT id FROM dog)")]),
        ("gone", [("Gone?", "SELECT id FROM cat")]),
    )
    second = write("b.json", ("zoo", [("Dogs?", "SELECT id FROM dog")]))
    found = table_of(capsys, "--data", first, second)
    assert found[""] == [first, second]
    assert found["dialogues"] == ["2", "1"] and found["questions"] == ["3", "1"]
    assert found["databases"] == ["1", "1"] and found["tables"] == ["2", "2"]
    assert found["words a question"] == ["2.0", "1.0"]  # 3, 2 and 1
    assert found["different words"] == ["5", "1"]  # how, many, cats, old, both
    assert found["questions a dialogue"] == ["1.5", "1.0"]
    assert found["dialogues left out, database missing"] == ["1", "0"]
    assert found["easy, %"] == ["66.7", "100.0"] and found["extra, %"][1] == "0.0"
    assert sum(float(found[f"{level}, %"][0]) for level in ("easy", "medium", "hard", "extra")) > 99.8


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not here")
def test_hardness_of_the_dev_sets_is_the_papers(capsys: pytest.CaptureFixture[str]):
    sets = [str(SHARED / name / "dev.json") for name in ("sparc", "cosql")]
    tables = [str(SHARED / name / "tables.json") for name in ("sparc", "cosql")]
    found = table_of(capsys, "--data", *sets, "--tables", *tables, "--databases", str(SHARED / "database"))
    for level, of_sparc, of_cosql in (
        ("easy", 40.1, 41.4), ("medium", 36.7, 31.8), ("hard", 12.1, 16.2), ("extra", 11.1, 10.5),
    ):  # fmt: skip
        shares = [float(cell) for cell in found[f"{level}, %"]]
        assert shares == pytest.approx([of_sparc, of_cosql], abs=0.15)
