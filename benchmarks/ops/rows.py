"""The rows that the benchmark of the ops stores, and their table. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.rows import read, write


@dataclass(frozen=True)
class Row:
    """One contender at one shape. What was not measured is None; `error` says why a contender did not run."""

    op: str  # "cross_entropy", "mlp", ...; with " errors" for rows about gradients alone
    shape: str  # "4096x4096x128256"
    contender: str
    gpu: str
    torch: str
    triton: str
    peer: str  # "liger_kernel 0.8.5"; "" for plain torch and for ours
    data: str = ""  # "peaked" or "flat" logits
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    rounds: int | None = None
    peak_mib: float | None = None  # forward + backward, above what was resident before
    held_mib: float | None = None  # the same between forward and backward, result included
    floor_mib: float | None = None  # results and gradients alone
    ratio_to_limit: float | None = None  # of the medians of one interleaved run
    dx_error: float | None = None  # relative Frobenius error against a float64 computation
    dw_error: float | None = None
    predicted_mib: float | None = None  # of oomph.predict, for the same function
    exact: bool = True  # computes the gradients in full, as opposed to leaving out small ones
    error: str = ""

    @property
    def above_floor_mib(self) -> float | None:
        if self.peak_mib is None or self.floor_mib is None:
            return None
        return self.peak_mib - self.floor_mib

    @property
    def prediction_error(self) -> float | None:
        """Relative; positive when the prediction is too high."""
        if self.predicted_mib is None or not self.peak_mib:
            return None
        return self.predicted_mib / self.peak_mib - 1

    @property
    def ours(self) -> bool:
        return self.contender.split()[0] == "oomph"


def read_rows(path: Path) -> list[Row]:
    return read(path, Row)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    cells = (asdict(row).items() for row in rows)
    write(path, [{key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row} for row in cells])


def merged(old: Sequence[Row], new: Sequence[Row], by_shape: bool = False) -> list[Row]:
    """The new rows in place of what was known about their ops, or about their ops at their shapes."""

    def about(row: Row) -> tuple[str, ...]:
        return (row.op, row.shape) if by_shape else (row.op.split()[0],)

    known = {about(row) for row in new}
    return [*(row for row in old if about(row) not in known), *new]


def table(rows: Sequence[Row]) -> str:
    """One Markdown table for each op and shape."""
    lines: list[str] = []
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.shape, row.data), []).append(row)
    for (op, shape, data), group in groups.items():
        floor = next((row.floor_mib for row in group if row.floor_mib is not None), None)
        lines += ["", f"### {op} {shape}{f' {data}' if data else ''}" + _floor(floor)]
        shown = [column for column in _COLUMNS if any(column[1](row) for row in group)]
        lines.append("| contender | " + " | ".join(name for name, _ in shown) + " |")
        lines.append("|---|" + "---:|" * len(shown))
        for row in group:
            lines.append(f"| {row.contender} | " + " | ".join(show(row) for _, show in shown) + " |")
    return "\n".join(lines).strip()


def _floor(floor: float | None) -> str:
    return "" if floor is None else f" (floor {floor:,.0f} MiB)"


def _number(value: float | None, format: str) -> str:
    return "" if value is None else f"{value:{format}}"


def _spread(row: Row) -> str:
    return "" if row.p20_ms is None or row.p80_ms is None else f"{row.p20_ms:.2f} .. {row.p80_ms:.2f}"


_COLUMNS = (
    ("median ms", lambda row: _number(row.median_ms, ".2f")),
    ("p20 .. p80", _spread),
    ("x limit", lambda row: _number(row.ratio_to_limit, ".3f")),
    ("peak MiB", lambda row: _number(row.peak_mib, ",.0f")),
    ("above floor", lambda row: _number(row.above_floor_mib, "+,.0f")),
    ("held MiB", lambda row: _number(row.held_mib, ",.1f")),
    ("predicted MiB", lambda row: _number(row.predicted_mib, ",.0f")),
    ("off by", lambda row: _number(row.prediction_error, "+.2%")),
    ("dX error", lambda row: _number(row.dx_error, ".3e")),
    ("dW error", lambda row: _number(row.dw_error, ".3e")),
    ("failed", lambda row: row.error),
)
