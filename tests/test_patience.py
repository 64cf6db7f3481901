"""How long calls are held, by what their clients say."""

from __future__ import annotations

import http.server
import threading

import anthropic
import openai
import pytest

from lightning_ray.config import ConfigError, load
from lightning_ray.gateway.patience import hold_s

GATEWAY = load(None, []).gateway


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 90),
        ({"x-stainless-read-timeout": "600"}, 480),
        ({"x-stainless-read-timeout": "300"}, 240),
        ({"x-stainless-timeout": "120"}, 96),
        ({"x-stainless-read-timeout": "30"}, 24),
        ({"x-stainless-read-timeout": "inf"}, 480),
        ({"x-stainless-timeout": "600", "user-agent": "claude-cli/2.1.0 (external, cli)"}, 240),
        ({"x-stainless-read-timeout": "NOT_GIVEN"}, 90),
        ({"x-stainless-read-timeout": "nan"}, 90),
        ({"x-stainless-read-timeout": "-1"}, 90),
        ({"x-stainless-read-timeout": ""}, 90),
    ],
)
def test_a_client_is_held_as_long_as_it_waits(headers: dict[str, str], seconds: float) -> None:
    assert hold_s(GATEWAY, headers) == pytest.approx(seconds)


def test_the_python_sdks_say_how_long_they_wait() -> None:
    heard: list[dict[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append({name.lower(): value for name, value in self.headers.items()})
            self.send_error(400)

    asked = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        client = openai.OpenAI(api_key="k", base_url=url, timeout=300)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**asked)
        with pytest.raises(anthropic.BadRequestError):
            anthropic.Anthropic(api_key="k", base_url=url).messages.create(max_tokens=9, **asked)
        server.shutdown()
    assert [hold_s(GATEWAY, headers) for headers in heard] == [240, 480]


def test_a_call_cannot_be_held_longer_than_the_longest() -> None:
    with pytest.raises(ConfigError, match="gateway.hold_s=90 is above gateway.longest_hold_s"):
        load(None, ["gateway.longest_hold_s=60"])
