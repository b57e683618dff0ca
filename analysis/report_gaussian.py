"""The report on Gaussian logits: measurement beside exact theory."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from analysis import plots
from analysis.conditions import ScoreMod, expected, expected_entropy, predict
from analysis.invariance import judge_all
from analysis.measure import Measurement, measure_gaussian
from analysis.ranges import law_edges
from analysis.report import LAST, Findings, Settings, described, markdown_table, mechanisms
from analysis.verdict import SLOPE, Verdicts

Intervals = dict[str, np.ndarray]  # mechanism to [3, K]: an estimate and the ends of its interval


def survey_gaussian(settings: Settings, folder: Path) -> Findings:
    """Measure the mechanisms on independent N(0, 1) logits and draw the figures into `folder`."""
    from tqdm import tqdm

    mods = mechanisms(settings.mods, settings.tau, heads=1)
    scales = {
        label: tau
        for tau in settings.tau
        for label in mechanisms(("scale_invariant",), (tau,), heads=1)
        if label in mods
    }
    lengths = settings.lengths
    edges = torch.cat([law_edges(tau, 2.0, lengths[-1] - 1) for tau in (10.0, *settings.tau)])
    entropy: dict[str, list[Tensor]] = {name: [] for name in mods}
    share: dict[str, list[Tensor]] = {name: [] for name in mods}
    for length in tqdm(lengths, desc="Gaussian logits", unit="length"):
        measurement = measure_gaussian(
            mods,
            length,
            rows=settings.rows,
            seed=settings.seed,
            edges=edges.unique() if length == lengths[-1] else None,
            last=LAST,
        )
        for name, rows in measurement.mechanisms.items():
            entropy[name].append(rows.entropy[0])
            share[name].append(rows.share(LAST)[0])
    verdicts = judge_all(measurement, tau=scales, seed=settings.seed)

    by_length = {
        "entropy": {name: _intervals(torch.stack(x, -1)) for name, x in entropy.items()},
        "last_share": {name: _intervals(torch.stack(x, -1)) for name, x in share.items()},
    }
    theory = {name: _expected_share(mod, lengths) for name, mod in mods.items()}
    _draw(folder, mods, measurement, verdicts, settings, by_length, theory)
    data = verdicts.to_dict() | {
        "by_length": {"lengths": lengths, **by_length, "expected_last_share": theory}
    }
    return Findings(
        title="Scale invariance on Gaussian logits",
        text=_text(settings, verdicts, by_length),
        table=str(verdicts),
        data=data,
    )


def _intervals(values: Tensor) -> np.ndarray:
    """Means over independent rows of `values` `[N, K]` and the ends of their 95 % intervals."""
    return _interval(values.mean(0), values.std(0) / math.sqrt(len(values)))


def _interval(mean: Tensor, error: Tensor) -> np.ndarray:
    return torch.stack([mean, mean - 1.96 * error, mean + 1.96 * error]).numpy()


def _expected_share(mod: ScoreMod | None, lengths: tuple[int, ...]) -> list[float]:
    """E[Z] of the last tokens over E[Z] of the row, for each length."""
    shares = []
    for length in lengths:
        near, far = expected(mod, [0, LAST, length]).log_total.tolist()
        shares.append(1 / (1 + math.exp(far - near)))
    return shares


def _draw(
    folder: Path,
    mods: dict[str, ScoreMod | None],
    measurement: Measurement,
    verdicts: Verdicts,
    settings: Settings,
    by_length: dict[str, Intervals],
    theory: dict[str, list[float]],
) -> None:
    lengths = settings.lengths
    t = torch.logspace(0, math.log10(lengths[-1] - 1), 80).round().long().unique()
    laws = {name: predict(mod, t) for name, mod in mods.items()}
    with plots.figure(folder / "law.png", 2, height=3.1) as axes:
        plots.multiplier(axes[0, 0], t, {name: law.a_t for name, law in laws.items()})
        plots.bias(axes[0, 1], t, {name: law.m_t for name, law in laws.items()})
        axes[0, 1].set_ylim(-25, 1)
        plots.legend(axes[0, 0], mods, columns=len(mods))

    last = lengths[-1] - 1
    with plots.panels(
        folder / "total_attention.png",
        len(mods),
        theory="log E[Z], exact",
        measured="mean of log Z over\nrows, measured",
    ) as axes:
        for place, (ax, verdict) in enumerate(zip(axes, verdicts.verdicts, strict=True)):
            name, edges = verdict.mechanism, torch.tensor(verdict.edges)
            measured = _intervals(measurement.mechanisms[name].ranges(edges).log_z[0])
            exact = expected(mods[name], edges, q_idx=last).log_total
            middle = (edges[:-1] * (edges[1:] - 1)).sqrt()
            plots.total_attention(ax, middle, {name: measured}, {name: exact}, first=place)
            ax.set_title(f"{name}\n{verdict.total.verdict}")

    ranges = law_edges(10.0, 2.0, last)[3:]
    entropies = {
        name: _intervals(rows.ranges(ranges).entropy[0])
        for name, rows in measurement.mechanisms.items()
    }
    simulated = {
        name: expected_entropy(mod, ranges, rows=settings.rows, seed=settings.seed + 1, q_idx=last)
        for name, mod in mods.items()
    }
    theories = {name: _interval(e.mean, e.standard_error) for name, e in simulated.items()}
    with plots.figure(folder / "entropy.png", 2, height=3.1, sharey=True) as axes:
        for ax, root in zip(axes[0], (False, True), strict=True):
            plots.entropy(ax, ranges[:-1], entropies, theories, root=root)
        axes[0, 1].set_ylabel("")
        plots.legend(axes[0, 0], mods, columns=4, theory="theory, simulated", measured="measured")

    with plots.figure(folder / "length.png", 2, height=3.1) as axes:
        plots.by_length(axes[0, 0], lengths, by_length["entropy"], "entropy of the row (nats)")
        plots.last_share(axes[0, 1], lengths, by_length["last_share"], theory)
        plots.legend(axes[0, 0], mods, columns=4, theory="theory (right)", measured="measured")


def _text(settings: Settings, verdicts: Verdicts, by_length: dict[str, Intervals]) -> str:
    total = [v.mechanism for v in verdicts.verdicts if v.total.verdict == "holds"]
    both = [
        v.mechanism
        for v in verdicts.verdicts
        if v.total.verdict == "holds" and v.negentropy.verdict == "holds"
    ]
    header = ["mechanism", *(f"{length:,}" for length in settings.lengths)]
    entropies = markdown_table(
        header,
        [[name, *(f"{x:.2f}" for x in y[0])] for name, y in by_length["entropy"].items()],
    )
    shares = markdown_table(
        header,
        [[name, *(f"{x:.2g}" for x in y[0])] for name, y in by_length["last_share"].items()],
    )
    return f"""
{settings.rows} rows of independent N(0, 1) logits, with {settings.lengths[-1]:,} keys each; the
query is the last token. The mechanisms:

{described(settings.mods)}

## Verdicts

{verdicts}

Total attention in a range of distances does not depend on the scale (its slope against log t lies
within ±{SLOPE}) under: {_listed(total)}. The unnormalised negentropy does not either under:
{_listed(both)}.

![Multiplier and bias against distance](law.png)

**What happens to a score at distance t**: it is multiplied by a_t and m_t is added (last query).

![Total attention by range of distance](total_attention.png)

**Total attention by range of distance**, in ranges with the edges tau (2^k - 1), tau = 10 for
mechanisms that have none. Where a few rare rows carry the expectation, the points lie below the
line; the verdict is on their slope. The scale is linear within ±20 and logarithmic outside.

![Entropy within ranges](entropy.png)

**Entropy within the range that starts at t and ends near 2t**, against ln t and its root. Its
expectation is not known exactly: the lines are the mean of {settings.rows} rows drawn apart from
those measured, with its 95 % band. Weakly sparse entropy grows more slowly than ln t.

![Entropy and share of the last tokens against context length](length.png)

**Against context length**: entropy of the whole row (lines join the points), and the share of
attention on the last {LAST} tokens. Theory is the ratio of expected total attentions; where single
keys carry them, the mean share can differ from it.

Entropy of the row in nats, by context length:

{entropies}

Share of attention on the last {LAST} tokens, by context length:

{shares}
"""


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none of them"
