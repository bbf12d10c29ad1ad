"""Fine-tuning without forgetting: regimes, presets, mixed shots, variants, `after`, and the trained errors."""

import itertools
import json
import re

import pytest
import torch
from support import training_configs
from support.op_cases import DOUBLE, assert_close
from support.training_configs import recording, trace

import fastlin as fl
from fastlin.theory import forgetting as ff
from fastlin.training import streams
from fastlin.training.objective import Objective
from fastlin.training.regimes import REGIMES, Phase, Regime, Term, keyed, named, together
from fastlin.training.start import initial_model, training_sources

EIGHT = [f"{objective}:{part}" for objective in ("zs", "zs+fs") for part in ("all", "q", "k", "v")]
MIX = fl.SphereTasks(3, noise_std=0.3, bias=True)
TASK = fl.FixedTask([1.0, 0.0, -1.0], noise_std=0.3, bias=True)
N = training_configs.N
SHORT = {"trials": 2, "steps": 8, "batch": 64, "records": 4, "seed": 3}
PARTS = {
    "full": {"all": {"W", "v"}, "q": {"W"}, "k": {"W"}, "v": {"v"}},
    "separate": {"all": {"Wq", "Wk", "Wv"}, "q": {"Wq"}, "k": {"Wk"}, "v": {"Wv"}},
    "stack": {"all": {"A", "C"}, "q": {"A"}, "k": {"A"}, "v": {"C"}},
}


def config_of(regime, **options):
    given = {"preset": "tuned", "steps": 8, "target": None if regime == "pretrain" else TASK, **options}
    return training_configs.config_of(regime, mix=MIX, **given)


def tuned(regime, **options):
    return fl.train(MIX, regime, N, target=TASK, **{**SHORT, **options})


def test_the_rows():
    assert {name for name, row in REGIMES.items() if row.study == "forgetting"} == {"pretrain", *EIGHT}
    assert REGIMES["pretrain"].phases == REGIMES["plain"].phases
    for name in EIGHT:
        row = REGIMES[name]
        first, second = row.phases
        assert first == REGIMES["pretrain"].phases[0]
        assert (row.judged.shots, row.judged.source) == (0, "target")
        zero, *few = second.objective
        assert zero == Term(0, (1.0, 1.0), "target")
        assert few == ([Term(None, (1.0, 0.0), "target")] if name.startswith("zs+fs") else [])


@pytest.mark.parametrize("preset", ["tuned", "authors"])
@pytest.mark.parametrize(("model", "heads"), [("full", 1), ("full", 2), ("separate", 1), ("separate", 2), ("stack", 1)])
@pytest.mark.parametrize("regime", EIGHT)
def test_each_row_trains_its_part(regime, model, heads, preset):
    _, seen = trace(config_of(regime, model=model, heads=heads, preset=preset, points=None))
    part = PARTS[model][regime.split(":")[1]]

    def moved(before, after):
        return {name for name in before if not torch.equal(before[name], after[name])}

    assert moved(seen[0], seen[4]) == PARTS[model]["all"]
    assert moved(seen[4], seen[-1]) == part


@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_the_authors_protocol(preset):
    one, two = (config_of(name, preset=preset, steps=None, batch=None) for name in ("pretrain", "zs:v"))
    assert (one.steps, two.steps, one.batch, one.lr, one.clip) == (5000, 10_000, 5000, 0.01, 1.0)
    assert (one.optimiser, one.optimiser_options) == ("SGD", {"momentum": 0.9})
    assert (one.start, one.start_attention, one.start_heads, one.start_values) == ("normal", 0.05, 0.05, 0.05)
    assert (one.see_query, one.shot_scale, one.heads_averaged, one.own_data, one.points) == (*[True] * 4, 100_000)


def test_the_prompts_presets_are_not_touched():
    for preset in ("paper", "authors", "tuned"):
        other = training_configs.config_of("joint", preset=preset)
        assert (other.shot_scale, other.heads_averaged, other.points) == (False, False, None)


