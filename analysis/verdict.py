"""What `analysis.invariance` concludes: data that print as a table and save as JSON."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = "scale-invariance-verdict/1"
SLOPE = 0.15
SPREAD = 2.0
FLAT, STEEP = 0.5, 0.9  # slope of the entropy


@dataclass(frozen=True)
class Finding:
    """A number with its 95 % interval, and what follows from it.

    Attributes:
        verdict: "holds", "fails", "rises", "falls", "consistent" or "cannot be told".
        value: The estimate.
        low: Lower end of the interval.
        high: Upper end.
    """

    verdict: str
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Verdict:
    """What one mechanism does on one head; `Verdicts` says how it is saved.

    Attributes:
        mechanism: Its name.
        head: The head.
        tau: Scale of the ranges, in tokens.
        delta: Their ratio.
        beta: Constant of the negentropy's law.
        rows: Number of rows.
        block: Rows resampled together.
        total: Slope of log Z: "holds", "rises", "falls" or "cannot be told".
        negentropy: Spread of rho: "holds", "fails" or "cannot be told".
        weak_sparsity: Slope of the entropy: "consistent", "fails" or "cannot be told".
        first_decade: Slope of the entropy in the first decade.
        law_slope: Slope of log E[Z] by the law of the measured logits.
        edges: The K+1 edges of the ranges.
        log_z: Mean over rows of log Z, by range.
        law_log_z: log E[Z] by the law of the measured logits, by range.
        rho: N~/(beta tau ln delta) by that law, by range.
        entropy: Mean over rows of the entropy in nats, by range.
    """

    mechanism: str
    head: int
    tau: float
    delta: float
    beta: float
    rows: int
    block: int
    total: Finding
    negentropy: Finding
    weak_sparsity: Finding
    first_decade: float
    law_slope: float
    edges: list[int]
    log_z: list[float]
    law_log_z: list[float]
    rho: list[float]
    entropy: list[float]

    def __str__(self) -> str:
        return str(Verdicts((self,)))


@dataclass(frozen=True)
class Verdicts:
    """Verdicts that print as a Markdown table and save as JSON.

    The JSON is one object:

        schema      "scale-invariance-verdict/1"
        thresholds  {"slope": 0.15, "spread": 2.0, "entropy_slope": [0.5, 0.9]}
        verdicts    a list of objects with the fields of `Verdict`; `total`, `negentropy` and
                    `weak_sparsity` are objects with the fields of `Finding`. A number that is not
                    finite is null.

    Attributes:
        verdicts: One `Verdict` for each mechanism and head.
    """

    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        several = len({v.head for v in self.verdicts}) > 1
        names = [
            f"{v.mechanism}, head {v.head}" if several else v.mechanism for v in self.verdicts
        ]
        head = [
            "mechanism",
            "total attention",
            "slope of log Z",
            "by the law",
            "negentropy",
            "N~/(beta tau ln delta)",
            "weak sparsity",
            "dH/d log t, last decade",
        ]
        cells = [
            [
                name,
                v.total.verdict,
                str(v.total),
                f"{v.law_slope:.2f}",
                v.negentropy.verdict,
                f"{_short(min(v.rho))} to {_short(max(v.rho))}",
                v.weak_sparsity.verdict,
                str(v.weak_sparsity),
            ]
            for name, v in zip(names, self.verdicts, strict=True)
        ]
        width = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        lines = [head, ["-" * w for w in width], *cells]
        return "\n".join(
            f"| {' | '.join(cell.ljust(w) for cell, w in zip(line, width, strict=True))} |"
            for line in lines
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the schema above."""
        return {
            "schema": SCHEMA,
            "thresholds": {"slope": SLOPE, "spread": SPREAD, "entropy_slope": [FLAT, STEEP]},
            "verdicts": [_finite(asdict(v)) for v in self.verdicts],
        }

    def save(self, path: str | Path) -> None:
        """Write the JSON object to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")


def _short(value: float) -> str:
    return f"{value:.2f}" if 0.01 <= abs(value) < 1000 else f"{value:.1e}"


def _finite(value: Any) -> Any:
    """The same nested value with None for every number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
