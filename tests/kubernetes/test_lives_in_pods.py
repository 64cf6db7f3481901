"""Two lives of a run on a real API server: what its Jobs did while nobody followed them."""

from __future__ import annotations

import time

import pytest
import ray
from test_pods import flags, running, site  # noqa: F401, fixtures

from lightning_ray.records import Outcome
from lightning_ray.rollouts import controller
from lightning_ray.rollouts.pods.attempts import attempts_in_pods

pytestmark = pytest.mark.slow


def test_what_ended_while_no_controller_ran_counts_and_its_job_stays_as_long_as_it_is_kept(
    site,  # noqa: F811
    flags,  # noqa: F811
) -> None:
    here = site("rollout.timeout_s=150", "kubernetes.keep_s=600")
    [before] = here.submit("work", name="before")
    assert here.results(1)[before.rollout_id].outcome is Outcome.COMPLETED
    [spec] = here.submit(f"wait {flags}/go no", name="quiet")
    here.cluster.until(lambda: here.calls(spec))
    ray.kill(here.controller)
    (flags / "go").touch()
    names = [f"{one.rollout_id}-a0" for one in (before, spec)]

    def jobs() -> dict[str, bool]:
        found = attempts_in_pods(here.config, here.folder.name)
        return {name: found[name] for name in names}

    here.cluster.until(lambda: all(jobs().values()))
    store = here.running.store
    stood = ray.get(store.open_attempts.remote())
    assert stood.keys() & set(names) == {names[1]}
    assert (stood[names[1]].calls, stood[names[1]].delivered) == (1, True)
    kept = names[1:]
    ray.get(store.end_orphans.remote(time.time(), kept))
    there = {job.metadata.name for job in here.jobs()}
    here.controller = controller.start(
        here.config, store, here.running.url, here.folder.name, kept, stood
    )
    assert ray.get(here.controller.submit.remote([spec])) == []
    ended = here.results(1)[spec.rollout_id]
    assert (ended.outcome, ended.attempts, here.calls(spec)) == (Outcome.COMPLETED, 1, 1), ended
    assert ended.reward is not None and ended.reward.solved, ended
    assert there <= {job.metadata.name for job in here.jobs()}
    assert all(jobs().values())
