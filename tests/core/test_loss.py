"""The judge of losses: hardly a false alarm on curves with all that training brings, and each fault is found."""

import math
import random
import struct

import pytest

from nvrx_slurm.core.rank.loss import Agreement, LossJudge, LossReport

pytestmark = pytest.mark.fast


STEPS = 100_000


def report(iteration, loss, norm=None):
    return LossReport(iteration, loss, norm, struct.unpack("q", struct.pack("d", loss or 0.0))[0])


def curve(seed, steps=STEPS):
    """A loss as of a language model: warm-up, a power law, noise that depends on itself, spikes that fade within a
    hundred steps, learning rates that fall, rise and begin anew, and single bad batches."""
    rng = random.Random(seed)
    floor, start, noise, spread = rng.uniform(0.02, 3.0), rng.uniform(4.0, 12.0), 0.0, rng.uniform(0.005, 0.08)
    spike, fades, shift, target, pace = 0.0, 1.0, 0.0, 0.0, 0.01
    for step in range(steps):
        base = floor + (start - floor) * (1.0 + step / rng.choice((50.0, 51.0))) ** -0.5
        noise = 0.7 * noise + rng.gauss(0.0, spread * base)
        if rng.random() < 1 / 2000:
            spike, fades = base * rng.uniform(0.3, 6.0), math.exp(-1 / rng.uniform(1.0, 60.0))
        if rng.random() < 1 / 3000:  # of the learning rate
            target, pace = rng.uniform(-0.15, 0.25) * base, rng.choice((1.0, 0.1, 0.01))
        spike, shift = spike * fades, shift + pace * (target - shift)
        bad_batch = base * rng.uniform(1.0, 9.0) if rng.random() < 1 / 1000 else 0.0
        yield max(1e-3, base + noise + spike + shift + bad_batch)


@pytest.mark.parametrize("seed", range(3))
def test_at_most_one_false_alarm_in_100_000_steps(seed):
    judge = LossJudge()
    said = [why for step, loss in enumerate(curve(seed)) if (why := judge.judge(report(step, loss, 1.0)))]
    assert len(said) <= 1, said


FAULTS = {
    "nan": (lambda loss, after: math.nan, 1),
    "infinite": (lambda loss, after: math.inf, 1),
    "diverges": (lambda loss, after: loss + 10.0, 64),
    "climbs": (lambda loss, after: loss + min(10.0, 0.2 * after), 128),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_loss_that_goes_wrong_is_found_once(fault):
    wrong, within = FAULTS[fault]
    judge, said = LossJudge(), []
    for step, loss in enumerate(curve(7, 5300)):
        value = wrong(loss, step - 5000) if step >= 5000 else loss
        said += [step] if judge.judge(report(step, value)) else []
    assert len(said) == 1 and 5000 <= said[0] < 5000 + within


def test_gradients_overflow_at_times():
    judge = LossJudge()
    assert not any(judge.judge(report(step, 2.0, math.inf if step % 10 else 1.0)) for step in range(100))
    assert sum(bool(judge.judge(report(step, 2.0, math.nan))) for step in range(100)) == 1


@pytest.mark.parametrize(
    "ranks, agree_for, odd, found",
    [(4, 150, {2}, "2 of 4"), (2, 150, {1}, "0, 1 of 2"), (4, 150, {0, 3}, "0, 1, 2, 3 of 4"), (4, 20, {2}, "")],
)
def test_ranks_with_other_bits(ranks, agree_for, odd, found):
    """A loss that is not all-reduced never agrees, so nothing is said of it."""
    agreement, said = Agreement(), []
    for step in range(agree_for + 1):
        for rank in range(ranks):
            loss = 2.0 + 1e-15 * (rank in odd and step == agree_for)
            said += filter(None, [agreement.judge(rank, report(step, loss), ranks)])
    assert len(said) == bool(found) and all(f"rank {found}" in why for why in said)
