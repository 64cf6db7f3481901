"""SWE-smith's procedural bug generator and its validation, unmodified, on local folders.

`python smith_adapter.py ORDER.json`, run by `making` and `benchmarks/swesmith_agreement.py` in
SWE-smith's own environment: for the repository in the order's folder, SWE-smith's `generate.main`
is called as its command line calls it. Only where a repository comes from is ours: a copy of the
local folder instead of a clone from a public host. The bugs that it wrote go to stdout, one JSON
object a line, in an order that depends on the seed alone. An order with `reports` (instance, log
with the bug, log without) gets what `get_valid_report` says.
"""

import contextlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from swesmith.bug_gen.procedural import generate
from swesmith.constants import LOG_DIR_BUG_GEN, PREFIX_BUG
from swesmith.harness.grading import get_valid_report
from swesmith.profiles import registry
from swesmith.profiles.python import PythonProfile

ORDER = json.loads(Path(sys.argv[1]).read_text())


@dataclass
class Local(PythonProfile):
    """A repository in a folder of this machine."""

    owner: str = ORDER["owner"]
    repo: str = ORDER["name"]
    commit: str = ORDER["commit"]

    def _mirror_exists(self) -> bool:
        return True

    def clone(self, dest: str | None = None) -> tuple[str, bool]:
        target = Path(dest or self.repo_name)
        if target.exists():
            return str(target), False
        shutil.copytree(ORDER["folder"], target)
        return str(target), True


def main() -> None:
    registry.register_profile(Local)
    for report in ORDER.get("reports", []):
        print(json.dumps(get_valid_report(report["bug"], report["clean"], report["instance"])))
    if "folder" in ORDER:
        bugs()


def bugs() -> None:
    name = Local().repo_name
    with contextlib.redirect_stdout(sys.stderr):
        generate.main(name, max_bugs=ORDER["max_bugs"], seed=ORDER["seed"])
    folder = LOG_DIR_BUG_GEN / name
    for path in sorted(folder.rglob(f"{PREFIX_BUG}__*.diff")):
        _, strategy, digest = path.stem.split("__")
        entity = path.parent.name
        bug = {"strategy": strategy, "digest": digest, "entity": entity, "patch": path.read_text()}
        print(json.dumps(bug))


if __name__ == "__main__":
    main()
