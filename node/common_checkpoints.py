"""Which checkpoints of a live swarm make a model: one of each stage, all of one step. Pure: offers in, a choice out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from node.checkpoint_fetch import Offer
from node.export import ExportError
from protocol.messages import CheckpointOffers


class MovedOnError(ExportError):
    """The stages had no step in common when they were asked, and may have one in a moment: a swarm trains on."""


def common_step(
    told: Mapping[int, Mapping[str, CheckpointOffers]], sizes: Sequence[int], step: int | None
) -> list[Offer]:
    """What to fetch of each stage, all of one step: the newest that every stage has, or the one that is wanted.

    Of a stage's step what most peers name counts, then the smaller digest.

    Args:
        told: stage -> peer -> what it offers.
        sizes: bytes that a file of each stage can have at most.

    Raises:
        MovedOnError: every stage has some step, and they have none in common.
        ExportError: there is no such step; says what there is.
    """
    held: list[dict[int, dict[tuple[int, bytes], list[str]]]] = []
    for stage, most in enumerate(sizes):
        offers: dict[int, dict[tuple[int, bytes], list[str]]] = defaultdict(lambda: defaultdict(list))
        for peer, each in told.get(stage, {}).items():
            for number, size, digest in zip(each.steps, each.sizes, each.parameters, strict=False):
                if number > 0 and size <= most:
                    offers[number][size, digest].append(peer)
        held.append(offers)
    if lacking := [str(stage) for stage, offers in enumerate(held) if not offers]:
        stages = " and ".join(lacking)
        raise ExportError(f"no node offers a checkpoint of stage {stages} yet; try again after some more steps")
    common = set.intersection(*(set(offers) for offers in held))
    chosen = max(common, default=None) if step is None else step
    if chosen is None or chosen not in common:
        named = [f"stage {stage}: {', '.join(map(str, sorted(offers)[-5:]))}" for stage, offers in enumerate(held)]
        wanted = "the stages have no step in common" if step is None else f"not every stage has step {step}"
        raise (MovedOnError if step is None else ExportError)(
            f"{wanted} (steps of {'; '.join(named)}); try again after some more steps"
        )
    found = []
    for offers in held:
        votes = Counter({key: len(peers) for key, peers in offers[chosen].items()})
        size, digest = min(votes, key=lambda key: (-votes[key], key[1], key[0]))
        peers = tuple(sorted(offers[chosen][size, digest]))
        found.append(Offer(step=chosen, size=size, parameters=digest, peers=peers))
    return found
