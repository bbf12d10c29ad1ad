"""fastlin.train: the attributes of a run on every source, and its distance from the optimum."""

import io
import json
import re
import sys

import pytest
import torch
from support.op_cases import DOUBLE, assert_close
from support.training_runs import assert_same

import fastlin as fl
from fastlin import theory
from fastlin.backends import cpu
from fastlin.training import judge, streams
from fastlin.training.judge import Estimate
from fastlin.training.regimes import Phase, Regime

N = 4
EYE = torch.eye(3, dtype=DOUBLE)
COV = torch.stack([EYE, 2 * EYE])
# The means have a weighted sum of zero: a shared head gains nothing.
MIX = fl.TaskMixture([[1.4] * 3, [-0.6] * 3], COV, [0.3, 0.7], noise_std=0.3)
SINGULAR = fl.TaskMixture([[1.0, 1.0], [-1.0, 0.5]], [[[1, 0], [0, 0]], [[2, 0], [0, 0]]], [0.5, 0.5], noise_std=0.5)
POINTS = fl.PointSet(torch.randn(30, 3, generator=torch.Generator().manual_seed(0)), torch.arange(30.0) / 10)
OPTIMA = {
    "plain": theory.plain,
    "fine-tune": theory.fine_tuned,
    "one-prompt": theory.one_prompt,
    "joint": theory.joint,
    "joint+heads": theory.decoupled,
}


def short(mix=MIX, regime="joint", n=N, **options):
    return fl.train(mix, regime, n, **{"steps": 6, "batch": 64, "trials": 2, **options})


@pytest.mark.parametrize("model", ["reduced", "full", "separate"])
@pytest.mark.parametrize("regime", ["plain", "fine-tune", "one-prompt", "joint", "joint+heads", "heads"])
@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (2, 3)])
def test_risk_is_exact_and_params_go_into_the_ops(model, regime, heads, tokens):
    run = short(regime=regime, model=model, attention_heads=heads, prompt_tokens=tokens, trials=3)
    assert list(run.params) == ["p", "W", "v"]
    assert torch.equal(run.risk, theory.full_population_loss(MIX, N, **run.params))
    assert (run.risk.shape, run.risk.dtype) == ((3,), DOUBLE)
    assert run.risk_error.tolist() == [0.0] * 3
    assert torch.equal(run.history["risk"][-1], run.risk)
    assert run.best == int(run.risk.argmin())
    loss, per_task = fl.sampled_loss(MIX, N, 64, **run.params, seed=1, step=2)
    assert (loss.shape, per_task.shape) == ((3,), (3, 2))
    assert torch.equal(loss, run.model.loss(MIX, N, 64, seed=1, step=2, prompts=run.params["p"] is not None)[0])
    assert not any(form.requires_grad for form in run.params.values() if form is not None)
    if regime == "heads":
        assert (run.theory, run.excess) == (None, None)
    else:
        wanted = OPTIMA[regime](MIX, N)
        assert isinstance(run.theory, theory.Optimum)
        assert run.theory.loss == wanted.loss
        assert torch.equal(run.excess, run.risk / wanted.loss - 1.0)


def test_what_else_a_run_says():
    run = short(seed=7)
    assert run.folder is None
    assert run.diverged == {}
    assert run.seconds > 0
    assert (run.config["n"], run.config["seed"], run.config["model"], run.config["trials"]) == (N, 7, "full", 2)
    assert run.config["sources"]["mix"]["weights"] == [0.3, 0.7]
    json.dumps(run.config)
    with pytest.raises(AttributeError):
        run.risk = None


@pytest.mark.filterwarnings("ignore:train. the sampled risk of trials")
def test_layers_and_heads_have_their_shapes():
    params = short(model="stack", layers=3, attention_heads=2, prompt_tokens=2, trials=4).params
    shapes = {letter: tuple(form.shape) for letter, form in params.items()}
    assert shapes == {"p": (4, 2, 2, 4), "A": (4, 3, 2, 4, 4), "C": (4, 3, 2, 4, 4), "h": (4, 2, 4)}
    loss, _ = fl.sampled_stack_loss(MIX, N, 8, **params, seed=0, step=0)
    assert loss.shape == (4,)


