"""Checkpoints are copied elsewhere and come back, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import fs

from lightning_ray.config import ConfigError
from lightning_ray.records import PolicyVersion
from lightning_ray.run import storage
from lightning_ray.run.checkpoint import Checkpoints, State
from lightning_ray.run.cycle import Phase, Position


def write(checkpoints: Checkpoints, step: int) -> None:
    def fill(folder: Path) -> State:
        (folder / "hf").mkdir()
        (folder / "hf" / "weights").write_text(f"weights {step}")
        return State(Position(step, Phase.COLLECT), PolicyVersion("l", step), "checksum", step)

    checkpoints.write(step, fill)


@pytest.fixture(params=["{}/there", "file://{}/there", "memory:/{}/there"])
def url(request, tmp_path):
    return request.param.format(tmp_path)


def test_a_machine_without_checkpoints_gets_those_that_were_kept(url, tmp_path):
    here = Checkpoints(tmp_path / "here", 1, url)
    for step in (1, 2, 3):
        write(here, step)
        if step == 1:
            here.mark_best(1, 0.5)
    here.settle()

    said: list[str] = []
    other = Checkpoints(tmp_path / "other", 1, url)
    other.fetch(said.append)
    assert len(said) == 2
    folder, state = other.latest()
    assert (folder.name, state.version.step) == ("step-00003", 3)
    assert (folder / "hf" / "weights").read_text() == "weights 3"
    assert other.best()[0].name == "step-00001"
    other.fetch(pytest.fail)  # what is here is not replaced


def test_a_copy_that_was_cut_off_is_not_fetched(url, tmp_path, monkeypatch):
    here = Checkpoints(tmp_path / "here", 2, url)
    write(here, 1)
    here.settle()
    copy = storage.Mirror._copy

    def killed(self, file, target):
        if file.name == "state.json":
            raise OSError("the connection was lost")
        copy(self, file, target)

    monkeypatch.setattr(storage.Mirror, "_copy", killed)
    write(here, 2)
    with pytest.raises(OSError, match="the connection was lost"):
        here.settle()
    monkeypatch.undo()
    other = Checkpoints(tmp_path / "other", 2, url)
    other.fetch(print)
    assert other.latest()[1].version.step == 1
    # The next checkpoint makes up for it.
    here = Checkpoints(tmp_path / "here", 2, url)
    write(here, 3)
    here.settle()
    third = Checkpoints(tmp_path / "third", 2, url)
    third.fetch(print)
    assert [folder.name for folder in third._folders()] == ["step-00002", "step-00003"]


def test_a_url_that_nobody_knows_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.storage=nothing://x"):
        Checkpoints(tmp_path, 1, "nothing://x")


def test_other_files_there_are_left_alone(tmp_path):
    there = tmp_path / "there"
    (there / "mine").mkdir(parents=True)
    (there / "mine" / "notes").write_text("mine")
    here = Checkpoints(tmp_path / "here", 1, str(there))
    for step in (1, 2):
        write(here, step)
    here.settle()
    assert sorted(path.name for path in there.iterdir()) == ["mine", "step-00002"]
    assert fs.LocalFileSystem().get_file_info(str(there / "mine" / "notes")).is_file
