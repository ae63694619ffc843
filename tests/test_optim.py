"""Optimizers against numbers worked by hand, clipping at its edges, and updates that see only a part."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar import optim
from refpar.nn.layer import ParamSpec
from refpar.optim import SGD, Adam, AdamW

OPTIMIZERS = [
    SGD(0.1),
    SGD(0.1, momentum=0.9, weight_decay=0.1, warmup=3),
    Adam(0.1, weight_decay=0.1),
    AdamW(0.1, (0.8, 0.9), 1e-6, 0.1, warmup=2),
]


def run(optimizer, p, gradients, decay=True):
    """Return every p after an update, and the state at the end."""
    p = np.array(p, dtype=float)
    state = optim.new_state(optimizer, p)
    path = []
    for t, g in enumerate(gradients, 1):
        optim.update(optimizer, p, np.array(g, dtype=float), state, t, decay)
        path.append(p.copy())
    return path, state


def test_sgd_with_momentum_by_hand():
    """lr 0.5, momentum 0.5, p = 1, g = 4, 2, 0::

    b = 4                    p = 1 - 2    = -1      the first buffer is g itself, as in PyTorch
    b = 0.5 * 4 + 2 = 4      p = -1 - 2   = -3
    b = 0.5 * 4 + 0 = 2      p = -3 - 1   = -4
    """
    path, state = run(SGD(0.5, momentum=0.5), [1], [[4], [2], [0]])
    assert [float(p[0]) for p in path] == [-1, -3, -4]
    assert state["momentum"] == [2]


def test_sgd_weight_decay_by_hand():
    """An L2 term of 0.5 * p = 1 in g = 3, in the buffer too: p = 2 - 0.25 * 4 = 1; without decay 2 - 0.75 = 1.25."""
    assert run(SGD(0.25, weight_decay=0.5), [2], [[3]])[0][0] == [1]
    assert run(SGD(0.25, weight_decay=0.5), [2], [[3]], decay=False)[0][0] == [1.25]
    assert run(SGD(0.25, momentum=0.5, weight_decay=0.5), [2], [[3]])[1]["momentum"] == [4]


def test_adam_by_hand():
    """lr 1, betas (1/2, 3/4), eps 1, p = 0, g = 2 and then -4::

    t = 1   m = 1/2 * 2              = 1        m / (1 - 1/2)  = 2
            v = 1/4 * 4              = 1        v / (1 - 3/4)  = 4      p = 0 - 2 / (2 + 1)          = -2/3
    t = 2   m = 1/2 * 1 + 1/2 * -4   = -3/2     m / (1 - 1/4)  = -2
            v = 3/4 * 1 + 1/4 * 16   = 19/4     v / (1 - 9/16) = 76/7   p = -2/3 + 2 / (sqrt(76/7) + 1)
    """
    path, state = run(Adam(1, (0.5, 0.75), 1), [0], [[2], [-4]])
    assert path[0][0] == pytest.approx(-2 / 3, rel=2.0**-50)
    assert path[1][0] == pytest.approx(-2 / 3 + 2 / (math.sqrt(76 / 7) + 1), rel=2.0**-49)
    assert (state["m"][0], state["v"][0]) == (-1.5, 4.75)


def test_the_first_step_of_adam_is_the_sign_of_the_gradient():
    """m / (1 - beta1) = g and v / (1 - beta2) = g^2, so the step is lr * g / (abs(g) + eps), for any betas."""
    for g in (1e-3, -5.0, 100.0):
        for optimizer in (Adam(0.01), AdamW(0.01, weight_decay=0.0)):
            path, _ = run(optimizer, [1], [[g]])
            assert path[0][0] == pytest.approx(1 - 0.01 * g / (abs(g) + 1e-8), rel=1e-15)


def test_adam_decays_through_the_gradient_and_adamw_beside_it():
    """p = 2, g = 0, decay 1/2, lr 1/4, eps 0. Adam: g becomes 1, a whole step of lr: 2 - 1/4. AdamW: 2 * (1 - 1/8)."""
    assert run(Adam(0.25, eps=0, weight_decay=0.5), [2], [[0]])[0][0] == pytest.approx(1.75, rel=2.0**-50)
    path, state = run(AdamW(0.25, weight_decay=0.5), [2], [[0]])
    assert path[0] == [1.75]
    assert not state["m"].any()
    assert not state["v"].any()
    # With g = 3 too: the decayed p first, then a step of lr.
    assert run(AdamW(0.25, eps=0, weight_decay=0.5), [2], [[3]])[0][0] == pytest.approx(1.75 - 0.25, rel=2.0**-50)
    assert run(AdamW(0.25, eps=0, weight_decay=0.5), [2], [[3]], decay=False)[0][0] == pytest.approx(1.75, rel=2.0**-50)


def test_learning_rate_warms_up_linearly():
    """Warm-up over 4 updates: 1/4, 2/4, 3/4, 4/4 of lr, then lr; without one, lr from the first."""
    assert [optim.learning_rate(SGD(8, warmup=4), t) for t in range(1, 7)] == [2, 4, 6, 8, 8, 8]
    assert optim.learning_rate(AdamW(8), 1) == 8
    assert [float(p[0]) for p in run(SGD(8, warmup=4), [0], [[1]] * 5)[0]] == [-2, -6, -12, -20, -28]


def test_a_skipped_step_does_not_advance():
    """ok, skip, ok: t = 2 at the second update, of the learning rate too; the skip leaves m and v alone (NeMo#3293)."""
    optimizer = AdamW(0.1, warmup=4)
    p = np.ones(1)
    state = optim.new_state(optimizer, p)
    t = 0
    for overflow in (False, True, False):
        if not overflow:
            t += 1
            optim.update(optimizer, p, np.full(1, 3.0), state, t, True)
    path, expected = run(optimizer, [1], [[3], [3]])
    assert (t, p) == (2, path[-1])
    assert all(np.array_equal(state[name], expected[name]) for name in state)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from(OPTIMIZERS), st.sampled_from([np.float32, np.float64]), st.integers(0, 2**32 - 1))
