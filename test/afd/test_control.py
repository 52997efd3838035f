"""Handshake, plans, heartbeats and loss of a peer, over real sockets.

Members run as threads of the test, or as child processes where one has to be killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import zmq

from sglang.srt.disaggregation.afd import control
from sglang.srt.disaggregation.afd.control import LeaderControl, MemberControl
from sglang.srt.disaggregation.afd.errors import (
    AFDConfigError,
    AFDError,
    DeadlineExceeded,
    HandshakeRefused,
    PeerLost,
)
from sglang.srt.disaggregation.afd.messages import (
    PROTOCOL,
    Facts,
    Ready,
    Refuse,
    Role,
    StepPlan,
    Stop,
    decode,
    encode,
)

LOAD_S, PEER_S = 20.0, 5.0


def make_facts(attn_ranks: int = 1, ffn_ranks: int = 1) -> Facts:
    return Facts(
        afd_version="0.1.0",
        sglang_version="0.5.17",
        model_digest="5d41402a",
        moe_layers=2,
        num_experts=8,
        hidden_size=64,
        topk=2,
        dtype="bfloat16",
        wire_dtype="bfloat16",
        capacity=16,
        microbatches=2,
        connector="gloo",
        attn_ranks=attn_ranks,
        ffn_ranks=ffn_ranks,
    )


def make_ready(role: Role, rank: int) -> Ready:
    return Ready(
        role=role, rank=rank, param_bytes=8, checkpoint_bytes=9, tensors_read=3, tensors_skipped=1
    )


def make_plan(step_id: int) -> StepPlan:
    return StepPlan(step_id=step_id, mode="decode", microbatches=1, bucket=0, tokens=(1,), rounds=1)


class Cluster:
    """Makes leaders and members and closes them all at the end of the test."""

    def __init__(self) -> None:
        self.closables: list[LeaderControl | MemberControl] = []

    def leader(
        self, facts: Facts, address: str = "127.0.0.1:0", peer_s: float = PEER_S
    ) -> LeaderControl:
        leader = LeaderControl(address, facts, "127.0.0.1", 29500, LOAD_S, peer_s)
        self.closables.append(leader)
        return leader

    def member(
        self,
        address: str,
        role: Role,
        rank: int,
        facts: Facts,
        load_s: float = LOAD_S,
        peer_s: float = PEER_S,
    ) -> MemberControl:
        member = MemberControl(address, role, rank, facts, load_s, peer_s)
        self.closables.append(member)
        return member

    def running(
        self, attn_ranks: int = 1, ffn_ranks: int = 1, peer_s: float = PEER_S
    ) -> tuple[LeaderControl, list[MemberControl]]:
        """A leader and all its members, joined and ready."""
        facts = make_facts(attn_ranks, ffn_ranks)
        leader = self.leader(facts, peer_s=peer_s)
        members = []
        for role, rank in [("attn", i) for i in range(1, attn_ranks)] + [
            ("ffn", j) for j in range(ffn_ranks)
        ]:
            member = self.member(leader.address, role, rank, facts, peer_s=peer_s)
            member.join()
            member.ready(make_ready(role, rank))
            members.append(member)
        leader.wait_ready(LOAD_S)
        return leader, members


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    for closable in made.closables:
        closable.close()
        closable.close()


def eventually_raises(check: Callable[[], object], kind: type[Exception], within_s: float) -> str:
    """The text of the error that `check` raises in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            check()
        except kind as error:
            return str(error)
        time.sleep(0.01)
    pytest.fail(f"no {kind.__name__} within {within_s} s")


