"""Which requests are being answered, by which gateway replica: what makes a retry the same call.

SDKs send an identical body again after a time-out or a lost connection. A request *joins* an
earlier one of its attempt only if the body is the same and the earlier connection is gone, or the
SDK's retry header says so; then it gets the same answer, also from another replica. Identical
requests on live connections are deliberate samples.

Pure: times are passed in. Invariants: a claim whose replica is dead blocks nobody; an answer that
was recorded but not delivered is given to the first request that asks for it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

# A replica reports every second while it works; a silence this long means that it is gone.
LEASE_S = 5.0


class Verdict(StrEnum):
    """What a gateway replica does with a request."""

    ANSWER = "answer"  # sample; the claim is new
    WAIT = "wait"  # another one samples for it: ask again in a moment
    REPLAY = "replay"  # give the recorded calls


@dataclass(frozen=True)
class Opening:
    """`calls` are the ids of the recorded calls to give again."""

    verdict: Verdict
    claim_id: int = 0
    calls: tuple[str, ...] = ()


@dataclass
class _Claim:
    claim_id: int
    request: str
    replica: str
    calls: tuple[str, ...] = ()  # set when they are recorded
    connected: bool = True  # somebody is listening for the answer


@dataclass
class Claims:
    """The claims of all live attempts, by attempt id; they are numbered from `next_id` on."""

    next_id: int = 1
    _claims: dict[str, list[_Claim]] = field(default_factory=dict)
    _seen: dict[str, float] = field(default_factory=dict)

    def open(
        self, attempt_id: str, request: str, replica: str, is_retry: bool, now: float
    ) -> Opening:
        """Decides about a request with the fingerprint `request`."""
        self._seen[replica] = now
        claims = self._claims.setdefault(attempt_id, [])
        for claim in [c for c in claims if c.request == request]:
            alive = now - self._seen.get(claim.replica, now) <= LEASE_S
            if claim.calls:
                if is_retry or not (claim.connected and alive):
                    # From here on this replica delivers it.
                    claim.connected, claim.replica = True, replica
                    return Opening(Verdict.REPLAY, claim.claim_id, claim.calls)
            elif not alive:
                claims.remove(claim)
            elif is_retry or not claim.connected:
                return Opening(Verdict.WAIT)
        claims.append(_Claim(self.next_id, request, replica))
        self.next_id += 1
        return Opening(Verdict.ANSWER, claims[-1].claim_id)

    def recorded(self, attempt_id: str, claim_id: int, calls: tuple[str, ...]) -> None:
        """The calls of a claim are on disk."""
        for claim in self._find(attempt_id, claim_id):
            claim.calls = calls

    def detached(self, attempt_id: str, claim_id: int) -> None:
        """Nobody listens any longer."""
        for claim in self._find(attempt_id, claim_id):
            claim.connected = False

    def dropped(self, attempt_id: str, claim_id: int) -> None:
        """The answer will not come: the generation failed or was stopped."""
        claims = self._claims.get(attempt_id, [])
        claims[:] = [c for c in claims if c.claim_id != claim_id or c.calls]

    def alive(self, replica: str, now: float) -> None:
        """A sign of life of a replica."""
        self._seen[replica] = now

    def ended(self, attempt_id: str) -> None:
        """The attempt takes no more requests."""
        self._claims.pop(attempt_id, None)

    def _find(self, attempt_id: str, claim_id: int) -> list[_Claim]:
        return [c for c in self._claims.get(attempt_id, ()) if c.claim_id == claim_id]