def test_history():
    run = short(steps=10, records=5, trials=3)
    assert run.history["step"].tolist() == [2, 4, 6, 8, 10]
    assert run.history["phase"].tolist() == [0] * 5
    assert {name: tuple(values.shape) for name, values in run.history.items()} == {
        "step": (5,),
        "phase": (5,),
        "lr": (5,),
        "loss": (5, 3),
        "risk": (5, 3),
        "risk_error": (5, 3),
    }
    every = short(steps=10, records=1000, trials=3)
    assert every.history["step"].tolist() == list(range(1, 11))
    pairs = every.history["loss"].view(5, 2, 3).mean(1)
    assert_close(run.history["loss"], pairs, 1e-12)
    assert_close(run.history["risk"], every.history["risk"][1::2], 0.0)
    assert_close(run.history["lr"], every.history["lr"][1::2], 0.0)


def test_history_ends_with_each_phase():
    run = short(regime="fine-tune", steps=7, records=2)
    assert run.history["step"].tolist() == [3, 6, 7]
    assert run.history["phase"].tolist() == [0, 1, 1]


def test_first_loss_is_that_of_the_start():
    run = short(preset="paper", steps=1, dtype=DOUBLE)
    again = short(preset="paper", steps=1, dtype=DOUBLE, lr=0.0)
    assert torch.equal(run.history["loss"][0], again.history["loss"][0])
    loss, _ = fl.sampled_loss(MIX, N, 64, **again.params, seed=0, step=0)
    assert_close(again.history["loss"][0], loss, 1e-12)


def test_a_bound_where_the_optimum_is_not_attained():
    with pytest.raises(theory.NotAttained) as error:
        theory.joint(SINGULAR, N)
    run = short(SINGULAR)
    assert isinstance(run.theory, theory.Bound)
    assert float(run.theory) == error.value.infimum
    assert torch.equal(run.excess, run.risk / error.value.infimum - 1.0)


CUSTOM = Regime("joint", (Phase(("attention", "prompts"), prompts=True),))


@pytest.mark.parametrize(
    ("mix", "regime", "options"),
    [
        (MIX, "heads", {}),
        (MIX, "joint", {"model": "stack", "layers": 2}),
        (MIX, "joint", {"see_query": True}),
        (MIX, CUSTOM, {}),
        (fl.SphereTasks(3), "plain", {}),
        (fl.FixedTask([1.0, 2.0, 3.0]), "plain", {}),
        (POINTS, "plain", {}),
        (fl.TaskMixture(MIX.means, COV, [0.3, 0.7], bias=True), "joint", {}),
    ],
    ids=["heads", "stack", "see_query", "own regime", "sphere", "fixed", "points", "bias"],
)
def test_no_theory_where_none_holds(mix, regime, options):
    run = short(mix, regime, **options)
    assert run.theory is None
    assert run.excess is None


def test_the_regime_of_the_table_given_as_a_row_has_its_theory():
    row = Regime("joint", (Phase(("attention", "heads", "prompts"), prompts=True),))
    assert short(regime=row).theory.loss == theory.joint(MIX, N).loss


@pytest.mark.parametrize(
    ("mix", "options"),
    [
        (MIX, {"model": "stack", "layers": 2}),
        (MIX, {"model": "stack", "layers": 1, "preset": "authors"}),
        (MIX, {"see_query": True}),
        (fl.SphereTasks(3, noise_std=0.1), {}),
    ],
    ids=["stack", "authors' stack", "see_query", "sphere"],
)
def test_sampled_risk_has_a_standard_error(mix, options):
    run = short(mix, **options)
    assert (run.risk_error > 0).all()
    assert (run.risk_error < 0.1 * run.risk).all()
    asked = {"see_query": run.config["see_query"]}
    op = fl.sampled_stack_loss if run.config["model"] == "stack" else fl.sampled_loss
    if run.config["model"] == "stack":
        asked["residual"] = run.config["residual"]
    losses = torch.stack([op(mix, N, 8192, **run.params, seed=99, step=i, **asked)[0].double() for i in range(100)])
    error = (run.risk_error**2 + losses.var(0) / 100).sqrt()
    assert ((losses.mean(0) - run.risk).abs() < 5 * error).all()
    assert (run.history["risk_error"] > 0).all()


