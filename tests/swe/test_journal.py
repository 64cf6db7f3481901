"""A run that is killed while it writes down what it found goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ray.tasks.swe import journal, making, offline, sources
from lightning_ray.tasks.swe.making import Bug

ROWS = [{"key": "a", "text": "\x85 "}, {"key": "b", "text": "x"}]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]
TEXT = "".join(f"{line}\n" for line in LINES).encode()


@settings(deadline=None, max_examples=len(TEXT))
@given(st.integers(0, len(TEXT)))
def test_wherever_a_journal_was_cut_it_has_its_whole_lines_and_takes_more(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("journal") / "lines.jsonl"
    path.write_bytes(TEXT[:cut])
    kept = journal.whole(path)
    assert kept == LINES[: TEXT[:cut].count(b"\n")]
    with path.open("a") as file:
        file.write('{"key": "c"}\n')
    assert journal.whole(path) == [*kept, '{"key": "c"}']


def test_there_is_no_journal_before_the_first_line(tmp_path):
    assert journal.whole(tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("cut", [5, -5], ids=["the first line", "the last line"])
def test_bugs_that_were_judged_before_a_kill_are_not_judged_again(tmp_path, monkeypatch, cut):
    asked: list[str] = []

    def judge(package: object, suite: object, bug: Bug) -> None:
        asked.append(bug.patch)
        raise making.Dropped("no test fails")

    monkeypatch.setattr(making, "judge", judge)
    bugs = [Bug("s", str(number), "f", f"patch {number}") for number in range(3)]

    def run() -> list[str]:
        asked.clear()
        package = sources.packages()["parse"]
        made = making._judge_all(package, offline.suite(SMALL), bugs, tmp_path, lambda text: None)
        assert [row["reason"] for row in made] == ["no test fails"] * 3
        return sorted(asked)

    assert len(run()) == 3
    file: Path = tmp_path / "judged.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    lost = 3 if cut > 0 else 1
    assert len(run()) == lost
    assert run() == []
    assert sorted(file.read_bytes().splitlines()) == sorted(whole.splitlines())


[SMALL] = [record for record in offline.records() if "b96d2ehw" in record.instance_id]
