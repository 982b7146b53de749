"""Findings: the patterns at a peak with their bytes, formulas in named dimensions, growth and lines."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from oomph.diagnosis.patterns import FRAGMENTATION, Pattern, PeakAnalysis, classify, elements
from oomph.records import Allocation, Finding, Prediction, Site, bytes_by_line
from oomph.units import format_bytes

_LEAST_SHARE = 0.02  # of what is reserved: smaller fragmentation is no finding
_MUCH_FRAGMENTATION = 0.25
_SITES = 4
_TERMS = 2  # of a formula
_OFF_BY = 0.06  # a ratio of bytes may differ from a power of the factors by this much
_BY_SUM = (  # tensors of many shapes: the formula is their elements
    *("parameters", "gradients", "optimizer state", "second copy of the weights", "casts of the weights"),
    *("second gradient buffer", "foreach optimizer temporaries", "workspace"),
)
_OF_MODEL = ("parameters", "gradients", "optimizer state", "duplicate buffers")
_FACTORS = (3, 0.5, 5)  # powers and products of these are all different


def find(facts: PeakAnalysis, scaled: Prediction | None = None) -> tuple[Finding, ...]:
    """What the peak consists of, the cause first.

    `scaled` is a prediction of the same Workload at `scaled_sizes`: bytes that differ show how they grow.
    """
    prediction = facts.prediction
    names = _Names(facts)
    sizes = {alive.allocation.id: alive.bytes for alive in prediction.at_peak}
    groups = classify(facts)
    larger = _bytes_by_pattern(scaled) if scaled is not None else {}
    factors = _factors(prediction, scaled)
    ranked = []
    for pattern, group in groups.items():
        size = sum(sizes[one.id] for one in group)
        if not size:
            continue
        exponents = _exponents(larger.get(pattern.name, 0) / size, factors)
        varied = names.varied
        if exponents is None or pattern.name in _OF_MODEL:
            shaped = [one for one in group if one.kind != "workspace"]  # how these grow is not known
            exponents, varied = names.growth(shaped) if pattern.name not in _BY_SUM else ({}, varied)
            varied = varied if shaped else ()
        finding = Finding(
            pattern.name,
            size,
            names.total(group) if pattern.name in _BY_SUM else names.formula(group),
            _growth(pattern, prediction, exponents, varied),
            _sites(pattern, facts, group, sizes),
            pattern.fixes,
            pattern.advice,
        )
        ranked.append((size * _avoidable(pattern, facts), finding))
    ranked += _fragmentation(prediction)
    return tuple(finding for _, finding in sorted(ranked, key=lambda pair: -pair[0]))


def scaled_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes to predict at once more. Sequences get shorter, since positions often end at the given length."""
    found = dict(sizes)
    for (name, size), factor in zip(sizes.items(), _FACTORS, strict=False):
        found[name] = size * 2 if factor < 1 and size % 2 else int(size * factor)
    return found


def _avoidable(pattern: Pattern, facts: PeakAnalysis) -> float:
    """What is kept inside one step does not grow with the steps."""
    prediction = facts.prediction
    if pattern.name == "retained graph" and prediction.growth is None and len(prediction.steps) >= 3:
        return 1.0
    return pattern.avoidable


def _fragmentation(prediction: Prediction) -> list[tuple[float, Finding]]:
    peak, limit = prediction.peak, prediction.limit
    size = peak.reserved - peak.allocated
    if size < _LEAST_SHARE * peak.reserved:
        return []
    decides = prediction.verdict == "does not fit" and limit is not None and peak.allocated <= limit
    text = f"{format_bytes(peak.reserved)} reserved - {format_bytes(peak.allocated)} allocated"
    sites = (peak.site,) if peak.site else ()
    advice = FRAGMENTATION.advice
    finding = Finding(FRAGMENTATION.name, size, text, "", sites, FRAGMENTATION.fixes, advice)
    # Some is normal. Where the tensors alone would fit, it is the cause, however much else there is.
    avoidable = FRAGMENTATION.avoidable if size >= _MUCH_FRAGMENTATION * peak.reserved else 0.1
    return [(math.inf if decides else size * avoidable, finding)]


