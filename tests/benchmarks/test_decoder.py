"""The decoder and its mixers against plain formulas, and what compiling them costs."""

import math

import pytest
import torch
from torch.nn import functional as F

import score_mods as sm
from benchmarks import decoder, mixers
from benchmarks.decoder import IGNORED, Decoder, Size
from benchmarks.mixers import (
    LogNAttention,
    Positions,
    ScaleInvariantAttention,
    SoftmaxAttention,
)

SIZE = Size(50, width=48, layers=3, head_dim=16)
ROTARY = sm.half_truncated_rope(16)


def made(mixer=None, size=SIZE):
    torch.manual_seed(0)
    mixer = mixer or (lambda layer: SoftmaxAttention(size.width, size.head_dim, ROTARY))
    model = Decoder(size, mixer, Positions(lambda length: ROTARY))
    for weight in model.parameters():  # what starts at 0 would hide the rest
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.1)
    model.refresh()
    return model


def normalised(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def attention_by_hand(layer, x, change=lambda s: s):
    """QK-norm, rotation, softmax over the keys up to the query, head by head."""
    length = x.shape[1]
    out = []
    for h in range(layer.num_heads):
        at = slice(h * 16, (h + 1) * 16)
        q, k, v = (x @ w.weight[at].T for w in (layer.q_proj, layer.k_proj, layer.v_proj))
        q, k = normalised(q), normalised(k)
        angle = torch.arange(length)[:, None] * ROTARY.frequencies
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

        def turned(y, cos=cos, sin=sin):
            a, b = y[..., :8], y[..., 8:]
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        scores = change(turned(q) @ turned(k).mT / 4)
        hidden = torch.ones(length, length).triu(1).bool()
        out.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
    return torch.cat(out, -1) @ layer.o_proj.weight.T


@pytest.mark.parametrize("length", [1, 7, 63])
def test_is_its_formula(length):
    model = made().double()
    ids = torch.randint(50, (2, length))
    x = normalised(model.embedding.weight[ids])
    for block in model.blocks:
        x = x + attention_by_hand(block.mixer, normalised(x))
        x = x + F.relu(normalised(x) @ block.up.weight.T).square() @ block.down.weight.T
    logits = normalised(x) @ model.head.weight.T
    targets = torch.randint(50, (2, length))
    want = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    got = model.token_losses(ids, targets)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    likeliest = model.likeliest(ids, slice(0, length))
    assert torch.equal(likeliest, logits.argmax(-1))


def test_losses_come_in_pieces_and_skip_what_is_ignored(monkeypatch):
    model = made()
    ids, targets = torch.randint(50, (2, 2, 40))
    whole = model.token_losses(ids, targets)
    monkeypatch.setattr(decoder, "_CHUNK", 7)
    torch.testing.assert_close(model.token_losses(ids, targets), whole)
    targets[:, :30] = IGNORED
    assert torch.equal(model.token_losses(ids, targets)[:, :30], torch.zeros(2, 30))
    torch.testing.assert_close(model.loss(ids, targets), whole[:, 30:].mean())
    last = targets[:, -9:]
    torch.testing.assert_close(model.token_losses(ids, last), whole[:, -9:])


def test_starts_at_the_entropy_of_all_tokens():
    model = Decoder(SIZE, lambda layer: SoftmaxAttention(48, 16), lambda *at: (None, None))
    ids = torch.randint(50, (1, 20))
    assert model.loss(ids, ids).item() == pytest.approx(math.log(50))


def test_logn_is_the_score_mod_and_starts_at_a_mean_of_one():
    trained = 4096
    layer = LogNAttention(48, 16, ROTARY, trained=trained)
    factors = layer.rate[0] * torch.arange(1, trained + 1).log()
    assert factors.mean().item() == pytest.approx(1, abs=2e-3)
    x, angles = torch.randn(1, 33, 48), ROTARY.cos_sin(torch.arange(33))
    with torch.no_grad():
        layer.rate.copy_(torch.tensor([0.1, 0.3, 0.5]))
    q, k, v = layer.heads(x, angles, None)
    want = sm.dense_attention(q, k, v, layer.mechanism(), sm.causal)
    torch.testing.assert_close(layer.attend(q, k, v, None), want, atol=1e-5, rtol=1e-5)


def test_a_law_is_each_heads_own():
    layer = ScaleInvariantAttention(48, 16, ROTARY, sinks=1)
    sigma, mu = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([-1.0, 0.0, 1.0])
    layer.set_law(sigma, mu)
    q, k, v = torch.randn(3, 1, 3, 40, 16)
    mod = sm.exempt_keys(sm.scale_invariant(10.0, sigma=sigma, mu=mu), 1)
    want = sm.dense_attention(q, k, v, mod, sm.causal)
    torch.testing.assert_close(layer.attend(q, k, v, None), want)
    other = ScaleInvariantAttention(48, 16, ROTARY, sinks=1)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other.attend(q, k, v, None), want)


