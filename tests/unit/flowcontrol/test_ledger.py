"""The ledger of an endpoint: what has room, and what its requests show. Literal times."""

import pytest
from support.plain import needs_plain

from ciuicflow.endpoint import EndpointId
from ciuicflow.flowcontrol.actions import Endpoint, Role
from ciuicflow.flowcontrol.cost import Cost
from ciuicflow.flowcontrol.ledger import EndpointLedger
from ciuicflow.flowcontrol.limit import AdaptiveLimit
from ciuicflow.flowcontrol.signals import Signals

SMALL = Cost(work=300.0, prefill_tokens=100, held_tokens=200)


pytestmark = needs_plain


class Recorder(AdaptiveLimit):
    """Notes rounds instead of adapting to them."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[Signals] = []

    def update(self, seen: Signals) -> None:
        self.rounds.append(seen)


class Probe:
    """A ledger whose rounds are recorded, and whose limits are set by hand."""

    def __init__(self, share: float = 0.5, max_requests: int | None = None) -> None:
        endpoint = Endpoint(id=EndpointId("e"), max_requests=max_requests)
        self.ledger = EndpointLedger(endpoint, share, 0.0)
        self.ledger.limit = recorder = Recorder()
        self.ledger.reconfigure(endpoint)
        self.rounds = recorder.rounds
        self.id = 0

    def set(self, requests: float = 1000, tokens: float = 1e9, prefill: float = 1e9) -> None:
        limit = self.ledger.limit
        limit.requests, limit.tokens, limit.prefill_tokens = requests, tokens, prefill

    def place(self, now: float, cost: Cost = SMALL, *, streams: bool = True, share: float = 1.0,
              role: Role = Role.ANY) -> int:  # fmt: skip
        self.id += 1
        self.ledger.place(now, self.id, cost, role, 0.2, streams=streams, share=share)
        return self.id

    def has_room(self, now: float, cost: Cost = SMALL, share: float = 1.0) -> bool:
        return self.ledger.has_room(now, cost, Role.ANY, share)

    def serve(self, now: float, after_s: float, cost: Cost = SMALL) -> None:
        """One request alone, from placement to the end."""
        id_ = self.place(now, cost)
        self.ledger.first_token(now + after_s, id_)
        self.ledger.release(now + after_s, id_, None)

    def round(self, now: float) -> Signals:
        self.rounds.clear()
        self.has_room(now)
        return self.rounds[-1]


# Room.


def test_requests_in_flight_are_bounded() -> None:
    probe = Probe()
    probe.set(requests=2.9)
    probe.place(0.0)
    assert probe.has_room(0.0)
    probe.place(0.0)
    assert not probe.has_room(0.0)


def test_tokens_in_flight_are_bounded() -> None:
    probe = Probe()
    probe.set(tokens=450)
    probe.place(0.0)
    assert probe.has_room(0.0)
    probe.place(0.0)
    assert not probe.has_room(0.0)


def test_prompt_tokens_without_a_first_token_are_bounded() -> None:
    probe = Probe()
    probe.set(prefill=150)
    first = probe.place(0.0)
    assert not probe.has_room(0.0)
    probe.ledger.first_token(0.01, first)
    assert probe.has_room(0.01)


def test_a_request_larger_than_any_limit_goes_alone() -> None:
    probe = Probe()
    probe.set(requests=1, tokens=10, prefill=10)
    assert probe.has_room(0.0)
    probe.place(0.0)
    assert not probe.has_room(0.0)


def test_a_release_gives_everything_back_and_a_second_one_nothing() -> None:
    probe = Probe()
    id_ = probe.place(0.0)
    assert (probe.ledger.requests, probe.ledger.tokens) == (1, 200)
    probe.ledger.release(1.0, id_, None)
    probe.ledger.release(2.0, id_, None)
    assert (probe.ledger.requests, probe.ledger.tokens) == (0, 0)
    assert probe.ledger.observer.line_tokens == 0


def test_a_corrected_cost_counts_from_then_on() -> None:
    probe = Probe()
    id_ = probe.place(0.0)
    probe.ledger.correct(0.0, id_, Cost(210.0, 10, 200))
    assert probe.ledger.observer.line_tokens == 10
    probe.ledger.first_token(0.1, id_)
    probe.ledger.correct(0.1, id_, Cost(210.0, 10, 500))
    assert probe.ledger.tokens == 500
    probe.ledger.release(0.2, id_, None)
    assert probe.ledger.tokens == 0


def test_an_answer_longer_than_expected_holds_more() -> None:
    probe = Probe()
    id_ = probe.place(0.0)
    probe.ledger.first_token(0.1, id_)
    probe.ledger.progress(1.0, id_, 150)  # 100 were expected
    assert probe.ledger.tokens > 200
    assert probe.ledger.release(1.0, id_, None) == 151
    assert probe.ledger.tokens == 0


def test_a_stream_of_twenty_minutes_is_still_counted() -> None:
    probe = Probe()
    probe.set(requests=1)
    id_ = probe.place(0.0)
    probe.ledger.first_token(1.0, id_)
    assert not probe.has_room(1200.0)
    probe.ledger.release(1200.0, id_, None)
    assert probe.has_room(1200.0)


def test_headroom_leaves_room_that_only_a_full_share_may_use() -> None:
    probe = Probe()
    probe.ledger.limit.starting = False
    probe.set(requests=4)
    for _ in range(2):
        probe.place(0.0)
    assert not probe.has_room(0.0, share=0.5)
    assert probe.has_room(0.0, share=1.0)


def test_headroom_pauses_between_lower_prompts() -> None:
    probe = Probe()
    for index in range(20):
        probe.serve(float(index), 0.1)
    other = probe.place(30.0)
    probe.ledger.first_token(30.1, other)
    lower = probe.place(31.0, share=0.5)
    probe.ledger.first_token(31.1, lower)
    assert not probe.has_room(31.15, share=0.5)
    assert probe.has_room(31.15)
    assert 31.15 < probe.ledger.changes_s(31.15) < 31.25
    assert probe.has_room(31.25, share=0.5)


def test_a_ceiling_bounds_the_learnt_limit() -> None:
    probe = Probe(max_requests=1)
    probe.place(0.0)
    assert not probe.has_room(0.0)
    probe.ledger.reconfigure(Endpoint(id=EndpointId("e"), max_requests=2))
    assert probe.has_room(0.0)


def test_load_is_the_fuller_of_requests_and_tokens() -> None:
    probe = Probe()
    probe.set(requests=10, tokens=400)
    probe.place(0.0)
    assert probe.ledger.load == pytest.approx(0.5)
    probe.ledger.bypass(0.0, 8, 0, 0)
    assert probe.ledger.load == pytest.approx(0.9)


# Bypass.


def test_bypass_takes_room_but_is_never_held() -> None:
    probe = Probe()
    probe.set(requests=4)
    probe.place(0.0)
    probe.ledger.bypass(0.0, 3, 0, 0)
    assert not probe.has_room(0.0)
    probe.ledger.bypass(0.1, 2, 0, 0)
    assert probe.has_room(0.1)


def test_opted_in_requests_that_were_deprived_keep_their_part_of_what_is_in_flight() -> None:
    probe = Probe(share=0.25)
    probe.set(requests=4)
    probe.ledger.bypass(0.0, 12, 12_000, 12_000)
    for expected in (True, True, True, True, False):
        assert probe.has_room(0.0) is expected
        if expected:
            probe.place(0.0)


def test_opted_in_requests_that_had_their_part_do_not_add_to_what_bypass_overfills() -> None:
    probe = Probe(share=0.25)
    probe.set(requests=4)
    for _ in range(20):
        probe.serve(0.0, 0.01)
    probe.place(0.0)
    probe.ledger.bypass(0.1, 12, 1200, 1200)
    assert not probe.has_room(0.1)


def test_one_request_goes_however_much_bypass_there_is() -> None:
    probe = Probe()
    probe.set(requests=4)
    probe.ledger.bypass(0.0, 1000, 10**6, 10**6)
    assert probe.has_room(0.0)


def test_bypass_beyond_its_part_is_named_in_the_signals() -> None:
    probe = Probe(share=0.5)
    probe.set(requests=10)
    probe.ledger.bypass(0.0, 4, 0, 0)
    assert not probe.round(10.0).foreign
    probe.ledger.bypass(10.0, 6, 0, 0)
    assert probe.round(20.0).foreign


# What a round shows.


def learnt(probe: Probe) -> None:
    """Teach it that 100 tokens of prompt take 0.1 s in an idle engine."""
    for index in range(30):
        probe.serve(index * 0.2, 0.1)
    probe.round(10.0)


def test_a_round_averages_what_was_in_flight() -> None:
    probe = Probe()
    learnt(probe)
    probe.place(10.0)
    id_ = probe.place(10.5)
    probe.ledger.first_token(10.6, id_)
    signals = probe.round(11.0)
    assert signals.requests == pytest.approx(1.5)
    assert signals.tokens == pytest.approx(300)


def test_a_request_left_alone_is_seen_before_its_first_token() -> None:
    probe = Probe()
    learnt(probe)
    probe.place(10.0)
    assert probe.round(11.0).blocked == pytest.approx(0.85, abs=0.05)  # 0.1 s, and half as much
    assert probe.round(13.0).blocked == pytest.approx(1.0)


def test_a_request_served_in_its_time_was_not_left_alone() -> None:
    probe = Probe()
    learnt(probe)
    probe.serve(10.0, 0.11)
    signals = probe.round(11.0)
    assert signals.blocked == 0
    assert signals.answers == 1


def test_time_behind_other_prompts_is_the_lines_and_not_the_engines() -> None:
    probe = Probe()
    learnt(probe)
    first, second = probe.place(10.0), probe.place(10.0)
    probe.ledger.first_token(10.1, first)
    probe.ledger.first_token(10.2, second)
    signals = probe.round(11.0)
    assert signals.blocked == 0
    assert signals.line_s == pytest.approx(0.05, abs=0.02)  # nothing and 0.1 s


def test_prompts_computed_side_by_side_lose_no_time() -> None:
    probe = Probe()
    learnt(probe)
    ids = [probe.place(10.0) for _ in range(4)]
    for id_ in ids:
        probe.ledger.first_token(10.1, id_)
    assert probe.round(11.0).line_s == pytest.approx(0.0, abs=0.01)


def test_a_request_that_leaves_the_line_lets_the_next_one_to_the_front() -> None:
    probe = Probe()
    learnt(probe)
    first, second = probe.place(10.0), probe.place(10.0)
    probe.ledger.release(10.05, first, None)
    probe.ledger.first_token(10.15, second)
    signals = probe.round(11.0)
    assert signals.blocked == 0
    assert probe.ledger.observer.line_tokens == 0


def test_the_next_in_line_can_be_left_alone_too() -> None:
    probe = Probe()
    learnt(probe)
    first = probe.place(10.0)
    probe.place(10.0)
    probe.ledger.first_token(10.1, first)
    assert probe.round(11.0).blocked > 0.5


def stream(probe: Probe, ids: list[int], start_s: float, steps: int, pause_s: float = 0.01) -> None:
    for step in range(steps):
        for id_ in ids:
            probe.ledger.progress(start_s + step * pause_s, id_, 1)


def test_the_mean_time_between_tokens_is_measured() -> None:
    probe = Probe()
    learnt(probe)
    ids = [probe.place(10.0) for _ in range(3)]
    for id_ in ids:
        probe.ledger.first_token(10.1, id_)
    stream(probe, ids, 10.12, 20, pause_s=0.02)
    assert probe.round(11.0).itl_s == pytest.approx(0.02)


def test_tokens_reported_several_at_once_give_the_same_mean() -> None:
    probe = Probe()
    learnt(probe)
    id_ = probe.place(10.0)
    probe.ledger.first_token(10.1, id_)
    for step in range(1, 5):
        probe.ledger.progress(10.1 + step * 0.2, id_, 10)
    assert probe.round(11.0).itl_s == pytest.approx(0.02)


def test_a_stream_that_misses_steps_while_others_go_on_was_set_aside() -> None:
    probe = Probe()
    learnt(probe)
    ids = [probe.place(10.0) for _ in range(3)]
    for id_ in ids:
        probe.ledger.first_token(10.1, id_)
    stream(probe, ids, 10.11, 10)
    probe.round(10.5)
    stream(probe, ids[:2], 10.5, 100)  # a second
    probe.ledger.progress(11.5, ids[2], 1)
    assert probe.round(12.0).stalls == 1


def test_a_pause_of_all_streams_is_a_long_step() -> None:
    probe = Probe()
    learnt(probe)
    ids = [probe.place(10.0) for _ in range(3)]
    for id_ in ids:
        probe.ledger.first_token(10.1, id_)
    stream(probe, ids, 10.11, 10)
    probe.round(10.5)
    stream(probe, ids, 13.0, 10)
    assert probe.round(14.0).stalls == 0


def test_the_strictest_target_in_flight_counts() -> None:
    probe = Probe()
    for itl_s in (0.5, 0.05, 1.0):
        probe.id += 1
        probe.ledger.place(0.0, probe.id, SMALL, Role.ANY, itl_s, streams=True)
    assert probe.round(5.0).itl_target_s == 0.05


def test_a_reported_queue_counts_once_and_without_what_is_known_to_wait() -> None:
    probe = Probe()
    for _ in range(5):
        probe.place(0.0, streams=False)
    probe.place(0.0)
    probe.ledger.observer.reported(1.0, 4)
    assert probe.round(2.0).hidden == 3
    assert probe.round(10.0).hidden == 0


def test_an_old_report_is_not_believed() -> None:
    probe = Probe()
    for _ in range(5):
        probe.place(0.0, streams=False)
    probe.ledger.observer.reported(1.0, 4)
    assert probe.round(60.0).hidden == 0


def test_answers_in_one_piece_are_judged_by_what_they_took_with_few_in_flight() -> None:
    probe = Probe()
    for index in range(20):
        id_ = probe.place(float(index), streams=False)
        probe.ledger.release(index + 0.5, id_, 100, answered=True)
    assert probe.round(100.0).late < 0.5
    id_ = probe.place(100.0, streams=False)
    probe.ledger.release(103.0, id_, 100, answered=True)
    assert probe.round(110.0).late == pytest.approx(2.0, rel=0.1)  # 3 s, where 1.5 s are allowed


def test_answers_without_usage_are_judged_by_what_they_were_expected_to_cost() -> None:
    probe = Probe()
    for index in range(20):
        id_ = probe.place(float(index), streams=False)
        probe.ledger.release(index + 0.5, id_, None, answered=True)
    seen = probe.round(100.0)
    assert (seen.answers, seen.late < 0.5) == (20, True)


def test_a_stream_whose_tokens_cannot_be_read_counts_as_an_answer_too() -> None:
    probe = Probe()
    id_ = probe.place(0.0)
    probe.ledger.release(1.0, id_, None, answered=True)
    assert probe.round(2.0).answers == 1


def test_an_answer_cut_short_tells_nothing() -> None:
    probe = Probe()
    id_ = probe.place(0.0, streams=False)
    probe.ledger.release(0.001, id_, None)
    assert probe.round(2.0).answers == 0


def test_a_decode_leg_stands_in_no_line_and_still_shows_its_tokens() -> None:
    probe = Probe()
    id_ = probe.place(0.0, role=Role.DECODE)
    assert not probe.ledger.observer.line
    probe.ledger.first_token(2.0, id_)
    stream(probe, [id_], 2.02, 10, pause_s=0.02)
    assert probe.round(5.0).itl_s == pytest.approx(0.02)


def test_events_of_requests_that_are_not_here_are_ignored() -> None:
    probe = Probe()
    probe.ledger.first_token(1.0, 99)
    probe.ledger.progress(1.0, 99, 1)
    probe.ledger.correct(1.0, 99, SMALL)
    assert probe.ledger.release(1.0, 99, None) == 0
