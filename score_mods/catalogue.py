"""The list of mechanisms: one entry each, plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mechanism:
    """One mechanism of the library.

    Attributes:
        name: its factory in `score_mods`.
        kind: what is exact: "score_mod", "mask_mod" or "q,k transform".
        formula: what it does to the score s (t = |q_idx - kv_idx|, n = q_idx + 1), the mask, or
            the frequencies w_i of RoPE (d = head_dim, i < d/2).
        positions: "relative" if only distances matter, "absolute" if packed documents need
            `with_positions`.
        learnable: parameters that may be tensors of shape (H,) that require grad.
        source: paper or public code.
        example: the call that makes it for 4 heads of 32 channels and 64 positions, in the names
            of `score_mods` and `torch`.
    """

    name: str
    kind: str
    formula: str
    positions: str
    learnable: tuple[str, ...]
    source: str
    example: str


catalogue: tuple[Mechanism, ...] = (
    Mechanism(
        "scale_invariant",
        "score_mod",
        "a_t s + m_t; a_t = sqrt(1 + 2 ln(t/tau + 1)), m_t = -2 ln(t/tau + 1)",
        "relative",
        ("tau", "sigma", "mu", "alpha", "beta"),
        "arXiv 2505.17083",
        "scale_invariant()",
    ),
    Mechanism(
        "scale_invariant_grid",
        "score_mod",
        "the same with t the Euclidean distance on a grid of d axes, and 2 d for 2",
        "relative",
        ("tau", "sigma", "mu", "alpha", "beta"),
        "derived from arXiv 2505.17083",
        "scale_invariant_grid((8, 8))",
    ),
    Mechanism(
        "alibi",
        "score_mod",
        "s - slope_h t; slope_h = 2^(-8 (h + 1)/H)",
        "relative",
        (),
        "arXiv 2108.12409",
        "alibi(4)",
    ),
    Mechanism(
        "logn",
        "score_mod",
        "s ln n, or s max(1, ln n / ln L0) with the trained length L0",
        "absolute",
        ("s",),
        "arXiv 2202.12172; Qwen",
        "logn()",
    ),
    Mechanism(
        "ssmax",
        "score_mod",
        "(s_h ln n + b_h) s",
        "absolute",
        ("s", "b"),
        "arXiv 2501.19399",
        "ssmax(0.43)",
    ),
    Mechanism(
        "causal",
        "mask_mod",
        "kv_idx <= q_idx",
        "relative",
        (),
        "attention-gym",
        "causal",
    ),
    Mechanism(
        "sliding_window",
        "mask_mod",
        "0 <= q_idx - kv_idx < window",
        "relative",
        (),
        "arXiv 2310.06825",
        "sliding_window(16)",
    ),
    Mechanism(
        "prefix_lm",
        "mask_mod",
        "kv_idx < prefix or kv_idx <= q_idx",
        "absolute",
        (),
        "attention-gym",
        "prefix_lm(16)",
    ),
    Mechanism(
        "document",
        "mask_mod",
        "id[q_idx] = id[kv_idx]",
        "absolute",
        (),
        "packed sequences",
        "document(torch.arange(64) // 20)",
    ),
    Mechanism(
        "rope",
        "q,k transform",
        "w_i = base^(-2i/d)",
        "relative",
        (),
        "arXiv 2104.09864",
        "rope(32)",
    ),
    Mechanism(
        "p_rope",
        "q,k transform",
        "w_i = base^(-2i/d) for i < floor(p d/2), else 0",
        "relative",
        (),
        "arXiv 2410.06205",
        "p_rope(32)",
    ),
    Mechanism(
        "half_truncated_rope",
        "q,k transform",
        "w_i = base^(-i/(d/4 - 1)) for i < d/4, else 0",
        "relative",
        (),
        "modded-nanogpt; arXiv 2505.17083",
        "half_truncated_rope(32)",
    ),
    Mechanism(
        "position_interpolation",
        "q,k transform",
        "w_i / factor",
        "relative",
        (),
        "arXiv 2306.15595",
        "position_interpolation(32, 4.0)",
    ),
    Mechanism(
        "ntk_rope",
        "q,k transform",
        "base factor^(d/(d-2)) for base",
        "relative",
        (),
        "arXiv 2309.00071",
        "ntk_rope(32, 4.0)",
    ),
    Mechanism(
        "dynamic_ntk_rope",
        "q,k transform",
        "as ntk_rope, with a factor that follows the length",
        "relative",
        (),
        "emozilla (2023); transformers",
        "dynamic_ntk_rope(32, 64, 16)",
    ),
    Mechanism(
        "yarn_rope",
        "q,k transform",
        "w_i, w_i / factor or between by its turns; scores times (0.1 ln factor + 1)²",
        "relative",
        (),
        "arXiv 2309.00071",
        "yarn_rope(32, 4.0, 16)",
    ),
)


def markdown_table() -> str:
    """The catalogue as a Markdown table, as the README shows it."""
    lines = ["| mechanism | exact as | formula | source |", "| --- | --- | --- | --- |"]
    lines += [f"| `{m.name}` | {m.kind} | {m.formula} | {m.source} |" for m in catalogue]
    return "\n".join(lines)