CHILD = """
import sys, types
package = types.ModuleType("sglang")  # the real one takes long to import and is not needed
package.__path__ = [sys.argv[1]]
sys.modules["sglang"] = package
from sglang.srt.disaggregation.afd.control import LeaderControl, MemberControl
from sglang.srt.disaggregation.afd.messages import Facts, Ready, decode
import msgspec
role, rank, address, peer_s = sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5])
facts = msgspec.json.decode(sys.argv[6], type=Facts)
if (role, rank) == ("attn", 0):
    leader = LeaderControl(address, facts, "127.0.0.1", 29500, 20, peer_s)
    print(leader.address, flush=True)
    leader.wait_ready(20)
    print("ready", flush=True)
    sys.stdin.read()
else:
    member = MemberControl(address, role, rank, facts, 20, peer_s)
    member.join()
    member.ready(Ready(role=role, rank=rank, param_bytes=0, checkpoint_bytes=0, tensors_read=0,
                       tensors_skipped=0))
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    children: list[subprocess.Popen[str]] = []

    def start(role: Role, rank: int, address: str, facts: Facts, peer_s: float = PEER_S):
        package = str(Path(control.__file__).parents[3])
        args = [package, role, str(rank), address, str(peer_s), msgspec.json.encode(facts).decode()]
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


# Handshake


@pytest.mark.parametrize(("attn_ranks", "ffn_ranks"), [(1, 1), (2, 2), (1, 3), (4, 1)])
def test_all_ranks_become_ready(cluster: Cluster, attn_ranks: int, ffn_ranks: int) -> None:
    leader, members = cluster.running(attn_ranks, ffn_ranks)
    names = [f"attn {i}" for i in range(1, attn_ranks)] + [f"ffn {j}" for j in range(ffn_ranks)]
    assert [peer.name for peer in leader.peers()] == names == [member.name for member in members]
    readies = leader.wait_ready(1)
    assert [f"{ready.role} {ready.rank}" for ready in readies] == names


@pytest.mark.pain(43)
def test_members_may_start_first(cluster: Cluster) -> None:
    facts = make_facts(2, 1)
    with closing(LeaderControl("127.0.0.1:0", facts, "h", 1, LOAD_S, PEER_S)) as probe:
        address = probe.address
    ffn = cluster.member(address, "ffn", 0, facts)
    attn = cluster.member(address, "attn", 1, facts)
    with ThreadPoolExecutor(2) as pool:
        joins = [pool.submit(member.join) for member in (ffn, attn)]
        time.sleep(0.5)
        assert not any(join.done() for join in joins)
        leader = cluster.leader(facts, address)
        welcomes = [join.result(LOAD_S) for join in joins]
    assert [welcome.store_port for welcome in welcomes] == [29500, 29500]
    assert welcomes[0].plan_endpoint.startswith("tcp://*:") and welcomes[1].plan_endpoint == ""
    ffn.ready(make_ready("ffn", 0))
    attn.ready(make_ready("attn", 1))
    leader.wait_ready(LOAD_S)


@pytest.mark.pain(43)
def test_hello_to_a_leader_that_ended_is_said_again(cluster: Cluster) -> None:
    """The first socket takes the hello and ends without an answer."""
    facts = make_facts()
    with ThreadPoolExecutor(1) as pool:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as first:
            port = first.bind_to_random_port("tcp://127.0.0.1")
            first.linger = 0
            member = cluster.member(f"127.0.0.1:{port}", "ffn", 0, facts)
            join = pool.submit(member.join)
            assert first.poll(5000)
            first.recv_multipart()
        cluster.leader(facts, f"127.0.0.1:{port}")
        assert join.result(LOAD_S).store_port == 29500


@pytest.mark.pain(12)
@pytest.mark.parametrize("field", Facts.__struct_fields__)
def test_any_different_fact_refuses_and_names_both(cluster: Cluster, field: str) -> None:
    facts = make_facts()
    ours = getattr(facts, field)
    theirs = f"{ours}x" if isinstance(ours, str) else 1 if field == "microbatches" else ours + 1
    leader = cluster.leader(facts)
    other = msgspec.structs.replace(facts, **{field: theirs})
    member = cluster.member(leader.address, "ffn", 0, other)
    said = rf"{field} differs: attn 0 says {ours!r}, ffn 0 \(pid \d+ on .+\) says {theirs!r}"
    with pytest.raises(HandshakeRefused, match=said):
        member.join()
    with pytest.raises(HandshakeRefused, match=said):
        leader.wait_ready(5)


@pytest.mark.pain(9, 12)
def test_other_protocol_is_refused_on_both_sides(cluster: Cluster) -> None:
    leader = cluster.leader(make_facts())
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://{leader.address}")
        stranger.send(b"\x63hello of another build")
        assert stranger.poll(5000)
        answer = decode(stranger.recv())
    assert isinstance(answer, Refuse)
    assert f"protocol 99, this side speaks {PROTOCOL}" in answer.reason
    with pytest.raises(HandshakeRefused, match=f"protocol 99, this side speaks {PROTOCOL}"):
        leader.wait_ready(5)


def test_member_refuses_a_leader_of_another_protocol(cluster: Cluster) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as stranger:
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        member = cluster.member(f"127.0.0.1:{port}", "ffn", 0, make_facts())
        with ThreadPoolExecutor(1) as pool:
            join = pool.submit(member.join)
            identity, _ = stranger.recv_multipart()
            stranger.send_multipart([identity, b"\x63welcome"])
            with pytest.raises(HandshakeRefused, match=f"protocol 99, this side speaks {PROTOCOL}"):
                join.result(5)


@pytest.mark.pain(5)
def test_rank_that_joins_twice_is_refused_and_the_first_goes_on(cluster: Cluster) -> None:
    facts = make_facts()
    leader = cluster.leader(facts)
    first = cluster.member(leader.address, "ffn", 0, facts)
    first.join()
    second = cluster.member(leader.address, "ffn", 0, facts)
    with pytest.raises(HandshakeRefused, match="has already joined as ffn 0"):
        second.join()
    second.close()
    first.ready(make_ready("ffn", 0))
    leader.wait_ready(5)
    leader.publish(make_plan(0))
    assert first.recv_plan() == make_plan(0)


@pytest.mark.pain(5)
@pytest.mark.parametrize(("role", "rank"), [("ffn", 1), ("attn", 0), ("attn", 1)])
def test_rank_out_of_range_is_refused(cluster: Cluster, role: Role, rank: int) -> None:
    facts = make_facts(1, 1)
    leader = cluster.leader(facts)
    member = cluster.member(leader.address, role, rank, facts)
    with pytest.raises(HandshakeRefused, match=rf"{role} {rank} .* is not a member .* ffn 0"):
        member.join()
    leader.check()


def test_bytes_of_a_stranger_do_no_harm(cluster: Cluster) -> None:
    leader, (member,) = cluster.running()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://{leader.address}")
        for data in (
            bytes([PROTOCOL]) + b"garbage",
            encode(make_ready("ffn", 0)),
            encode(Stop(reason="x")),
        ):
            stranger.send_multipart([b"", data])
            assert stranger.poll(5000)
            assert isinstance(decode(stranger.recv()), Refuse)
    leader.publish(make_plan(1))
    assert member.recv_plan() == make_plan(1)
    leader.check()


# Deadlines


def test_missing_members_are_named(cluster: Cluster) -> None:
    facts = make_facts(2, 2)
    leader = cluster.leader(facts)
    cluster.member(leader.address, "ffn", 0, facts).join()
    with pytest.raises(DeadlineExceeded) as caught:
        leader.wait_ready(0.3)
    text = str(caught.value)
    assert f"ffn 1 at {leader.address}: never said hello" in text
    assert f"attn 1 at {leader.address}: never said hello" in text
    assert re.search(r"ffn 0 \(pid \d+ on .+\): joined, still loading", text)
    assert "--afd-load-timeout" in text


@pytest.mark.pain(41)
def test_join_without_a_leader_ends(cluster: Cluster) -> None:
    member = cluster.member("127.0.0.1:9", "ffn", 0, make_facts(), load_s=0.3)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"127\.0\.0\.1:9.*--afd-bootstrap-addr"):
        member.join()
    member.close()
    assert time.monotonic() - start < 3


def test_waits_are_logged(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sglang.srt.disaggregation.afd.channel._LOG_EVERY_S", 0.05)
    caplog.set_level("INFO")
    with pytest.raises(DeadlineExceeded):
        cluster.leader(make_facts()).wait_ready(0.2)
    with pytest.raises(DeadlineExceeded):
        cluster.member("127.0.0.1:9", "ffn", 0, make_facts(), load_s=0.2).join()
    assert "attn 0: waiting for ffn 0 at" in caplog.text
    assert "ffn 0: waiting for the leader (attn 0) at 127.0.0.1:9" in caplog.text


@pytest.mark.parametrize("address", ["host", ":1", "host:", "host:http", "host:70000"])
def test_bad_address(address: str) -> None:
    with pytest.raises(AFDConfigError, match="must be HOST:PORT"):
        LeaderControl(address, make_facts(), "h", 1, LOAD_S, PEER_S)


def test_address_that_cannot_be_bound(cluster: Cluster) -> None:
    leader = cluster.leader(make_facts())
    for address in (leader.address, "192.0.2.1:0"):
        with pytest.raises(AFDConfigError, match="--afd-bootstrap-addr"):
            LeaderControl(address, make_facts(), "h", 1, LOAD_S, PEER_S)


@pytest.mark.pain(43, 47)
def test_two_instances_on_one_host(cluster: Cluster) -> None:
    pairs = [cluster.running() for _ in range(2)]
    for step_id, (leader, _) in enumerate(pairs):
        leader.publish(make_plan(step_id))
    assert [members[0].recv_plan().step_id for _, members in pairs] == [0, 1]


@pytest.mark.pain(42)
def test_all_interfaces_and_host_names(cluster: Cluster) -> None:
    facts = make_facts()
    for bind, host in (("0.0.0.0:0", "127.0.0.1"), ("localhost:0", "localhost")):
        leader = cluster.leader(facts, bind)
        port = leader.address.rpartition(":")[2]
        assert leader.address == bind.replace(":0", f":{port}")
        member = cluster.member(f"{host}:{port}", "ffn", 0, facts)
        member.join()
        member.ready(make_ready("ffn", 0))
        leader.wait_ready(5)
        leader.publish(make_plan(5))
        assert member.recv_plan() == make_plan(5)


# Plans


@pytest.mark.parametrize("ffn_ranks", [1, 3])
def test_plans_keep_their_order_and_stop_comes_last(cluster: Cluster, ffn_ranks: int) -> None:
    num_plans = 10_000
    leader, members = cluster.running(1, ffn_ranks)
    received = [0] * ffn_ranks

    def follow(rank: int) -> tuple[list[int], Stop]:
        steps = []
        while isinstance(plan := members[rank].recv_plan(), StepPlan):
            steps.append(plan.step_id)
            received[rank] += 1
        return steps, plan

    with ThreadPoolExecutor(ffn_ranks) as pool:
        followers = [pool.submit(follow, rank) for rank in range(ffn_ranks)]
        for step_id in range(num_plans):
            leader.publish(make_plan(step_id))
            while step_id - min(received) > 500:
                time.sleep(0.001)
        leader.stop("done")
        for follower in followers:
            steps, stop = follower.result(10)
            assert steps == list(range(num_plans))
            assert stop == Stop(reason="done")


@pytest.mark.pain(60)
def test_plans_in_flight_survive_the_stop(cluster: Cluster) -> None:
    leader, (attn, ffn) = cluster.running(2, 1)
    for step_id in range(100):
        leader.publish(make_plan(step_id))
    leader.stop("done")
    time.sleep(0.3)  # the leader is gone before the first plan is read
    assert [ffn.recv_plan().step_id for _ in range(100)] == list(range(100))
    assert ffn.recv_plan() == ffn.recv_plan() == attn.stopped() == Stop(reason="done")
    attn.check()
    with pytest.raises(AFDError, match="step 7 published after the stop"):
        leader.publish(make_plan(7))


def test_stop_ends_a_waiting_member_at_once(cluster: Cluster) -> None:
    leader, (ffn,) = cluster.running()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ffn.recv_plan)
        time.sleep(0.1)
        start = time.monotonic()
        leader.stop("bye")
        assert waiting.result(5) == Stop(reason="bye")
    assert time.monotonic() - start < 1


@pytest.mark.pain(52)
def test_waiting_for_a_plan_takes_no_processor_time(cluster: Cluster) -> None:
    leader, (ffn,) = cluster.running()

    def wait() -> float:
        before = time.thread_time()
        ffn.recv_plan()
        return time.thread_time() - before

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        time.sleep(1)
        leader.publish(make_plan(0))
        assert waiting.result(5) < 0.1


def test_stop_may_come_from_another_thread(cluster: Cluster) -> None:
    leader, (ffn,) = cluster.running()
    thread = threading.Thread(target=leader.stop, args=("bye",))
    thread.start()
    assert ffn.recv_plan() == Stop(reason="bye")
    thread.join(5)


def test_publish_to_a_stuck_rank_never_blocks(cluster: Cluster) -> None:
    leader, _ = cluster.running()
    start = time.monotonic()
    with pytest.raises(PeerLost, match=r"ffn 0 .*does not take its plans, step \d+ could not"):
        for step_id in range(100_000):
            leader.publish(make_plan(step_id))
    assert step_id < 20_000
    assert time.monotonic() - start < 10
    eventually_raises(leader.check, PeerLost, 1)


def test_recv_plan_before_join(cluster: Cluster) -> None:
    with pytest.raises(AFDError, match="before join"):
        cluster.member("127.0.0.1:9", "ffn", 0, make_facts()).recv_plan()


# Heartbeats and losses


def test_heartbeats_carry_counters(cluster: Cluster) -> None:
    leader, (ffn,) = cluster.running(peer_s=1.0)
    ffn.count(steps=12, rows=345)
    time.sleep(1.5)  # longer than the timeout: heartbeats keep both sides content
    leader.check()
    ffn.check()
    (peer,) = leader.peers()
    assert peer.heartbeat is not None
    assert (peer.heartbeat.steps, peer.heartbeat.rows) == (12, 345)
    assert peer.silent_s < 1


@pytest.mark.pain(58)
def test_text_of_a_failure_reaches_the_leader(cluster: Cluster) -> None:
    leader, (_, ffn) = cluster.running(2, 1)
    seen: list[AFDError] = []
    leader.set_on_failure(seen.append)
    ffn.failed("CUDA out of memory in layer 3")
    text = eventually_raises(leader.check, PeerLost, 2)
    assert re.search(r"ffn 0 \(pid \d+ on .+\) failed: CUDA out of memory in layer 3", text)
    time.sleep(0.2)
    assert [str(error) for error in seen] == [text], "once, and the close that follows is no news"
    late: list[AFDError] = []
    leader.set_on_failure(late.append)
    time.sleep(0.1)
    assert [str(error) for error in late] == [text]


def test_failure_while_loading_ends_the_wait(cluster: Cluster) -> None:
    facts = make_facts()
    leader = cluster.leader(facts)
    member = cluster.member(leader.address, "ffn", 0, facts)
    member.join()
    threading.Timer(0.2, member.failed, ("no such file",)).start()
    with pytest.raises(PeerLost, match="ffn 0 .* failed: no such file"):
        leader.wait_ready(10)


@pytest.mark.parametrize(("role", "rank"), [("ffn", 0), ("attn", 1)])
def test_killed_member_is_noticed_within_a_second(cluster: Cluster, spawn, role, rank) -> None:
    facts = make_facts(2, 1)
    leader = cluster.leader(facts, peer_s=60)
    children = {key: spawn(*key, leader.address, facts, 60) for key in (("ffn", 0), ("attn", 1))}
    leader.wait_ready(LOAD_S)
    lost = threading.Event()
    leader.set_on_failure(lambda error: lost.set())
    children[role, rank].send_signal(signal.SIGKILL)
    text = eventually_raises(leader.check, PeerLost, 1)
    assert f"{role} {rank} (pid {children[role, rank].pid} on " in text
    assert "closed its connection" in text
    assert lost.wait(1)


@pytest.mark.pain(53)
def test_killed_leader_ends_recv_plan(cluster: Cluster, spawn) -> None:
    facts = make_facts()
    child = spawn("attn", 0, "127.0.0.1:0", facts, 60)
    address = child.stdout.readline().strip()
    member = cluster.member(address, "ffn", 0, facts, peer_s=60)
    member.join()
    member.ready(make_ready("ffn", 0))
    assert child.stdout.readline() == "ready\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(member.recv_plan)
        time.sleep(0.1)
        child.send_signal(signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"leader \(attn 0\) at .* closed its connection"):
            waiting.result(1)


@pytest.mark.pain(33, 59)
def test_frozen_member_is_silent(cluster: Cluster, spawn) -> None:
    facts = make_facts()
    leader = cluster.leader(facts, peer_s=1.0)
    child = spawn("ffn", 0, leader.address, facts, 1.0)
    leader.wait_ready(LOAD_S)
    child.send_signal(signal.SIGSTOP)
    text = eventually_raises(leader.check, PeerLost, 3)
    assert re.search(r"ffn 0 .*: no heartbeat for 1\.\d s", text)
    with pytest.raises(PeerLost, match="no heartbeat"):
        leader.publish(make_plan(0))


@pytest.mark.pain(59)
def test_frozen_leader_ends_recv_plan(cluster: Cluster, spawn) -> None:
    facts = make_facts()
    child = spawn("attn", 0, "127.0.0.1:0", facts, 1.0)
    member = cluster.member(child.stdout.readline().strip(), "ffn", 0, facts, peer_s=1.0)
    member.join()
    member.ready(make_ready("ffn", 0))
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(PeerLost, match=r"leader \(attn 0\) at .*: no heartbeat for 1\.\d s"):
        member.recv_plan()
    assert time.monotonic() - start < 3


@pytest.mark.pain(50)
def test_loading_may_be_silent_for_longer_than_the_peer_timeout(cluster: Cluster, spawn) -> None:
    facts = make_facts()
    leader = cluster.leader(facts, peer_s=0.5)
    member = cluster.member(leader.address, "ffn", 0, facts, peer_s=60)  # beats every 2 s only
    member.join()
    time.sleep(1.2)
    leader.check()


def test_environment_is_not_read() -> None:
    folder = Path(control.__file__).parent
    for name in ("channel.py", "control.py", "member.py", "messages.py", "plan.py"):
        assert not re.search(r"environ|getenv", (folder / name).read_text())


def test_close_leaves_no_thread_and_no_descriptor(cluster: Cluster) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    cluster.running()[0].stop("warm-up")
    for closable in cluster.closables:
        closable.close()
    before, threads = open_files(), threading.active_count()
    leader, members = cluster.running(2, 2)
    assert open_files() > before
    leader.stop("done")
    for member in members:
        member.close()
    assert (open_files(), threading.active_count()) == (before, threads)
