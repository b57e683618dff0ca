import copy
import pickle

import pytest
import torch

import score_mods as sm
from score_mods.cache import KVCache

B, H, D = 2, 2, 4


def tokens(n, value_dim=D):
    return torch.randn(B, H, n, D), torch.randn(B, H, n, value_dim)


def attend(q, cache, k, v, positions, mask_mod):
    """Queries at `positions` against the cache, after their own keys went into it."""
    keys, values, at = cache.update(k, v, positions)
    mod = sm.with_positions(sm.logn(), positions.clamp(min=0), at.clamp(min=0))
    return sm.dense_attention(q, keys, values, mod, cache.mask(mask_mod, positions, at))


def alone(q, k, v, mask_mod):
    """The same for tokens at 0 to T - 1 without a cache, in float64, each row by itself."""
    q, k, v = (x.double()[None] for x in (q, k, v))
    return sm.dense_attention(q, k, v, sm.logn(), mask_mod)[0]


@pytest.mark.parametrize(("sliding", "capacity"), [(False, 23), (False, 40), (True, 7), (True, 1)])
@pytest.mark.parametrize("blocks", [[23], [1] * 23, [9, 1, 1, 5, 1, 6], [2, 8, 8, 5]])
def test_any_blocks_equal_one_pass(sliding, capacity, blocks):
    (k, v), q = tokens(23, 3), torch.randn(B, H, 23, D)
    cache = KVCache(B, H, capacity, D, value_dim=3, sliding=sliding)
    mask = sm.sliding_window(capacity) if sliding else sm.causal
    out = []
    for at in torch.arange(23).split(blocks):
        out.append(attend(q[:, :, at], cache, k[:, :, at], v[:, :, at], at, sm.causal))
    expected = torch.stack([alone(*x, mask) for x in zip(q, k, v, strict=True)])
    assert (torch.cat(out, 2) - expected).abs().max() < 1e-6
    assert cache.lengths.tolist() == [23, 23]
    # The twin: a window of another size is noticed.
    other = sm.sliding_window(2 if capacity == 1 else min(capacity, 23) - 1)
    wrong = torch.stack([alone(*x, other) for x in zip(q, k, v, strict=True)])
    assert (torch.cat(out, 2) - wrong).abs().max() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("sliding", [False, True])
def test_ragged_rows_equal_each_alone(side, sliding):
    """Prompts of 3 and 8 tokens in a block of 8, then four tokens for both, one at a time."""
    lengths, prompt, more = [3, 8], 8, 4
    cache = KVCache(B, H, 6 if sliding else 20, D, sliding=sliding)
    mask = sm.sliding_window(6) if sliding else sm.causal
    rows = [(torch.randn(3, H, n + more, D)) for n in lengths]
    block = torch.randn(3, B, H, prompt, D)
    positions = torch.full((B, prompt), -1)
    for b, n in enumerate(lengths):
        at = slice(prompt - n, prompt) if side == "left" else slice(0, n)
        block[:, b, :, at] = rows[b][:, :, :n]
        positions[b, at] = torch.arange(n)
    out = [attend(block[0], cache, block[1], block[2], positions, sm.causal)]
    assert (out[0][positions[:, None].expand(B, H, prompt) < 0] == 0).all()
    for step in range(more):
        q, k, v = torch.stack([x[:, :, [n + step]] for x, n in zip(rows, lengths, strict=True)], 1)
        out.append(attend(q, cache, k, v, cache.next_positions(1), sm.causal))
    for b in range(B):
        got = torch.cat([out[0][b][:, positions[b] >= 0]] + [x[b] for x in out[1:]], 1)
        assert (got - alone(*rows[b], mask)).abs().max() < 1e-6
    assert cache.lengths.tolist() == [7, 12]