@pytest.mark.parametrize("units", ["literal", "data"])
@pytest.mark.parametrize(("model", "heads"), [("full", 1), ("full", 2), ("separate", 2)])
def test_the_model_is_the_papers(model, heads, units):
    """[Z + (1/N) mean_h V_h Z Z'Q_h Z] at its last row and column, the query among the columns."""
    config = config_of("pretrain", model=model, heads=heads, units=units)
    net = initial_model(config)
    with torch.no_grad():
        forms = net.forms(False)
    W, v = forms["W"].reshape(2, heads, 5, 5), forms["v"].reshape(2, heads, 5)
    for n in (0, 1, N):
        z, q, y, _ = MIX.sample(20, n, seed=9, dtype=DOUBLE)
        Z = torch.cat([z, q[:, None]], 1)
        raw = W * heads  # heads are averaged: each has 1/H folded in
        value = torch.einsum("rhm,bim->rhbi", v, Z)
        score = torch.einsum("bm,rhml,bil->rhbi", q, raw, Z)
        wanted = ((value * score).sum(-1) / (n + 1)).mean(1)
        loss, _ = net.loss(MIX, n, 20, seed=9, step=0, prompts=False)
        found, _ = fl.prompt_loss(z, q, y, None, None, *_layers(forms), see_query=True, scale=1 / (n + 1))
        assert_close(found, (wanted - y).square().mean(1), 1e-11)
        assert net.op_options(n) == {"see_query": True, "scale": 1 / (n + 1)}
        assert loss.shape == (2,)


def _layers(forms):
    return forms["W"], forms["v"]


def test_mixed_shots_in_one_step_have_their_own_scale():
    """The gradient of zs+fs is that of both losses, with the weight of the step."""
    store = []
    config = config_of("zs+fs:all", optimiser=recording(store), own_data=True, clip=None)
    _, seen = trace(config)
    for step in range(4, 8):
        net = training_configs.with_values(config, seen[step])
        first, second = (
            net.loss(TASK, n, 60, seed=3, step=step, stream=[2 * i, 2 * i + 1], prompts=False)[0]
            for i, n in enumerate((0, N))
        )
        total = (first + (1 - (step - 4) / 4) * second).sum() / net.loss_unit
        wanted = torch.autograd.grad(total, [net.W, net.v])
        assert_close(store[step], list(wanted), 1e-11)


def test_mixed_shots_work_for_a_row_of_ones_own():
    row = Regime("own", (Phase(("attention", "heads"), False, (Term(2), Term(7, (0.5, 1.0)))),))
    mix = fl.TaskMixture([[1.0, 0.0], [0.0, 1.0]], torch.eye(2).expand(2, 2, 2), [0.5, 0.5])
    run = fl.train(mix, row, 5, steps=4, batch=32, trials=2)
    assert torch.isfinite(run.risk).all()


@pytest.mark.parametrize("model", ["full", "separate"])
def test_after_a_run_has_the_bits_of_the_whole(tmp_path, model):
    whole = tuned("zs+fs:v", model=model)
    first = fl.train(MIX, "pretrain", N, model=model, **{**SHORT, "steps": 4}, out=tmp_path / "first")
    for after in (first, tmp_path / "first", str(tmp_path / "first")):
        run = tuned("zs+fs:v", model=model, after=after)
        assert all(torch.equal(run.params[name], whole.params[name]) for name in ("W", "v"))
        assert torch.equal(run.risk, whole.risk)
    assert run.history["step"].tolist() == [6, 8]


def test_after_a_run_stopped_and_gone_on_with(tmp_path, monkeypatch):
    first = fl.train(MIX, "pretrain", N, **{**SHORT, "steps": 4})
    whole = tuned(EIGHT, after=first)
    original, calls = Objective.by_hand, itertools.count()

    def failing(self, *args, **options):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return original(self, *args, **options)

    monkeypatch.setattr(Objective, "by_hand", failing)
    with pytest.raises(KeyboardInterrupt):
        tuned(EIGHT, after=first, out=tmp_path / "run", checkpoint_seconds=0.0)
    monkeypatch.setattr(Objective, "by_hand", original)
    run = tuned(EIGHT, after=first, out=tmp_path / "run", resume=True)
    assert torch.equal(run.params["W"], whole.params["W"])
    assert torch.equal(run.params["v"], whole.params["v"])


def test_after_says_what_does_not_fit(tmp_path):
    first = fl.train(MIX, "pretrain", N, **{**SHORT, "steps": 4}, out=tmp_path / "first")
    wrong = [
        ({"after": 3}, TypeError, "after: got a int"),
        ({"after": tmp_path / "none"}, ValueError, f"{tmp_path / 'none'}: holds no run, wants the folder of one"),
        ({"after": first, "steps": 20}, ValueError, "after: got a run of 4 steps, wants 10"),
        ({"after": first, "seed": 4}, ValueError, "after: got a run with seed = 3, wants 4"),
        ({"after": first, "model": "separate"}, ValueError, "after: got a run with model = 'full', wants 'separate'"),
        ({"after": tuned("zs:v")}, ValueError, "after: got a run of regime 'zs:v', wants the first phases"),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match="^" + re.escape(message)):
            tuned("zs:q", **options)


