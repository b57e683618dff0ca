"""A small decoder of GPT-2's shape, whose token mixer is a parameter.

As the model of arXiv 2505.17083 (modded-nanogpt): RMSNorm without weights on the embedding, before
each mixer and MLP and at the end, squared ReLU, no biases, embedding and head apart. What ends a
residual branch, and the head, start at 0, so that the first loss is ln(vocabulary).

On a GPU it computes in bfloat16 by autocast, and `compile_parts` compiles one block and one piece
of the loss for each length: all layers share their graph. Logits exist for 8,192 tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from score_mods._checks import integer

IGNORED = -100  # target of a token that has no loss
_CHUNK = 8192  # tokens whose logits exist at once
_GRAPHS = 1024  # torch stops compiling one function at 8


@dataclass(frozen=True)
class Size:
    """How large a decoder is.

    Attributes:
        vocabulary: number of token ids.
        width: channels, a multiple of `head_dim`.
        layers: number of blocks.
        head_dim: channels of a head.
    """

    vocabulary: int
    width: int = 256
    layers: int = 6
    head_dim: int = 64

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "head_dim"):
            integer(name, getattr(self, name))
        if self.width % self.head_dim:
            raise ValueError(
                f"width must be a multiple of head_dim, got {self.width} and {self.head_dim}"
            )

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.width // self.head_dim

    @property
    def weights(self) -> int:
        """Weights that are multiplied with every token: 12 width² a layer, and the head."""
        return 12 * self.layers * self.width**2 + self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All weights, the embedding among them."""
        return self.weights + self.vocabulary * self.width

    def flops_per_token(self, length: int) -> int:
        """FLOPs of training on one token of a sequence, with causal softmax attention.

        6 a weight, and 6 a channel, layer and visible key, of which there are length/2 with two
        products each: 6 weights + 6 layers width length.
        """
        return 6 * self.weights + 6 * self.layers * self.width * length


class Block(nn.Module):
    """x + mixer(norm(x)), then x + down(relu(up(norm(x)))²)."""

    def __init__(self, size: Size, mixer: nn.Module) -> None:
        """Build the block around a mixer, whose `o_proj` starts at 0."""
        super().__init__()
        self.norm = nn.RMSNorm(size.width, elementwise_affine=False)
        self.mixer = mixer
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)
        for last in (mixer.get_submodule("o_proj"), self.down):
            nn.init.zeros_(last.get_parameter("weight"))

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        """`[B, T, width]` to the same."""
        x = x + self.mixer(self.norm(x), *shared)
        return x + self.down(F.relu(self.up(self.norm(x))).square())


class Decoder(nn.Module):
    """A language model: embedding, blocks, head."""

    def __init__(
        self,
        size: Size,
        mixer: Callable[[int], nn.Module],
        shared: Callable[[int, torch.device], tuple[Any, ...]] = lambda length, device: (),
    ) -> None:
        """Build it.

        Args:
            size: how large it is.
            mixer: from the index of a layer to its mixer: a module from `[B, T, width]`, and what
                `shared` gives, to `[B, T, width]`, with a last projection `o_proj`.
            shared: from length and device to what every mixer is given besides x.
        """
        super().__init__()
        self.size, self.shared = size, shared
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size, mixer(layer)) for layer in range(size.layers))
        self.norm = nn.RMSNorm(size.width, elementwise_affine=False)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        nn.init.zeros_(self.head.weight)
        self._losses: Callable[..., Tensor] = _chunk_losses

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile a block and the loss: a graph for each length, one for all layers."""
        torch._dynamo.config.recompile_limit = _GRAPHS
        torch._dynamo.config.accumulated_recompile_limit = _GRAPHS
        for block in self.blocks:
            block.compile(fullgraph=True, dynamic=False, backend=backend)
        self._losses = torch.compile(_chunk_losses, fullgraph=True, dynamic=False, backend=backend)

    def refresh(self) -> None:
        """Let each mixer that derives something from its parameters derive it anew."""
        for block in self.blocks:
            if hasattr(block.mixer, "refresh"):
                block.mixer.refresh()

    def hidden(self, ids: Tensor) -> Tensor:
        """What the head reads, `[B, T, width]`, for token ids `[B, T]`."""
        *_, (_, x) = self._walk(ids)
        with _precision(ids.device):
            return self.norm(x)

    def token_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of each target in nats, float32; 0 where it is `IGNORED`.

        Targets `[B, S]` are those of the last S of the T tokens.
        """
        rows = self.hidden(ids)[:, -targets.shape[1] :].flatten(0, 1).split(_CHUNK)
        with _precision(ids.device):
            losses = [
                self._losses(x, self.head.weight, wanted)
                for x, wanted in zip(rows, targets.flatten().split(_CHUNK), strict=True)
            ]
        return torch.cat(losses).view_as(targets)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the targets that are not `IGNORED`."""
        return self.token_losses(ids, targets).sum() / (targets != IGNORED).sum()

    @torch.no_grad()
    def likeliest(self, ids: Tensor, at: slice) -> Tensor:
        """The likeliest next token after each of the tokens `at`, for ids `[B, T]`."""
        x = self.hidden(ids)[:, at]
        with _precision(ids.device):
            return self.head(x).argmax(-1)

    @torch.no_grad()
    def heads(self, ids: Tensor) -> Iterator[tuple[Any, ...]]:
        """What each mixer's `heads` gives, for ids `[B, T]`: queries, keys `[B, H, T, D]`, ..."""
        shared = self.shared(ids.shape[1], ids.device)
        for block, x in self._walk(ids):
            if block is not None:
                with _precision(ids.device):
                    found = block.mixer.heads(block.norm(x), *shared)
                yield found

    def _walk(self, ids: Tensor) -> Iterator[tuple[Block | None, Tensor]]:
        """Each block with its input, and None with the last one's output."""
        shared = self.shared(ids.shape[1], ids.device)
        with _precision(ids.device):
            x = self.norm(self.embedding(ids))
        for block in self.blocks:
            yield block, x
            with _precision(ids.device):
                x = block(x, *shared)
        yield None, x


def _precision(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _chunk_losses(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(x, weight).float()
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
