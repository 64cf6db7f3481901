"""Parcels to a real actor over its Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

import pytest
import ray
from ray.exceptions import RayActorError

from lightning_ray.line import TOKEN_BYTES, Line, LineEnd, LineLost


class Actor(LineEnd):
    """Counts how a parcel came to it."""

    LINE = "answer"

    def __init__(self) -> None:
        self._asked = 0

    async def answer(self, name: str, parcel: bytes) -> bytes:
        self._asked += 1
        if name == "raise":
            raise LookupError(parcel.decode())
        if name == "die":
            os._exit(1)
        await asyncio.sleep(0.05 if name == "slow" else 0)
        return name.encode() + b":" + parcel

    async def asked(self) -> int:
        return self._asked


@pytest.fixture(scope="module")
def cluster():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def actor(cluster):
    options = {"num_cpus": 0, "max_concurrency": 100, "max_restarts": 1, "max_task_retries": 1}
    actor = ray.remote(Actor).options(**options).remote()
    yield actor
    ray.kill(actor)


async def test_each_parcel_gets_its_own_answer_or_error_in_any_order(actor):
    line = Line(actor, "answer")
    slow = asyncio.create_task(line.send("slow", b"0"))
    big = os.urandom(3_000_000)
    many = [line.send("n", b"%d" % i) for i in range(200)]
    *answers, whole, error = await asyncio.gather(
        *many, line.send("n", big), line.send("raise", b"nowhere"), return_exceptions=True
    )
    assert answers == [b"n:%d" % i for i in range(200)] and whole == b"n:" + big
    assert isinstance(error, LookupError) and error.args == ("nowhere",)
    assert "in answer" in error.__notes__[0]  # where in the actor it came from
    assert await slow == b"slow:0"


async def test_whoever_does_not_know_the_token_is_not_listened_to(actor):
    address, token = await actor.open_line.remote(ray.get_runtime_context().get_node_id())
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(address)
        frame = (3).to_bytes(4, "little") + bytes(4) + b"n\0x"
        stranger.sendall(bytes(TOKEN_BYTES) + frame)
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""  # closed
    assert await actor.asked.remote() == 0 and len(token) == TOKEN_BYTES


async def test_a_caller_on_another_node_goes_through_ray(actor):
    assert await actor.open_line.remote("another node") is None

    class Elsewhere:
        """The actor, to a caller who is not on its node."""

        answer = actor.answer

        class open_line:  # noqa: N801
            @staticmethod
            async def remote(node_id: str) -> None:
                return await actor.open_line.remote("another node")

    line = Line(Elsewhere(), "answer")
    assert await line.send("n", b"1") == b"n:1" and await line.send("n", b"2") == b"n:2"


async def test_a_parcel_whose_actor_dies_is_lost_and_the_line_is_there_again(actor):
    line = Line(actor, "answer")
    with pytest.raises(LineLost):
        await line.send("die", b"")
    while True:  # Ray has yet to notice
        try:
            assert await line.send("n", b"back") == b"n:back"
            break
        except (LineLost, RayActorError):
            await asyncio.sleep(0.1)
    assert await actor.asked.remote() == 1


async def test_a_parcel_that_may_be_sent_again_is_answered_by_the_next_life(cluster, tmp_path):
    class Once(Actor):
        async def answer(self, name: str, parcel: bytes) -> bytes:
            if not os.path.exists(parcel):
                open(parcel, "x").close()
                os._exit(1)
            return await super().answer(name, parcel)

    options = {"num_cpus": 0, "max_restarts": 1, "max_task_retries": 1}
    dying = ray.remote(Once).options(**options).remote()
    mark = bytes(tmp_path / "mark")
    try:
        line = Line(dying, "answer", again=True)
        assert await asyncio.wait_for(line.send("n", mark), 60) == b"n:" + mark
    finally:
        ray.kill(dying)