def test_an_update_of_pieces_is_the_update_of_the_whole(data, optimizer, dtype, seed):
    """Bit for bit, for any cut into pieces (empty ones too): what lets ZeRO shard the optimizer."""
    n = data.draw(st.integers(0, 9))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal(n).astype(dtype)
    pieces = [piece.copy() for piece in np.split(whole, cuts)]
    state, states = optim.new_state(optimizer, whole), [optim.new_state(optimizer, p) for p in pieces]
    for t in (1, 2, 3):
        g = rng.standard_normal(n).astype(dtype)
        g.flags.writeable = False
        optim.update(optimizer, whole, g, state, t, True)
        for p, part, s in zip(pieces, np.split(g, cuts), states, strict=True):
            optim.update(optimizer, p, part, s, t, True)
    assert np.array_equal(np.concatenate(pieces), whole)
    assert whole.dtype == dtype
    assert tuple(state) == optimizer.state_names
    for name in state:
        assert state[name].dtype == dtype
        assert np.array_equal(np.concatenate([s[name] for s in states]), state[name])


def test_what_each_optimizer_keeps():
    """The names of the buffers, which ZeRO shards and a saved run names."""
    assert SGD(1).state_names == ()
    assert SGD(1, momentum=0.5).state_names == ("momentum",)
    assert Adam(1).state_names == AdamW(1).state_names == ("m", "v")


def test_weights_decay_and_biases_and_norms_do_not():
    assert optim.decays(ParamSpec((2, 2)))
    assert not optim.decays(ParamSpec((2,), decay=False))


@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"),
    [
        (5, 1, 0.2),
        (0.5, 1, 1),  # never above 1: DeepSpeed#5150 took the maximum of the two and gave 2
        (1, 1, 1),
        (0, 1, 1),
        (math.inf, 1, 0),
        (5, math.inf, 1),
        (5, None, 1),
        (math.inf, None, 1),
    ],
)
def test_clip_factor(norm, max_norm, factor):
    """min(1, max_norm / norm), without PyTorch's 1e-6."""
    assert optim.clip_factor(norm, max_norm) == factor


def test_a_norm_that_is_not_a_number_is_not_hidden():
    """``min(1, nan)`` is 1 in Python: the gradients would be applied unclipped, as if nothing were wrong."""
    assert math.isnan(optim.clip_factor(math.nan, 1))


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 1e100), st.floats(1e-100, 1e100))
def test_clipping_never_enlarges_and_never_exceeds(norm, max_norm):
    """The clipped norm is at most ``max_norm``, up to one rounding of the quotient and one of the product."""
    factor = optim.clip_factor(norm, max_norm)
    assert 0 <= factor <= 1
    assert norm * factor <= max_norm * (1 + 2 * 2.0**-53) ** 2


def test_squared_norm():
    """In float64 whatever the type: the squares of halves (fairscale#520) and of large float32 do not overflow."""
    assert math.sqrt(optim.squared_norm(np.array([5000, 5000], np.float16))) == pytest.approx(7071.0678118654755)
    assert optim.squared_norm(np.array([1e25], np.float32)) == float(np.float32(1e25)) ** 2
    assert optim.squared_norm(np.array([[3.0, 0.0], [0.0, 4.0]]).T) == 25
    assert optim.squared_norm(np.ones(4096, np.float16)) == 4096
    assert optim.squared_norm(np.empty((0, 3))) == 0
    assert sum(optim.squared_norm(np.array(shard)) for shard in ([3.0], [4.0])) == 25  # not a mean (llm.c@7018280)
    assert optim.squared_norm(np.array([1.0, 3.0]) + np.array([2.0, 1.0])) == 25  # of the sum (pytorch#159856)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD(-1), "SGD lr is -1: it must be a number of at least 0, and finite"),
        (lambda: SGD(math.nan), "SGD lr is nan"),
        (lambda: SGD(math.inf), "SGD lr is inf"),
        (lambda: SGD(10**400), "SGD lr is 10000"),
        (lambda: SGD("0.1"), "SGD lr is '0.1'"),
        (lambda: SGD(True), "SGD lr is True"),
        (lambda: SGD(1, momentum=1), "SGD momentum is 1: it must be a number of at least 0, and below 1"),
        (lambda: SGD(1, weight_decay=-1), "SGD weight_decay is -1"),
        (lambda: Adam(1, betas=(0.9, 1)), r"Adam betas\[1\] is 1: it must be a number of at least 0, and below 1"),
        (lambda: Adam(1, betas=(0.9,)), r"Adam betas is \(0.9,\): it must be two numbers"),
        (lambda: Adam(1, betas=0.9), "Adam betas is 0.9"),
        (lambda: AdamW(1, eps=-1), "AdamW eps is -1"),
        (lambda: AdamW(1, warmup=0.5), "AdamW warmup is 0.5: it must be a whole number of at least 0"),
        (lambda: AdamW(1, warmup=True), "AdamW warmup is True"),
    ],
)
def test_bad_settings_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
