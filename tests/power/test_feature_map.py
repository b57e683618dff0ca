import math

import pytest
import torch

from power.feature_map import monomials, state_size, symmetric_power, tile_size

SHAPES = [(16, 2), (32, 2), (24, 2), (5, 2), (1, 2), (16, 4), (6, 4), (5, 6), (4, 8)]


@pytest.mark.parametrize(("head_dim", "deg"), SHAPES)
def test_product_of_features_is_the_power_of_the_product(head_dim, deg):
    generator = torch.Generator().manual_seed(head_dim)
    q, k = torch.randn(2, 50, head_dim, generator=generator, dtype=torch.float64)
    features = (symmetric_power(q, deg) * symmetric_power(k, deg)).sum(-1)
    bound = (q.norm(dim=-1) * k.norm(dim=-1)) ** deg
    assert ((features - (q * k).sum(-1) ** deg).abs() <= 1e-13 * bound).all()


@pytest.mark.parametrize(("head_dim", "deg"), SHAPES)
def test_layout_by_enumeration(head_dim, deg):
    """Lexicographic multi-indices with tiles that do not fall, weighed by the number of orders."""
    tile = tile_size(head_dim, deg)
    kept, weights = [], []

    def extend(prefix):
        if len(prefix) == deg:
            tiles = [i // tile for i in prefix]
            orders = math.factorial(deg)
            for t in set(tiles):
                orders //= math.factorial(tiles.count(t))
            kept.append(prefix)
            weights.append(math.sqrt(orders))
            return
        for i in range(head_dim):
            if not prefix or i // tile >= prefix[-1] // tile:
                extend([*prefix, i])

    extend([])
    index, weight = monomials(head_dim, deg)
    assert index.T.tolist() == kept
    assert weight.tolist() == weights
    assert state_size(head_dim, deg) == len(kept)


def test_what_is_done_to_the_layout_stays_with_the_caller():
    index, weight = monomials(6)
    index[:], weight[:] = 0, 0
    x = torch.randn(6, dtype=torch.float64)
    torch.testing.assert_close(symmetric_power(x) @ symmetric_power(x), (x @ x) ** 2)


def test_state_sizes():
    assert [state_size(k) for k in (16, 32, 64, 128)] == [256, 768, 2560, 9216]
    assert [state_size(k, 4) for k in (16, 32)] == [8960, 84480]
    assert state_size(10, 6) == math.comb(15, 6)


def test_degree_two_by_hand():
    x = torch.arange(1.0, 33.0, dtype=torch.float64)
    phi = symmetric_power(x)
    assert phi[0] == 1  # x_0 x_0
    assert phi[1] == phi[32] == 2  # x_0 x_1 and x_1 x_0 in one tile: both kept, weight 1
    assert phi[16] == pytest.approx(math.sqrt(2) * 17)  # x_0 x_16, across tiles
    assert phi[16 * 32] == 17 * 17  # x_16 x_16 opens the second tile


def test_dtype_and_gradient():
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: symmetric_power(x, 4), x)
    assert symmetric_power(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "deg must be positive and even .* got 3", lambda: state_size(8, 3)),
        (ValueError, "deg must be positive and even .* got 0", lambda: state_size(8, 0)),
        (TypeError, "deg must be an int, got float", lambda: state_size(8, 2.0)),
        (ValueError, "head_dim must be 1 or more, got 0", lambda: state_size(0)),
        (TypeError, "head_dim must be an int, got float", lambda: state_size(2.5)),
        (TypeError, "head_dim must be an int, got bool", lambda: state_size(True)),
        (TypeError, "floating dtype, got torch.int64", lambda: symmetric_power(torch.arange(4))),
        (TypeError, "floating dtype, got list", lambda: symmetric_power([1.0])),
        (ValueError, r"the shape \[..., K\], got \[\]", lambda: symmetric_power(torch.ones(()))),
    ],
)
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call()