def test_unfilled_slots_are_seen_by_no_mask():
    cache = KVCache(B, H, 9, D)
    (k, v), q = tokens(2), torch.randn(B, H, 2, D)
    keys, values, at = cache.update(k, v)
    cache.keys[:, :, 2:] = 1e4
    out = sm.dense_attention(q, keys, values, None, cache.mask(None, at[:, :2], at))
    assert (out - sm.dense_attention(q.double(), k.double(), v.double())).abs().max() < 1e-6
    cache.reset()
    assert (cache.positions == -1).all()
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_by_itself(copied):
    cache = KVCache(B, H, 4, D)
    cache.update(*tokens(2))
    k, v = tokens(1)
    other = copied(cache)
    keys, values, positions = other.update(k, v)
    assert torch.equal(keys[:, :, 2:3], k)
    assert torch.equal(values[:, :, 2:3], v)
    assert positions.tolist() == [[0, 1, 2, -1]] * B
    assert cache.positions.tolist() == [[0, 1, -1, -1]] * B


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("positions", [[1, 2], [3, 3], [4, 3], [2, -1], [[2, 3], [1, 2]]])
def test_positions_that_do_not_ascend_are_an_error(sliding, positions):
    cache = KVCache(B, H, 9, D, sliding=sliding)
    cache.update(*tokens(3), torch.tensor([[-1, 0, 1], [0, 1, 2]]))
    with pytest.raises(ValueError, match=r"must ascend .* where it ends, at \[2, 3\], got"):
        cache.update(*tokens(2), torch.tensor(positions))
    cache.update(*tokens(2), torch.tensor([[2, 5], [-1, 3]]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_positions_of_any_integer_dtype(dtype):
    k, v = tokens(3)
    cache = KVCache(B, H, 4, D)
    keys, _, positions = cache.update(k, v, torch.arange(3).to(dtype))
    assert torch.equal(keys[:, :, :3], k)
    assert positions.tolist() == [[0, 1, 2, -1]] * B
    assert cache.lengths.tolist() == [3, 3]


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="dtype must be a floating dtype, got torch"):
        KVCache(1, 1, 1, 1, dtype=torch.int32)
    with pytest.raises(TypeError, match="sliding must be a bool, got str"):
        KVCache(1, 1, 1, 1, sliding="no")
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        KVCache(1, 1, 0, 1)
    with pytest.raises(TypeError, match="head_dim must be an int"):
        KVCache(1, 1, 1, 1.0)
    cache = KVCache(B, H, 4, D)
    k, v = tokens(3)
    with pytest.raises(ValueError, match=r"k must have shape \(2, 2, n, 4\)"):
        cache.update(k[:1], v)
    with pytest.raises(ValueError, match="v must have the cache's dtype"):
        cache.update(k, v.double())
    with pytest.raises(TypeError, match="v must be a tensor, got list"):
        cache.update(k, [v])
    with pytest.raises(TypeError, match="positions must be an integer tensor, got torch"):
        cache.update(k, v, torch.ones(3))
    with pytest.raises(TypeError, match=r"positions must be an integer tensor, got torch\.bool"):
        cache.update(k, v, torch.tensor([False, True, True]))
    with pytest.raises(ValueError, match=r"positions must have shape \(3,\) or \(2, 3\)"):
        cache.update(k, v, torch.arange(2))
    with pytest.raises(TypeError, match="count must be an int, got float"):
        cache.next_positions(3.0)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        cache.next_positions(-1)
    for held in (cache, KVCache(B, H, 4, D, sliding=True)):
        with pytest.raises(TypeError, match=r"mask_mod must be a mask_mod .* got str"):
            held.mask("causal", torch.arange(3), torch.arange(3))
        with pytest.raises(TypeError, match="q_positions must be an int32 or int64 tensor"):
            held.mask(None, [0], torch.arange(3))
    with pytest.raises(ValueError, match=r"use torch.no_grad\(\)"):
        cache.update(k.requires_grad_(), v)
    with torch.no_grad():
        cache.update(k, v)
        with pytest.raises(ValueError, match="below the capacity of 4, got 5"):
            cache.update(k, v)


def test_too_long_a_row_is_an_error_in_a_compiled_function():
    cache = KVCache(B, H, 4, D)
    update = torch.compile(cache.update, fullgraph=True, backend="eager")
    k, v = tokens(2)
    update(k, v)
    update(k, v)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        update(k, v)


@pytest.mark.parametrize(("sliding", "tokens", "kept"), [(False, 1, 2), (True, 3, 2)])
def test_a_compiler_keeps_positions_out_of_the_attention_kernel(sliding, tokens, kept):
    """They come from tensors of the cache, which may have counted on when the kernel reads."""
    operators = []

    def backend(graph, _):
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    cache = KVCache(1, 1, 8, 4, sliding=sliding)
    k = torch.randn(1, 1, tokens, 4)
    compiled = torch.compile(lambda k: cache.update(k, k)[2], fullgraph=True, backend=backend)
    positions = compiled(k)
    assert sorted(positions[positions >= 0].tolist()) == list(range(tokens))
    assert sum("score_mods.kept" in name for name in operators) == kept
