"""The report on a model: its base logits, and each mechanism on its own queries and keys."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis import huggingface, plots
from analysis.base_logits import BaseLogits
from analysis.conditions import ScoreMod
from analysis.huggingface import LayerQK
from analysis.invariance import judge
from analysis.measure import Rows, measure
from analysis.report import (
    LAST,
    Findings,
    Settings,
    described,
    markdown_table,
    mechanisms,
    one_thread,
)
from analysis.verdict import SLOPE, Verdict

_PER_LENGTH = 16  # rows that end at each context length
_TAU = 10.0  # of the ranges, for every mechanism: ranges of a larger tau would not fit the text
_NORMAL = np.array([NormalDist().inv_cdf(p) for p in np.linspace(0.001, 0.999, 101)])

Survey = dict[str, np.ndarray]  # L layers, M mechanisms, H heads: [L, H, ...] or [L, M, H, ...]


def survey_model(settings: Settings, folder: Path) -> Findings:
    """Measure the mechanisms on a model's own q and k and draw the figures into `folder`."""
    from tqdm import tqdm

    text = None if settings.text is None else _read(settings.text)
    model, tokenizer = huggingface.load(settings.model, settings.gguf)
    length = settings.lengths[-1]
    tokens = huggingface.tokenise(tokenizer, length, text)
    late = torch.linspace(length // 2, length - 1, settings.rows).long().unique()
    ends = [torch.linspace(int(0.95 * n), n - 1, _PER_LENGTH).long() for n in settings.lengths]

    layers: list[Survey] = []
    names: list[str] = []
    notes: Counter[str] = Counter()
    bar = tqdm(desc=f"{settings.model}, {length:,} tokens", unit="layer")

    @one_thread()
    def visit(layer: LayerQK) -> None:
        q = layer.q[:, :, : len(late)]
        logits = measure(q, layer.k, {}, q_positions=late, scale=layer.scale).base
        mods = mechanisms(
            settings.mods, settings.tau, layer.q.shape[1], measured=(logits.sigma, logits.mu)
        )
        names[:] = mods
        found = _base(logits, reach=length // 2)
        layers.append(found | _mechanisms(layer, mods, late, ends, settings.seed))
        layers[-1]["layer"] = np.array(layer.layer)
        if layer.softcap is not None:
            notes["soft-cap their logits; these are the logits before it"] += 1
        if not bool(layer.mask_mod(*(torch.tensor(i) for i in (0, 0, length - 1, 0)))):
            notes["see a window only; they are measured on the whole context all the same"] += 1
        bar.update()

    with bar:
        huggingface.capture(model, tokens, torch.cat([late, *ends]), visit)
    survey = {key: np.stack([layer[key] for layer in layers]) for key in layers[0]}
    _draw(folder, survey, names, settings)
    about = [
        f"{len(layers)} layers of {survey['sigma'].shape[1]} heads read {length:,} tokens of",
        "the source code of Python's standard library" if text is None else f"{settings.text}",
        f"({_trained(model)}). Statistics are over {len(late)} queries in the second half.",
        *(f"{count} of the layers {what}." for what, count in notes.items()),
    ]
    table = _table(survey, names)
    data = {"mechanisms": names, "normal_quantiles": _NORMAL, **survey}
    return Findings(
        title=f"Scale invariance on the logits of {settings.model}",
        text=_text(" ".join(about), survey, names, table, settings),
        table=table,
        data=data,
    )


def _base(logits: BaseLogits, reach: int) -> Survey:
    """What the base logits of a layer are like, head by head; by distance up to `reach`."""
    whole = logits.cells[1:] <= reach
    mean, deviation = (x[:, whole] for x in logits.by_distance())
    ends = (logits.cells[:-1] * (logits.cells[1:] - 1))[whole]
    shares = torch.linspace(0.001, 0.999, len(_NORMAL), dtype=torch.float64)
    fields = ("sigma", "mu", "skewness", "excess_kurtosis", "qq_correlation")
    return {name: getattr(logits, name).numpy() for name in fields} | {
        "mu_by_sigma": (logits.mu / logits.sigma).numpy(),
        "quantiles": logits.sample.double().flatten().quantile(shares).numpy(),
        "distance": ends.double().sqrt().numpy(),  # geometric middle of each cell
        "mean_by_distance": mean.numpy(),
        "deviation_by_distance": deviation.numpy(),
    }


def _mechanisms(
    layer: LayerQK,
    mods: dict[str, ScoreMod | None],
    late: Tensor,
    ends: list[Tensor],
    seed: int,
) -> Survey:
    """What each mechanism does on a layer's queries and keys, head by head."""
    q, *parts = layer.q.split([len(late), *map(len, ends)], dim=2)
    main = measure(q, layer.k, mods, q_positions=late, scale=layer.scale)
    verdicts = np.array(
        [
            [
                judge(main, name, head=head, tau=_TAU, resamples=200, seed=seed)
                for head in range(q.shape[1])
            ]
            for name in mods
        ]
    )

    def each(number: Callable[[Verdict], Any]) -> np.ndarray:
        return np.array([[number(v) for v in row] for row in verdicts])

    by_length = [
        measure(q, layer.k[:, :, : int(at[-1]) + 1], mods, q_positions=at, scale=layer.scale)
        for q, at in zip(parts, ends, strict=True)
    ]

    def lengths(number: Callable[[Rows], Tensor]) -> np.ndarray:
        values = [[number(m.mechanisms[name]).mean(1) for m in by_length] for name in mods]
        return np.stack([torch.stack(row, -1).numpy() for row in values])

    return {
        "verdict": each(lambda v: v.total.verdict),
        "slope": each(lambda v: v.total.value),
        "law_slope": each(lambda v: v.law_slope),
        "negentropy_verdict": each(lambda v: v.negentropy.verdict),
        "entropy_slope": each(lambda v: v.weak_sparsity.value),
        "edges": np.array(verdicts[0, 0].edges),
        "log_z": each(lambda v: v.log_z),
        "law_log_z": each(lambda v: v.law_log_z),
        "first": np.stack(
            [_first(layer, mod, q, late, main.mechanisms[name]) for name, mod in mods.items()]
        ),
        "entropy": lengths(lambda rows: rows.entropy),
        "last": lengths(lambda rows: rows.share(LAST)),
    }


def _first(
    layer: LayerQK, mod: ScoreMod | None, q: Tensor, positions: Tensor, rows: Rows
) -> np.ndarray:
    """Share of attention on the first token, mean over rows `[H]`."""
    k = layer.k[0, :, 0].repeat_interleave(q.shape[1] // layer.k.shape[1], dim=0)
    logits = torch.einsum("hrd,hd->hr", q[0].float(), k.float()) * layer.scale
    if mod is not None:
        head = torch.arange(len(logits))[:, None]
        logits = mod(logits, torch.tensor(0), head, positions[None], torch.tensor(0))
    return (logits.double() - rows.log_total).exp().mean(1).numpy()


def _table(survey: Survey, names: list[str]) -> str:
    header = [
        "mechanism",
        "slope of log Z (80 % of heads)",
        "by the law",
        "heads that hold",
        "rise",
        "fall",
        "cannot be told",
        "negentropy holds",
        "dH/d log t",
        f"last {LAST} tokens",
        "first token",
    ]
    rows = []
    for m, name in enumerate(names):
        low, middle, high = np.quantile(survey["slope"][:, m], [0.1, 0.5, 0.9])
        heads = Counter(survey["verdict"][:, m].ravel().tolist())
        rows.append(
            [
                name,
                f"{middle:.2f} ({low:.2f} to {high:.2f})",
                f"{np.median(survey['law_slope'][:, m]):.2f}",
                *(str(heads[v]) for v in ("holds", "rises", "falls", "cannot be told")),
                str((survey["negentropy_verdict"][:, m] == "holds").sum()),
                f"{np.median(survey['entropy_slope'][:, m]):.2f}",
                f"{survey['last'][:, m, :, -1].mean():.3f}",
                f"{survey['first'][:, m].mean():.3f}",
            ]
        )
    return markdown_table(header, rows)


def _text(about: str, survey: Survey, names: list[str], table: str, settings: Settings) -> str:
    slope = {name: float(np.median(survey["slope"][:, m])) for m, name in enumerate(names)}
    nearest = min(slope, key=lambda name: abs(slope[name]))
    within = (np.abs(survey["slope"][:, 0]) <= SLOPE).mean()
    header = ["mechanism", *(f"{n:,}" for n in settings.lengths)]
    entropies, shares = (
        markdown_table(
            header,
            [
                [name, *(f"{x:.{digits}f}" for x in survey[what][:, m].mean((0, 1)))]
                for m, name in enumerate(names)
            ],
        )
        for what, digits in (("entropy", 2), ("last", 3))
    )
    return f"""
{about}

## The base logits

They are q·k times the model's scale, after its rotary embedding and before any mechanism.
Distance 0 and the first token are left out.

{_base_text(survey)}

![Base logits](logits.png)

**Mean and deviation of the base logits**: by head above; by distance below, in deviations of the
head (median over heads, and the band of 80 % of them).

![Quantiles of the base logits, and attention on the first token](layers.png)

**By layer**: quantiles of the base logits, standardised row by row, against the normal's; and the
attention on the first token under plain softmax, head by head.

## The mechanisms on the model's own q and k

{described(settings.mods)}

`scale_invariant` assumes base logits of deviation 1 and mean 0. Where it is calibrated it has been
given the deviation sigma and the mean mu that were measured, head by head.

{table}

The slope is that of log total attention against log t. It is 0 if attention is scale-invariant; a
head holds if its 95 % interval lies within ±{SLOPE}. Beside it stands the slope of log E[Z] that
follows from the mean and deviation measured at each distance if the logits were Gaussian; the two
differ where E[Z] would be carried by keys so far out in the tail that the text has none. Slopes
are medians over heads (that of the entropy, dH/d log t, over the last decade of t), shares are
means, at {settings.lengths[-1]:,} tokens. The negentropy's verdict follows from the same law.

- Under plain softmax the median slope is {slope["none"]:+.2f}; {within:.0%} of the heads lie
  within ±{SLOPE}.
- Nearest to 0 is the median slope of `{nearest}`, {slope[nearest]:+.2f}.
- Logits that did not depend on distance would give +1, the growth of the number of keys; the law
  asks that the weight of a key fall as 1/t, which takes that 1 away. This model's own logits take
  away {1 - slope["none"]:.2f} (median).

![Slopes of all heads](slopes.png)

**Slope of every head** (dots), their median (bar), and the band that counts as scale-invariant.
The scale is linear within ±1 and logarithmic outside.

![Total attention by range of distance](total_attention.png)

**Total attention by range of distance, relative to the nearest range**: medians over heads with
the band of 80 % of them, and what follows from mean and deviation by distance. The scale is linear
within ±20 and logarithmic outside.

![Entropy and share of the last tokens against context length](length.png)

**Against the number of tokens read**: entropy of the whole row, and the share of attention on the
last {LAST} tokens (means over heads).

Entropy of the row in nats, by tokens read:

{entropies}

Share of attention on the last {LAST} tokens, by tokens read:

{shares}
"""


def _base_text(survey: Survey) -> str:
    sigma, layer, first = survey["sigma"], survey["layer"], survey["first"][:, 0].mean(-1)
    t = survey["distance"][0]
    mean, deviation = (np.median(x, axis=0) for x in _by_distance(survey))
    change = "falls" if mean[-1] < mean[0] else "rises"
    kurtosis, skewness, qq, mu = (
        float(np.median(survey[name]))
        for name in ("excess_kurtosis", "skewness", "qq_correlation", "mu_by_sigma")
    )
    high = first > 0.1
    sink = (
        f"above 0.1 in {high.sum()} of {len(first)} layers ({layer[high].min()} to "
        f"{layer[high].max()}), where it is {first[high].min():.2f} to {first[high].max():.2f}"
        if high.any()
        else f"at most {first.max():.2g} in every layer"
    )
    return f"""
- Standard deviation within a row: {sigma.min():.1f} to {sigma.max():.1f} by head, median
  {np.median(sigma):.1f}. An unscaled law assumes 1.
- Mean: {mu:+.1f} deviations (median over heads). It {change} with distance, from {mean[0]:+.1f}
  at t = {t[0]:.0f} to {mean[-1]:+.1f} at t = {t[-1]:,.0f}. The deviation at one distance goes from
  {deviation[0]:.2f} to {deviation[-1]:.2f} of the head's own.
- Shape: excess kurtosis {kurtosis:+.2f}, skewness {skewness:+.2f}, correlation of the QQ plot
  {qq:.3f} (medians over heads; 0, 0 and 1 for a Gaussian).
- Attention on the first token under plain softmax, mean over heads: {sink}.
""".strip()


def _by_distance(survey: Survey) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation at each distance in deviations of the head, a row for each head."""
    sigma = survey["sigma"][..., None]
    mean, deviation = survey["mean_by_distance"] / sigma, survey["deviation_by_distance"] / sigma
    return mean.reshape(-1, mean.shape[-1]), deviation.reshape(-1, deviation.shape[-1])


def _draw(folder: Path, survey: Survey, names: list[str], settings: Settings) -> None:
    t, (mean, deviation) = survey["distance"][0], _by_distance(survey)
    with plots.figure(folder / "logits.png", 2, 2) as axes:
        plots.heatmap(axes[0, 0], survey["sigma"], r"deviation $\sigma$ of the base logits")
        plots.heatmap(axes[0, 1], survey["mu_by_sigma"], r"mean of the base logits / $\sigma$")
        plots.spread(axes[1, 0], t, mean, r"mean / $\sigma$")
        plots.spread(axes[1, 1], t, deviation, r"deviation / $\sigma$", colour=3)
    with plots.figure(folder / "layers.png", 2) as axes:
        plots.qq(axes[0, 0], _NORMAL, survey["quantiles"])
        plots.by_layer(axes[0, 1], survey["first"][:, 0], "attention on the first token")
    with plots.figure(folder / "slopes.png", height=0.8 + 0.4 * len(names)) as axes:
        slopes = {name: survey["slope"][:, m].ravel() for m, name in enumerate(names)}
        plots.slopes(axes[0, 0], slopes, tolerance=SLOPE)

    edges = survey["edges"][0]
    middle = np.sqrt(edges[:-1] * (edges[1:] - 1))
    log_z, law = (x - x[..., :1] for x in (survey["log_z"], survey["law_log_z"]))
    measured = np.quantile(log_z, [0.5, 0.1, 0.9], axis=(0, 2))  # [3, M, K]
    with plots.panels(
        folder / "total_attention.png",
        len(names),
        theory="log E[Z] from mean and\ndeviation by distance",
        measured="mean of log Z over rows",
    ) as axes:
        for m, (name, ax) in enumerate(zip(names, axes, strict=True)):
            predicted = np.median(law[:, m], axis=(0, 1))
            plots.total_attention(ax, middle, {name: measured[:, m]}, {name: predicted}, first=m)
            ax.set_title(name.replace(", ", ",\n"))

    entropy, last = (
        {name: survey[what][:, m].mean((0, 1)) for m, name in enumerate(names)}
        for what in ("entropy", "last")
    )
    with plots.figure(folder / "length.png", 2, height=3.2) as axes:
        plots.by_length(axes[0, 0], settings.lengths, entropy, "entropy of the row (nats)")
        plots.last_share(axes[0, 1], settings.lengths, last)
        plots.legend(axes[0, 0], names, columns=3, measured="mean over heads")


def _trained(model: Any) -> str:
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return "no context length is stated" if length is None else f"the model is made for {length:,}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise OSError(f"text: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {path} is not UTF-8 text") from error