def _sites(
    pattern: Pattern, facts: PeakAnalysis, group: Iterable[Allocation], sizes: Mapping[int, int]
) -> tuple[Site, ...]:
    """The line that keeps the tensors alive, if there is one; then the lines that made most of them."""
    lines = bytes_by_line((one.site, sizes[one.id]) for one in group)
    keepers: Counter[Site] = Counter()
    if pattern.name == "growing list":
        for one in group:
            if (holder := facts.held.get((one.site, one.op))) is not None:
                keepers[holder.site] += sizes[one.id]
    elif pattern.name in ("retained graph", "evaluation without no_grad", "loop kept by autograd"):
        keepers.update(holder.site for holder in facts.graph_holders)
    elif pattern.name == "oversized vocabulary":
        keepers.update(one.site for one in group if one.kind == "parameter" and one.site is not None)
    # Of a result that is alive, the line that made its operand may be the one to change.
    for one in sorted(group, key=lambda one: -sizes[one.id])[:_SITES]:
        source = facts.parent(one)
        if source is not None and source.site is not None and pattern.applies(facts, source):
            lines[source.site] += 1
    ordered = [site for site, _ in keepers.most_common()]
    ordered += [site for site, _ in lines.most_common() if site not in keepers]
    return tuple(ordered[:_SITES])


# ------------------------------------------------------------------------------------------- growth


def _bytes_by_pattern(prediction: Prediction) -> dict[str, int]:
    sizes = {alive.allocation.id: alive.bytes for alive in prediction.at_peak}
    return {
        pattern.name: sum(sizes[one.id] for one in group)
        for pattern, group in classify(PeakAnalysis(prediction)).items()
    }


def _factors(prediction: Prediction, scaled: Prediction | None) -> dict[str, float]:
    if scaled is None:
        return {}
    after = dict(scaled.sizes)
    return {name: after[name] / size for name, size in prediction.sizes if after.get(name, size) != size}


def _exponents(ratio: float, factors: Mapping[str, float]) -> dict[str, int] | None:
    """The powers of the sizes that explain a ratio of bytes; None where none do."""
    if not factors or ratio <= 0:
        return None

    def explained(powers: Sequence[int]) -> float:
        return math.prod(factor**power for factor, power in zip(factors.values(), powers, strict=True))

    best = min(
        product(range(3), repeat=len(factors)), key=lambda powers: abs(math.log(ratio / explained(powers)))
    )
    if abs(ratio / explained(best) - 1) > _OFF_BY:
        return None
    return dict(zip(factors, best, strict=True))


def _growth(
    pattern: Pattern, prediction: Prediction, exponents: Mapping[str, int], varied: Sequence[str]
) -> str:
    """`x4 when T doubles, x2 when B doubles`"""
    if pattern.name in ("growing list", "retained graph") and prediction.growth is not None:
        return f"grows by {format_bytes(prediction.growth.bytes)} with every step"
    if pattern.name == "growing list":
        return "grows with every step"
    ordered = sorted((item for item in exponents.items() if item[1]), key=lambda item: -item[1])
    if ordered:
        return ", ".join(f"x{2**power} when {name} doubles" for name, power in ordered)
    return f"does not depend on {' or '.join(varied)}" if varied else ""


# ------------------------------------------------------------------------------------------- formulas


