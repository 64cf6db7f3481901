"""Rows of SWE-smith's or SWE-bench's form from wherever they lie, as typed records.

A source is a JSON or Parquet file, a folder of them, a folder that `datasets` saved, or the name
of a data set on the Hugging Face hub, each with `:split` behind it where it has several.
`records` yields one `Found` per row, in the order of the source; `write` is the way back, for other
tools.

Invariants: every row is yielded or is an error that names its file and line (or row); reading the
same source twice gives the same rows in the same order; no whole data set is held in memory.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lightning_ray.config import ConfigError
from lightning_ray.records import Split
from lightning_ray.tasks.swe.record import Format, RecordError, RepositoryTask

# Rows of a Parquet file read at a time; one can hold thousands of test ids.
BATCH_ROWS = 64
FORMS = {"swe-smith": RepositoryTask.to_smith, "swe-bench": RepositoryTask.to_bench}
_SUFFIXES = (".jsonl", ".json", ".parquet")


class RowsError(ConfigError):
    """A source that cannot be read; the message says which one, where, and what to do."""


@dataclass(frozen=True)
class Found:
    """One row: where it stands, and the record in it or what is wrong with it."""

    where: str
    record: RepositoryTask | None
    problem: str = ""


def records(source: str, format: Format | None = None) -> Iterator[Found]:
    """The rows of `source`. `format` is told from each row where it is not given.

    Raises:
        RowsError: there is no such source, or a file of it is damaged.
    """
    for where, row in _rows(source):
        if isinstance(row, str):
            yield Found(where, None, row)
            continue
        try:
            if "task_id" in row and "instance_id" not in row:
                names = {"instance_id": row["task_id"], "problem_statement": row["statement"]}
                row = {"patch": "", **row, **names}
            yield Found(where, RepositoryTask.from_row(row, format))
        except (RecordError, KeyError) as error:
            yield Found(where, None, str(error))


def fingerprint(source: str) -> str:
    """What tells one state of a source from another, for data cards: the hash of its files, or the
    hub's name for the revision."""
    path, split = _path(source)
    if path is None:
        return f"hub:{_load(source).info.version or ''} {_load(source)._fingerprint}"
    digest = hashlib.sha256(split.encode())
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(file.name.encode())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"


def write(records: Mapping[Split, Sequence[RepositoryTask]], folder: Path) -> list[Path]:
    """Writes records into an existing folder as rows for other tools, a file for each split and
    form; returns the files, each of which appears whole."""
    written = []
    for split, some in records.items():
        for form, row_of in FORMS.items():
            path = folder / f"{split}.{form}.jsonl"
            lines = (json.dumps(row_of(one) | {"split": split}, ensure_ascii=False) for one in some)
            partial = path.with_name(f"{path.name}.partial")
            partial.write_text("".join(f"{line}\n" for line in lines))
            partial.replace(path)
            written.append(path)
    return written


def _rows(source: str) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Each row with where it stands; as text what is wrong with it."""
    path, split = _path(source)
    if (
        path is None
        or (path / "dataset_info.json").exists()
        or (path / "dataset_dict.json").exists()
    ):
        for number, row in enumerate(_load(source), 1):
            yield f"{source}, row {number}", row
        return
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
        # As on the hub: data/train-00000-of-00004.parquet.
        files = [file for file in files if not split or file.name.startswith(split)]
    if not files:
        raise RowsError(f"{source}: no {', '.join(_SUFFIXES)} file in this folder")
    for file in files:
        yield from _parquet(file) if file.suffix == ".parquet" else _json(file)


def _json(file: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """JSON lines, or one JSON array, as SWE-smith's own tools write it."""
    try:
        with file.open("rb") as lines:
            if lines.read(1) == b"[":
                for number, row in enumerate(json.loads(file.read_bytes()), 1):
                    yield f"{file}, item {number}", _object(row)
                return
            lines.seek(0)
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = _object(json.loads(line.decode()))
                except (ValueError, RecursionError) as error:
                    row = f"not JSON in UTF-8: {error}"
                yield f"{file}, line {number}", row
    except OSError as error:
        raise RowsError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RowsError(f"{file} is no JSON array: {error}") from error


def _object(row: object) -> dict[str, Any] | str:
    return row if isinstance(row, dict) else "not a JSON object"


def _parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        said = str(error).splitlines()[0]
        raise RowsError(f"{file}, after row {number}: no readable Parquet file: {said}") from error


def _path(source: str) -> tuple[Path | None, str]:
    """The file or folder of a source, None if it has none, and its split."""
    name, _, split = source.partition(":")
    for text, of in ((source, ""), (name, split)):
        path = Path(text).expanduser()
        if path.exists():
            return path, of
    if Path(name).suffix in _SUFFIXES or name.startswith((".", "/", "~")):
        raise RowsError(f"{source}: there is no such file or folder")
    return None, split


@functools.lru_cache(maxsize=4)  # it is read several times, and memory-mapped
def _load(source: str) -> Any:
    """A data set that `datasets` knows, from disk or from the hub.

    Raises:
        RowsError: there is none, or it has several splits and none is named.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    name, _, split = source.partition(":")
    path, _ = _path(source)
    try:
        found = datasets.load_from_disk(str(path)) if path else datasets.load_dataset(name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError, HfHubHTTPError) as error:
        raise RowsError(
            f"{source}: no such file, folder or data set on the hub, or it cannot be fetched "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
    if not isinstance(found, datasets.DatasetDict):
        return found
    if split not in found and len(found) > 1:
        raise RowsError(
            f"{source}: name a split, as {name}:{next(iter(found))} ({', '.join(found)})"
        )
    return found[split] if split in found else next(iter(found.values()))