@pytest.mark.parametrize(("model", "heads"), [("full", 1), ("separate", 2)])
@pytest.mark.parametrize("optimiser", ["Adam", "AdamW", "SGD"])
def test_side_by_side_is_one_after_the_other(model, heads, optimiser):
    options = {"model": model, "attention_heads": heads, "dtype": DOUBLE, "optimiser": optimiser, "weight_decay": 0.01}
    run = tuned(EIGHT, **options)
    assert run.risk.shape == (16,)
    assert run.config["trials"] == 2
    for name in EIGHT:
        alone = tuned(name, **options)
        assert_close(run.params["W"][run.trials_of(name)], alone.params["W"], 1e-9)
        assert_close(run.params["v"][run.trials_of(name)], alone.params["v"], 1e-9)
        assert_close(run.risk[run.trials_of(name)], alone.risk, 1e-9)


def test_side_by_side_on_shared_data():
    run, alone = (tuned(regime, own_data=False, dtype=DOUBLE) for regime in (["zs:v", "zs+fs:v"], "zs+fs:v"))
    assert_close(run.params["v"][run.trials_of("zs+fs:v")], alone.params["v"], 1e-9)
    with pytest.raises(ValueError, match=r"^regime: got 'zs:q'"):
        run.trials_of("zs:q")


def test_phases_of_variants_are_told_apart_by_their_place():
    """Two rows with the same phases in another order combine to two equal phases."""
    v, q = (Phase((part,), False, (Term(0, source="target"),)) for part in ("v", "q"))
    rows = [Regime(name, phases, study="forgetting") for name, phases in (("vq", (v, q)), ("qv", (q, v)))]
    run = tuned(rows, dtype=DOUBLE)
    for row in rows:
        alone = tuned(row, dtype=DOUBLE)
        assert_close(run.params["W"][run.trials_of(row.name)], alone.params["W"], 1e-9)
        assert_close(run.params["v"][run.trials_of(row.name)], alone.params["v"], 1e-9)


def test_a_term_is_taken_on_the_trials_that_have_it():
    """The few-shot loss may overflow in trials of zs, which do not have it: weighting it with 0 would give NaN."""
    few, zero = (
        Regime(f"{n}", (Phase(("v",), False, (Term(n, source="target"),)),), study="forgetting") for n in (N, 0)
    )
    config, seen = config_of([few, zero]), []
    kind = type(initial_model(config))
    original = kind.gradients

    def noting(self, source, n, batch, forms, *args, **options):
        seen.append((n, forms["W"].tolist()))
        return original(self, source, n, batch, forms, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "gradients", noting)
        trace(config)
    W = initial_model(config).forms()["W"].tolist()
    assert seen[:2] == [(N, [W[0], W[2]]), (0, [W[1], W[3]])]


