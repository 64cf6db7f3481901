"""The store's actor (without Ray): what is left of a life of it in the next one."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from test_store import make_call, make_spec

from lightning_ray.records import Outcome
from lightning_ray.store import actor
from lightning_ray.store.actor import UPDATING, Asked, StoreActor
from lightning_ray.store.claims import Opening, Verdict
from lightning_ray.store.errors import AttemptOver, StoreLocked
from lightning_ray.store.rollouts import RolloutStore
from lightning_ray.tasks.swe import canaries
from lightning_ray.views import PageQuery


async def begin(directory: Path) -> StoreActor:
    store = StoreActor(str(directory))
    await store.create_rollouts([make_spec()])
    await store.start_attempt("r-a0", "r", 0, "hash", 1.0)
    return store


async def again(store: StoreActor) -> StoreActor:
    """The next life."""
    await store.close()
    return StoreActor(str(store._directory))


def asked(request: str, *, is_retry: bool = False, samples: int = 1) -> Asked:
    return Asked("r-a0", request, "replica", is_retry, 0, samples)


async def open_call(store: StoreActor, request: Asked) -> Opening | None:
    [(opening, _)] = await store.open_calls([request])
    return opening


async def test_a_gate_that_was_closed_stays_closed_until_it_is_opened(tmp_path: Path):
    store = await begin(tmp_path)
    await store.close_gate()
    for _ in range(2):
        store = await again(store)
        assert await open_call(store, asked("x")) is None
        assert await store.wait_gate(0.01) == UPDATING
        assert await store.replica_alive("replica", ["r-a0", "r-a7"]) == (["r-a7"], UPDATING)
    waiting = asyncio.create_task(store.wait_gate(20))
    await store.open_gate()
    assert await waiting == ""
    store = await again(store)
    assert (await open_call(store, asked("x"))).verdict is Verdict.ANSWER
    await store.close()


async def test_what_was_in_flight_before_does_not_settle_a_claim_of_this_life(tmp_path: Path):
    store = await begin(tmp_path)
    before = await open_call(store, asked("first"))
    store = await again(store)
    after = await open_call(store, asked("second"))
    assert after.claim_id != before.claim_id
    call = dataclasses.replace(make_call("c0", [1], [2]), request="first")
    assert await store.record_calls([([call], before.claim_id)]) == [[0]]
    assert (await open_call(store, asked("second", is_retry=True))).verdict is Verdict.WAIT
    await store.close()


@pytest.mark.parametrize("samples", [1, 2])
async def test_a_retry_in_the_next_life_gets_the_calls_of_one_answer(tmp_path: Path, samples: int):
    store = await begin(tmp_path)
    calls = [
        dataclasses.replace(make_call(f"c{i}", [1], [i]), request="same")
        for i in range(3 * samples)
    ]
    answers = [(calls[i : i + samples], 0) for i in range(0, len(calls), samples)]
    recorded = await store.record_calls(answers)
    assert [seq for answer in recorded for seq in answer] == list(range(len(calls)))
    store = await again(store)
    opening = await open_call(store, asked("same", is_retry=True, samples=samples))
    assert opening.verdict is Verdict.REPLAY
    assert opening.calls in [tuple(call.call_id for call in answer) for answer, _ in answers]
    await store.close()


async def test_a_reply_with_a_canary_is_noted_with_its_call(tmp_path: Path):
    store, said = await begin(tmp_path), canaries.mint("git")
    for number, text in enumerate(("well", f"I found {said}", f"again {said}")):
        call = dataclasses.replace(make_call(f"c{number}", [1], [2]), text=text)
        await store.record_calls([([call], number)])
    await store.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0)
    noted = f"call 1 of attempt r-a0 read or said a canary ({said})"
    assert [await store.canary("r-a0") for _ in range(2)] == [noted] * 2
    [event] = (await store.list_events("r", PageQuery())).events
    assert (event.kind, event.data["call"]) == ("canary", 1)
    await store.start_attempt("r-a1", "r", 1, "hash", 3.0)
    assert await store.canary("r-a1") is None
    await store.close()


async def test_the_answers_of_one_message_succeed_or_fail_by_themselves(tmp_path: Path):
    store = await begin(tmp_path)
    await store.start_attempt("r-a1", "r", 1, "hash", 1.0)
    await store.end_attempt("r-a1", Outcome.COMPLETED, "", 2.0)
    over, fine = make_call("c0", [1], [2], attempt="r-a1"), make_call("c1", [1], [2])
    refused, recorded = await store.record_calls([([over], 1), ([fine], 2)])
    assert isinstance(refused, AttemptOver) and recorded == [0]
    await store.close()


async def test_an_owner_that_is_about_to_go_is_waited_for(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(actor, "AGAIN_S", 0.01)
    owner = RolloutStore(tmp_path)
    opening = asyncio.create_task(begin(tmp_path))
    await asyncio.sleep(0.1)
    assert not opening.done()
    owner.close()
    store = await opening
    monkeypatch.setattr(actor, "LOCKED_S", 0.05)
    with pytest.raises(StoreLocked, match="another run"):
        await begin(tmp_path)
    await store.close()
