"""The list of mechanisms: one entry each, plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mechanism:
    """One mechanism of the library.

    Attributes:
        name: its factory in `score_mods`.
        kind: what is exact: "score_mod", "mask_mod", "q,k transform", "post-op" on (out, lse) or
            "two-branch", which is two calls of attention or one on doubled keys.
        formula: what it does to the score s (t = |q_idx - kv_idx|, n = q_idx + 1), the mask, or
            the frequencies w_i of RoPE (d = head_dim, i < d/2).
        positions: "relative" if only distances matter, "absolute" if packed documents need
            `with_positions`.
        learnable: parameters that may be tensors of shape (H,) that require grad.
        source: paper or public code.
        example: the call that makes it for 4 heads of 32 channels and 64 positions, in the names
            of `score_mods` and `torch`.
        stage: for a score_mod, where it stands in the order of `compose`: "temperature" (it
            multiplies rows), "softcap", "bias" or "affine" (both by distance).
    """

    name: str
    kind: str
    formula: str
    positions: str
    learnable: tuple[str, ...]
    source: str
    example: str
    stage: str = ""


catalogue: tuple[Mechanism, ...] = (
    Mechanism(
        "scale_invariant",
        "score_mod",
        "a_t s + m_t; a_t = sqrt(1 + 2 ln(t/tau + 1)), m_t = -2 ln(t/tau + 1)",
        "relative",
        ("tau", "sigma", "mu", "alpha", "beta"),
        "arXiv 2505.17083",
        "scale_invariant()",
        "affine",
    ),
    Mechanism(
        "scale_invariant_grid",
        "score_mod",
        "the same with t the Euclidean distance on a grid of d axes, and 2 d for 2",
        "relative",
        ("tau", "sigma", "mu", "alpha", "beta"),
        "derived from arXiv 2505.17083",
        "scale_invariant_grid((8, 8))",
        "affine",
    ),
    Mechanism(
        "alibi",
        "score_mod",
        "s - slope_h t; slope_h = 2^(-8 (h + 1)/H)",
        "relative",
        (),
        "arXiv 2108.12409",
        "alibi(4)",
        "bias",
    ),
    Mechanism(
        "logn",
        "score_mod",
        "s ln n, or s max(1, ln n / ln L0) with the trained length L0",
        "absolute",
        ("s",),
        "arXiv 2202.12172; Qwen",
        "logn()",
        "temperature",
    ),
    Mechanism(
        "ssmax",
        "score_mod",
        "(s_h ln n + b_h) s",
        "absolute",
        ("s", "b"),
        "arXiv 2501.19399",
        "ssmax(0.43)",
        "temperature",
    ),
    Mechanism(
        "infoscale",
        "score_mod",
        "s sqrt(1 - n^(-2/d)) / sqrt(1 - L0^(-2/d))",
        "absolute",
        (),
        "arXiv 2501.08570",
        "infoscale(16, 32)",
        "temperature",
    ),
    Mechanism(
        "llama4_temperature",
        "score_mod",
        "(1 + scale ln(floor(n / interval) + 1)) s",
        "absolute",
        ("scale",),
        "Llama 4; transformers",
        "llama4_temperature(0.1, 16)",
        "temperature",
    ),
    Mechanism(
        "ministral_temperature",
        "score_mod",
        "(1 + beta ln(floor((n - 1) / L0) + 1)) s",
        "absolute",
        ("beta",),
        "Ministral 3; transformers",
        "ministral_temperature(0.1, 16)",
        "temperature",
    ),
    Mechanism(
        "asentmax_scale",
        "score_mod",
        "(delta_h + beta_h ln(n + 1)^gamma_h) s",
        "absolute",
        ("beta", "gamma", "delta"),
        "arXiv 2506.16640",
        "asentmax_scale(0.5, 1.0)",
        "temperature",
    ),
    Mechanism(
        "power_law_temperature",
        "score_mod",
        "c_h n^p s; critical at p = 2/(d - 1)",
        "absolute",
        ("c",),
        "arXiv 2605.08505",
        "power_law_temperature(2 / 31)",
        "temperature",
    ),
    Mechanism(
        "log_power_temperature",
        "score_mod",
        "c_h (ln n)^p s",
        "absolute",
        ("c",),
        "arXiv 2605.12697; 2510.05554",
        "log_power_temperature(0.5)",
        "temperature",
    ),
    Mechanism(
        "yarn_temperature",
        "score_mod",
        "(0.1 ln factor + 1)² s",
        "relative",
        (),
        "arXiv 2309.00071",
        "yarn_temperature(4.0)",
        "temperature",
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
    Mechanism(
        "attention_sink",
        "post-op",
        "one more logit sink_h in the softmax, without a value",
        "relative",
        ("sink",),
        "gpt-oss",
        "attention_sink(1.0)",
    ),
    Mechanism(
        "softmax_off_by_one",
        "post-op",
        "1 more in the softmax's denominator",
        "relative",
        (),
        "Miller (2023)",
        "softmax_off_by_one()",
    ),
    Mechanism(
        "rerope",
        "two-branch",
        "rotated for min(t, window)",
        "relative",
        (),
        "Su (2023)",
        "rerope(rope(32), 16)",
    ),
    Mechanism(
        "leaky_rerope",
        "two-branch",
        "rotated for t, beyond the window for window + (t - window)/factor",
        "relative",
        (),
        "Su (2023)",
        "leaky_rerope(rope(32), 16, 4.0)",
    ),
    Mechanism(
        "self_extend",
        "two-branch",
        "rotated for t, beyond the window for positions of groups of tokens",
        "absolute",
        (),
        "arXiv 2401.01325",
        "self_extend(rope(32), 16, 4)",
    ),
    Mechanism(
        "lm_infinite",
        "two-branch",
        "t < window or kv_idx < sinks, rotated for min(t, window)",
        "absolute",
        (),
        "arXiv 2308.16137",
        "lm_infinite(rope(32), 16, 4)",
    ),
    Mechanism(
        "streaming_llm",
        "two-branch",
        "t < window or kv_idx < sinks, rotated for positions in the cache",
        "absolute",
        (),
        "arXiv 2309.17453",
        "streaming_llm(rope(32), 16, 4)",
    ),
)


stages = {m.name: m.stage for m in catalogue if m.stage}


def markdown_table() -> str:
    """The catalogue as a Markdown table, as the README shows it."""
    lines = ["| mechanism | exact as | formula | source |", "| --- | --- | --- | --- |"]
    lines += [f"| `{m.name}` | {m.kind} | {m.formula} | {m.source} |" for m in catalogue]
    return "\n".join(lines)