class _Names:
    """Names of dimensions by their size: of the Workload, the batch and the model's config."""

    def __init__(self, facts: PeakAnalysis) -> None:
        prediction = facts.prediction
        found: dict[str, int] = dict(prediction.sizes)
        if not found and facts.batch_shape:
            found = {"B": facts.rows if facts.rows > 1 else facts.batch_shape[0]}
            if len(facts.batch_shape) == 2 or facts.batch_shape[1:-1] == (facts.second,):
                found["T"] = facts.batch_shape[1]
        self.varied = tuple(found)  # those that a user varies from run to run
        for name, size in prediction.dimensions:
            found.setdefault(name, size)
        if "V" not in found and facts.classes:
            found["V"] = max(facts.classes)
        self.sizes = {name: size for name, size in found.items() if size > 1}
        self._pairs = facts.pairs
        self._class_maps = facts.class_maps
        squares: Counter[int] = Counter()
        for one in facts.alive:
            if len(one.shape) > 1 and one.shape[-1] == one.shape[-2]:
                squares[one.shape[-1]] += one.bytes
        # N is one size: a CNN has pictures of several.
        self._square = max(squares, key=squares.__getitem__, default=0)

    def of(self, shape: Sequence[int], position: int) -> tuple[tuple[str, ...], int]:
        """The names of one dimension, and the number that is left: ("B", "T"), 1 for flattened tokens."""
        size, last = shape[position], len(shape) - 1
        of_pairs = size in self._pairs and position in (last, last - 1)
        not_rows = position > 1 or (position == 1 and shape[0] == self.sizes.get("B"))
        exact = [name for name, known in self.sizes.items() if known == size]
        exact = [name for name in exact if not (name == "B" and not_rows and not of_pairs)]
        # [B*heads, T, T] may be as long as a vocabulary, which is the last dimension, or a table's first.
        if position < last and last > 1 and tuple(shape) not in self._class_maps:
            exact = [name for name in exact if name != "V"]
        if exact:
            first = position == 0 and last > 0
            prefers = ("B",) if first else ("V", "d", "f", "dk") if position == last else ("T", "N", "H")
            return (next((name for name in prefers if name in exact), exact[0]),), 1
        shifted = [name for name in self.varied if self.sizes.get(name) == size + 1 > 2]
        if shifted:  # a loss leaves one token out
            return (shifted[0],), 1
        rows = self.sizes.get("B", 0)
        if of_pairs and rows and size % rows == 0:
            return ("B",), size // rows
        if last > 0 and position in (last, last - 1) and shape[last] == shape[last - 1] == self._square > 1:
            return ("N",), 1
        if position == 0 and rows and size % rows == 0:
            for name in ("T", "N", "H"):
                if size == rows * self.sizes.get(name, 0) or size == rows * (self.sizes.get(name, 0) - 1):
                    return ("B", name), 1
            return ("B",), size // rows
        return (), size

    def growth(self, group: Iterable[Allocation]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Powers of the varied names in what most bytes have in common; and the names that none has."""
        sizes: Counter[tuple[int, ...]] = Counter()
        for one in group:
            counts = Counter(name for index in range(len(one.shape)) for name in self.of(one.shape, index)[0])
            sizes[tuple(counts[name] for name in self.varied)] += one.bytes
        powers = max(sizes, key=lambda each: sizes[each], default=())
        unused = (name for index, name in enumerate(self.varied) if not any(each[index] for each in sizes))
        return dict(zip(self.varied, powers, strict=False)), tuple(unused)

    def _term(self, shape: Sequence[int]) -> tuple[str, dict[str, int]]:
        """`B*H*T^2*64`, and the values of the names."""
        counts: Counter[str] = Counter()
        number, values = 1, {}
        for index in range(len(shape)):
            names, rest = self.of(shape, index)
            counts.update(names)
            number *= rest
            values.update({name: self.sizes.get(name, shape[index]) for name in names})
        parts = [f"{name}^{power}" if power > 1 else name for name, power in counts.items()]
        return "*".join(parts + ([f"{number}"] if number > 1 or not parts else [])), values

    def formula(self, group: Iterable[Allocation]) -> str:
        """`12 x B*H*T^2 float32 + 6 x B*T*V bfloat16 (B=8, H=12, T=1024, V=50257)`, the largest terms."""
        terms: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        used: dict[tuple[str, str], dict[str, int]] = {}
        for one in group:
            term, values = self._term(one.shape)
            key = ("workspace" if one.kind == "workspace" else term, one.dtype)
            terms[key].append(one.bytes)
            used[key] = {} if one.kind == "workspace" else values
        largest = sorted(terms, key=lambda key: -sum(terms[key]))
        texts = [
            f"{len(terms[key])} x {key[0]} {key[1]}" if len(terms[key]) > 1 else f"{key[0]} {key[1]}"
            for key in largest[:_TERMS]
        ]
        more = sum(sum(terms[key]) for key in largest[_TERMS:])
        names = {name: size for key in largest[:_TERMS] for name, size in used[key].items()}
        known = ", ".join(f"{name}={size}" for name, size in names.items())
        rest = f" + {format_bytes(more)} of other shapes" if more else ""
        return " + ".join(texts) + rest + (f" ({known})" if known else "")

    @staticmethod
    def total(group: Iterable[Allocation]) -> str:
        """`124,439,808 elements float32`, by dtype."""
        counts: Counter[str] = Counter()
        for one in group:
            counts[one.dtype] += elements(one)
        return " + ".join(f"{count:,} elements {dtype}" for dtype, count in counts.most_common(_TERMS))
