"""What a figure is measured on."""

from __future__ import annotations

import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def device_of(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: if there is none here.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device must be cpu or cuda, got {name}")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu on this machine, which has no CUDA device")
    return device


def machine(device: torch.device | str) -> dict[str, str]:
    """Name the device, the versions of what runs on it, and this library's commit.

    Args:
        device: where the benchmark runs.

    Returns:
        Values by `device`, `python`, `torch`, `transformers`, `triton` and `commit`; what is not
        there is left out.
    """
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    found = {"device": name, "python": platform.python_version()}
    for package in ("torch", "transformers", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return found | ({"commit": commit} if commit else {})
