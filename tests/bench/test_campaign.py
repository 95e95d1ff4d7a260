"""The order of things in a campaign, with arms that only note what is asked of them."""

import pytest

from headstart.bench.campaign import Plan, run_campaign
from headstart.bench.drive import Pace
from headstart.bench.load import Shape, make_load
from headstart.bench.phases import Phase
from headstart.bench.serve import Load
from headstart.errors import HeadstartError

SHAPE = Shape(sessions=3)
LOAD = Load(
    workload="unique",
    shape=SHAPE,
    pace=Pace(concurrency=1),
    asks=tuple(make_load("unique", SHAPE)),
    block_size=16,
    num_warm_up=0,
)
STEADY = (Phase.COLD, Phase.STEADY, Phase.ENGINE_RESTART)


class Noting:
    """An arm; `fails` names what it cannot do."""

    def __init__(self, name, notes, run, fails=()):
        self.name, self._notes, self._run, self._fails = name, notes, run, fails

    def _note(self, what):
        self._notes.append(f"{self.name} {what}")
        if what in self._fails:
            raise HeadstartError(f"{self.name} cannot {what}")

    def start(self):
        self._note("start")

    def ready(self, phase, load):
        self._note(f"ready {phase}".strip())

    def run(self, phase, load, salt, advance):
        self._note(f"run {salt}")
        advance(1)
        return self._run(arm=self.name, phase=str(phase), salt=salt)

    def settle(self):
        self._note("settle")

    def end(self):
        self._note("end")


@pytest.fixture
def campaign(run):
    """Runs a plan with the arms a and b; the notes, the runs and the steps of progress."""

    def call(plan, fails=(), arms="ab"):
        notes, runs, steps = [], [], []
        made = [Noting(name, notes, lambda **known: run(**known), fails) for name in arms]
        error = None
        try:
            run_campaign(made, LOAD, plan, runs.append, lambda *step: steps.append(step))
        except HeadstartError as found:
            error = found
        return notes, runs, steps, error

    return call


def test_rounds_visit_all_arms_in_turn_with_one_salt(campaign):
    notes, runs, _, _ = campaign(Plan(num_rounds=2, salt="s"))
    assert notes == [
        *("a start", "b start"),
        *("a ready", "a run s-1", "a settle", "b ready", "b run s-1", "b settle"),
        *("b ready", "b run s-2", "b settle", "a ready", "a run s-2", "a settle"),
        *("b end", "a end"),
    ]
    assert [(run.round, run.arm) for run in runs] == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    _, runs, _, _ = campaign(Plan(salt="s"))
    assert [run.salt for run in runs] == ["s", "s"], "one round has the salt that was asked for"


def test_one_at_a_time_ends_an_arm_before_the_next_starts(campaign):
    notes, _, _, _ = campaign(Plan(one_at_a_time=True, phases=STEADY[:2]))
    kinds = [note.split()[0] + note.split()[1] for note in notes]
    visit = ["start", "ready", "run", "settle", "ready", "run", "settle", "end"]
    assert kinds == [arm + what for arm in "ab" for what in visit]


def test_a_restart_is_compared_with_the_steady_run_of_its_round(campaign):
    _, runs, _, _ = campaign(Plan(phases=STEADY, num_rounds=2))
    assert [run.phase for run in runs[:3]] == ["cold", "steady", "engine-restart"]
    for run in runs:
        assert (run.rebuild is not None) == (run.phase == "engine-restart")
    _, runs, _, _ = campaign(Plan(phases=(Phase.COLD, Phase.ENGINE_RESTART)))
    assert not any(run.rebuild for run in runs), "there is nothing to compare it with"


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_what_fails_ends_everything_and_keeps_what_was_done(campaign, one_at_a_time):
    plan = Plan(phases=STEADY, one_at_a_time=one_at_a_time)
    notes, runs, _, error = campaign(plan, fails=("ready engine-restart",))
    assert str(error) == "a cannot ready engine-restart"
    assert [run.phase for run in runs] == ["cold", "steady"]
    started = {note.split()[0] for note in notes if note.endswith(" start")}
    ended = {note.split()[0] for note in notes if note.endswith(" end")}
    assert started == ended == ({"a"} if one_at_a_time else {"a", "b"})


def test_a_run_is_kept_before_its_arm_is_found_dead(campaign):
    _, runs, _, error = campaign(Plan(), fails=("settle",))
    assert (len(runs), str(error)) == (1, "a cannot settle")


def test_an_arm_that_does_not_start_is_ended_too(campaign):
    notes, _, _, error = campaign(Plan(), fails=("start",))
    assert (notes, str(error)) == (["a start", "a end"], "a cannot start")


def test_progress_says_who_and_what(campaign):
    _, _, steps, _ = campaign(Plan(phases=(Phase.COLD,), num_rounds=2), arms="a")
    assert steps[:3] == [
        ("a: starting", 0, 3),
        ("round 1 of 2, a, cold: getting ready", 0, 3),
        ("round 1 of 2, a, cold", 1, 3),
    ]
