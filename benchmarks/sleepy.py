"""An agent whose tools sleep, its tasks and its grader: what `async_vs_sync.py` trains.

A rollout has four turns, each a repair of the embedded kind in a fresh context (the tiny model has
learnt nothing longer), and after each turn a tool that takes a log-normal time. The reward is the
share of turns that were answered with the right command. As a program it uses only the standard
library, so that starting it costs little.

    python sleepy.py agent | grade
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
import time

TURNS = 4
MEDIAN_S = float(os.environ.get("SLEEPY_MEDIAN_S", "1"))
# The 99th percentile is 12 times the median: ln 12 over the normal's 2.326.
SIGMA = math.log(12) / 2.326


def sleeps(seed: str, attempt: str) -> list[float]:
    """Seconds that the tools of a rollout take: the same in every run of a seed, since they depend
    on the place of the task and the number of the rollout only."""
    place, number = re.fullmatch(r"(p\d+).*?(r\d+)-a\d+", attempt).groups()
    dice = random.Random(f"{seed} {place} {number}")
    return [MEDIAN_S * math.exp(dice.gauss(0, SIGMA)) for _ in range(TURNS)]


def agent() -> None:
    # Here, so that the grader does not pay for them.
    import http.client
    from urllib.parse import urlsplit

    work, url = json.loads(sys.stdin.read()), urlsplit(os.environ["BASE_URL"])
    system = {"role": "system", "content": work["system"]}
    for statement, seconds in zip(
        work["turns"], sleeps(os.environ["SEED"], os.environ["ATTEMPT"]), strict=True
    ):
        messages = [system, {"role": "user", "content": statement}]
        body = json.dumps({"model": "policy", "messages": messages})
        while True:
            link = http.client.HTTPConnection(url.netloc, timeout=600)
            key = {"Authorization": "Bearer " + os.environ["KEY"]}
            link.request("POST", url.path + "/chat/completions", body, key)
            answer = link.getresponse()
            if answer.status != 503:
                break
            time.sleep(float(answer.headers["Retry-After"]))
        assert answer.status == 200, answer.read()
        answer.read()
        time.sleep(seconds)


def grade() -> None:
    question = json.loads(sys.stdin.read())
    said, wanted = question["episode"]["texts"], question["task"]["fields"]["wanted"]
    right = sum(a.strip() == b for a, b in zip(said, wanted, strict=False))
    print(json.dumps({"value": right / TURNS, "solved": right == TURNS}))


def train() -> list:
    from lightning_ray.records import Split, Task
    from lightning_ray.tasks import tiny_model
    from lightning_ray.tasks.swe import embedded

    dice, tasks = random.Random(0), []
    for number in range(256):
        picked = dice.sample(embedded.pairs(Split.TRAIN), TURNS)
        turns = [
            embedded.statement(dice.choice(embedded.PACKAGES[Split.TRAIN]), file, word)
            for file, word in picked
        ]
        system = tiny_model.messages("")[0]["content"]
        tasks.append(
            Task(
                f"t{number:03d}",
                json.dumps({"system": system, "turns": turns}),
                {"wanted": [tiny_model.command(file, word) for file, word in picked]},
            )
        )
    return tasks


if __name__ == "__main__":
    {"agent": agent, "grade": grade}[sys.argv[1]]()
