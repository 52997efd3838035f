"""The whole API answers as upstream's colocated server; what would change one pool is refused."""

from __future__ import annotations

import re

import pytest
import requests
from served.api import CALLS, FLAGS, REFUSED, ask
from served.conftest import AFD

SERVERS = {
    "colocated": FLAGS,
    "afd": (*FLAGS, *AFD, "--afd-attn-ranks", "2", "--afd-microbatches", "2"),
}


@pytest.fixture(scope="module")
def servers(serve):
    started = {name: serve("tiny", *flags, log=f"api-{name}") for name, flags in SERVERS.items()}
    yield started
    for server in started.values():
        server.kill()


@pytest.mark.parametrize("name", CALLS)
def test_answer_is_upstreams(servers, name):
    status, expected = ask(servers["colocated"], CALLS[name])
    assert status == CALLS[name].status, expected
    assert ask(servers["afd"], CALLS[name]) == (status, expected)


def test_grammars_and_biases_did_something(servers):
    """Equal answers prove nothing if both ignored the request."""
    _, plain = ask(servers["afd"], CALLS["seed"])
    _, biased = ask(servers["afd"], CALLS["logit_bias"])
    assert biased["choices"][0]["text"] == "b" * 12  # token 65 of the byte tokenizer
    assert plain["choices"][0]["text"] != biased["choices"][0]["text"]
    _, answer = ask(servers["afd"], CALLS["regex"])
    assert re.fullmatch("(ab|cd){3}-[0-9]{2}", answer["choices"][0]["text"])
    # A random model fills its tokens with white space before the call is complete.
    _, unasked = ask(servers["afd"], CALLS["tools, none wanted"])
    _, answer = ask(servers["afd"], CALLS["required tool"])
    assert answer["choices"][0]["message"] != unasked["choices"][0]["message"]
    _, answer = ask(servers["afd"], CALLS["json schema"])
    assert answer["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize("path", REFUSED)
def test_what_would_change_one_pool_is_refused_with_the_reason(servers, path):
    url = f"{servers['afd'].url}{path}"
    answer = requests.post(url, json=REFUSED[path], timeout=60)
    assert answer.status_code == 400, answer.text
    assert "--disaggregation-mode afd" in answer.text


def test_the_server_works_after_all_of_it(servers):
    for call in (CALLS["n"], CALLS["json schema"]):
        assert ask(servers["afd"], call) == ask(servers["colocated"], call)
