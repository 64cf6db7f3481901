"""Which Jobs to create and to delete, and which have ended: wishes against what is seen. Pure.

`want` and `release` say what is wished; lists and watch events of Jobs and pods say what is there;
`actions` says what is to be done about the difference. Whoever carries an action out reports with
`created` or `refused`. Time is passed in, in seconds.

Invariants, from any state and any order of events: a wished Job that is not there is created, at
most `most` at a time and `per_second` a second; what is no longer wished counts until nothing of it
runs; a Job of this run that nobody wishes is deleted, unless it has ended and such are kept; a Job
that was there and is gone is an end, never created again; each wished Job ends once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from lightning_ray.records import Json, Outcome
from lightning_ray.rollouts.pods.outcomes import STARTING, End, Patience, finished, standing

Kind = Literal["jobs", "pods"]

JOB_LABEL = "job-name"  # of every pod that belongs to a Job; old and new servers set it
_AGAIN_S = 1.0  # a refused creation is tried again after so long, then twice as long, ...
_MOST_AGAIN_S = 30.0  # ... and so long at most
_MOMENT_S = 5.0  # what takes no longer is not worth a line
_START_S = 60.0  # nor is an ordinary start, with the pull of an image
_LINGER_S = 60.0  # a pod that is not gone by then is on a lost node: others need not wait for it


class Phase(StrEnum):
    """Where a wished Job stands."""

    WISHED = "wished"  # not created yet
    CREATING = "creating"  # somebody is at it
    THERE = "there"
    ENDED = "ended"  # it counts no more, and goes as soon as it is released


@dataclass(frozen=True)
class Create:
    name: str


@dataclass(frozen=True)
class Delete:
    """`uid` makes sure that no namesake is meant."""

    name: str
    uid: str


@dataclass(frozen=True)
class Finish:
    name: str
    end: End


Action = Create | Delete | Finish


@dataclass
class _Wish:
    phase: Phase
    since: float  # when the phase began, or what it waits for changed
    waits: str = ""
    unpulled: str = ""  # why its image could not be pulled, as the node said first
    patience_s: float | None = None
    urgent: bool = False
    holds: bool = False  # counts as open: its Job is there, or may be
    gone: str = ""  # the uid of its Job, if that was deleted before we were told of its creation
    tries: int = 0
    not_before: float = 0.0


@dataclass
class _Seen:
    """A Job's latest state, and those of its pods in the order in which they came, by uid. What is
    older than `since` does not know of it."""

    job: Json | None = None
    pods: dict[str, Json] = field(default_factory=dict)
    deleting: bool = False
    since: float = 0.0


class Reconciler:
    """The Jobs of one run. With `keep`, those that have ended stay, of an earlier life as well."""

    def __init__(
        self, patience: Patience, most: int, per_second: float, *, keep: bool = False
    ) -> None:
        self._patience, self._most, self._per_second = patience, most, per_second
        self._keep = keep
        self._wishes: dict[str, _Wish] = {}
        self._urgent: dict[str, None] = {}  # wished, in order
        self._waiting: dict[str, None] = {}  # after those
        self._seen: dict[str, _Seen] = {}
        self._kept: set[str] = set()
        self._synced: set[Kind] = set()
        self._changed: set[str] = set()
        self._open = 0  # wished Jobs that are being created or there
        self._creating: set[str] = set()  # asked for, and not seen yet: also when wished no more
        self._going: dict[str, float] = {}  # no longer wished, and may run: since when
        self._tokens, self._refilled = per_second, 0.0

    # -- what is wished -------------------------------------------------------------------------

    def want(self, name: str, now: float, *, there: bool = False, urgent: bool = False) -> None:
        """Wishes a Job; one that is `there` already is taken over, not created; one that is
        `urgent` is created before those that wait."""
        phase = Phase.THERE if there else Phase.WISHED
        self._wishes[name] = _Wish(phase, now, urgent=urgent, holds=there)
        self._going.pop(name, None)
        if there:
            self._open += 1
            self._changed.add(name)
        else:
            (self._urgent if urgent else self._waiting)[name] = None

    def release(self, name: str) -> None:
        """Nobody wishes this Job any more."""
        wish = self._wishes.pop(name, None)
        if wish:
            self._leave(name, wish)
        self._waiting.pop(name, None)
        self._urgent.pop(name, None)
        self._changed.add(name)

    def forget(self, name: str) -> None:
        """Nobody wishes this Job any more, and it may stay."""
        self.release(name)
        self._kept.add(name)

    def not_deleted(self, name: str) -> None:
        """The API server did not delete it: it is to be asked again."""
        if seen := self._seen.get(name):
            seen.deleting = False
            self._changed.add(name)

    # -- what is seen ---------------------------------------------------------------------------

    def listed(self, kind: Kind, objects: Iterable[Json], asked_at: float) -> None:
        """All that there was at `asked_at`: what was seen before and is not among it is gone."""
        there = {o["metadata"]["uid"]: o for o in objects}
        before = [seen for seen in self._seen.values() if seen.since < asked_at]
        known = [s.job for s in before if s.job] if kind == "jobs" else _pods(before)
        for old in known:
            if old["metadata"]["uid"] not in there:
                self.event(kind, "DELETED", old)
        for new in there.values():
            self.event(kind, "MODIFIED", new)
        if kind not in self._synced:
            # Nobody saw what happened meanwhile, so whatever waits begins to wait now.
            for wish in self._wishes.values():
                wish.since = max(wish.since, asked_at)
        self._synced.add(kind)
        self._changed.update(self._wishes)

    def lost(self, kind: Kind) -> None:
        """Nobody sees any more what happens: nothing is decided until the next list."""
        self._synced.discard(kind)

    def event(self, kind: Kind, type: str, thing: Json) -> None:
        """A watch event: ADDED, MODIFIED or DELETED."""
        metadata = thing["metadata"]
        labels = metadata.get("labels") or {}
        name = metadata["name"] if kind == "jobs" else labels.get(JOB_LABEL, "")
        seen = self._seen.setdefault(name, _Seen())
        uid = metadata["uid"]
        if kind == "pods":
            # A pod that is gone stays as it was: a second one must not count as the first.
            if type != "DELETED" or uid in seen.pods:
                gone = {"deletionTimestamp": "gone"} if type == "DELETED" else {}
                seen.pods[uid] = {**thing, "metadata": {**metadata, **gone}}
        elif type != "DELETED":
            self._creating.discard(name)
            seen.job, seen.deleting = thing, "deletionTimestamp" in metadata
        elif seen.job and seen.job["metadata"]["uid"] == uid:
            self._kept.discard(name)
            if (wish := self._wishes.get(name)) and wish.phase is Phase.CREATING:
                wish.gone = uid
            seen.job = None  # its pods may outlive it, and `runs` is asked for them
        self._changed.add(name)

    def created(self, name: str, job: Json, now: float) -> None:
        """The Job is there, as the server answered."""
        self._creating.discard(name)
        wish = self._wishes.get(name)
        if wish and wish.phase is Phase.CREATING:
            wish.phase, wish.since = Phase.THERE, now
        seen = self._seen.setdefault(name, _Seen())
        if not (wish and wish.gone == job["metadata"]["uid"]):
            seen.job, seen.since = seen.job or job, now
        self._changed.add(name)

    def refused(self, name: str, problem: str, now: float, *, for_good: bool) -> None:
        """The Job could not be created, or nobody knows whether it was."""
        if for_good:
            self._creating.discard(name)
        wish = self._wishes.get(name)
        if wish is None or wish.phase is not Phase.CREATING:
            return
        wish.since = wish.since if wish.waits else now
        wish.waits = problem
        if for_good:
            self._leave(name, wish)
            wish.phase = Phase.ENDED
            self._changed.add(name)
        else:
            wish.phase, wish.tries = Phase.WISHED, wish.tries + 1
            pause = min(_AGAIN_S * 2 ** (wish.tries - 1), _MOST_AGAIN_S)
            wish.not_before = now + pause
            if wish.urgent:
                self._urgent = {name: None, **self._urgent}
            else:
                self._waiting = {name: None, **self._waiting}

    # -- what is to be done ---------------------------------------------------------------------

    def actions(self, now: float, *, everything: bool = False) -> list[Action]:
        """What to do now. `everything` looks also at Jobs that nothing was heard of, for those
        that only wait: once a second is often enough."""
        found: list[Action] = []
        changed, self._changed = self._changed, set()
        for name in [*self._wishes, *self._seen] if everything else changed:
            found += self._about(name, now)
        found += self._creations(now)
        return list(dict.fromkeys(found))

    def _about(self, name: str, now: float) -> list[Action]:
        wish, seen = self._wishes.get(name), self._seen.get(name)
        if wish is None:
            if seen and seen.job and not seen.deleting and name not in self._kept:
                if self._keep and finished(seen.job):
                    self._kept.add(name)
                    return []
                seen.deleting = True
                self._going.setdefault(name, now)
                return [Delete(name, seen.job["metadata"]["uid"])]
            if seen and not seen.job and not self.runs(name):
                del self._seen[name]  # pods without a Job go by themselves
            return []
        if wish.phase is Phase.ENDED and wish.waits:
            end, wish.waits = End(Outcome.LAUNCH_FAULT, wish.waits), ""
            return [Finish(name, end)]
        return self._standing(name, wish, seen, now) if wish.phase is Phase.THERE else []

    def _standing(self, name: str, wish: _Wish, seen: _Seen | None, now: float) -> list[Action]:
        if not self.synced:
            return []
        pods = list(seen.pods.values()) if seen else []
        how = standing(seen.job if seen else None, pods, self._patience)
        # The words change all the time; what it waits for changes with the patience for it.
        if how.patience_s != wish.patience_s:
            wish.patience_s, wish.since = how.patience_s, now
        wish.waits = how.waits
        if how.waits.startswith("ErrImagePull: "):
            wish.unpulled = how.waits
        elif how.waits.startswith("ImagePullBackOff") and wish.unpulled:
            wish.waits += f" ({wish.unpulled})"  # a node that waits need not say what for
        end = how.end
        if end is None and how.patience_s is not None and now > wish.since + how.patience_s:
            end = End(how.then, f"{wish.waits} (for {how.patience_s:g} s)")
        if end is None:
            return []
        self._leave(name, wish)
        wish.phase, wish.waits = Phase.ENDED, ""
        return [Finish(name, end)]

    def _creations(self, now: float) -> list[Action]:
        passed = now - self._refilled
        # Less than one a second still saves up for one.
        most = max(1.0, self._per_second)
        self._tokens = min(most, self._tokens + passed * self._per_second)
        self._refilled = now
        if self._tokens < 1 or not self.synced:
            return []
        for name, left in list(self._going.items()):
            self._going[name] = since = min(left, now)
            if now >= since + _LINGER_S or not self._occupies(name):
                del self._going[name]
                self._creating.discard(name)
        found: list[Action] = []
        for queue in (self._urgent, self._waiting):
            for name in list(queue):
                wish = self._wishes[name]
                full = self._open + len(self._going) >= self._most
                # Those that hold a place were refused before, and stand first.
                if self._tokens < 1 or (full and not wish.holds):
                    break
                if wish.not_before > now:
                    continue
                del queue[name]
                wish.phase, wish.since = Phase.CREATING, now
                self._open += not wish.holds
                wish.holds = True
                self._tokens -= 1
                self._creating.add(name)
                found.append(Create(name))
        return found

    def _leave(self, name: str, wish: _Wish) -> None:
        if wish.holds:
            self._open -= 1
            wish.holds = False
            self._going[name] = math.inf  # from the next look on

    def _occupies(self, name: str) -> bool:
        """True if something of the Job runs, or may begin to."""
        seen = self._seen.get(name)
        if seen is None or not (seen.job or seen.pods):
            return name in self._creating
        gone = (pod["metadata"].get("deletionTimestamp") == "gone" for pod in seen.pods.values())
        if not all(gone):
            return self.runs(name)
        return seen.job is not None and not finished(seen.job)

    def trouble(self, now: float) -> str:
        """What Jobs have waited for, for longer than a moment, the most frequent first; empty if
        nothing."""
        waits = Counter(
            wish.waits
            for wish in self._wishes.values()
            if wish.waits and now > wish.since + (_START_S if wish.waits == STARTING else _MOMENT_S)
        )
        return "; ".join(f"{count} x {what[:200]}" for what, count in waits.most_common(2))

    def pod_of(self, name: str) -> tuple[str, str] | None:
        """The names of the Job's pod and of its first container, if it is there."""
        pods = self._seen[name].pods.values() if name in self._seen else ()
        there = (pod for pod in pods if pod["metadata"].get("deletionTimestamp") != "gone")
        for pod in there:
            containers = pod.get("spec", {}).get("containers") or [{}]
            return pod["metadata"]["name"], containers[0].get("name", "")
        return None

    def runs(self, name: str) -> bool:
        """True if a pod of the Job may still run."""
        pods = self._seen[name].pods.values() if name in self._seen else ()
        return any(
            pod["metadata"].get("deletionTimestamp") != "gone"
            and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
            for pod in pods
        )

    @property
    def synced(self) -> bool:
        """Whether it is known what there is."""
        return self._synced == {"jobs", "pods"}

    @property
    def left(self) -> int:
        """How many Jobs are there, or may be, that shall not stay, those that are being deleted
        included."""
        there = {n for n, seen in self._seen.items() if seen.job and n not in self._kept}
        never_seen = self._going.keys() - self._seen.keys()  # taken over, and nobody told of them
        return len(there | self._creating | never_seen)


def _pods(seen: Iterable[_Seen]) -> list[Json]:
    return [pod for one in seen for pod in one.pods.values()]