def test_taus_gradient_is_exact_over_all_rows(monkeypatch):
    """And 0 is added to the output. The rows are drawn, so the estimate has this for its mean."""
    length = mixers._SAMPLED
    monkeypatch.setattr(torch, "randint", lambda high, size, device: torch.arange(high))
    layer = ScaleInvariantAttention(48, 16, learned=True).double()
    layer.refresh()
    q, k, v = torch.randn(3, 2, 3, length, 16, dtype=torch.float64)
    out = layer.attend(q, k, v, None)
    want = sm.dense_attention(q, k, v, sm.scale_invariant(10.0), sm.causal)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-6)
    got = torch.autograd.grad(out.sin().sum(), layer.log_tau)[0]
    log_tau = layer.log_tau.detach().clone().requires_grad_()
    exact = sm.dense_attention(q, k, v, sm.scale_invariant(log_tau.exp()), sm.causal)
    expected = torch.autograd.grad(exact.sin().sum(), log_tau)[0]
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_queries_and_keys_are_those_of_each_layer():
    model = made()
    ids = torch.randint(50, (1, 20))
    pairs = list(model.heads(ids))
    assert len(pairs) == 3
    x = normalised(model.embedding.weight[ids])
    q, k, _ = model.blocks[0].mixer.heads(normalised(x), *model.shared(20, torch.device("cpu")))
    torch.testing.assert_close(pairs[0][:2], (q, k))
    assert not torch.allclose(pairs[1][0], q)


@pytest.mark.parametrize("learned", [False, True])
def test_all_layers_share_one_graph_at_each_length(learned):
    torch.compiler.reset()
    model, plain = (
        made(lambda layer: ScaleInvariantAttention(48, 16, ROTARY, learned=learned))
        for _ in range(2)
    )
    model.compile_parts(backend="eager")
    torch._dynamo.utils.counters.clear()
    for length in (64, 128):
        ids = torch.randint(50, (1, length))
        for _ in range(2):
            model.refresh()  # a new score_mod is no new graph
            loss = model.loss(ids, ids)
            torch.testing.assert_close(loss, plain.loss(ids, ids))
            loss.backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4  # a block and a loss each
    torch.compiler.reset()


@pytest.mark.parametrize(
    "mixer",
    [
        lambda layer: SoftmaxAttention(48, 16, ROTARY, sm.alibi(3)),
        lambda layer: LogNAttention(48, 16, ROTARY, trained=64),
        lambda layer: ScaleInvariantAttention(48, 16, ROTARY, learned=True, sinks=1),
    ],
    ids=["softmax", "logn", "scale_invariant"],
)
def test_flexattention_takes_the_place_of_the_dense_form(mixer):
    """As on a GPU, but for its kernel: traced whole, with a BlockMask, on a graph for a length."""
    torch.compiler.reset()
    model, plain = made(mixer), made(mixer)

    def with_blocks(length, device):
        mask = sm.create_block_mask(sm.causal, None, None, length, length, device)
        return ROTARY.cos_sin(torch.arange(length)), mask

    shared = {length: with_blocks(length, "cpu") for length in (64, 300)}
    model.shared = lambda length, device: shared[length]
    model.compile_parts(backend="eager")
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for length in (64, 300):
            ids = torch.randint(50, (1, length))
            for _ in range(2):
                model.refresh()
                torch.testing.assert_close(model.loss(ids, ids), plain.loss(ids, ids))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"width": 100}, "width must be a multiple of head_dim"), ({"layers": 0}, "layers")],
)
def test_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        Size(50, **options)


def test_counts_weights_and_flops():
    model = made()
    assert sum(x.numel() for x in model.parameters()) == SIZE.parameters
    hidden = SIZE.parameters - model.embedding.weight.numel()
    assert SIZE.weights == hidden
    visible = sum(range(1, 1001)) / 1000
    products = 2 * 2 * SIZE.layers * SIZE.width * visible
    assert SIZE.flops_per_token(1000) == pytest.approx(3 * (2 * hidden + products), rel=1e-3)
