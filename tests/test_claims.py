"""A retry is the same call; two samples of one prompt are two calls."""

from __future__ import annotations

from lightning_ray.store.claims import LEASE_S, Claims, Opening, Verdict


def opened(claims: Claims, replica: str = "r1", *, is_retry: bool = False, now: float = 0):
    return claims.open("a", "request", replica, is_retry, now)


def test_identical_requests_on_live_connections_are_two_samples():
    claims = Claims()
    first, second = opened(claims), opened(claims)
    assert first.verdict is second.verdict is Verdict.ANSWER
    assert first.claim_id != second.claim_id


def test_a_request_waits_for_the_answer_to_one_that_lost_its_client():
    claims = Claims()
    first = opened(claims)
    claims.detached("a", first.claim_id)
    assert opened(claims, "r2").verdict is Verdict.WAIT
    claims.recorded("a", first.claim_id, ("c1",))
    assert opened(claims, "r2") == Opening(Verdict.REPLAY, first.claim_id, ("c1",))


def test_the_retry_header_joins_although_the_connection_looks_alive():
    claims = Claims()
    first = opened(claims)
    assert opened(claims, is_retry=True).verdict is Verdict.WAIT
    claims.recorded("a", first.claim_id, ("c1",))
    assert opened(claims, is_retry=True).calls == ("c1",)


def test_an_undelivered_answer_is_given_once_and_then_counts_as_delivered():
    claims = Claims()
    first = opened(claims)
    claims.detached("a", first.claim_id)
    claims.recorded("a", first.claim_id, ("c1",))
    assert opened(claims).verdict is Verdict.REPLAY
    assert opened(claims).verdict is Verdict.ANSWER


def test_a_dead_replica_blocks_nobody():
    claims = Claims()
    opened(claims, "dead", now=0)
    assert opened(claims, "r2", is_retry=True, now=LEASE_S + 1).verdict is Verdict.ANSWER


def test_what_a_dead_replica_recorded_is_given_to_the_next_one():
    claims = Claims()
    first = opened(claims, "dead", now=0)
    claims.recorded("a", first.claim_id, ("c1",))
    assert opened(claims, "r2", now=LEASE_S + 1) == Opening(Verdict.REPLAY, first.claim_id, ("c1",))


def test_a_replica_that_reports_keeps_its_claims():
    claims = Claims()
    opened(claims, "r1", now=0)
    claims.alive("r1", now=100)
    assert opened(claims, "r2", is_retry=True, now=101).verdict is Verdict.WAIT


def test_a_failed_generation_is_made_again():
    claims = Claims()
    first = opened(claims)
    claims.dropped("a", first.claim_id)
    assert opened(claims, is_retry=True).verdict is Verdict.ANSWER


def test_other_attempts_and_other_bodies_are_other_calls():
    claims = Claims()
    opened(claims)
    assert claims.open("b", "request", "r1", True, 0).verdict is Verdict.ANSWER
    assert claims.open("a", "another", "r1", True, 0).verdict is Verdict.ANSWER
    claims.ended("a")
    assert opened(claims, is_retry=True).verdict is Verdict.ANSWER
