"""Grids of launches, without launching: CUDA takes 65,535 programs on all axes but the first."""

import pytest
import torch

from power import state_size

launch = pytest.importorskip(
    "power.kernels.launch", reason="the kernels need Triton", exc_type=ImportError
)
config = pytest.importorskip(
    "power.kernels.config", reason="the kernels need Triton", exc_type=ImportError
)
KERNELS = {
    name
    for name, x in vars(launch).items()
    if name.endswith("_kernel") and name not in ("to_kernel", "from_kernel")
}
STEP = {"step_state_kernel", "step_out_kernel"}
QUARTIC = {name for name in KERNELS if name.startswith("quartic")}
SEQUENCES = 70_000


class Recorder(list):
    """Stands for a kernel: the list of the grids that it is launched on."""

    def __getitem__(self, grid):
        self.append(grid)
        return lambda *args, **sizes: None


@pytest.fixture
def grids(monkeypatch):
    recorders = {name: Recorder() for name in KERNELS}
    for name, recorder in recorders.items():
        monkeypatch.setattr(launch, name, recorder)
    return recorders


def check(grids, launched):
    assert {name for name in KERNELS if len(grids[name])} == launched
    for name in launched:
        for grid in iter(grids[name]):
            assert grid[0] >= SEQUENCES, name
            assert max(grid[1:], default=1) <= 65_535, name


@pytest.mark.parametrize("deg", [2, 4])
def test_any_number_of_sequences_and_chunks(deg, grids):
    q, k, v = (torch.empty(SEQUENCES, 1, 2, 16, device="meta") for _ in range(3))
    log_g = torch.empty(SEQUENCES, 1, 2, device="meta")
    s = torch.empty(SEQUENCES, 1, state_size(16, deg), 16, device="meta")
    state = s, s[..., 0]
    out, *_, saved = launch.forward(q, k, v, log_g, *state, None, deg, 1.0, 1, True)
    launch.backward(out, *state, q, k, v, log_g, *state, None, out, saved, deg, 1.0, 1)
    check(grids, KERNELS - STEP - (QUARTIC if deg == 2 else {"update_kernel"}))


def test_any_number_of_decoded_sequences(grids):
    q = torch.empty(SEQUENCES, 1, 1, 16, device="meta")
    s = torch.empty(SEQUENCES, 1, state_size(16, 2), 16, device="meta")
    rows = torch.empty(SEQUENCES, 1, 8, 16, device="meta")
    filled = torch.empty(SEQUENCES, dtype=torch.int32, device="meta")
    launch.step(q, q, q, None, s, s[..., 0], rows, rows, rows[..., 0], filled, 2, 1.0)
    check(grids, STEP)


def test_what_a_refusal_proposes_is_taken():
    q = torch.empty(1, 1, 300, 64)
    with_chunks = config.unsupported(q, q, q, None, 4, 128)
    assert "use chunk_size=None" in with_chunks
    assert config.unsupported(q, q, q, None, 4, None) is None
    with_state = config.unsupported(q, q, q, None, 4, None, with_state=True)
    assert 'use impl="reference"' in with_state


@pytest.mark.parametrize(
    ("T", "size", "backward", "chunk"),
    [
        (4096, 64, True, None),
        (4097, 64, True, 1024),
        (5504, 64, False, None),
        (5505, 64, False, 1024),
        (2048, 32, False, None),
        (2048, 32, True, 512),
        (65_536, 128, True, 2048),
    ],
)
def test_the_form_is_chosen_by_length_and_by_whether_gradients_follow(T, size, backward, chunk):
    assert config.choose_chunk_size(T, size, 32, 2, backward) == chunk
    assert config.choose_chunk_size(T, 32, size, 2, backward) == chunk
    assert config.choose_chunk_size(T, size, size, 4, backward) is None


@pytest.mark.parametrize(("learns", "chunk"), [(False, None), (True, 1024)])
def test_the_form_is_chosen_inside_a_compiled_model(learns, chunk):
    def choice(x):
        trains = torch.is_grad_enabled() and x.requires_grad
        return x, config.choose_chunk_size(x.shape[0], 64, 64, 2, trains)

    compiled = torch.compile(choice, fullgraph=True, backend="eager")
    assert compiled(torch.ones(5000, requires_grad=learns))[1] == chunk
