"""Orders and reports of rooms without a gateway: by way of the API server alone.

An order goes into the Secret of its Job, packed and in parts, since an environment takes no text
above 128 KiB (`pack`); `BOOTSTRAP` is the pod's program in the place of `manifest`'s. The report
comes back as one line of the pod's log, which has nothing else (`unpack`): what the order's command
prints does not go there.

Invariants: no part and no report passes its limit; a report that is not whole is none.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import zlib

# Linux: MAX_ARG_STRLEN, less the variable's name.
_MOST_PART = 96 << 10
# Kubernetes takes 1 MiB, and the names of the parts count.
MOST_PACKED = 1_000_000
# Nodes begin a new file of a container's log at 10 MiB, and give only that one away.
MOST_LINE = 8 << 20
MOST_REPORT = 64 << 20
_MARK = b"lightning-ray report: "

BOOTSTRAP = f"""
import base64, gzip, itertools, json, os
names = ("LIGHTNING_RAY_ORDER_%d" % number for number in itertools.count())
parts = itertools.takewhile(bool, (os.environ.pop(name, "") for name in names))
told, _, workspace = gzip.decompress(base64.b64decode("".join(parts))).partition(b"\\n")
log = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
space = {{"__name__": "entry"}}
def request(name, body=None):
    if body is None:
        return workspace
    line = {_MARK!r} + base64.b64encode(gzip.compress(body)) + b"\\n"
    if len(line) > {MOST_LINE}:
        raise space["Ended"]("output", "its report is larger than {MOST_LINE} bytes, packed")
    while line:
        line = line[os.write(log, line):]
order = json.loads(told)
for name, source in order.pop("entry"):
    exec(compile(source, name, "exec"), space)
space["main"](order, request, "")
"""


def pack(order: bytes, workspace: bytes) -> tuple[str, ...]:
    """An order (one line) and its files, as `staging.room_files` makes them, for a Secret.

    Raises:
        ValueError: it is too large.
    """
    packed = gzip.compress(order + b"\n" + workspace)
    text = base64.b64encode(packed).decode()
    if len(text) > MOST_PACKED:
        raise ValueError(f"{len(text)} bytes, packed, are more than a Secret holds ({MOST_PACKED})")
    return tuple(text[start : start + _MOST_PART] for start in range(0, len(text), _MOST_PART))


def unpack(log: bytes) -> bytes | None:
    """The report in a pod's log; None: there is none, or not to its end."""
    line, end, _ = log.partition(_MARK)[2].partition(b"\n")
    try:
        stream = zlib.decompressobj(wbits=31)
        report = stream.decompress(base64.b64decode(line), MOST_REPORT)
    except (binascii.Error, zlib.error):
        return None
    return report if end and stream.eof else None
