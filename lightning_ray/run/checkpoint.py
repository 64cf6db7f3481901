"""Checkpoints of a run: `checkpoints/step-00004/` with `state.json`, `trainer/` and `hf/`.

A checkpoint is written under a temporary name, made durable, and renamed; one that goes is renamed
back first. Invariants: a folder without `.partial` in its name is whole; the best one is never
pruned; the weights in it have the checksum that its state names; reading changes nothing. With
`storage`, all of them are copied there too, in the background (`storage.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from lightning_ray.files import fsync, replace
from lightning_ray.records import PolicyVersion
from lightning_ray.run.cycle import Position
from lightning_ray.run.groups import Group
from lightning_ray.run.storage import BEST, STATE, Mirror


@dataclass(frozen=True)
class State:
    """What a run resumes from. `position` is what comes next; `checksum` is that of the exported
    weights; `next_place` is the first place of the task order that no group has; `pending` are the
    groups in flight, `consumed` the ids of those that the last update took; `ancestry` are the last
    versions of earlier lineages whose weights these ones come from; `ranks` is how many wrote the
    trainer's part."""

    position: Position
    version: PolicyVersion
    checksum: str
    next_place: int
    consumed: tuple[str, ...] = ()
    pending: tuple[Group, ...] = ()
    ancestry: tuple[PolicyVersion, ...] = ()
    ranks: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> State:
        return TypeAdapter(State).validate_json(text, strict=True)

    def descends_from(self, version: PolicyVersion) -> bool:
        """True if these weights are `version` or were trained from it."""
        known = (*self.ancestry, self.version)
        return any(v.lineage == version.lineage and version.step <= v.step for v in known)


class Checkpoints:
    """The checkpoints of the run in `run_dir`. `storage` is the path or URL of a copy.

    Raises:
        ConfigError: no file system is known for the URL.
        OSError: from `fetch`, `write`, `mark_best` and `settle`, if the storage refused.
    """

    def __init__(self, run_dir: Path, keep: int, storage: str | None = None) -> None:
        self._root, self._keep = run_dir / "checkpoints", keep
        self._mirror = Mirror(storage) if storage else None
        self._root.mkdir(parents=True, exist_ok=True)

    def fetch(self, say: Callable[[str], None]) -> None:
        """Brings the checkpoints of the storage here, if there are none here."""
        if self._mirror and self.latest() is None:
            self._mirror.fetch(self._root, say)

    def settle(self) -> None:
        """Returns when the storage has what is here. Before anything here is removed, too."""
        if self._mirror:
            self._mirror.wait()

    def latest(self) -> tuple[Path, State] | None:
        """The newest whole checkpoint and its state."""
        folders = self._folders()
        if not folders:
            return None
        return folders[-1], State.from_json((folders[-1] / STATE).read_text())

    def write(self, step: int, fill: Callable[[Path], State]) -> Path:
        """Writes the checkpoint of `step`; `fill` puts everything but the state, which it returns,
        into the folder it is given."""
        self.settle()
        final = self._root / f"step-{step:05d}"
        for left_over in self._root.glob("*.partial"):
            shutil.rmtree(left_over)
        partial = final.with_suffix(".partial")
        partial.mkdir()
        (partial / STATE).write_text(fill(partial).to_json())
        _fsync_tree(partial)
        if final.exists():
            _delete(final, ".old.partial")
        partial.rename(final)
        fsync(self._root)
        self._prune()
        return final

    def mark_best(self, step: int, score: float) -> None:
        """Keeps the checkpoint of `step` if its score is the best so far (a later one wins a
        tie)."""
        best = self.best()
        if best is None or score >= best[1]:
            mark = json.dumps({"step": step, "score": score})
            replace(self._root / BEST, mark.encode(), durable=True)
            fsync(self._root)
            self.settle()
            self._prune()

    def best(self) -> tuple[Path, float] | None:
        """The best validated checkpoint and its score."""
        pointer = self._root / BEST
        if not pointer.exists():
            return None
        data = json.loads(pointer.read_text())
        folder = self._root / f"step-{data['step']:05d}"
        return (folder, data["score"]) if folder.exists() else None

    def _folders(self) -> list[Path]:
        return sorted(path.parent for path in self._root.glob(f"step-?????/{STATE}"))

    def _prune(self) -> None:
        best = self.best()
        for folder in self._folders()[: -self._keep]:
            if best is None or folder != best[0]:
                _delete(folder, ".partial")
        if self._mirror:
            self._mirror.update(self._root, self._folders())


def _delete(folder: Path, suffix: str) -> None:
    """Removes a folder, which at no moment is there in part."""
    shutil.rmtree(folder.rename(folder.with_suffix(suffix)))


def _fsync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        fsync(path)
    fsync(folder)
