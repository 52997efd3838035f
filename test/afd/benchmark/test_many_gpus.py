"""The command for a host with many GPUs: what it would run exists, and how its steps end is told."""

from __future__ import annotations

import json
import time

import gate
import many_gpus
import pytest
from decode import shapes
from decode.configurations import parse
from many_gpus import ROOT, Step

STEPS = many_gpus.steps()


def value(step: Step, flag: str) -> str:
    return step.command[step.command.index(flag) + 1]


def test_names_are_of_one_step_each_and_correctness_comes_first():
    names = [step.name for step in STEPS]
    assert len(set(names)) == len(names)
    kinds = [name.partition("_")[0] for name in names]
    assert kinds.index("decode") > max(i for i, kind in enumerate(kinds) if kind != "decode")


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_is_a_command_that_exists_and_fits_the_host(step):
    first = step.command[0]
    if first == "-m":
        assert (ROOT / step.command[-1]).is_file()
        assert sum(gate.topology(step.ranks)) <= step.gpus
        return
    assert (ROOT / many_gpus.HERE / first).is_file()
    if first == "gate.py":
        for text in value(step, "--topologies").split(","):
            assert 2 < sum(gate.topology(text)) <= step.gpus
        return
    assert value(step, "--shape") in shapes.names()
    for wave in value(step, "--configs").split(";"):
        for name in wave.split(","):
            assert parse(name).gpus <= step.gpus
    verdicts = {value(each, "--out") for each in STEPS if each.command[0] == "gate.py"}
    assert value(step, "--gate") in verdicts


def step_of(name: str, code: str, limit_s: int = 30) -> Step:
    # A command whose first word is -m is taken as it is.
    command = ("-m", "timeit", "-n", "1", "-r", "1", code)
    return Step(name=name, gpus=1, limit_s=limit_s, command=command)


def test_every_end_is_told(tmp_path):
    found = [
        step_of("well", "pass"),
        step_of("badly", "raise ValueError"),
        step_of("never", "import time; time.sleep(60)", limit_s=2),
        step_of("too late", "pass", limit_s=2000),
    ]
    assert many_gpus.run(found, tmp_path, time.monotonic() + 600) == 1
    ended = json.loads((tmp_path / "steps.json").read_text())
    assert {name: end["outcome"] for name, end in ended.items()} == {
        "well": "passed",
        "badly": "exit code 1",
        "never": "out of time",
        "too late": "not started: no time left",
    }
