"""CONFIG.toml: valid files, error messages, and the settings that ship."""

import json
from pathlib import Path

import pytest
import torch

from fastlin import settings, theory

GOOD = {
    "name": '"two tasks"',
    "dimension": "2",
    "means": "[1.5, [0.0, -1]]",
    "covariances": "[2, [1.0, 0.5]]",
    "weights": "[0.25, 0.75]",
    "context_lengths": "[20, 1, 5]",
}
FIELDS = "name, description, dimension, means, covariances, weights, noise_std, feature_cov, context_lengths"
LENGTHS = "a list of different integers from 0 to 1099511627775"
MATRIX = "a finite number, a list of 2 (the diagonal) or 2 lists of 2 (the matrix)"

# Fields that differ from GOOD (None: left out), and what the error says after the file's name.
WRONG = [
    ({"nois_std": "1"}, f"nois_std: unknown field (did you mean noise_std?), wants one of {FIELDS}"),
    ({"Mean": "[1, 2]", "means": None}, f"Mean: unknown field (did you mean means?), wants one of {FIELDS}"),
    ({"NOISE_STD": "1"}, f"NOISE_STD: unknown field (did you mean noise_std?), wants one of {FIELDS}"),
    ({"seed": "1"}, f"seed: unknown field, wants one of {FIELDS}"),
    ({"name": None}, "name: missing, wants a text that is not empty"),
    ({"dimension": None}, "dimension: missing, wants an integer from 1 to 4096"),
    ({"means": None}, "means: missing, wants a list with a number or a vector for each task"),
    ({"covariances": None}, "covariances: missing, wants a list with a number, a diagonal or a matrix for each task"),
    ({"weights": None}, "weights: missing, wants a list with a number for each task"),
    ({"context_lengths": None}, f"context_lengths: missing, wants {LENGTHS}"),
    ({"name": "7"}, "name: got 7, wants a text that is not empty"),
    ({"name": '"  "'}, "name: got '  ', wants a text that is not empty"),
    ({"description": "[1]"}, "description: got a list of 1, wants a text"),
    ({"dimension": "0"}, "dimension: got 0, wants an integer from 1 to 4096"),
    ({"dimension": "1000000"}, "dimension: got 1000000, wants an integer from 1 to 4096"),
    ({"dimension": "2.0"}, "dimension: got 2.0, wants an integer from 1 to 4096"),
    ({"dimension": "true"}, "dimension: got true, wants an integer from 1 to 4096"),
    ({"means": "1.5"}, "means: got 1.5, wants a list with a number or a vector for each task"),
    ({"means": "[]"}, "means: got a list of 0, wants a list with a number or a vector for each task"),
    ({"means": '[1, "2"]'}, "means[1]: got '2', wants a finite number or a list of 2"),
    ({"means": "[1, [1, 2, 3]]"}, "means[1]: got a list of 3, wants a finite number or a list of 2"),
    ({"means": "[1, [1, false]]"}, "means[1][1]: got false, wants a finite number"),
    ({"means": "[1, [1, [2]]]"}, "means[1][1]: got a list of 1, wants a finite number"),
    ({"means": "[1, inf]"}, "means[1]: got inf, wants a finite number or a list of 2"),
    ({"means": "[1, {a = 1}]"}, "means[1]: got a table, wants a finite number or a list of 2"),
    ({"covariances": "1.0"}, "covariances: got 1.0, wants a list of 2, one for each of means"),
    ({"covariances": "[1, 2, 3]"}, "covariances: got a list of 3, wants a list of 2, one for each of means"),
    ({"covariances": "[1, true]"}, f"covariances[1]: got true, wants {MATRIX}"),
    ({"covariances": "[1, nan]"}, f"covariances[1]: got nan, wants {MATRIX}"),
    ({"covariances": "[1, []]"}, f"covariances[1]: got a list of 0, wants {MATRIX}"),
    ({"covariances": "[1, [1, 2, 3]]"}, f"covariances[1]: got a list of 3, wants {MATRIX}"),
    ({"covariances": "[1, [[1, 0]]]"}, f"covariances[1]: got a list of 1, wants {MATRIX}"),
    ({"covariances": "[1, [[1, 0], [0]]]"}, "covariances[1][1]: got a list of 1, wants a list of 2 finite numbers"),
    ({"covariances": "[1, [[1, 0], 3]]"}, "covariances[1][1]: got 3, wants a list of 2 finite numbers"),
    ({"covariances": "[1, [3, [1, 0]]]"}, "covariances[1][1]: got a list of 2, wants a finite number"),
    ({"covariances": "[1, [[1, 0], [0, -inf]]]"}, "covariances[1][1][1]: got -inf, wants a finite number"),
    ({"covariances": "[-1, 1]"}, "covariances[0]: has the eigenvalue -1, wants a positive semi-definite matrix"),
    (
        {"covariances": "[1, [[1, 2], [2, 1]]]"},
        "covariances[1]: has the eigenvalue -1, wants a positive semi-definite matrix",
    ),
    (
        {"covariances": "[1, [[1, 0.5], [0.25, 1]]]"},
        "covariances[1]: differs from its transpose by 0.25, wants a symmetric matrix",
    ),
    ({"weights": "[1.0]"}, "weights: got a list of 1, wants a list of 2, one for each of means"),
    ({"weights": '[0.25, "0.75"]'}, "weights[1]: got '0.75', wants a finite number"),
    ({"weights": "[0.25, 0.5]"}, "weights: got [0.25, 0.5] of sum 0.75, wants numbers >= 0 of sum 1"),
    ({"weights": "[-1.0, 2.0]"}, "weights: got [-1.0, 2.0] of sum 1.0, wants numbers >= 0 of sum 1"),
    ({"noise_std": "-0.5"}, "noise_std: got -0.5, wants a finite number >= 0"),
    ({"noise_std": "true"}, "noise_std: got true, wants a finite number >= 0"),
    ({"noise_std": "1979-05-27"}, "noise_std: got 1979-05-27, wants a finite number >= 0"),
    ({"noise_std": "1e200"}, "means, covariances, noise_std: E[y²] of the labels is inf, wants a finite number > 0"),
    ({"feature_cov": '"I"'}, f"feature_cov: got 'I', wants {MATRIX}"),
    ({"feature_cov": "[1, -2]"}, "feature_cov: has the eigenvalue -2, wants a positive semi-definite matrix"),
    ({"feature_cov": "0"}, "means, covariances, noise_std: E[y²] of the labels is 0.0, wants a finite number > 0"),
    ({"context_lengths": "10"}, f"context_lengths: got 10, wants {LENGTHS}"),
    ({"context_lengths": "[]"}, f"context_lengths: got a list of 0, wants {LENGTHS}"),
    ({"context_lengths": "[1, -1]"}, "context_lengths[1]: got -1, wants an integer from 0 to 1099511627775"),
    ({"context_lengths": "[2.0]"}, "context_lengths[0]: got 2.0, wants an integer from 0 to 1099511627775"),
    ({"context_lengths": "[true]"}, "context_lengths[0]: got true, wants an integer from 0 to 1099511627775"),
    ({"context_lengths": '["1"]'}, "context_lengths[0]: got '1', wants an integer from 0 to 1099511627775"),
    ({"context_lengths": "[5, 1, 5]"}, f"context_lengths: has 5 more than once, wants {LENGTHS}"),
]
GOLDEN = {"2a": "fig2a", "2c": "fig2c", "A1a": "D1_2a_sigma5", "A2d": "E2_noisy", "A2e": "E2_noisy", "A2f": "E2_noisy"}
OPTIMA = {
    "L_PT": theory.plain,
    "L_FT": theory.fine_tuned,
    "L_JT": theory.joint,
    "L_PGD": theory.decoupled,
    "L_JT_shifted_head": theory.shared_shift,
    "L_heads_scaled": theory.scaled_heads,
    "L_heads_lower": theory.heads_lower_bound,
}
STAR = [0.9, *(0.9**-i for i in range(1, 10))]
LONG, SHORT = (1, 10, 20, 30, 40, 50), (1, 3, 5, 7, 10, 15, 20)
# Panel: means, diagonals of the covariances as multiples of I or STAR, first weight, noise variance, lengths.
PANELS = {
    "2a": ((1.7, -1.3), (1, 1), None, 0.3, 0, LONG),
    "2b": ((0, 0), (1, 2), None, 0.5, 0, LONG),
    "2c": ((2.1, -0.9), (1, 1), None, 0.3, 0, LONG),
    "2d": ((1.4, -0.6), (1, 2), None, 0.3, 0, LONG),
    "A1a": ((1.7, -1.3), (1, 1), None, 0.3, 5, SHORT),
    "A1b": ((2.1, -0.9), (1, 1), None, 0.3, 5, SHORT),
    "A1c": ((1.7, -1.3), (1, 1), STAR, 0.3, 5, SHORT),
    "A1d": ((1.4, -0.6), (1, 2), STAR, 0.3, 5, SHORT),
    **{f"A2{panel}": ((1.7, -1.3), (1, 2), STAR, 0.3, 0, SHORT) for panel in "abc"},
    **{f"A2{panel}": ((1.7, -1.3), (1, 2), STAR, 0.3, 5, SHORT) for panel in "def"},
}


