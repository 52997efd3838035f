"""The kernels on one GPU, all ranks in one process.

python -m pytest sgl-kernel/tests -m gpu -q
"""

from __future__ import annotations

import random
import time

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

if torch.cuda.is_available():
    import reference
    from harness import Link
    from sglang_afd_kernel import abi
    from sglang_afd_kernel.ends import Shape

ULP = 2**-7  # of BF16, relative to a value, at most


def make_shape(attn=1, ffn=1, *, experts=32, hidden=2048, topk=8, capacity=64, fp8=True):
    return Shape(
        attn_ranks=attn,
        ffn_ranks=ffn,
        num_experts=experts,
        hidden=hidden,
        topk=topk,
        capacity=capacity,
        fp8=fp8,
    )


def experts(link, ffn_rank, batch):
    """What the experts of an FFN rank answer to rows by expert, or to rows."""
    first = reference.experts_of(link.shape, ffn_rank).start
    if len(batch) == 3:
        hidden_ELH = reference.dequantized(batch.hidden_ELH, batch.scales_ELG)
        ids = torch.arange(hidden_ELH.shape[0], device=hidden_ELH.device) + first
        return (hidden_ELH * reference.expert_factor(ids)[:, None, None]).bfloat16()
    hidden_RH = reference.dequantized(batch.hidden_RH, batch.scales_RG)
    total_RH = torch.zeros_like(hidden_RH)
    for k in range(link.shape.topk):
        ids_R = batch.topk_ids_RK[:, k]
        out_RH = (hidden_RH * reference.expert_factor(ids_R + first)[:, None]).bfloat16().float()
        total_RH += out_RH * (batch.topk_weights_RK[:, k] * (ids_R >= 0))[:, None]
    return total_RH.bfloat16()


def play(link, sent, *, microbatch=0, max_rows=None, by_expert=None, look=None):
    """One transfer on the ranks' streams; the results by attention rank."""
    shape = link.shape
    by_expert = shape.fp8 if by_expert is None else by_expert
    max_rows = max_rows or tuple(len(tokens.hidden_TH) for tokens in sent)
    outs = [torch.full_like(tokens.hidden_TH, torch.nan) for tokens in sent]
    link.ready()
    for end, stream, tokens in zip(link.attn, link.attn_streams, sent, strict=True):
        with torch.cuda.stream(stream):
            end.dispatch(microbatch, *tokens, max_rows=max_rows, layer=3)
    for j, (end, stream) in enumerate(zip(link.ffn, link.ffn_streams, strict=True)):
        with torch.cuda.stream(stream):
            receive = end.receive_by_expert if by_expert else end.receive
            batch = receive(microbatch, sum(max_rows), layer=3)
            out = experts(link, j, batch)
            if look is not None:
                look(j, type(batch)(*(None if x is None else x.clone() for x in batch)))
            end.send(microbatch, out, max_rows=max_rows, layer=3)
    for end, stream, tokens, out in zip(link.attn, link.attn_streams, sent, outs, strict=True):
        with torch.cuda.stream(stream):
            end.combine(microbatch, tokens.ids_TK, out, layer=3)
    link.finish()
    return outs


def wire(shape, hidden_TH):
    """What reaches an expert, FP32: the hidden states, quantised as upstream quantises them."""
    if not shape.fp8 or len(hidden_TH) == 0:
        return hidden_TH.float()
    return reference.dequantized(*upstream_quantized(hidden_TH))


def upstream_quantized(hidden_TH):
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    return sglang_per_token_group_quant_fp8(hidden_TH, abi.GROUP)


def assert_near(got_TH, shape, tokens):
    expected_TH = reference.result(shape, tokens, wire(shape, tokens.hidden_TH))
    if len(got_TH) == 0:
        return
    # All parts of a sum have one sign. The result is rounded once, and a part whose FP32 sum was taken
    # in another order may have been rounded to its other neighbour.
    bound_TH = expected_TH.abs() * (1.5 * ULP) + 1e-30
    assert torch.isfinite(got_TH).all()
    wrong = ((got_TH.double() - expected_TH).abs() > bound_TH).nonzero()
    assert len(wrong) == 0, (
        len(wrong),
        wrong[0],
        got_TH[tuple(wrong[0])],
        expected_TH[tuple(wrong[0])],
    )


@pytest.fixture(scope="module")
def link_of():
    links = {}

    def get(shape, **options):
        key = (shape, tuple(sorted(options.items())))
        if key not in links:
            links.clear()  # one at a time: buffers are large
            links[key] = Link(shape, by_expert=True, **options)
        return links[key]

    return get