def test_rows_that_do_not_go_together():
    for rows, message in (
        (["zs:v", "pretrain"], "regime: 'pretrain' has judged"),
        (["zs:v", "zs:v"], "regime: got zs:v, zs:v, wants different ones"),
        (["plain", "joint"], "regime: 'joint' has other phases than 'plain'"),
        (["plain", "joint+heads"], "regime: 'joint+heads' has task_heads"),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            named(rows)
    both = together([REGIMES["zs:v"], REGIMES["zs+fs:q"]])
    assert both.phases[1].trains == ("v", "q")
    assert list(keyed(both.phases[1].objective)) == [(0, "target", 0), (None, "target", 0)]
    with pytest.raises(ValueError, match="combines several regimes"):
        together([both, REGIMES["zs:v"]])
    assert named(["zs:v"]) is REGIMES["zs:v"]


def test_a_trial_that_diverged_before_stays_so():
    options = {**SHORT, "lr": 1e30, "optimiser": "SGD", "clip": None, "trials": 3}
    first = fl.train(MIX, "pretrain", N, **{**options, "steps": 4})
    assert first.diverged
    run = fl.train(MIX, ["zs:v", "zs:q"], N, target=TASK, after=first, **options)
    for trial in first.diverged:
        assert run.diverged[2 * trial] == run.diverged[2 * trial + 1] == first.diverged[trial]
        assert torch.isnan(run.params["W"][2 * trial]).all()


def test_points_are_drawn_once_and_with_replacement():
    config = config_of("zs:v", points=7)
    source = training_sources(config)["target"]
    assert isinstance(source, fl.PointSet)
    _, q, y, _ = TASK.sample(7, 0, seed=3, stream=streams.POINTS, dtype=DOUBLE)
    assert_close(source.x, q[:, 1:-1], 1e-15)
    _, q, y, _ = source.sample(200, 0, seed=1, dtype=DOUBLE)
    assert len(torch.unique(y)) == 7
    assert q.shape == (200, 5)
    # The risk is that of the task, not of the points.
    assert config.sources["target"] is TASK
    assert training_sources(config_of("zs:v", points=None))["target"] is TASK
    given = fl.PointSet(torch.randn(9, 3), torch.randn(9), bias=True)
    assert training_sources(config_of("zs:v", points=7, target=given))["target"] is given


def test_training_on_points_of_ones_own_is_sampled():
    given = fl.PointSet.drawn(TASK, 500, seed=1)
    run = fl.train(MIX, "zs:v", N, target=given, **SHORT)
    assert (run.risk_error > 0).all()
    assert run.theory is None


def test_risk_is_exact_and_theory_beside_it():
    for regime, target in (("pretrain", None), ("zs:v", TASK), ("zs+fs:all", TASK), ("zs:q", TASK)):
        run = fl.train(MIX, regime, N, target=target, **SHORT)
        source, n = (MIX, N) if target is None else (TASK, 0)
        losses = torch.stack(
            [
                fl.sampled_loss(source, n, 50_000, **run.params, **run.options_at(n), seed=9, step=i)[0].double()
                for i in range(30)
            ]
        )
        assert ((losses.mean(0) - run.risk).abs() < 5 * losses.std(0) / 30**0.5).all()
        assert (run.risk_error == 0).all()
    assert run.options == {"see_query": True, "scale": 1 / (N + 1)}
    moment = torch.eye(3, dtype=DOUBLE) / 3
    data = {"noise_var": 0.09, "task_cov": moment}
    assert float(fl.train(MIX, "pretrain", N, **SHORT).theory) == pytest.approx(
        float(ff.pretraining_loss(3, N, **data))
    )
    assert float(tuned("zs+fs:v").theory) == pytest.approx(0.09 + 2 * 2.0 / 7)
    assert float(tuned("zs:all", attention_heads=2).theory) == pytest.approx(0.09)
    assert tuned("zs:v", attention_heads=2).theory is None
    assert tuned("zs:k").theory is None
    assert tuned("zs:v", see_query=False).theory is None
    other = fl.FixedTask([1.0, 0.0, -1.0], 0.3, 2 * torch.eye(3), bias=True)
    assert fl.train(MIX, "zs:v", N, target=other, **SHORT).theory is None


def test_models_with_the_scale_of_shots_are_stored(tmp_path):
    run = tuned("zs:v", out=tmp_path / "run")
    held = fl.models.load(tmp_path / "run" / "model.safetensors")
    assert held.op_options(4) == {"see_query": True, "scale": 0.2}
    assert_close(held.forms(False)["W"], run.params["W"], 0.0)
    config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert config["regime"]["judged"] == {"shots": 0, "weight": [1.0, 1.0], "source": "target"}


def test_softmax_has_no_scale_of_shots():
    with pytest.raises(ValueError, match=r"^shot_scale: got True for model 'softmax'"):
        fl.train(MIX, "pretrain", N, model="softmax", **SHORT)


@pytest.mark.parametrize("name", ["sphere", "correlated"])
def test_training_ends_in_the_closed_forms(name):
    """Training on samples ends within the tolerances of the paper's figure."""
    if name == "sphere":
        mix, m, T = fl.SphereTasks(4, noise_std=0.5, bias=True), 10, torch.eye(4, dtype=DOUBLE) / 4
        task = fl.FixedTask([0.6, 0.0, 0.8, 0.0], noise_std=0.5, bias=True)
    else:
        T = torch.diag(torch.tensor([0.5, 1.0, 2.0], dtype=DOUBLE))
        cov = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 0.5]], dtype=DOUBLE)
        same = {"noise_std": 0.7, "feature_cov": cov, "bias": True}
        mix, task, m = fl.TaskMixture(torch.zeros(1, 3), T[None], [1.0], **same), fl.FixedTask([1, -1, 0.5], **same), 12
    first = fl.train(mix, "pretrain", m, trials=2, steps=800, batch=2000)
    run = fl.train(mix, ["zs:all", "zs:v"], m, target=task, after=first, trials=2, steps=1600, batch=2000)
    data = {"cov": mix.feature_cov, "noise_var": mix.noise_std**2, "task_cov": T}
    assert (first.excess.abs() < 0.005).all()
    assert float(first.theory) == pytest.approx(float(ff.pretraining_loss(mix.d, m, **data)))
    assert ((run.risk[run.trials_of("zs:all")] / task.noise_std**2 - 1).abs() < 0.005).all()
    family = ff.value_tuned(task.theta, shots=m, **data)
    least = float(ff.error(family, task.theta, 0, mix.feature_cov, task.noise_std**2))
    assert ((run.risk[run.trials_of("zs:v")] / least - 1).abs() < 0.005).all()
    few = fl.evaluate(run, task, m).error[0, run.trials_of("zs:v")]
    theory = float(ff.error(family, task.theta, m, mix.feature_cov, task.noise_std**2))
    assert ((few / theory - 1).abs() < 0.02).all()