def document(changes):
    fields = {**GOOD, **changes}
    return "".join(f"{field} = {text}\n" for field, text in fields.items() if text is not None)


def write(folder, text):
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def same(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0.0)


@pytest.fixture(scope="module")
def golden():
    return json.loads((Path(__file__).parent / "data" / "golden.json").read_text())["PB"]


def test_fields_and_their_defaults(tmp_path):
    found = settings.load(write(tmp_path, document({})))
    assert (found.name, found.description, found.context_lengths) == ("two tasks", "", (1, 5, 20))
    mix = found.mixture
    same(mix.means, [[1.5, 1.5], [0.0, -1.0]])
    same(mix.covariances, [[[2.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [0.0, 0.5]]])
    same(mix.weights, [0.25, 0.75])
    same(mix.feature_cov, [[1.0, 0.0], [0.0, 1.0]])
    assert mix.noise_std == 0.0
    assert not mix.bias
    assert found.values == {
        "name": "two tasks",
        "description": "",
        "dimension": 2,
        "means": [1.5, [0.0, -1]],
        "covariances": [2, [1.0, 0.5]],
        "weights": [0.25, 0.75],
        "noise_std": 0.0,
        "feature_cov": 1.0,
        "context_lengths": [20, 1, 5],
    }


def test_full_matrices_and_optional_fields(tmp_path):
    given = {
        "description": '"nothing commutes"',
        "covariances": "[[[2, 1], [1, 3]], 0]",
        "noise_std": "0.5",
        "feature_cov": "[[1, 0.5], [0.5, 2]]",
        "context_lengths": "[0]",
    }
    found = settings.load(str(write(tmp_path, document(given))))
    same(found.mixture.covariances, [[[2.0, 1.0], [1.0, 3.0]], [[0.0, 0.0], [0.0, 0.0]]])
    same(found.mixture.feature_cov, [[1.0, 0.5], [0.5, 2.0]])
    assert found.mixture.noise_std == 0.5
    assert found.description == "nothing commutes"
    assert found.context_lengths == (0,)


@pytest.mark.parametrize(("text", "matrix"), [("3", [[3.0, 0.0], [0.0, 3.0]]), ("[3, 4]", [[3.0, 0.0], [0.0, 4.0]])])
def test_feature_covariance_as_a_number_and_as_a_diagonal(tmp_path, text, matrix):
    same(settings.load(write(tmp_path, document({"feature_cov": text}))).mixture.feature_cov, matrix)


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message.split(",")[0] for _, message in WRONG])
def test_wrong_fields(tmp_path, changes, message):
    path = write(tmp_path, document(changes))
    with pytest.raises(settings.ConfigError) as caught:
        settings.load(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'name = "x"\ndimension 3\n',
            "not valid TOML: Expected '=' after a key in a key/value pair (at line 2, column 11)",
        ),
        ('name = "x"\nname = "y"\n', "not valid TOML: Cannot overwrite a value (at line 2, column 11)"),
        ("means = " + "[" * 100_000, "not valid TOML: "),
        ("dimension = " + "9" * 5000, "Exceeds the limit"),
    ],
    ids=["syntax", "twice", "depth", "digits"],
)
def test_what_is_not_toml(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(settings.ConfigError) as caught:
        settings.load(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_what_is_not_text(tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(settings.ConfigError, match=r"config\.toml: not valid TOML: 'utf-8' codec"):
        settings.load(path)


@pytest.mark.parametrize("name", ["missing.toml", "2e", "a2a"])
def test_what_is_not_there(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(settings.ConfigError) as caught:
        settings.load(name)
    assert str(caught.value) == f"{name}: no such file; the settings that ship with fastlin are {', '.join(PANELS)}"


def test_what_is_not_a_file(tmp_path):
    with pytest.raises(settings.ConfigError) as caught:
        settings.load(tmp_path)
    assert str(caught.value) == f"{tmp_path}: is a directory, wants a TOML file"


def test_other_lengths():
    found = settings.load("2a").with_lengths([7, 2])
    assert found.context_lengths == (2, 7)
    assert found.values["context_lengths"] == [2, 7]
    assert found.values["means"] == [1.7, -1.3]
    with pytest.raises(ValueError, match=r"context_lengths\[0\]: got -1"):
        found.with_lengths([-1])


def test_a_shipped_name_wins_over_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("2c").write_text(document({}))
    assert settings.load("2c").name == "Figure 2(c)"
    assert settings.load("./2c").name == "two tasks"


def test_every_panel_ships():
    assert list(settings.shipped()) == list(PANELS)


@pytest.mark.parametrize("panel", PANELS)
def test_shipped_settings_are_the_papers(panel):
    means, multiples, diagonal, first, noise_variance, lengths = PANELS[panel]
    found = settings.load(panel)
    mix = found.mixture
    same(mix.means, [[mean] * 10 for mean in means])
    diagonals = torch.tensor([[c * entry for entry in diagonal or [1.0] * 10] for c in multiples], dtype=torch.float64)
    torch.testing.assert_close(mix.covariances, torch.diag_embed(diagonals), rtol=1e-15, atol=0.0)
    same(mix.weights, [first, 1 - first])
    same(mix.feature_cov, torch.eye(10).tolist())
    assert mix.noise_std**2 == pytest.approx(noise_variance, rel=1e-15)
    assert found.context_lengths == lengths
    assert f"{panel[:-1]}(" in found.name
    assert found.description


@pytest.mark.parametrize("panel", PANELS)
def test_shipped_settings_survive_a_round_trip(tmp_path, panel):
    """JSON's numbers, strings and lists are TOML's too."""
    found = settings.load(panel)
    text = "".join(f"{field} = {json.dumps(value)}\n" for field, value in found.values.items())
    again = settings.load(write(tmp_path, text))
    assert again.values == found.values
    assert torch.equal(again.mixture.covariances, found.mixture.covariances)
    assert torch.equal(again.mixture.means, found.mixture.means)


@pytest.mark.parametrize(("panel", "case"), GOLDEN.items())
def test_shipped_settings_have_the_reference_losses(golden, panel, case):
    mix = settings.load(panel).mixture
    assert theory.normaliser(mix) == pytest.approx(golden[case]["Ey2"], rel=1e-9)
    for n, values in golden[case]["n"].items():
        for name, optimum in OPTIMA.items():
            assert float(optimum(mix, int(n))) == pytest.approx(values[name], rel=1e-9), (name, n)
