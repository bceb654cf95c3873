"""What each panel of the Grafana dashboard shows and asks. ``scripts.dashboard`` puts around it what Grafana wants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HERE = 'job=~"$job", instance=~"$instance"'
"""The nodes that are chosen at the top of the dashboard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. ``asks``: legend -> query."""

    title: str
    about: str
    asks: dict[str, str]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    steps: tuple[tuple[str, float], ...] = ()
    """Colours from a value on, above green."""
    stacked: bool = False
    from_zero: bool = True
    most: float | None = None
    """The end of the axis."""


def rate(metric: str, by: str, more: str = "") -> str:
    """The rate of a counter over five minutes, summed by labels."""
    return f"sum by ({by}) (rate({metric}{{{HERE}{more}}}[5m]))"


def quantile(metric: str, q: float, by: str) -> str:
    """A quantile of a histogram over five minutes."""
    return f"histogram_quantile({q}, sum by ({by}, le) (rate({metric}_bucket{{{HERE}}}[5m])))"


def stat(title: str, about: str, query: str, **more: Any) -> Panel:
    """One large number."""
    return Panel(title=title, about=about, asks={"": query}, kind="stat", width=more.pop("width", 3), **more)


NOT_ZERO = (("red", 1.0),)

ROWS: dict[str, tuple[Panel, ...]] = {
    "The swarm at a glance": (
        stat("Step", "The newest optimizer step that any node is in.", "swarm:sentinel_step:max"),
        stat(
            "Loss", "Training loss in nats per token, the middle of what the nodes say.", "swarm:sentinel_loss:median"
        ),
        stat("Steps per minute", "How fast the swarm trains.", "60 * swarm:sentinel_steps:rate5m"),
        stat(
            "Tokens per second",
            "Of the first stage: each token passes it once, if nothing is repeated.",
            'swarm_stage:sentinel_tokens:rate5m{stage="0"}',
        ),
        stat("Replicas", "Live ones of all stages.", "sum by (swarm) (swarm_stage:sentinel_view_replicas:max)"),
        stat(
            "Stages without replica",
            "One is enough for the swarm to stand still.",
            "count by (swarm) (swarm_stage:sentinel_view_serving_replicas:max == 0) "
            "or 0 * max by (swarm) (swarm_stage:sentinel_view_serving_replicas:max)",
            steps=NOT_ZERO,
        ),
        stat(
            "Peers ejected",
            "Until their ejections end.",
            f"count(count by (peer) (sentinel_peer_ejected{{{HERE}}})) or vector(0)",
            steps=(("orange", 1.0),),
        ),
        stat(
            "Alerts",
            "That fire now.",
            'count(ALERTS{alertname=~"Sentinel.*", alertstate="firing"}) or vector(0)',
            steps=NOT_ZERO,
        ),
        Panel(
            title="Loss over time",
            from_zero=False,
            about="The middle of what the nodes say, and each node's own.",
            asks={
                "the swarm": "swarm:sentinel_loss:median",
                "{{instance}}": f"sentinel_loss{{{HERE}}} == sentinel_loss{{{HERE}}}",
            },
            width=12,
        ),
        Panel(
            title="Step by node",
            from_zero=False,
            about="Nodes of one swarm are in the same step; one that lags joins, or is in trouble.",
            asks={"{{instance}}": f"sentinel_step{{{HERE}}}"},
            width=12,
        ),
    ),
    "Stages and replicas": (
        Panel(
            title="Replicas that take work",
            about="By stage. At 0 the swarm stands still, at 1 the stage has nobody to spare.",
            asks={"stage {{stage}}": "swarm_stage:sentinel_view_serving_replicas:max"},
            steps=(("green", 2.0),),
            kind="bargauge",
        ),
        Panel(
            title="Live replicas",
            about="By stage, in whatever state: those that fetch the state are among them.",
            asks={"stage {{stage}}": "swarm_stage:sentinel_view_replicas:max"},
        ),
        Panel(
            title="Nodes by state",
            about="Of those that are scraped.",
            asks={"{{state}}": f"sum by (state) (sentinel_node_state{{{HERE}}})"},
            stacked=True,
        ),
        Panel(
            title="Nodes",
            about="Who is who.",
            asks={"": f"sentinel_info{{{HERE}}}"},
            kind="table",
            width=16,
        ),
        Panel(
            title="Fetching the state",
            about="How far nodes that join are with their stage's state.",
            asks={
                "{{instance}}": f"sentinel_state_fetched_bytes{{{HERE}}} / (sentinel_state_bytes{{{HERE}}} > 0)",
            },
            unit="percentunit",
            most=1.0,
        ),
    ),
    "Trust and ejections": (
        Panel(
            title="Trust",
            about="The least that any scraped node has in a peer; 0 while it is quarantined or ejected.",
            asks={"{{peer}} (stage {{stage}})": f"min by (peer, stage) (sentinel_peer_trust{{{HERE}}})"},
            width=12,
            most=1.0,
        ),
        Panel(
            title="Strikes",
            about="Given to peers, by reason.",
            asks={"{{reason}}": f"{rate('sentinel_strikes_total', 'reason')} > 0"},
            width=6,
            stacked=True,
        ),
        Panel(
            title="Flags",
            about="Tensors that the statistics found strange; most are audited and used.",
            asks={"{{direction}}: {{reason}}": rate("sentinel_flags_total", "direction, reason")},
            width=6,
            stacked=True,
        ),
        Panel(
            title="Quarantines, accusations and ejections",
            about="Within the last hour.",
            asks={
                "quarantines": f"sum(increase(sentinel_quarantines_total{{{HERE}}}[1h]))",
                "accusations {{direction}}": (
                    f"sum by (direction) (increase(sentinel_accusations_total{{{HERE}}}[1h]))"
                ),
                "ejections {{kind}}": f"sum by (kind) (increase(sentinel_ejections_total{{{HERE}}}[1h]))",
            },
        ),
        Panel(
            title="Audits",
            about="By how they ended, a second. Expired and skipped ones found no time.",
            asks={"{{outcome}}": rate("sentinel_audits_total", "outcome")},
            stacked=True,
        ),
        Panel(
            title="Open audits, and votes",
            about="Audits under way, and this operator's votes as jurors a second.",
            asks={
                "open as {{role}}": f"sum by (role) (sentinel_audits_open{{{HERE}}})",
                "votes {{vote}}": rate("sentinel_votes_total", "vote"),
            },
        ),
    ),
    "Throughput and phases": (
        Panel(
            title="Tokens per second by stage",
            about="Of the nodes that are scraped.",
            asks={"stage {{stage}}": "swarm_stage:sentinel_tokens:rate5m"},
        ),
        Panel(
            title="Microbatches",
            about="A second, by outcome. Some retries are normal; lost ones are not.",
            asks={"{{outcome}}": rate("sentinel_microbatches_total", "outcome")},
        ),
        Panel(
            title="In flight",
            about="Microbatches inside each node.",
            asks={"{{instance}}": f"sentinel_microbatches_in_flight{{{HERE}}}"},
        ),
        Panel(
            title="Phases",
            about="What nodes do, in seconds a second; microbatches overlap, so the sum can pass 1 a node.",
            asks={"{{phase}}": rate("sentinel_phase_seconds_total", "phase")},
            stacked=True,
            width=12,
            unit="none",
        ),
        Panel(
            title="Seconds of a step",
            about="And of the averaging in it.",
            asks={
                "step, half": quantile("sentinel_step_seconds", 0.5, "job"),
                "step, 95 %": quantile("sentinel_step_seconds", 0.95, "job"),
                "averaging, half": quantile("sentinel_averaging_seconds", 0.5, "job"),
            },
            unit="s",
            width=6,
        ),
        Panel(
            title="Averaging",
            about="Rounds a second, by how they ended, and nodes whose parameters differ from their siblings'.",
            asks={
                "{{outcome}}": rate("sentinel_averaging_rounds_total", "outcome"),
                "nodes that differ": f"count(sentinel_parameter_agreement{{{HERE}}} == 0) or vector(0)",
            },
            width=6,
        ),
    ),
    "Network": (
        Panel(
            title="Traffic",
            about="Framed bytes a second, by direction and stream. That of the DHT is not counted.",
            asks={"{{direction}}, {{stream}}": rate("sentinel_stream_bytes_total", "direction, stream")},
            unit="Bps",
        ),
        Panel(
            title="Peers connected",
            about="With an open control stream.",
            asks={"{{instance}}": f"sentinel_peers_connected{{{HERE}}}"},
        ),
        Panel(
            title="Clock offset",
            from_zero=False,
            about="Median of the peers' clocks minus the node's. Beyond 3 s it is refused.",
            asks={"{{instance}}": f"sentinel_clock_offset_seconds{{{HERE}}}"},
            unit="s",
            steps=(("red", 3.0),),
        ),
        Panel(
            title="DHT",
            about="Seconds of 95 % of the operations.",
            asks={"{{operation}}": quantile("sentinel_dht_seconds", 0.95, "operation")},
            unit="s",
            width=6,
        ),
        Panel(
            title="DHT failures",
            about="A second; a store that nobody took counts.",
            asks={"{{operation}}": rate("sentinel_dht_failures_total", "operation")},
            width=6,
        ),
        Panel(
            title="Requests that failed",
            about="A second, by what went wrong.",
            asks={"{{method}}: {{outcome}}": rate("sentinel_requests_total", "method, outcome", ', outcome!="ok"')},
            width=6,
        ),
        Panel(
            title="Rules that peers broke",
            about="A second, by kind, and records refused.",
            asks={
                "{{kind}}": f"{rate('sentinel_remote_errors_total', 'kind')} > 0",
                "record: {{kind}}": f"{rate('sentinel_record_rejects_total', 'kind')} > 0",
            },
            width=6,
        ),
    ),
    "Node health": (
        Panel(
            title="Up",
            about="Whether Prometheus reaches a node, and whether its p2pd runs.",
            asks={"{{instance}}": f"up{{{HERE}}}", "p2pd of {{instance}}": f"sentinel_p2pd_up{{{HERE}}}"},
            most=1.0,
        ),
        Panel(
            title="Memory",
            about="Resident, of the node and of its p2pd.",
            asks={
                "{{instance}}": f"process_resident_memory_bytes{{{HERE}}}",
                "p2pd of {{instance}}": f"sentinel_p2pd_resident_memory_bytes{{{HERE}}}",
            },
            unit="bytes",
        ),
        Panel(
            title="Processor",
            about="Cores in use by the node, p2pd not included.",
            asks={"{{instance}}": rate("process_cpu_seconds_total", "instance")},
        ),
        Panel(
            title="Open files",
            about="Of those that the process may open.",
            asks={"{{instance}}": f"process_open_fds{{{HERE}}} / process_max_fds{{{HERE}}}"},
            unit="percentunit",
            steps=(("red", 0.8),),
            width=6,
        ),
        Panel(
            title="Event loop",
            about="How late it wakes up; beyond a second heartbeats suffer.",
            asks={"{{instance}}": f"sentinel_event_loop_lag_seconds{{{HERE}}}"},
            unit="s",
            steps=(("red", 1.0),),
            width=6,
        ),
        Panel(
            title="Disk that is free",
            about="With the state folder.",
            asks={"{{instance}}": f"sentinel_disk_free_bytes{{{HERE}}} / (sentinel_disk_size_bytes{{{HERE}}} > 0)"},
            unit="percentunit",
            width=6,
            most=1.0,
        ),
        Panel(
            title="Age of the newest checkpoint",
            about="By node.",
            asks={"{{instance}}": f"sentinel_checkpoint_age_seconds{{{HERE}}} >= 0"},
            unit="s",
            width=6,
        ),
        Panel(
            title="Checkpoints",
            about="Within the last hour, by what became of them.",
            asks={"{{outcome}}": f"sum by (outcome) (increase(sentinel_checkpoints_total{{{HERE}}}[1h]))"},
        ),
        Panel(
            title="Versions",
            about="Nodes with other versions can compute other bits.",
            asks={"": f"sentinel_build_info{{{HERE}}}"},
            kind="table",
            width=16,
        ),
    ),
    "Seen from outside (sentinel observe)": (
        Panel(
            title="Nodes, by whether they answer",
            about="Silent ones have a live claim and do not answer the observer; gone ones have none any more.",
            asks={"{{presence}}": "sum by (presence) (sentinel_swarm_nodes)"},
            stacked=True,
        ),
        Panel(
            title="Replicas that serve, by stage",
            about="That answer, take work in the present step, and are not ejected. Without any the swarm waits.",
            asks={"stage {{stage}}": "min by (stage) (sentinel_swarm_stage_serving_replicas)"},
        ),
        Panel(
            title="Loss, as most nodes tell it",
            about="Nats per token.",
            asks={"{{instance}}": "sentinel_swarm_loss"},
            from_zero=False,
        ),
        Panel(
            title="Tokens per second, as most nodes tell it",
            about="Of the whole swarm.",
            asks={"{{instance}}": "sentinel_swarm_tokens_per_second"},
        ),
        Panel(
            title="Trust of each node",
            about="The middle of what its neighbours tell; at most 256 nodes have series.",
            asks={"{{peer}} of stage {{stage}}": "sentinel_swarm_node_trust"},
            most=1.0,
        ),
        Panel(
            title="Ejections, verdicts, accusations",
            about="That hold now. Accusations and verdicts are signed; ejections are what most neighbours tell.",
            asks={
                "ejected": "max(sentinel_swarm_ejected)",
                "verdicts": "max(sentinel_swarm_verdicts)",
                "accusations": "max(sentinel_swarm_accusations)",
            },
        ),
    ),
}
