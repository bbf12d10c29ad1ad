"""Independence of sequences, across steps, streams and seeds too, and of the draws of one sequence.

The tests replace each statistic by its rank, and the rank by its Legendre polynomials of orders 1 to 3. These powers
are bounded and uncorrelated for any distribution. If two columns are independent, their mean product over B pairs is
normal with deviation B^-1/2 (the kurtosis is at most 2.4, so B = 40,000 leaves only normal tails). The level of each
test is 1e-3, shared equally by all pairs of columns (Bonferroni): for 55,000 of them |r| B^1/2 stays below 5.8. The
seed is fixed.

Planted faults must be detected: lanes that mix or repeat, counters used twice, sections that overlap.
"""

import functools

import pytest
import torch
from scipy import stats

import fastlin as fl
from fastlin.data.layout import BETA, NOISE, QUERY, BatchDraws, check_draws

DOUBLE = torch.float64
DTYPES = (torch.float32, DOUBLE)
B, N_TOKENS = 40_000, 6
LEVEL = 1e-3
LAGS = [*range(1, 18), 32, 64]
AT = {"seed": 20, "step": 21, "stream": 22, "offset": 23}
MEANS, WEIGHTS = [[1.0, -0.5, 0.5], [0.0, 1.0, -1.0]], [0.4, 0.6]
COVARIANCES = torch.stack([torch.eye(3, dtype=DOUBLE), 0.5 * torch.eye(3, dtype=DOUBLE)])
MIX = fl.TaskMixture(MEANS, COVARIANCES, WEIGHTS, noise_std=0.8, bias=True)
STANDARD = {
    noise: fl.TaskMixture([[0.0] * 3], torch.eye(3, dtype=DOUBLE)[None], [1.0], noise_std=noise) for noise in (0.0, 1.0)
}


def powers(columns):
    """(B, 3 c): P1, P2, P3 of the ranks of c columns (B, c), of mean 0 and variance 1."""
    size = columns.shape[0]
    u = (2 * columns.argsort(0).argsort(0).to(DOUBLE) + 1) / size - 1
    P = torch.stack([u, (3 * u**2 - 1) / 2, (5 * u**3 - 3 * u) / 2], -1).flatten(1)
    return (P - P.mean(0)) / P.std(0)


def statistics(form="gram", dtype=DOUBLE, **place):
    """Entries of G (or of the tokens), q and y of B sequences, each as its powers."""
    draw = MIX.sample_gram if form == "gram" else MIX.sample
    x, q, y, _ = draw(B, N_TOKENS if form == "gram" else 2, **{**AT, **place}, dtype=dtype)
    if form == "gram":
        rows, columns = torch.triu_indices(MIX.m, MIX.m)[:, 1:]
        x = x[:, rows, columns]
    else:
        x = x[..., 1:].flatten(1)
    return powers(torch.cat([x, q[:, 1:-1], y[:, None]], 1))


@functools.cache
def base(form="gram", dtype=DOUBLE):
    return statistics(form, dtype)


def smallest_p(pairs, keep=None):
    """Smallest p-value over the correlations of all columns of each pair (a, b), times their number."""
    largest, tests = 0.0, 0
    for a, b in pairs:
        z = (a.T @ b / len(a) ** 0.5).abs()
        z = z.flatten() if keep is None else z[keep]
        largest, tests = max(largest, float(z.max())), tests + len(z)
    return min(1.0, 2 * float(stats.norm.sf(largest)) * tests)


def lagged(columns):
    return [(columns[:-lag], columns[lag:]) for lag in LAGS]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["gram", "tokens"])
def test_sequences_of_a_batch_are_independent(form, dtype):
    assert smallest_p(lagged(base(form, dtype))) > LEVEL


