"""Images of podman that are made without a registry: this machine's Python, git and a shell, with
the libraries that they need, and what a test adds."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

# The container runtime of many a distribution cannot raise limits of resources on a machine that is
# a container or a small VM itself, nor work with control groups of both versions; podman can use
# another one. A user's `containers.conf` says so, and so does this.
SETTINGS = """
[engine]
runtime = "runc"
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
"""
_PROGRAMS = ("/bin/sh", "/usr/bin/git", "/bin/cp", "/bin/cat", "/bin/ls", "/bin/sleep")
_LEFT_OUT = {"site-packages", "test", "idlelib", "tkinter", "ensurepip", "__pycache__"}


def configure(folder: Path) -> None:
    """Sets podman up for this process and those that it starts."""
    file = folder / "containers.conf"
    file.write_text(SETTINGS)
    os.environ["CONTAINERS_CONF"] = str(file)


def base(name: str) -> str:
    """Makes the image `name`, which has Python where this machine has it, and as python3."""
    python = os.path.realpath(sys.executable)
    stdlib = Path(sysconfig.get_path("stdlib"))
    git = Path("/usr/lib/git-core")
    modules = [*stdlib.glob("lib-dynload/*.so"), git / "git"]  # what they load
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for folder in (stdlib, git, Path("/usr/share/git-core/templates")):
                tar.add(folder, filter=_needed)
            for path in sorted({python, *_PROGRAMS, *_libraries([python, *_PROGRAMS, *modules])}):
                _add(tar, path)
            _link(tar, "/usr/local/bin/python3", python)
            _write(
                tar, "/etc/passwd", b"root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n"
            )
            for folder in ("/tmp", "/root", "/proc", "/sys", "/dev"):
                entry = tarfile.TarInfo(folder[1:])
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
                tar.addfile(entry)
        file.seek(0)
        subprocess.run(["podman", "import", "--quiet", "-", name], stdin=file, check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
    return name


def with_folders(name: str, image: str, folders: dict[str, Path]) -> str:
    """Makes `name` of `image` with folders of this machine at other places."""
    with tempfile.TemporaryDirectory() as context:
        lines = [f"FROM {image}"]
        for number, (place, folder) in enumerate(folders.items()):
            subprocess.run(["cp", "-a", folder, f"{context}/{number}"], check=True)
            lines.append(f"COPY {number} {place}")
        Path(context, "Containerfile").write_text("\n".join(lines))
        argv = ["podman", "build", "--quiet", "--pull-never", "--tag", name, context]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return name


def remove(*names: str) -> None:
    subprocess.run(["podman", "rmi", "--force", *names], check=False, capture_output=True)


def _needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = set(Path(entry.name).parts)
    unused = parts & _LEFT_OUT or any(part.startswith("config-") for part in parts)
    # Most of git's programs are git itself under another name.
    return None if unused or entry.name.endswith(".a") else entry


def _libraries(binaries: Iterable[str | Path]) -> set[str]:
    told = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True).stdout
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    # What compiled packages of a harness want: the C and C++ libraries in all their parts.
    parts = r"lib(?:gcc_s|stdc\+\+|c|m|dl|rt|util|pthread|resolv)\.so\.\d+"
    wanted = re.findall(rf"{parts} \(libc6,[^)]*\) => (\S+)", known)
    return {*re.findall(r"(?:=> |^\t)(/\S+) \(0x", told, re.M), *wanted}


def _add(tar: tarfile.TarFile, path: str) -> None:
    """The file itself under this name, through all links."""
    entry = tar.gettarinfo(os.path.realpath(path), path[1:])
    entry.type, entry.linkname = tarfile.REGTYPE, ""
    entry.size = os.path.getsize(path)
    with open(path, "rb") as file:
        tar.addfile(entry, file)


def _link(tar: tarfile.TarFile, path: str, target: str) -> None:
    entry = tarfile.TarInfo(path[1:])
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _write(tar: tarfile.TarFile, path: str, content: bytes) -> None:
    entry = tarfile.TarInfo(path[1:])
    entry.size, entry.mode = len(content), 0o644
    tar.addfile(entry, io.BytesIO(content))
