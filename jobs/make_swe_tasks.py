"""Makes the offline repair tasks anew: bugs in pinned PyPI packages, validated by their suites.

python jobs/make_swe_tasks.py                 all packages of the manifest
python jobs/make_swe_tasks.py toolz parse     some of them
python jobs/make_swe_tasks.py --out FOLDER    where tasks.jsonl and suites.json go
python jobs/make_swe_tasks.py --export FOLDER makes nothing: the checked-in tasks as rows of
                                              SWE-smith's and SWE-bench's forms
python jobs/make_swe_tasks.py --fetch         makes nothing: downloads the packages, for an image
                                              whose pods reach no registry

What is done already is kept in ~/.cache/lightning_ray/swe/making, so an interrupted run goes on.
"""

import argparse
import sys
import time
from pathlib import Path

from lightning_ray.records import Split
from lightning_ray.tasks.swe import making, offline, sources
from lightning_ray.tasks.swe.preparation import rows

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", choices=[*sources.packages(), []])
    parser.add_argument("--out", type=Path, default=sources.DATA)
    parser.add_argument("--work", type=Path, default=sources.cache() / "making")
    parser.add_argument("--export", type=Path)
    parser.add_argument("--fetch", action="store_true")
    options = parser.parse_args()
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {line}", flush=True)

    if options.fetch:
        for name in options.packages or sources.packages():
            say(f"{name}: {len(sources.tree(name))} files")
        sys.exit()
    if options.export:
        options.export.mkdir(parents=True, exist_ok=True)
        some = {split: [r for r in offline.records() if r.split is split] for split in Split}
        for path in rows.write(some, options.export):
            say(f"wrote {path}")
        sys.exit()
    suites, made = making.make(options.packages or sources.packages(), options.work, say)
    making.write(suites, made, options.out)
    making.report(made, say)