def test_reported_and_selected_on_other_data_than_trained_on():
    run = short(model="stack", layers=2, trials=3, seed=11)
    assert len({streams.SELECT, streams.REPORT, streams.START, streams.UNITS}) == 4
    assert min(streams.SELECT, streams.REPORT, streams.START, streams.UNITS) >= streams.FIRST_RESERVED
    means, errors = {}, {}
    for name, stream, batches in (("select", streams.SELECT, 128), ("report", streams.REPORT, 64)):
        losses = [
            fl.sampled_stack_loss(MIX, N, 8192, **run.params, seed=11, step=i, stream=stream)[0].double()
            for i in range(batches)
        ]
        means[name] = torch.stack(losses).mean(0)
        errors[name] = torch.stack(losses).std(0) / batches**0.5
    assert_close(run.risk, means["report"], 1e-6)
    assert run.best == int((means["select"] + 2 * errors["select"]).argmin())


def test_the_best_trial_is_not_chosen_on_what_is_reported(monkeypatch):
    planted = {streams.SELECT: [3.0, 1.0, 2.0], streams.REPORT: [4.0, 6.0, 5.0]}
    tails = {streams.SELECT: [0.01, 0.02, 0.01], streams.REPORT: [0.01, 0.02, 0.03]}

    def risk(self, model, source, n, prompts, sample, batch):
        stream = sample.stream
        error = torch.full((3,), 0.5, dtype=DOUBLE)
        risk = torch.tensor(planted[stream], dtype=DOUBLE)
        return Estimate(risk, error, torch.tensor(tails[stream], dtype=DOUBLE), 0.5 * risk)

    monkeypatch.setattr(judge.Judge, "_sampled", risk)
    run = short(model="stack", layers=2, trials=3)
    assert run.best == 1
    assert run.risk.tolist() == [4.0, 6.0, 5.0]
    assert run.risk_error.tolist() == [0.5] * 3
    assert run.tail.tolist() == [0.01, 0.02, 0.03]
    assert run.typical.tolist() == [2.0, 3.0, 2.5]
    # A lower risk with a heavy tail is not selected, unless all tails are heavy.
    tails[streams.SELECT] = [0.01, 0.5, 0.01]
    assert short(model="stack", layers=2, trials=3).best == 2
    tails[streams.SELECT] = [0.5, 0.5, 0.5]
    assert short(model="stack", layers=2, trials=3).best == 1