@pytest.mark.parametrize(
    "change",
    [
        {"step": AT["step"] + 1},
        {"step": AT["step"] + 2**16},
        {"stream": AT["stream"] + 1},
        {"stream": AT["stream"] + 256},
        {"seed": AT["seed"] + 1},
        {"seed": AT["seed"] + 2**32},
        {"offset": AT["offset"] + 2**32},
        # The two fields of a word of the counter, exchanged.
        {"step": AT["stream"], "stream": AT["step"]},
    ],
)
@pytest.mark.parametrize("form", ["gram", "tokens"])
def test_other_steps_streams_seeds_are_independent(form, change):
    """Sequence by sequence, and against the next one."""
    one, other = base(form), statistics(form, **change)
    assert smallest_p([(one, other), (one[:-1], other[1:]), (one[1:], other[:-1])]) > LEVEL


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_a_lane_that_mixes_with_its_neighbour_is_seen(lanes):
    """A correlation of 1/2 in a single lane, below 0.04 over all lanes."""
    raw = torch.randn(B, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    assert smallest_p(lagged(powers(raw))) > LEVEL
    raw[3 % lanes :: lanes] = 0.5 * raw[3 % lanes - 1 :: lanes] + 0.75**0.5 * raw[3 % lanes :: lanes]
    assert smallest_p(lagged(powers(raw))) < LEVEL


def drawn(change=lambda G, q, y: None):
    """The columns of a batch of Gram matrices after `change`."""
    G, q, y, _ = MIX.sample_gram(B, N_TOKENS, **AT, dtype=DOUBLE)
    change(G, q, y)
    rows, columns = torch.triu_indices(MIX.m, MIX.m)[:, 1:]
    return powers(torch.cat([G[:, rows, columns], q[:, 1:-1], y[:, None]], 1))


def mix_a_lane(G, q, y):
    """Lane 3 of 8 shares half of its labels with lane 2."""
    y[3::8] = 0.5 * y[2::8] + 0.75**0.5 * y[3::8]


def repeat_a_lane(G, q, y):
    for t in (G, q, y):
        t[5::8] = t[4::8]


def repeat_one_entry(G, q, y):
    """Lane 0 has a query feature from lane 7 of the previous tile."""
    q[8::8, 2] = q[7:-8:8, 2]


def share_signs(G, q, y):
    """Lanes share sizes but not signs, which leaves no correlation."""
    y[3::8] = y[2::8].abs() * y[3::8].sign()


@pytest.mark.parametrize("change", [mix_a_lane, repeat_a_lane, repeat_one_entry, share_signs])
def test_lanes_that_depend_on_each_other_are_seen(change):
    assert smallest_p(lagged(drawn(change))) < LEVEL


def test_a_block_that_is_drawn_twice_is_seen():
    """Every other block of 64 sequences repeats the previous one."""

    def change(G, q, y):
        for t in (G, q, y):
            blocks = t[: B // 128 * 128].unflatten(0, (-1, 2, 64))
            blocks[:, 1] = blocks[:, 0]

    assert smallest_p(lagged(drawn(change))) < LEVEL


@pytest.mark.parametrize("shift", [0, 1])
def test_a_counter_that_is_used_twice_is_seen(shift):
    """The same step twice, also shifted by one sequence. Two trials on one stream have the same fault."""
    one, other = base(), statistics(offset=AT["offset"] + shift)
    assert smallest_p([(one, other), (one[:-1], other[1:]), (one[1:], other[:-1])]) < LEVEL


def test_trials_share_data_if_they_share_a_stream():
    """Losses of single sequences of two trials with the same parameters: equal, or uncorrelated."""
    W, v = torch.eye(5, dtype=DOUBLE).expand(2, 5, 5) / 50, torch.ones(2, 2, 5, dtype=DOUBLE)
    for streams, is_shared in (([5, 5], True), ([5, 6], False), ("trial", False), (5, True)):
        losses = torch.stack(
            [fl.sampled_loss(MIX, 6, 1, None, W, v, seed=1, step=s, stream=streams)[0] for s in range(2000)]
        )
        one, other = powers(losses[:, :1]), powers(losses[:, 1:])
        assert (smallest_p([(one, other)]) < LEVEL) == is_shared, streams


def variates(draw):
    """The independent draws (B, 17) of B sequences of standard normal tasks, recovered from the results.

    Sources with and without noise have the same weights, features and factor. With R'R = X'X and labels y: R itself
    (chi variates and normals), beta = (X'X)^-1 X'y without noise, and from the difference of the two sources the noise
    of the query, that of the factor's rows, R'^-1 X'g, and what is left of y'y.
    """
    (G, q, y), (noisy, _, noisy_y) = draw(STANDARD[0.0]), draw(STANDARD[1.0])
    R = torch.linalg.cholesky(G[:, :3, :3]).mT
    beta = torch.cholesky_solve(G[:, :3, 3:], R, upper=True)[..., 0]
    g = torch.linalg.solve_triangular(R.mT, (noisy - G)[:, :3, 3:], upper=False)[..., 0]
    rows, columns = torch.triu_indices(3, 3)
    rest = noisy[:, 3, 3] - ((R @ beta[..., None])[..., 0] + g).square().sum(-1)
    return torch.cat([R[:, rows, columns], beta, q[:, :3], (noisy_y - y)[:, None], g, rest[:, None]], 1)


def by_kernel(source):
    return source.sample_gram(B, N_TOKENS, **AT, dtype=DOUBLE)[:3]


def in_torch(source):
    return source._gram_in_torch(check_draws(B, N_TOKENS, **AT)[0], N_TOKENS)[:3]


def smallest_p_within(draw):
    """Smallest p-value over all pairs of different variates."""
    x = variates(draw)
    which = torch.arange(x.shape[1]).repeat_interleave(3)
    return smallest_p([(powers(x), powers(x))], keep=which[:, None] < which)


def test_the_draws_of_a_sequence_are_independent():
    """Weights, query, noise, and the factor's normals and chi variates, all against all."""
    assert smallest_p_within(by_kernel) > LEVEL
    assert smallest_p_within(in_torch) > LEVEL


@pytest.mark.parametrize(
    ("section", "other", "columns", "shift"),
    [(QUERY, BETA, 3, 0), (QUERY, BETA, 1, 2), (NOISE, QUERY, 3, 0), (NOISE, QUERY, 1, 3), (5, NOISE, 3, 0)],
)
def test_sections_that_overlap_are_seen(section, other, columns, shift, monkeypatch):
    """The first columns of a section repeat columns of another."""
    right = BatchDraws.normal

    def wrong(self, which, count):
        out = right(self, which, count)
        if which == section:
            out[:, :columns] = right(self, other, shift + columns)[:, shift:]
        return out

    monkeypatch.setattr(BatchDraws, "normal", wrong)
    assert smallest_p_within(in_torch) < LEVEL


def test_a_chi_variate_of_a_used_word_is_seen(monkeypatch):
    """Every slot reads the same blocks, so two chi variates of the factor rise and fall together."""
    right = BatchDraws.chi
    monkeypatch.setattr(BatchDraws, "chi", lambda self, freedom: torch.cat([right(self, [k]) for k in freedom], 1))
    assert smallest_p_within(in_torch) < LEVEL