SIZES = [(1, 1), (2, 1), (1, 2), (3, 2), (2, 5), (7, 1), (4, 4)]


def in_turn(counts):
    """Every case of one size one after the other, so that a link serves many transfers."""
    return [(size, tokens) for size in SIZES for tokens in counts]


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize(
    ("size", "num_tokens"), in_turn((0, 1, 2, 17, 64)), ids=lambda value: str(value)
)
def test_results(link_of, size, num_tokens, fp8):
    """Rank i has `num_tokens` less i tokens."""
    shape = make_shape(*size, experts=30, fp8=fp8)
    link = link_of(shape)
    sent = [
        reference.draw(shape, max(0, num_tokens - i), seed=10 * num_tokens + i)
        for i in range(shape.attn_ranks)
    ]
    for microbatch in (0, 1):
        for got_TH, tokens in zip(play(link, sent, microbatch=microbatch), sent, strict=True):
            assert_near(got_TH, shape, tokens)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize(
    ("hidden", "topk", "experts"),
    [(256, 1, 8), (384, 16, 64), (2816, 4, 32), (4096, 8, 128), (7168, 8, 256), (7168, 16, 512)],
)
def test_shapes(link_of, hidden, topk, experts, fp8):
    shape = make_shape(2, 3, experts=experts, hidden=hidden, topk=topk, fp8=fp8)
    link = link_of(shape)
    sent = [
        reference.draw(shape, count, seed=count, ids=ids)
        for count, ids in ((64, torch.int64), (5, torch.int32))
    ]
    for got_TH, tokens in zip(play(link, sent), sent, strict=True):
        assert_near(got_TH, shape, tokens)


def test_quantized_as_upstream(link_of):
    """Bits and scales, with groups of zeros, of tiny, of huge and of not finite values."""
    shape = make_shape(1, 1, capacity=64)
    link = link_of(shape)
    tokens = reference.draw(shape, 64, seed=1, masked=0)
    hidden_TH = tokens.hidden_TH
    hidden_TH[0] = 0
    hidden_TH[1, :128] = 1e-30
    hidden_TH[2] *= 1e30
    hidden_TH[3, 5] = torch.inf
    hidden_TH[4, 7] = -torch.inf
    hidden_TH[5] *= 1e-9
    seen = []
    play(link, [tokens], by_expert=False, look=lambda _, batch: seen.append(batch))
    expected, scales = upstream_quantized(hidden_TH)
    torch.cuda.synchronize()
    assert torch.equal(seen[0].scales_RG, scales)
    same = seen[0].hidden_RH.view(torch.uint8) == expected.view(torch.uint8)
    assert same.all(), same.logical_not().nonzero()[:4]


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_rows_arrive_bitwise(link_of, fp8):
    """Rows of a rank's own experts only; ids and weights of all; padding says -1."""
    shape = make_shape(3, 2, experts=30, fp8=fp8)
    link = link_of(shape)
    counts, max_rows = (20, 0, 33), (24, 3, 33)
    sent = [reference.draw(shape, n, seed=n, masked=0.6) for n in counts]
    seen = {}
    play(link, sent, by_expert=False, max_rows=max_rows, look=seen.__setitem__)
    torch.cuda.synchronize()
    for j in range(shape.ffn_ranks):
        own = reference.experts_of(shape, j)
        start = 0
        for tokens, count, room in zip(sent, counts, max_rows, strict=True):
            ids_TK = tokens.ids_TK
            here_TK = (ids_TK >= own.start) & (ids_TK < own.stop)
            rows = slice(start, start + count)
            assert torch.equal(
                seen[j].topk_ids_RK[rows], torch.where(here_TK, ids_TK - own.start, -1)
            )
            assert torch.equal(seen[j].topk_weights_RK[rows], tokens.weights_TK * here_TK)
            needed_T = here_TK.any(dim=1)
            got = seen[j].hidden_RH[rows][needed_T]
            if fp8:
                expected, scales = upstream_quantized(tokens.hidden_TH) if count else (None, None)
                if count:
                    assert torch.equal(got.view(torch.uint8), expected[needed_T].view(torch.uint8))
                    assert torch.equal(seen[j].scales_RG[rows][needed_T], scales[needed_T])
            else:
                assert torch.equal(got, tokens.hidden_TH[needed_T])
            assert (seen[j].topk_ids_RK[start + count : start + room] == -1).all()
            assert (seen[j].topk_weights_RK[start + count : start + room] == 0).all()
            start += room


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_rows_by_expert(link_of, fp8):
    """Counts are right, and the rows of an expert are those of its tokens, in some order."""
    shape = make_shape(3, 2, experts=30, fp8=fp8)
    link = link_of(shape)
    sent = [reference.draw(shape, n, seed=n) for n in (20, 1, 64)]
    seen = {}
    play(link, sent, by_expert=True, look=seen.__setitem__)
    torch.cuda.synchronize()
    for j in range(shape.ffn_ranks):
        batch = seen[j]
        for slot, expert in enumerate(reference.experts_of(shape, j)):
            expected = torch.cat(
                [
                    wire(shape, tokens.hidden_TH)[(tokens.ids_TK == expert).any(dim=1)]
                    for tokens in sent
                ]
            )
            count = int(batch.rows_per_expert_E[slot])
            assert count == len(expected)
            scales = None if batch.scales_ELG is None else batch.scales_ELG[slot, :count]
            got = reference.dequantized(batch.hidden_ELH[slot, :count], scales)
            order = [rows[:, 0].argsort(stable=True) for rows in (got, expected)]
            if len(set(expected[:, 0].tolist())) == count:  # else the order is not unique
                assert torch.equal(got[order[0]], expected[order[1]])


