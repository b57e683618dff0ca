"""The kernels compiled for Hopper, without a GPU: they compile, and their products are wgmma.

Triton chooses 16-row `mma.sync` without a word where an operand's shape does not fit wgmma, at a
half of the speed or less. What is compiled is what the launches ask for, in a process of its own
whose driver claims to be an H100.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from power import state_size

PRODUCTS = {"update", "attention_fwd", "attention_bwd_dq", "attention_bwd_dk", "attention_bwd_dv"}
QUARTIC = {"quartic_update", "quartic_fwd", "quartic_bwd_dq", "quartic_bwd_dkv"}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
@pytest.mark.parametrize(
    ("deg", "head_dim", "products"),
    [(2, 64, PRODUCTS), (4, 16, PRODUCTS - {"update"} | QUARTIC)],
)
def test_products_are_wgmma(deg, head_dim, products):
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, __file__, str(deg), str(head_dim)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    codes = json.loads(run.stdout)
    rest = {"fold_fwd", "fold_bwd", "scan_fwd", "scan_bwd", "gate_fwd", "gate_bwd"}
    assert {name.removesuffix("_kernel") for name in codes} == products | rest | {
        "step_state",
        "step_out",
    }
    for name in products:
        assert codes[f"{name}_kernel"] == ["wgmma"], name


def compile_all(deg, head_dim):
    """Print, for each kernel that a pass and a step launch, which matrix instructions it has."""
    import triton
    from triton.backends.compiler import GPUTarget

    from power.kernels import launch

    class Hopper:
        """As much of a driver as compiling asks for."""

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    triton.runtime.driver.set_active(Hopper())
    found = {}

    class Compiled:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(launch, name)

        def __getitem__(self, grid):
            def compile_it(*args, **sizes):
                ptx = self.kernel.warmup(*args, grid=grid, **sizes).asm["ptx"]
                kinds = {kind for kind in ("wgmma", "mma.sync") if f"{kind}." in ptx}
                found[self.name] = sorted(kinds | set(found.get(self.name, ())))

            return compile_it

    for name, kernel in list(vars(launch).items()):
        if isinstance(kernel, triton.runtime.JITFunction):
            setattr(launch, name, Compiled(name))

    q, k, v = torch.randn(3, 1, 2, 300, head_dim).to(torch.bfloat16)
    log_g = torch.zeros(1, 2, 300)
    s = torch.zeros(1, 2, state_size(head_dim, deg), head_dim)
    z = s[..., 0].contiguous()
    out, *end, saved = launch.forward(q, k, v, log_g, s, z, None, deg, 1.0, 128, True)
    launch.backward(out, *end, q, k, v, log_g, s, z, None, out, saved, deg, 1.0, 128)
    rows, filled = q[:, :, :64].contiguous(), torch.zeros(1, dtype=torch.int32)
    x = q[:, :, :1]
    launch.step(x, x, x, log_g[..., :1], s, z, rows, rows, log_g[..., :64], filled, deg, 1.0)
    print(json.dumps(found))


if __name__ == "__main__":
    compile_all(*map(int, sys.argv[1:]))
