"""Strikes, trust and states."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from verifier.config import CheckerConfig
from verifier.ledger import (
    BARRED,
    MAX_COUNT,
    MAX_PEER_CHARS,
    REMEDY,
    RETURN_TRUST,
    STRANGER_TRUST,
    TRANSITIONS,
    Ledger,
    PeerEvent,
    PeerState,
    SavedStanding,
    Standing,
    StandingChanged,
)
from verifier.verdicts import Reason

PEER = "peer"


def ledger(**settings: object) -> Ledger:
    return Ledger(CheckerConfig(**settings))  # type: ignore[arg-type]


def strike(book: Ledger, times: int = 1, *, peer: str = PEER, step: int = 0) -> None:
    for _ in range(times):
        book.strike(peer, Reason.NORM, step=step)


def state(book: Ledger, peer: str = PEER) -> PeerState:
    return book.standing(peer).state


def test_a_stranger_is_on_probation_and_allowed() -> None:
    book = ledger()
    assert book.standing(PEER) == Standing(state=PeerState.PROBATION, trust=STRANGER_TRUST)
    assert book.allows(PEER)
    assert book.peers() == ()


def test_credits_lead_to_trust() -> None:
    book = ledger(trusted_after=3)
    assert book.credit(PEER, step=0) == book.credit(PEER, step=0) == ()
    (change,) = book.credit(PEER, step=1)
    assert (change.before, change.after) == (PeerState.PROBATION, PeerState.TRUSTED)
    assert book.credit(PEER, step=1) == ()
    assert book.standing(PEER).trust > STRANGER_TRUST


def test_the_first_strike_makes_a_suspect_and_the_third_a_quarantine() -> None:
    book = ledger()
    (first,) = book.strike(PEER, Reason.SHAPE, step=4)
    assert (first.after, first.reason, first.would) == (PeerState.SUSPECT, Reason.SHAPE, False)
    assert book.strike(PEER, Reason.SHAPE, step=4) == ()
    assert book.allows(PEER)
    (third,) = book.strike(PEER, Reason.NORM, step=4)
    assert (third.after, third.reason) == (PeerState.QUARANTINED, Reason.NORM)
    assert not book.allows(PEER)
    assert book.standing(PEER).trust == 0.0
    assert book.strike(PEER, Reason.NORM, step=5) == ()


def test_one_heavy_strike_is_enough() -> None:
    book = ledger()
    (change,) = book.strike(PEER, Reason.RECEIPT, step=0, weight=3.0)
    assert (change.before, change.after) == (PeerState.PROBATION, PeerState.QUARANTINED)


def test_statistics_strike_once_a_step_however_many_messages_they_flag() -> None:
    book = ledger()
    for _ in range(20):
        book.strike(PEER, Reason.L2, step=7)
        book.strike(PEER, Reason.CONTINUITY, step=7, weight=0.7)
    assert book.standing(PEER).strikes == 1.0
    book.strike(PEER, Reason.NORM, step=7)
    assert book.standing(PEER).strikes == 2.0
    book.strike(PEER, Reason.L1, step=8, weight=0.4)
    book.strike(PEER, Reason.L1, step=8, weight=9.0)
    assert state(book) is PeerState.QUARANTINED
    assert book.standing(PEER).strikes == 3.0


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_strike_without_weight_is_a_mistake(weight: float) -> None:
    with pytest.raises(ValueError, match="weighs"):
        ledger().strike(PEER, Reason.L1, step=0, weight=weight)


def test_strikes_leak_and_a_suspect_is_cleared() -> None:
    book = ledger(strike_decay=0.5, trusted_after=1)
    book.credit(PEER, step=0)
    strike(book)
    assert book.end_step(0) == ()
    (change,) = book.end_step(1)
    assert (change.before, change.after) == (PeerState.SUSPECT, PeerState.TRUSTED)
    assert book.standing(PEER).strikes == 0.0


def test_a_strike_is_no_short_cut_out_of_probation() -> None:
    book = ledger(strike_decay=1.0)
    strike(book)
    (change,) = book.end_step(0)
    assert change.after is PeerState.PROBATION


def test_ten_tenths_clear_one_strike() -> None:
    book = ledger(strike_decay=0.1)
    strike(book)
    for step in range(10):
        book.end_step(step)
    assert state(book) is PeerState.PROBATION


def test_a_step_that_has_ended_leaks_once_and_skipped_steps_count() -> None:
    book = ledger(strike_decay=0.1)
    book.end_step(10)
    strike(book)
    for _ in range(5):
        book.end_step(11)
    assert book.standing(PEER).strikes == pytest.approx(0.9)
    book.end_step(15)
    assert book.standing(PEER).strikes == pytest.approx(0.5)


def test_a_quarantine_does_not_leak_away() -> None:
    book = ledger()
    strike(book, 3)
    assert book.end_step(1) == book.end_step(10_000) == ()
    assert not book.allows(PEER)


def test_a_quarantine_ends_when_served() -> None:
    book = ledger(release_after_steps=5)
    strike(book, 4, step=2)
    assert book.end_step(6) == ()
    (change,) = book.end_step(7)
    assert (change.after, change.event) == (PeerState.PROBATION, PeerEvent.RELEASED)
    assert book.standing(PEER).trust == RETURN_TRUST


def test_a_quarantine_ends_when_released() -> None:
    book = ledger()
    assert book.release(PEER) == ()
    strike(book, 2)
    assert book.release(PEER) == ()
    strike(book)
    (change,) = book.release(PEER)
    assert change.after is PeerState.PROBATION
    assert book.allows(PEER)


def test_an_ejection_bars_until_it_expires() -> None:
    book = ledger()
    (change,) = book.eject(PEER, reason=Reason.AUDIT, until=100.0, now=0.0)
    assert (change.after, change.until, change.reason) == (PeerState.EJECTED, 100.0, Reason.AUDIT)
    assert not book.allows(PEER)
    assert book.credit(PEER, step=0) == book.strike(PEER, Reason.L1, step=0) == ()
    assert book.expire(99.9) == ()
    (back,) = book.expire(100.0)
    assert (back.after, back.event) == (PeerState.PROBATION, PeerEvent.EXPIRED)
    assert book.standing(PEER) == Standing(trust=RETURN_TRUST, reason=Reason.AUDIT)
    assert book.allows(PEER)


def test_a_second_ejection_only_prolongs() -> None:
    book = ledger()
    book.eject(PEER, reason=Reason.AUDIT, until=100.0, now=0.0)
    assert book.eject(PEER, reason=Reason.STRIKES, until=50.0, now=0.0) == ()
    assert book.standing(PEER).until == 100.0
    book.eject(PEER, reason=Reason.STRIKES, until=150.0, now=0.0)
    assert book.standing(PEER).until == 150.0


@pytest.mark.parametrize("until", [0.0, -5.0, math.nan])
def test_an_ejection_that_is_over_does_nothing(until: float) -> None:
    book = ledger()
    assert book.eject(PEER, reason=Reason.AUDIT, until=until, now=0.0) == ()
    assert book.peers() == ()


def test_no_ejection_outlives_the_configured_time() -> None:
    book = ledger(ejection_seconds=60.0)
    book.eject(PEER, reason=Reason.AUDIT, until=math.inf, now=10.0)
    assert book.standing(PEER).until == 70.0


def test_observing_counts_and_reports_but_bars_nobody() -> None:
    book = ledger(mode="observe")
    changes = [c for step in range(3) for c in book.strike(PEER, Reason.L1, step=step)]
    assert [c.after for c in changes] == [PeerState.SUSPECT, PeerState.QUARANTINED]
    assert all(c.would for c in changes)
    assert book.allows(PEER)


def test_off_means_off() -> None:
    book = ledger(mode="off")
    assert book.strike(PEER, Reason.L1, step=0, weight=99.0) == ()
    assert book.eject(PEER, reason=Reason.AUDIT, until=9.0, now=0.0) == ()
    assert book.allows(PEER)
    assert book.peers() == ()


def test_a_full_ledger_forgets_the_harmless_first_and_the_ejected_last() -> None:
    book = ledger(max_peers=4)
    book.eject("ejected", reason=Reason.AUDIT, until=9.0, now=0.0)
    strike(book, 3, peer="quarantined")
    strike(book, peer="suspect")
    for name in ("old", "young"):
        book.credit(name, step=0)
    assert book.peers() == ("ejected", "quarantined", "suspect", "young")
    for number in range(2):
        strike(book, 3, peer=f"offender-{number}")
    assert book.peers() == ("ejected", "quarantined", "offender-0", "offender-1")
    strike(book, peer="offender-2")
    assert book.peers() == ("ejected", "offender-0", "offender-1", "offender-2")


def test_dealing_with_a_peer_keeps_it_remembered() -> None:
    book = ledger(max_peers=2)
    for name in ("a", "b", "a", "c"):
        book.credit(name, step=0)
    assert book.peers() == ("a", "c")


def test_every_state_can_be_left_and_ejection_is_possible_from_all() -> None:
    for before in PeerState:
        assert (before, PeerEvent.EJECTED) in TRANSITIONS
        assert any(start is before and end is not before for (start, _), end in TRANSITIONS.items())


@given(weights=st.lists(st.floats(0.01, 2.9), max_size=30))
def test_trust_falls_with_every_strike(weights: list[float]) -> None:
    book, before = ledger(), STRANGER_TRUST
    for weight in weights:
        book.strike(PEER, Reason.SHAPE, step=0, weight=weight)
        now = book.standing(PEER).trust
        assert 0.0 <= now < before or now == before == 0.0
        before = now


# condemned -----------------------------------------------------------------------------


@given(strikes=st.lists(st.floats(0.01, 1.4), max_size=12), credits=st.integers(0, 40), reason=st.sampled_from(Reason))
def test_a_condemned_peer_is_quarantined_whatever_its_count(strikes: list[float], credits: int, reason: Reason) -> None:
    book = ledger()
    for _ in range(credits):
        book.credit(PEER, step=0)
    for weight in strikes:
        book.strike(PEER, Reason.NORM, step=0, weight=weight)
    before = book.standing(PEER)
    changes = book.condemn(PEER, reason, step=7)
    after = book.standing(PEER)
    assert (after.state, after.reason) == (PeerState.QUARANTINED, reason)
    assert after.strikes == max(3.0, before.strikes)
    assert after.trust == 0.0
    assert not book.allows(PEER)
    if before.state is PeerState.QUARANTINED:
        assert changes == ()
    else:
        (change,) = changes
        assert change == StandingChanged(
            peer=PEER, before=before.state, after=PeerState.QUARANTINED, event=PeerEvent.CONDEMNED, reason=reason
        )


def test_condemning_counts_from_its_step_and_not_again() -> None:
    book = ledger(release_after_steps=5)
    book.condemn(PEER, Reason.AUDIT, step=10)
    assert book.condemn(PEER, Reason.AUDIT, step=14) == ()
    assert book.end_step(14) == ()
    (change,) = book.end_step(15)
    assert change.event is PeerEvent.RELEASED


def test_observing_condemns_without_barring() -> None:
    book = ledger(mode="observe")
    (change,) = book.condemn(PEER, Reason.AUDIT, step=0)
    assert (change.after, change.would) == (PeerState.QUARANTINED, True)
    assert book.allows(PEER)


def test_neither_off_nor_an_ejection_can_be_condemned() -> None:
    assert (book := ledger(mode="off")).condemn(PEER, Reason.AUDIT, step=0) == ()
    assert book.peers() == ()
    book = ledger()
    book.eject(PEER, reason=Reason.STRIKES, until=9.0, now=0.0)
    before = book.export()
    assert book.condemn(PEER, Reason.AUDIT, step=0) == ()
    assert book.export() == before


def test_what_an_audit_found_stays_the_reason() -> None:
    book = ledger()
    strike(book, 3)
    book.condemn(PEER, Reason.AUDIT, step=1)
    strike(book, 2)
    book.condemn(PEER, Reason.STRIKES, step=2)
    assert book.standing(PEER).reason is Reason.AUDIT


# forgiven ------------------------------------------------------------------------------


def test_forgiving_takes_back_one_strike_and_its_loss_of_trust() -> None:
    book = ledger()
    strike(book, 2)
    assert book.forgive(PEER, step=0) == ()
    assert book.standing(PEER) == Standing(
        state=PeerState.SUSPECT, trust=STRANGER_TRUST / 2, strikes=1.0, reason=Reason.NORM
    )
    (change,) = book.forgive(PEER, step=0)
    assert (change.after, change.event) == (PeerState.PROBATION, PeerEvent.CLEARED_EARLY)
    assert book.standing(PEER).trust == STRANGER_TRUST
    assert book.forgive(PEER, step=0) == ()


def test_forgiving_makes_room_for_the_next_statistical_strike_of_the_step() -> None:
    book = ledger()
    book.strike(PEER, Reason.L1, step=3)
    book.forgive(PEER, step=3)
    book.strike(PEER, Reason.L2, step=3)
    assert book.standing(PEER).strikes == 1.0
    book.forgive(PEER, step=4)
    assert book.strike(PEER, Reason.L2, step=3) == ()


def test_forgiving_a_stranger_or_an_ejected_peer_does_nothing() -> None:
    book = ledger()
    assert book.forgive(PEER, step=0) == ()
    assert book.peers() == ()
    strike(book)
    book.eject(PEER, reason=Reason.STRIKES, until=9.0, now=0.0)
    assert book.forgive(PEER, step=0) == ()
    assert state(book) is PeerState.EJECTED


@pytest.mark.parametrize("reason", [Reason.STRIKES, Reason.L1])
def test_forgiving_ends_a_quarantine_that_rested_on_the_strike(reason: Reason) -> None:
    book = ledger()
    strike(book)
    book.condemn(PEER, reason, step=0)
    (change,) = book.forgive(PEER, step=0)
    assert (change.after, change.event) == (PeerState.PROBATION, PeerEvent.RELEASED)
    assert book.allows(PEER)


def test_forgiving_leaves_a_quarantine_that_is_still_borne_out() -> None:
    book = ledger()
    strike(book, 4)
    assert book.forgive(PEER, step=0) == ()
    assert state(book) is PeerState.QUARANTINED
    assert len(book.forgive(PEER, step=0)) == 1


def test_forgiving_a_strike_does_not_undo_an_audit() -> None:
    book = ledger()
    strike(book)
    book.condemn(PEER, Reason.AUDIT, step=0)
    for _ in range(4):
        assert book.forgive(PEER, step=0) == ()
    assert book.standing(PEER) == Standing(state=PeerState.QUARANTINED, trust=0.0, strikes=3.0, reason=Reason.AUDIT)


# saved and restored --------------------------------------------------------------------


def saved(**changes: Any) -> SavedStanding:
    values: dict[str, Any] = {
        "peer": PEER,
        "state": PeerState.SUSPECT,
        "trust": 0.5,
        "strikes": 1.0,
        "credits": 3,
        "reason": Reason.L1,
    }
    return SavedStanding(**(values | changes))


def reborn(book: Ledger, *, now: float = 0.0, **settings: object) -> Ledger:
    """The ledger after a restart of the node."""
    after = ledger(**settings)
    after.restore(book.export(), now=now)
    return after


def test_a_restart_is_no_amnesty() -> None:
    book = ledger()
    book.credit("trusted", step=0)
    strike(book, peer="suspect")
    strike(book, 3, peer="quarantined")
    book.eject("ejected", reason=Reason.AUDIT, until=100.0, now=0.0)
    after = reborn(book, now=50.0)
    assert after.peers() == ("trusted", "suspect", "quarantined", "ejected")
    assert [after.standing(peer) for peer in after.peers()] == [book.standing(peer) for peer in book.peers()]
    assert [after.allows(peer) for peer in after.peers()] == [True, True, False, False]


def test_restoring_replaces_what_was_known() -> None:
    book = ledger()
    strike(book, peer="other")
    assert book.restore([saved()], now=0.0) == ()
    assert book.peers() == (PEER,)
    assert book.restore([], now=0.0) == ()
    assert book.peers() == ()


def test_an_ejection_that_ran_out_meanwhile_is_over() -> None:
    book = ledger()
    strike(book, 2)
    book.eject(PEER, reason=Reason.AUDIT, until=100.0, now=0.0)
    after = ledger()
    (change,) = after.restore(book.export(), now=100.0)
    assert (change.before, change.after, change.event) == (PeerState.EJECTED, PeerState.PROBATION, PeerEvent.EXPIRED)
    assert after.standing(PEER) == Standing(trust=RETURN_TRUST, reason=Reason.AUDIT)


def test_a_clock_that_was_set_back_ejects_nobody_for_years() -> None:
    book = ledger(ejection_seconds=60.0)
    book.restore([saved(state=PeerState.EJECTED, until=1e9)], now=10.0)
    assert book.standing(PEER).until == 70.0


def test_a_quarantine_goes_on_where_it_was() -> None:
    book = ledger(release_after_steps=5)
    strike(book, 3, step=1000)
    after = reborn(book, release_after_steps=5)
    assert after.end_step(1004) == ()
    assert len(after.end_step(1005)) == 1


def test_the_offenders_of_a_larger_ledger_are_kept() -> None:
    book = ledger()
    strike(book, 3, peer="offender")
    for name in ("a", "b", "c"):
        book.credit(name, step=0)
    strike(book, peer="suspect")
    book.credit("d", step=0)
    assert reborn(book, max_peers=4).peers() == ("offender", "c", "suspect", "d")
    assert reborn(book, max_peers=2).peers() == ("offender", "suspect")


@pytest.mark.parametrize(
    "changes",
    [
        {"peer": ""},
        {"peer": "x" * (MAX_PEER_CHARS + 1)},
        *({"trust": trust} for trust in (-0.1, 1.1, math.nan, math.inf)),
        *({"strikes": strikes} for strikes in (-1.0, math.nan, math.inf)),
        *({"credits": credits} for credits in (-1, MAX_COUNT + 1)),
        *({"quarantined_at": step} for step in (-1, MAX_COUNT + 1)),
        {"until": 5.0},
        {"state": PeerState.EJECTED},
        *({"state": PeerState.EJECTED, "until": until} for until in (0.0, -1.0, math.nan, math.inf)),
        *({"state": state, "until": 5.0} for state in (PeerState.TRUSTED, PeerState.QUARANTINED)),
        *({"state": state, "reason": None} for state in (PeerState.SUSPECT, PeerState.QUARANTINED)),
        {"state": PeerState.EJECTED, "until": 5.0, "reason": None},
        *({"state": state} for state in (PeerState.PROBATION, PeerState.TRUSTED)),
    ],
)
def test_an_impossible_standing_names_the_problem_and_the_remedy(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"a saved standing has .*; {REMEDY}"):
        saved(**changes)


@pytest.mark.parametrize(
    "wrong",
    [
        [saved(), saved()],
        [saved(strikes=3.0)],
        [saved(state=PeerState.QUARANTINED, strikes=2.9)],
    ],
)
def test_a_refused_restore_changes_nothing(wrong: list[SavedStanding]) -> None:
    book = ledger()
    strike(book, 2, peer="other")
    before = book.export()
    with pytest.raises(ValueError, match=REMEDY):
        book.restore([saved(peer="first"), *wrong], now=0.0)
    assert book.export() == before


# whatever happens ----------------------------------------------------------------------

MAX_PEERS = 3


class LedgerMachine(RuleBasedStateMachine):
    """Whatever happens, states change along the table and nobody is let in early."""

    peers = st.sampled_from(["a", "b", "c", "d", "e"])
    reasons = st.sampled_from(Reason)

    @initialize(release=st.sampled_from([None, 3]), mode=st.sampled_from(["enforce", "observe"]))
    def start(self, release: int | None, mode: str) -> None:
        self.settings = {
            "release_after_steps": release,
            "trusted_after": 3,
            "ejection_seconds": 50.0,
            "max_peers": MAX_PEERS,
            "mode": mode,
        }
        self.book = ledger(**self.settings)
        self.known: dict[str, PeerState] = {}
        self.step = 0
        self.now = 0.0

    def see(self, changes: Iterable[StandingChanged]) -> None:
        """Follow the changes, each of which has to be in the table and to start where the last one ended."""
        for change in changes:
            assert TRANSITIONS[change.before, change.event] is change.after is not change.before
            assert change.would is (self.settings["mode"] == "observe")
            assert change.before is self.known.get(change.peer, PeerState.PROBATION)
            self.known[change.peer] = change.after
        for peer in self.known.keys() - set(self.book.peers()):
            del self.known[peer]  # forgotten, so a stranger again

    @rule(peer=peers, reason=reasons, weight=st.floats(0.1, 4.0))
    def strikes(self, peer: str, reason: Reason, weight: float) -> None:
        self.see(self.book.strike(peer, reason, step=self.step, weight=weight))

    @rule(peer=peers, reason=reasons)
    def condemns(self, peer: str, reason: Reason) -> None:
        self.see(self.book.condemn(peer, reason, step=self.step))
        assert self.book.standing(peer).state in BARRED

    @rule(peer=peers)
    def forgives(self, peer: str) -> None:
        before = self.book.standing(peer)
        self.see(self.book.forgive(peer, step=self.step))
        assert self.book.standing(peer).strikes <= before.strikes

    @rule(peer=peers, times=st.integers(1, 4))
    def credits(self, peer: str, times: int) -> None:
        before = {each.peer: each for each in self.book.export()}.get(peer)
        for _ in range(times):
            self.see(self.book.credit(peer, step=self.step))
        after = {each.peer: each for each in self.book.export()}[peer]
        if before is not None and before.state in BARRED:
            assert after == before
        else:
            assert after.credits == (0 if before is None else before.credits) + times

    @rule(steps=st.integers(0, 30))
    def ends_step(self, steps: int) -> None:
        self.step += steps
        self.see(self.book.end_step(self.step))

    @rule(peer=peers, seconds=st.floats(-5.0, 100.0))
    def ejects(self, peer: str, seconds: float) -> None:
        self.see(self.book.eject(peer, reason=Reason.AUDIT, until=self.now + seconds, now=self.now))

    @rule(peer=peers)
    def releases(self, peer: str) -> None:
        self.see(self.book.release(peer))

    @rule(seconds=st.floats(0.0, 40.0))
    def expires(self, seconds: float) -> None:
        self.now += seconds
        self.see(self.book.expire(self.now))

    @rule()
    def restarts(self) -> None:
        before, self.book = self.book, ledger(**self.settings)
        self.see(self.book.restore(before.export(), now=self.now))
        assert self.book.export() == before.export()
        assert self.book.peers() == before.peers()
        assert all(self.book.standing(peer) == before.standing(peer) for peer in before.peers())
        assert all(self.book.allows(peer) == before.allows(peer) for peer in before.peers())

    @invariant()
    def holds(self) -> None:
        assert len(self.book.peers()) <= MAX_PEERS
        for peer in self.book.peers():
            standing = self.book.standing(peer)
            assert standing.state is self.known.get(peer, PeerState.PROBATION)
            assert 0.0 <= standing.trust <= 1.0
            assert standing.strikes >= 0.0
            assert (standing.state is PeerState.EJECTED) == (standing.until is not None)
            barred = standing.state in BARRED and self.settings["mode"] == "enforce"
            assert self.book.allows(peer) is not barred


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=40, stateful_step_count=40)


EVENT_NAMES = ["strike", "condemn", "forgive", "credit", "end", "eject", "expire", "release"]


def happen(book: Ledger, name: str, amount: int, time: int) -> tuple[StandingChanged, ...]:
    """One event of the given name; ``time`` serves as step and as seconds."""
    match name:
        case "strike":
            return book.strike(PEER, Reason.L1, step=time, weight=amount / 5)
        case "condemn":
            return book.condemn(PEER, Reason.AUDIT, step=time)
        case "forgive":
            return book.forgive(PEER, step=time)
        case "credit":
            return book.credit(PEER, step=time)
        case "end":
            return book.end_step(time)
        case "eject":
            return book.eject(PEER, reason=Reason.STRIKES, until=time + amount, now=time)
        case "expire":
            return book.expire(time)
        case _:
            return book.release(PEER)


@given(events=st.lists(st.tuples(st.sampled_from(EVENT_NAMES), st.integers(1, 20)), max_size=40))
def test_every_reported_change_is_in_the_table(events: list[tuple[str, int]]) -> None:
    book = ledger(trusted_after=2, release_after_steps=7)
    time, known = 0, PeerState.PROBATION
    for name, amount in events:
        time += amount
        for change in happen(book, name, amount, time):
            assert change.before is known
            assert TRANSITIONS[change.before, change.event] is change.after
            known = change.after
        assert state(book) is known
