"""Does SWE-smith's own validation find the same tests as ours, on the offline set?

python benchmarks/swesmith_agreement.py [PACKAGE ...]
python benchmarks/swesmith_agreement.py --tasks 1       only the first of each package

For every task the suite is run as SWE-smith runs it (`pytest --verbose`, its log between its
markers), with the bug and without, and SWE-smith's `get_valid_report` (0.0.9, unmodified, in its
own environment) reads the logs. Its FAIL_TO_PASS and PASS_TO_PASS are compared with the record's;
every difference is printed with its reason. Logs stay in the user's cache, so that an interrupted
run goes on.
"""

import argparse
import collections
import json
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lightning_ray.tasks.swe import cleanroom, offline, smith_environment, sources
from lightning_ray.tasks.swe.record import RepositoryTask

MARKS = ("+ : '>>>>> Start Test Output'", "+ : '>>>>> End Test Output'")
WORKERS = 2


def log(tree: dict[str, bytes], package: sources.Package, path: Path) -> None:
    """Runs a suite as SWE-smith does."""
    if path.exists():
        return
    python = sources.environment() / "bin" / "python"
    options = ["-o", "addopts=", "--disable-warnings", "--color=no", "--tb=no", "--verbose"]
    with tempfile.TemporaryDirectory() as folder:
        cleanroom.stage(tree, Path(folder))
        done = subprocess.run(
            [str(python), "-B", "-m", "pytest", *options, *package.targets],
            cwd=folder, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    path.write_text("\n".join([MARKS[0], done.stdout, MARKS[1], ""]))


def compare(
    package: sources.Package, records: list[RepositoryTask], folder: Path
) -> collections.Counter[str]:
    folder.mkdir(parents=True, exist_ok=True)
    clean = folder / "clean.log"
    log(sources.tree(package.name), package, clean)
    with ThreadPoolExecutor(WORKERS) as pool:
        for record in records:
            path = folder / f"{record.instance_id}.log"
            pool.submit(log, offline.graded_tree(record), package, path)
    order = {
        "owner": package.owner,
        "name": package.name,
        "commit": package.sdist_sha256[:8],
        "reports": [
            {
                "instance": record.to_smith(),
                "bug": str(folder / f"{record.instance_id}.log"),
                "clean": str(clean),
            }
            for record in records
        ],
    }
    found: collections.Counter[str] = collections.Counter()
    for record, report in zip(records, smith_environment.run(order), strict=True):
        same = True
        for column, ours in (
            ("FAIL_TO_PASS", record.fail_to_pass),
            ("PASS_TO_PASS", record.pass_to_pass),
        ):
            theirs = set(report[column])
            for test in set(ours) ^ theirs:
                why = reason(test, test in theirs, record)
                found[f"{column}: {why}"] += 1
                same = same and why == "an id with a space"
                print(f"{record.instance_id} {column} {test}: {why}")
        found["tasks that agree" if same else "tasks that differ"] += 1
    return found


def reason(test: str, theirs: bool, record: RepositoryTask) -> str:
    known = offline.suites()[record.package]
    if any(character.isspace() for character in test) and not theirs:
        return "an id with a space"  # which SWE-smith's log parser drops
    if test in known["others"] and theirs:
        return "a test that does not always pass"
    return "unexplained"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", choices=[*sources.packages(), []])
    parser.add_argument("--tasks", type=int, help="of each package, at most")
    parser.add_argument("--work", type=Path, default=sources.cache() / "agreement")
    options = parser.parse_args()
    total: collections.Counter[str] = collections.Counter()
    for name in options.packages or sources.packages():
        records = [r for r in offline.records() if r.package == name][: options.tasks]
        counts = compare(sources.packages()[name], records, options.work / name)
        print(json.dumps({"package": name, "tasks": len(records)} | counts), flush=True)
        total += counts
    print(json.dumps(total))
