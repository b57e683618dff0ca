import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.manual_seed(0)
    yield
    torch.compiler.reset()