def test_all_tokens_to_one_expert(link_of):
    shape = make_shape(2, 2)
    link = link_of(shape)
    sent = []
    for i in range(2):
        tokens = reference.draw(shape, shape.capacity, seed=i)
        tokens.ids_TK[:] = -1
        tokens.ids_TK[:, 3] = 17
        sent.append(tokens)
    for got_TH, tokens in zip(play(link, sent), sent, strict=True):
        assert_near(got_TH, shape, tokens)


def test_shared_expert_is_added(link_of):
    shape = make_shape(1, 2)
    link = link_of(shape)
    tokens = reference.draw(shape, 9, seed=4)
    plain = play(link, [tokens])[0]
    shared_TH = torch.randn_like(plain)
    out_TH = torch.empty_like(plain)
    link.ready()
    with torch.cuda.stream(link.attn_streams[0]):
        link.attn[0].dispatch(0, *tokens, max_rows=(9,))
    for j, stream in enumerate(link.ffn_streams):
        with torch.cuda.stream(stream):
            batch = link.ffn[j].receive_by_expert(0, 9)
            link.ffn[j].send(0, experts(link, j, batch), max_rows=(9,))
    with torch.cuda.stream(link.attn_streams[0]):
        link.attn[0].combine(0, tokens.ids_TK, out_TH, shared_TH=shared_TH)
    link.finish()
    torch.testing.assert_close(
        out_TH.float(), plain.float() + shared_TH.float(), rtol=2 * ULP, atol=0.05
    )


def test_skew(link_of):
    """Ranks that come late, in any order, with sizes that change from transfer to transfer."""
    shape = make_shape(3, 2, experts=30)
    link = link_of(shape)
    rng = random.Random(0)
    for step in range(60):
        sent = [
            reference.draw(shape, rng.choice((0, 1, 5, 31, 64)), seed=100 * step + i)
            for i in range(shape.attn_ranks)
        ]
        link.ready()
        for stream in link.streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(rng.choice((0, 0, 20_000, 400_000)))
        results = play(link, sent, microbatch=step % 2, by_expert=bool(rng.randrange(2)))
        for got_TH, tokens in zip(results, sent, strict=True):
            assert_near(got_TH, shape, tokens)


