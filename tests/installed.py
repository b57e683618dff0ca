"""What `make wheel` runs with a clean environment's Python, outside the checkout.

The installed packages import, come from that environment, carry their type marker, and work.
"""

import importlib
import sys
from importlib.metadata import distribution
from pathlib import Path

import torch

PACKAGES = ("score_mods", "power", "analysis")


def main(checkout: Path) -> None:
    """Raise where the installation at hand is not what the checkout says."""
    root = Path(sys.prefix)
    for name in PACKAGES:
        module = importlib.import_module(name)
        place = Path(module.__file__).parent
        assert place.is_relative_to(root), f"{name} comes from {place}"
        assert (place / "py.typed").is_file(), f"{name} has no py.typed"
        assert all(hasattr(module, public) for public in module.__all__), name
        sources = {path.relative_to(checkout) for path in (checkout / name).rglob("*.py")}
        installed = {path.relative_to(place.parent) for path in place.rglob("*.py")}
        assert installed == sources, installed ^ sources

    top = {path.parts[0] for path in distribution("scale-invariant-attention").files}
    assert {part for part in top if not part.endswith(".dist-info")} == set(PACKAGES), top

    import power
    import score_mods

    q, k, v = torch.randn(3, 1, 2, 16, 8)
    dense = score_mods.dense_attention(q, k, v, score_mods.scale_invariant(), score_mods.causal)
    assert dense.shape == power.power_attention(q, k, v).shape == v.shape
    version = distribution("scale-invariant-attention").version
    print(f"scale-invariant-attention {version}: the installed packages work")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
