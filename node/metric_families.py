"""Metric families that describe themselves, in a registry of their own, and their text for Prometheus.

Knows nothing of training. Each family is defined once, with its help, its unit and what its labels can be; the
document about metrics is made from that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

PREFIX: Final = "sentinel_"

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
"""The content type of ``Families.render``."""

Values = tuple[str, ...] | str
"""What a label can be: a closed set of words, or for people what bounds it."""

UNITS: Final = {"_seconds": "seconds", "_bytes": "bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One family, for people."""

    name: str
    """As it is written in a query, without ``_bucket`` and the like."""
    section: str
    kind: str
    text: str
    unit: str
    labels: Mapping[str, Values]


class Families:
    """Defines metrics and renders them."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.described: list[Described] = []
        self.section = "The process"
        """Under which the families that are defined next belong together."""
        # The names that every exporter has for memory, files and processor time; what dashboards know.
        for family in ProcessCollector(registry=self.registry).collect():
            name = family.name + "_total" * (family.type == "counter")
            self._describe(name, family.type, family.documentation, "", {})

    def _gauge(self, name: str, text: str, *, unit: str = "", **labels: Values) -> Gauge:
        self._describe(PREFIX + name, "gauge", text, unit, labels)
        return Gauge(PREFIX + name, text, tuple(labels), registry=self.registry)

    def _counter(self, name: str, text: str, *, unit: str = "", **labels: Values) -> Counter:
        """A counter. Its series are there from the start where all are known and few, so that rates can be taken."""
        self._describe(PREFIX + name, "counter", text, unit, labels)
        counter = Counter(PREFIX + name, text, tuple(labels), registry=self.registry)
        if len(labels) == 1:
            ((label, values),) = labels.items()
            for value in values if isinstance(values, tuple) else ():
                counter.labels(**{label: value})
        return counter

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], **labels: Values) -> Histogram:
        self._describe(PREFIX + name, "histogram", text, "", labels)
        return Histogram(PREFIX + name, text, tuple(labels), registry=self.registry, buckets=buckets)

    def _info(self, name: str, text: str, /, **labels: Values) -> Info:
        self._describe(f"{PREFIX}{name}info", "gauge", text, "always 1", labels)
        return Info((PREFIX + name).rstrip("_"), text, registry=self.registry)

    def _describe(self, name: str, kind: str, text: str, unit: str, labels: Mapping[str, Values]) -> None:
        found = [word for end, word in UNITS.items() if name.removesuffix("_total").endswith(end)]
        self.described.append(
            Described(
                name=name,
                section=self.section,
                kind=kind,
                text=text,
                unit=unit or "".join(found),
                labels=labels,
            )
        )

    def render(self) -> bytes:
        """All metrics in the Prometheus text format; see ``CONTENT_TYPE``."""
        # generate_latest asks its argument for nothing but collect().
        return generate_latest(cast(CollectorRegistry, _WithoutCreated(self.registry)))


class Series:
    """The series of a gauge whose set of labels changes: those that are gone disappear."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._labels: set[tuple[str, ...]] = set()

    def replace(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Have exactly these series, by the values of the labels."""
        for gone in self._labels - values.keys():
            self._gauge.remove(*gone)
        for labels, value in values.items():
            self._gauge.labels(*labels).set(value)
        self._labels = set(values)


class _WithoutCreated:
    """A registry without the ``_created`` series, which double the exposition and which nobody reads.

    prometheus-client can leave them out itself, but only by a switch for the whole process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            copy = Family(family.name, family.documentation, family.type, family.unit)
            copy.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield copy