SOURCES = {
    "fixed": fl.FixedTask([1.0, 2.0, 3.0], noise_std=0.1),
    "fixed, bias": fl.FixedTask([1.0, 2.0, 3.0], noise_std=0.1, bias=True),
    "sphere": fl.SphereTasks(3, noise_std=0.1),
    "points": POINTS,
    "one task": fl.TaskMixture([[1.0, 0.0, 2.0]], EYE[None], [1.0]),
    "stratified": fl.TaskMixture(MIX.means, COV, [0.25, 0.75], stratify=True),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("model", ["reduced", "full", "stack"])
def test_sources_train(name, model, monkeypatch):
    monkeypatch.setattr(judge, "_EVALUATION_BATCH", 1024)
    source = SOURCES[name]
    run = fl.train(source, "joint", N, model=model, steps=40, batch=128, trials=2, records=2, lr=0.05)
    op = fl.sampled_stack_loss if model == "stack" else fl.sampled_loss
    loss, per_task = op(source, N, 64, **run.params, seed=5, step=0)
    assert per_task.shape == (2, source.K)
    exact = name in ("fixed", "one task", "stratified")
    assert bool((run.risk_error == 0).all()) == exact
    assert run.diverged == {}
    # It learns: below the loss of predicting nothing.
    _, _, y, _ = source.sample(4096, 0, dtype=DOUBLE)
    assert float(run.risk[run.best]) < 0.9 * float(y.square().mean())
    assert torch.isfinite(loss).all()


def test_exact_risk_of_a_fixed_task():
    source = SOURCES["fixed"]
    run = short(source, "plain")
    losses = torch.stack([fl.sampled_loss(source, N, 8192, **run.params, seed=9, step=i)[0] for i in range(100)])
    error = losses.double().std(0) / 10
    assert ((losses.double().mean(0) - run.risk).abs() < 5 * error).all()


@pytest.mark.parametrize("model", ["reduced", "full", "separate", "stack"])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_dtypes(model, dtype):
    run = short(model=model, dtype=dtype)
    assert all(form.dtype == dtype for form in run.params.values())
    assert all(raw.dtype == dtype for raw in run.model.parameters())
    assert run.risk.dtype == run.history["loss"].dtype == DOUBLE
    assert run.config["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("model", ["reduced", "full", "separate", "stack"])
@pytest.mark.parametrize("preset", ["tuned", "authors"])
def test_backends_agree(model, preset, monkeypatch):
    monkeypatch.setattr(judge, "_EVALUATION_BATCH", 64)
    cpu.backend.last_kernel = None
    runs = {}
    for backend in ("eager", "cpu", "reference"):
        runs[backend] = short(model=model, backend=backend, dtype=DOUBLE, preset=preset, batch=32, records=1)
        assert (cpu.backend.last_kernel is None) == (backend == "eager")
    for backend in ("cpu", "reference"):
        for letter, form in runs["eager"].params.items():
            assert_close(runs[backend].params[letter], form, 1e-9, f"{backend}, {letter}")
        assert_close(runs[backend].history["loss"], runs["eager"].history["loss"], 1e-9)
        assert_close(runs[backend].risk, runs["eager"].risk, 1e-9)


@pytest.mark.parametrize("model", ["reduced", "full", "separate", "stack", "softmax"])
def test_the_same_seed_gives_the_same_bits(model):
    one, two, other = (short(model=model, seed=seed, regime="joint+heads") for seed in (4, 4, 5))
    assert_same(one, two)
    for letter, form in one.params.items():
        if letter != "v" or model != "reduced":
            assert not torch.equal(form, other.params[letter])


def test_a_trial_does_not_depend_on_the_others():
    one, three = (short(trials=trials, dtype=DOUBLE, steps=10) for trials in (1, 3))
    assert_close(three.risk[:1], one.risk, 1e-10)
    assert_close(three.history["loss"][:, :1], one.history["loss"], 1e-10)
    assert len(set(three.risk.tolist())) == 3


def test_a_trial_that_diverges_ends_alone():
    """The learning rate is too high for the trial with the largest initial parameters."""

    def make(parameters):
        for raw in parameters:
            raw.data[1] *= 1e12
        return torch.optim.SGD(parameters, lr=1e-4)

    given = {"preset": "paper", "trials": 3, "steps": 20, "dtype": DOUBLE}
    run = short(**given, optimiser=make)
    calm = short(**given, optimiser=lambda parameters: torch.optim.SGD(parameters, lr=1e-4))
    assert list(run.diverged) == [1]
    assert 0 < run.diverged[1] < 20
    assert torch.isinf(run.risk[1])
    assert run.best != 1
    assert all(torch.isnan(form[1]).all() for form in run.params.values())
    assert torch.isinf(run.history["risk"][-1, 1])
    for letter, form in calm.params.items():
        assert_close(run.params[letter][[0, 2]], form[[0, 2]], 1e-12)
    assert_close(run.risk[[0, 2]], calm.risk[[0, 2]], 1e-12)
    assert run.best == (0, 2)[int(calm.risk[[0, 2]].argmin())]


def test_all_trials_diverge():
    run = short(preset="paper", optimiser="SGD", lr=1e6, steps=20)
    assert sorted(run.diverged) == [0, 1]
    assert run.risk.tolist() == [torch.inf] * 2


@pytest.mark.parametrize("model", ["full", "stack"])
def test_records_of_trials_that_diverge_are_json(model, tmp_path):
    """Also records between the update that was too large and the loss that shows it."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    short(preset="paper", optimiser="SGD", lr=1e6, steps=3, model=model, out=tmp_path / "run")
    for line in (tmp_path / "run/records.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=refuse)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress(capsys, monkeypatch):
    for quiet in (None, False):
        short(progress=quiet)
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == ("", "")
    short(progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "6/6" in shown.err
    assert "joint n=4" in shown.err
    line = shown.err.splitlines()[-1].split("\r")[-1]
    assert re.search(r" 6/6 steps, 0:00 left, \d+ steps/s, [0-9.]+M seq/s, loss [0-9.]+ \([+-][0-9.]+ %\)$", line)
    assert len(line) < 100
    for asked, expected in ((None, True), (False, False)):
        monkeypatch.setattr(sys, "stderr", Terminal())
        short(progress=asked)
        assert ("6/6" in sys.stderr.getvalue()) == expected
    monkeypatch.setattr(sys, "stderr", Terminal())
    short(regime="heads", progress=True)
    assert "%)" not in sys.stderr.getvalue()


@pytest.mark.parametrize("model", ["reduced", "full"])
@pytest.mark.parametrize("regime", ["plain", "fine-tune", "one-prompt", "joint", "joint+heads"])
def test_few_steps_come_close_to_the_optimum(model, regime):
    """The reduced model's risk cannot be below the optimum of its own family."""
    run = fl.train(MIX, regime, N, model=model, steps=600, batch=2048, trials=2, records=10, seed=1)
    assert (run.excess.abs() < 0.02).all()
    if regime in ("joint", "joint+heads"):
        # They reach a few tenths of a percent.
        assert (run.excess < 0.002).all()
    # Fine-tuning trains prompts on top of the first phase, which ends slightly above its optimum.
    if model == "reduced" and regime in ("plain", "one-prompt", "joint"):
        assert (run.excess >= -1e-12).all()
    if regime == "joint+heads":
        assert (run.risk >= float(theory.heads_lower_bound(MIX, N))).all()


def test_a_stack_of_one_layer_has_its_exact_risk():
    for heads in (1, 2):
        run = short(model="stack", attention_heads=heads, trials=2)
        A, C, h = (run.params[letter].double() for letter in "ACh")
        v = (h if heads == 1 else h[:, None]) @ C[:, 0].mT
        exact = fl.theory.full_population_loss(MIX, N, run.params["p"], A[:, 0], v)
        assert torch.allclose(run.risk, exact, rtol=1e-6)
        assert not run.risk_error.any()
        assert float(run.theory) == fl.theory.joint(MIX, N).loss


def test_heavy_tails_warn(monkeypatch):
    """One batch dominates the risk of three layers, whose predictions are large polynomials."""
    given = {"model": "stack", "layers": 3, "preset": "paper", "start_attention": 0.05, "steps": 1, "batch": 8}
    monkeypatch.setattr(judge, "_EVALUATION_BATCH", 64)
    with pytest.warns(UserWarning, match=r"^train: the sampled risk of trials \[.* has heavy tails"):
        short(**given)


def test_options_of_the_ops_come_with_the_params():
    run = short(model="stack", layers=2, preset="authors", steps=1, batch=8)
    assert run.options == {"see_query": True, "residual": 2.0}
    loss, _ = fl.sampled_stack_loss(MIX, N, 512, **run.params, seed=1, step=0, **run.options)
    wanted, _ = run.model.loss(MIX, N, 512, seed=1, step=0)
    assert torch.equal(loss, wanted.detach())


def test_large_labels_in_float64():
    mix = fl.TaskMixture(1e20 * MIX.means, 1e40 * MIX.covariances, MIX.weights)
    run = fl.train(mix, "plain", N, steps=2, batch=64, dtype="float64")
    assert torch.isfinite(run.risk).all()
    assert run.diverged == {}
