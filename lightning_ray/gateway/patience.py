"""How long a model call may be held before its client must hear something.

The SDKs of OpenAI and Anthropic, and what is built on them, say with each request after how many
seconds they give up; of others it is not known. A call that is held too long is sent again, which
costs one of the client's few tries.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_ray.config import GatewaySection

_STATED = ("x-stainless-read-timeout", "x-stainless-timeout")  # by Python's, by JavaScript's
_SHARE = 0.8  # of it: when the gate opens, the answer has to be made in what is left
# Claude Code's own runtime ends a request after 300 s, whatever its SDK says.
_CLAUDE_CODE, _CLAUDE_CODE_S = "claude-cli", 300.0


def hold_s(gateway: GatewaySection, headers: Mapping[str, str]) -> float:
    """Seconds that a call with these headers may be held while the gate is closed."""
    said = [headers[name] for name in _STATED if name in headers]
    try:
        stated = float(said[0])
    except (IndexError, ValueError):
        return gateway.hold_s
    if not stated > 0:
        return gateway.hold_s
    if headers.get("user-agent", "").startswith(_CLAUDE_CODE):
        stated = min(stated, _CLAUDE_CODE_S)
    return min(_SHARE * stated, gateway.longest_hold_s)
