"""Makes ``docs/metrics.md`` from the metrics that a node and an observer define: ``python -m scripts.metrics_doc``.

With ``--check`` it writes nothing, and fails if the document is out of date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from node import metric_words
from node.metric_families import Described, Values
from node.metrics import Metrics
from node.observing.metrics import SwarmMetrics

PATH = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
COMMAND = "python -m scripts.metrics_doc"
LONGEST_LIST = 12
"""Words of a label that stand beside it; longer lists are told once, at the end."""

LONG_LISTS = {
    "reasons": ("Why a peer was flagged or struck.", metric_words.REASONS),
    "methods": ("Requests that nodes make of each other.", metric_words.METHODS),
    "kinds": (
        "Rules that a peer can break, and its reasons to refuse; some refusals are no fault.",
        metric_words.REMOTE_KINDS,
    ),
    "outcomes": ("How a request ended: the [kinds](#kinds) of a refusal, and these.", metric_words.REQUEST_OUTCOMES),
    "record-kinds": ("What can be wrong with a record.", metric_words.RECORD_KINDS),
}

HEAD = f"""# Metrics

Every node serves its metrics for Prometheus at `/metrics` on its HTTP port, on loopback unless `--http-host` says
otherwise ([how to scrape, alert and look](operating.md)). This page is made from the code by
`{COMMAND}`; a test fails when it is out of date.

- A **counter** only rises, and begins anew when the node is started: take `rate()` or `increase()` of it. A **gauge**
  goes both ways. A **histogram** has the series `_bucket`, `_sum` and `_count`.
- Labels are bounded, whatever peers do. A word that is not in its list is counted as `other`.
- Counters with one label have all their series from the start; the others appear with the first event.
- A coordinator has the same metrics. It trains nothing: its step and loss are what most nodes say, and those of the
  checker stay at 0.
- An [observer](observe.md) has those of the process and its own, which begin with `sentinel_swarm_`. What a node
  *tells* there may be a lie; what is signed, or was seen by the observer itself, is said to be so.
"""


def main() -> int:
    """Write the document, or compare it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the document is out of date")
    options = parser.parse_args()
    text = document()
    if not options.check:
        PATH.write_text(text, encoding="utf-8")
        return 0
    if not PATH.exists() or PATH.read_text(encoding="utf-8") != text:
        print(f"{PATH.name} is out of date; run: {COMMAND}", file=sys.stderr)
        return 1
    return 0


def document() -> str:
    """The whole page."""
    families = Metrics().described
    known = {family.name for family in families}
    families += [family for family in SwarmMetrics().described if family.name not in known]
    parts = [HEAD]
    for section in dict.fromkeys(family.section for family in families):
        parts.append(f"## {section}\n\n| metric | type | unit | meaning |\n|---|---|---|---|")
        mine = [family for family in families if family.section == section]
        parts[-1] += "".join(f"\n{row(family)}" for family in mine) + "\n"
    parts.append("## Long lists of label values\n")
    for name, (text, values) in LONG_LISTS.items():
        own = values if name != "outcomes" else tuple(v for v in values if v not in metric_words.REMOTE_KINDS)
        parts.append(f"### {name}\n\n{text}\n\n{words(own)}\n")
    return "\n".join(parts)


def row(family: Described) -> str:
    """One line of a table."""
    labels = "".join(f"<br>`{label}`: {label_values(values)}" for label, values in family.labels.items())
    return f"| `{family.name}` | {family.kind} | {family.unit or 'count'} | {family.text}{labels} |"


def label_values(values: Values) -> str:
    """What a label can be, in a cell of a table."""
    if isinstance(values, str):
        return values
    for name, (_, long) in LONG_LISTS.items():
        if values == long:
            return f"[{name}](#{name})"
    if len(values) > LONGEST_LIST:
        raise ValueError(f"a list of {len(values)} words needs a name in LONG_LISTS")
    return words(values)


def words(values: tuple[str, ...]) -> str:
    """A list of words."""
    return ", ".join(f"`{value}`" for value in values)


if __name__ == "__main__":
    sys.exit(main())