def test_epochs_wrap_around(link_of):
    """After 2^22 transfers a flag has counted through all of its 32 bits."""
    shape = make_shape(2, 1)
    link = link_of(shape, blocks=3, ffn_blocks=7)
    last = 2**22 - 2
    for end, peers in [(end, shape.ffn_ranks) for end in link.attn] + [
        (end, shape.attn_ranks) for end in link.ffn
    ]:
        flags = end._own[: 32 * peers].view(torch.int32).view(peers, 8)
        flags[:, 0] = (last * 1024) - 2**32
        end._state[0, 0] = last
    torch.cuda.synchronize()
    for step in range(6):
        sent = [reference.draw(shape, 7, seed=step), reference.draw(shape, 8, seed=step + 50)]
        for got_TH, tokens in zip(play(link, sent), sent, strict=True):
            assert_near(got_TH, shape, tokens)
    assert int(link.attn[0]._state[0, 0]) == last + 6


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_graph_replays_equal_eager_bitwise(link_of, fp8):
    """A whole step of several layers and two microbatches, captured per rank, replayed."""
    shape = make_shape(2, 2, experts=30, fp8=fp8)
    link = link_of(shape)
    layers, rows = 5, (24, 24)
    static = [[reference.draw(shape, 24, seed=i + 7 * m) for m in (0, 1)] for i in (0, 1)]
    outs = [
        [[torch.zeros_like(t.hidden_TH) for _ in range(layers)] for t in mine] for mine in static
    ]

    def attn_step(i):
        for layer in range(layers):
            for m in (0, 1):
                link.attn[i].dispatch(m, *static[i][m], max_rows=rows, layer=layer)
            for m in (0, 1):
                link.attn[i].combine(m, static[i][m].ids_TK, outs[i][m][layer], layer=layer)

    def ffn_step(j):
        for layer in range(layers):
            for m in (0, 1):
                receive = link.ffn[j].receive_by_expert if fp8 else link.ffn[j].receive
                out = experts(link, j, receive(m, sum(rows), layer=layer))
                link.ffn[j].send(m, out, max_rows=rows, layer=layer)

    steps = [(attn_step, i, link.attn_streams[i]) for i in (0, 1)]
    steps += [(ffn_step, j, link.ffn_streams[j]) for j in (0, 1)]
    link.ready()
    for step, rank, stream in steps:  # eager, and a warm-up
        with torch.cuda.stream(stream):
            step(rank)
    link.finish()
    graphs = []
    for step, rank, stream in steps:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step(rank)
        graphs.append((graph, stream))
    for replay in range(8):
        for mine in static:
            for m, tokens in enumerate(mine):
                fresh = reference.draw(shape, 24, seed=replay + 31 * m)
                for old, new in zip(tokens, fresh, strict=True):
                    old.copy_(new)
        link.ready()
        for graph, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        link.finish()
        torch.cuda.synchronize()
        replayed = [[[out.clone() for out in each] for each in mine] for mine in outs]
        for i in (0, 1):
            for m in (0, 1):
                assert_near(replayed[i][m][-1], shape, static[i][m])
        link.ready()
        for step, rank, stream in steps:
            with torch.cuda.stream(stream):
                step(rank)
        link.finish()
        torch.cuda.synchronize()
        for i in (0, 1):
            for m in (0, 1):
                for layer in range(layers):
                    assert torch.equal(replayed[i][m][layer], outs[i][m][layer])


@pytest.mark.parametrize("operation", ["receive", "combine"])
def test_a_wait_ends_and_says_for_whom(operation):
    shape = make_shape(2, 1)
    link = Link(shape, by_expert=True, timeout_s=0.3)
    tokens = reference.draw(shape, 4, seed=0)
    rows = (4, 4)
    if operation == "receive":
        link.attn[0].dispatch(0, *tokens, max_rows=rows, layer=5)  # attention rank 1 never comes
        began = time.monotonic()
        link.ffn[0].receive_by_expert(0, 8, layer=5)
        end = link.ffn[0]
        peer, rank = 1, 2
    else:
        for attn in link.attn:
            attn.dispatch(0, *tokens, max_rows=rows, layer=5)
        began = time.monotonic()
        link.attn[1].combine(0, tokens.ids_TK, torch.empty_like(tokens.hidden_TH), layer=5)
        end = link.attn[1]
        peer, rank = 2, 1
    torch.cuda.synchronize()
    assert 0.25 < time.monotonic() - began < 3
    failure = end.failure
    assert failure is not None
    assert (failure.operation, failure.rank, failure.peer) == (operation, rank, peer)
    assert (failure.layer, failure.microbatch, failure.seen) == (5, 0, 0)
    assert failure.expected == 1024
    assert f"world rank {peer}" in str(failure)
    # What follows returns at once, and tells no peer that it has done its part.
    began = time.monotonic()
    for _ in range(50):
        if operation == "receive":
            link.ffn[0].send(
                0, torch.zeros(32, 8, 2048, dtype=torch.bfloat16, device="cuda"), max_rows=rows
            )
        else:
            link.attn[1].dispatch(0, *tokens, max_rows=rows)
    torch.cuda.synchronize()
    assert time.monotonic() - began < 0.2
    assert end.failure == failure


def test_a_wait_in_a_graph_ends_sooner_than_outside():
    """Outside, a peer may still compile what it runs before it dispatches."""
    link = Link(make_shape(), by_expert=False, timeout_s=0.3, eager_timeout_s=20.0)
    tokens = reference.draw(link.shape, 4, seed=0)
    link.ready()
    with torch.cuda.stream(link.ffn_streams[0]):
        link.ffn[0].receive(0, 4)
    time.sleep(1.0)
    link.attn[0].dispatch(0, *tokens, max_rows=(4,))
    link.finish()  # late, and no failure
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        link.ffn[0].send(0, tokens.hidden_TH, max_rows=(4,))
        link.ffn[0].receive(0, 4)
    began = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    assert 0.25 < time.monotonic() - began < 3
    assert link.ffn[0].failure is not None
