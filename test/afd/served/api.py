"""Requests over the whole API, each with what is compared of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import requests
from served.server import Server

TIMEOUT_S = 120
FLAGS = ("--tool-call-parser", "qwen25", "--constrained-json-disable-any-whitespace")
# Names, times, and which rank's cache was hit.
_VOLATILE = {
    *(
        "id",
        "created",
        "created_at",
        "e2e_latency",
        "cached_tokens",
        "cached_tokens_details",
        "dp_rank",
        "metadata",
    ),
    *("prompt_tokens_details", "request_received_ts", "response_sent_ts", "request_sent_ts"),
    *("queue_time", "inference_time", "decode_throughput", "prefill_launch_delay"),
    *("prefill_launch_latency", "forward_entry_time", "prefill_finished_ts"),
    *("decode_finished_ts", "total_retractions", "max_total_num_tokens", "weight_version"),
    *("completed_at", "root", "owned_by", "model"),
}
_GREEDY = {"model": "x", "temperature": 0, "max_tokens": 12}
_IDS = list(b"the value of a list")
_SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["K", "C"]}, "on": {"type": "boolean"}},
    "required": ["unit", "on"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {"name": "set_unit", "description": "Set it.", "parameters": _SCHEMA},
}


@dataclass(frozen=True)
class Call:
    """One request, and the status that upstream's colocated server gives it."""

    path: str
    body: dict[str, Any] | None = None
    status: int = 200


def _completion(status: int = 200, **body: Any) -> Call:
    return Call("/v1/completions", {**_GREEDY, "prompt": "for name in ", **body}, status)


def _chat(status: int = 200, **body: Any) -> Call:
    messages = [{"role": "user", "content": "def read"}]
    return Call("/v1/chat/completions", {**_GREEDY, "messages": messages, **body}, status)


def _generate(status: int = 200, **body: Any) -> Call:
    sampling = {"temperature": 0, "max_new_tokens": 8, **body.pop("sampling_params", {})}
    return Call("/generate", {"input_ids": _IDS, **body, "sampling_params": sampling}, status)


CALLS = {
    "n": _completion(n=3),
    "n of a sampled request": _completion(n=2, temperature=1, top_k=1),
    "several prompts": _completion(prompt=["a", "list of names", "x" * 100]),
    "echo": _completion(echo=True),
    "logprobs": _completion(logprobs=3),
    "echo with logprobs": _completion(echo=True, logprobs=1),
    "stop at a byte": _completion(stop=[" ", "a", "e"], max_tokens=100),
    "stop_token_ids": _completion(stop_token_ids=list(range(64, 160)), max_tokens=100),
    "min_tokens": _completion(min_tokens=10, stop_token_ids=list(range(256))),
    "min_p": _completion(temperature=1, min_p=1.0),
    "top_k": _completion(temperature=1.5, top_k=1),
    "top_p": _completion(temperature=1, top_p=1e-9),
    "seed": _completion(seed=7),
    "logit_bias": _completion(logit_bias={"65": 100}),
    "penalties": _completion(frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2),
    "regex": _completion(regex="(ab|cd){3}-[0-9]{2}", max_tokens=40),
    "ebnf": _completion(ebnf='root ::= ("yes" | "no") " " [a-c]+', max_tokens=9),
    "json schema": _chat(
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
        max_tokens=80,
    ),
    "json object": _chat(response_format={"type": "json_object"}, max_tokens=20),
    "required tool": _chat(tools=[_TOOL], tool_choice="required", max_tokens=120),
    "named tool": _chat(
        tools=[_TOOL],
        tool_choice={"type": "function", "function": {"name": "set_unit"}},
        max_tokens=120,
    ),
    "tools, none wanted": _chat(tools=[_TOOL], tool_choice="none"),
    "chat logprobs": _chat(logprobs=True, top_logprobs=2),
    "chat n": _chat(n=2),
    "responses": Call(
        "/v1/responses",
        {"model": "x", "input": "def", "temperature": 0, "max_output_tokens": 8},
    ),
    "messages": Call(
        "/v1/messages",
        {
            **_GREEDY,
            "messages": [{"role": "user", "content": "return"}],
        },
    ),
    "input_ids": _generate(),
    "input_ids of a batch": _generate(input_ids=[_IDS, _IDS[:1], _IDS * 20]),
    "input logprobs": _generate(return_logprob=True, logprob_start_len=0, top_logprobs_num=2),
    "logprobs of given tokens": _generate(
        return_logprob=True, logprob_start_len=3, token_ids_logprob=[10, 65, 200]
    ),
    "parallel samples": _generate(sampling_params={"n": 3}),
    "hidden states": _generate(status=400, return_hidden_states=True),
    "score": Call(
        "/v1/score",
        {
            "model": "x",
            "query": "a list",
            "items": [" of", " is"],
            "label_token_ids": [65, 97],
            "apply_softmax": True,
        },
    ),
    "models": Call("/v1/models"),
    "embeddings": Call("/v1/embeddings", {"model": "x", "input": "text"}, 400),
    "too long": _completion(status=400, prompt="x" * 5000),
    "bad regex": _completion(status=400, regex="(unclosed"),
    "bad temperature": _completion(status=400, temperature=-1),
    "unknown adapter": Call("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, 400),
    "flush": Call("/flush_cache", {}),
}

# What would change one pool only; colocated servers do it, an AFD server answers 400.
REFUSED = {
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["eA=="]},
    "/init_weights_update_group": {
        **{"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1},
        **{"world_size": 2, "group_name": "g", "backend": "gloo"},
    },
    "/destroy_weights_update_group": {"group_name": "g"},
    "/update_weights_from_distributed": {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
    "/release_memory_occupation": {},
    "/resume_memory_occupation": {},
    "/weights_checker": {"action": "snapshot"},
    "/start_expert_distribution_record": {},
}


def ask(server: Server, call: Call) -> tuple[int, Any]:
    """Status and answer, without what differs between two runs of one server."""
    url = f"{server.url}{call.path}"
    if call.body is None:
        answer = requests.get(url, timeout=TIMEOUT_S)
    else:
        answer = requests.post(url, json=call.body, timeout=TIMEOUT_S)
    is_json = "json" in answer.headers.get("content-type", "")
    return answer.status_code, stable(answer.json() if is_json else answer.text)


def stable(value: Any) -> Any:
    """Without volatile fields, and with numbers that sums in another order leave alone."""
    if isinstance(value, dict):
        return {
            k: stable(v) for k, v in value.items() if k not in _VOLATILE and not k.endswith("_ts")
        }
    if isinstance(value, list):
        return [stable(item) for item in value]
    return Number(value) if isinstance(value, float) else value


class Number(float):
    """Equal to another if they differ by less than 1e-3."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (int, float)) and abs(float(self) - float(other)) < 1e-3

    __hash__ = None  # type: ignore[assignment]
