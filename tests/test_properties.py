"""Properties of ops, configs and the command line on inputs that nobody thought of."""

import json
import math
import tomllib

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import fastlin as fl
from fastlin import cli
from fastlin.settings import FIELDS, ConfigError, load

# The same examples everywhere, no file of those that failed, and no limit on the time of one on a busy machine.
property_of = settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

SIZES = {"B": st.integers(0, 9), "n": st.integers(0, 9), "m": st.integers(1, 9), "K": st.integers(1, 3)}
SIZES |= {"t": st.integers(0, 2), "R": st.integers(0, 3), "H": st.integers(1, 2), "L": st.integers(1, 3)}
# Zero, denormal, tiny, ordinary, huge and not finite, in both dtypes.
NUMBERS = st.sampled_from([0.0, -0.0, 1e-310, 1e-45, 1e-30, 0.5, -1.0, 3.0, 1e30, -1e38, 1e300, math.inf, math.nan])


def problem(sizes, dtype, stack, seed, special):
    """Arguments of a loss, standard normal but for a few entries; without trials where R = 0."""
    B, n, m, K, t, R, H, L = (sizes[name] for name in ("B", "n", "m", "K", "t", "R", "H", "L"))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    front, heads = ([R], [H] if H > 1 else []) if R else ([], [])
    given = {"z": normal(B, n, m), "q": normal(B, m), "y": normal(B)}
    given |= {"task": torch.randint(0, K, (B,), generator=generator), "p": normal(*front, K, t, m)}
    if stack:
        given |= {"A": normal(*front, L, *heads, m, m), "C": normal(*front, L, *heads, m, m) / m}
        given |= {"h": normal(*front, K, m)}
    else:
        given |= {"W": normal(*front, *heads, m, m), "v": normal(*front, *heads, K, m)}
    for name, at, value in special:
        tensor = given.get(name)
        if tensor is not None and tensor.numel():
            tensor.view(-1)[at % tensor.numel()] = value
    return {name: value if name == "task" else value.to(dtype) for name, value in given.items()}


@property_of
@given(
    sizes=st.fixed_dictionaries(SIZES),
    stack=st.booleans(),
    seed=st.integers(0, 1000),
    special=st.lists(st.tuples(st.sampled_from("zqypAWvCh"), st.integers(0, 100), NUMBERS), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    see_query=st.booleans(),
)
def test_losses_of_any_shape_and_value(sizes, stack, seed, special, dtype, see_query):
    """Finite where the reference is, and then equal; gradients have the shapes of what they are of."""
    given = problem(sizes, dtype, stack, seed, special)
    loss_of = fl.stack_loss if stack else fl.prompt_loss
    parameters = [value.requires_grad_() for name, value in given.items() if name in ("p", "A", "C", "h", "W", "v")]
    loss, per_task = loss_of(*given.values(), see_query=see_query)
    exact = [value if value.dtype == torch.int64 else value.detach().double() for value in given.values()]
    wanted, wanted_per_task = loss_of(*exact, see_query=see_query, backend="reference")
    assert loss.shape == wanted.shape
    assert per_task.shape == wanted_per_task.shape
    gradients = torch.autograd.grad(loss.sum(), parameters)
    assert [gradient.shape for gradient in gradients] == [parameter.shape for parameter in parameters]
    ordinary = all(value == 0 or 1e-30 <= abs(value) <= 3.0 for _, _, value in special)
    if ordinary:
        tolerance = {"rtol": 2e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-8, "atol": 1e-8}
        torch.testing.assert_close(loss.double(), wanted, **tolerance)
        torch.testing.assert_close(per_task.double(), wanted_per_task, **tolerance)
        assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    elif dtype == torch.float64 and not bool(torch.isfinite(wanted).all()):
        assert not bool(torch.isfinite(loss).all()), "what is not finite does not get lost"


@property_of
@given(
    sizes=st.fixed_dictionaries(SIZES),
    name=st.sampled_from("zqypWv"),
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_check_finite_names_the_argument(sizes, name, value):
    given = problem(sizes, torch.float32, False, 0, [(name, 0, value)])
    assume(given[name].numel() > 0)
    with pytest.raises(ValueError, match=rf"prompt_loss: {name} holds 1 values that are not finite"):
        fl.prompt_loss(*given.values(), check_finite=True)


@property_of
@given(
    sizes=st.fixed_dictionaries(SIZES),
    name=st.sampled_from(["z", "q", "y", "task", "p", "W", "v"]),
    change=st.sampled_from(["longer", "shorter", "deeper", "flatter", "integer", "complex", "list", "meta"]),
)
def test_wrong_arguments_are_named(sizes, name, change):
    given = problem({**sizes, "n": 2, "t": 1}, torch.float32, False, 0, [])
    tensor = given[name]
    given[name] = {
        "longer": lambda: torch.cat([tensor, tensor[..., :1]], -1),
        "shorter": lambda: tensor[..., :-1],
        "deeper": lambda: tensor[None, None, None],
        "flatter": lambda: tensor.flatten()[..., None] if tensor.ndim == 1 else tensor.flatten(),
        "integer": lambda: tensor.float() if name == "task" else tensor.long(),
        "complex": lambda: tensor.to(torch.complex64),
        "list": lambda: tensor.tolist(),
        "meta": lambda: tensor.to("meta"),
    }[change]()
    try:
        fl.prompt_loss(*given.values())
    except (ValueError, TypeError) as error:
        message = str(error)
    else:
        # One task and no trials: a head (m,) is a head (1, m), and B or K of zero leaves nothing to take away.
        message = "prompt_loss: accepted"
        assert tensor.numel() == 0 or (name == "v" and tensor.ndim == 2)
    assert message.startswith("prompt_loss: ")


# TOML that is nearly a config: each field right most of the time.
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**12) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=8,
)
RIGHT = {
    "name": "x",
    "dimension": 2,
    "means": [1, [0, 1]],
    "covariances": [1, [[1, 0], [0, 1]]],
    "weights": [0.5, 0.5],
    "noise_std": 0.5,
    "feature_cov": [1, 2],
    "context_lengths": [1, 2],
}


def toml_of(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_of(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    if isinstance(value, float):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan" if math.isnan(value) else repr(value))
    return json.dumps(value) if isinstance(value, (bool, str)) else str(value) if value is not None else '""'


@property_of
@given(changes=st.dictionaries(st.sampled_from([*RIGHT, "description", "weight"]), ANY, max_size=3))
def test_configs_are_right_or_their_field_is_named(tmp_path, changes):
    values = {**RIGHT, **changes}
    path = tmp_path / "own.toml"
    text = "".join(f"{name} = {toml_of(value)}\n" for name, value in values.items())
    path.write_text(text.encode("utf-8", "replace").decode(), encoding="utf-8")
    try:
        found = load(path)
    except ConfigError as error:
        said = str(error)
        assert said.startswith(f"{path}: ")
        assert any(name in said for name in FIELDS) or "not valid TOML" in said
    else:
        assert "weight" not in values
        assert abs(float(found.mixture.weights.sum()) - 1) < 1e-9
        assert found.mixture.d == tomllib.loads(path.read_text(encoding="utf-8"))["dimension"]


WORDS = st.sampled_from(
    ["2c", "all", "2z", "claims", "", "-1", "0", "1,2", "1e9", "nan", "x=1", "plain", "joint", "\0"]
)
FLAGS = st.sampled_from(
    ["--n", "--json", "--csv", "--regime", "--steps", "--seed", "--scale", "--set", "--shard", "--jobs"]
)


@property_of
@given(
    command=st.sampled_from(["theory", "status", "plot", "train", "reproduce", "info", "inof"]),
    rest=st.lists(WORDS | FLAGS, max_size=5),
)
def test_the_command_line_says_what_is_wrong(tmp_path, monkeypatch, capsys, command, rest):
    """Nothing is trained: what is not wrong ends where training would begin."""
    from fastlin.figures import curves, own, reproduce

    class Right(Exception):
        pass

    def stop(*given, **options):
        raise Right

    monkeypatch.chdir(tmp_path)
    for module, name in ((own, "train_panel"), (reproduce, "reproduce"), (reproduce, "locked"), (curves, "compute")):
        monkeypatch.setattr(module, name, stop)
    try:
        code = cli.main([command, *rest])
    except SystemExit as end:
        code = end.code
    except Right:
        return
    finally:
        said = capsys.readouterr()
    assert code in (0, 1, 2)
    assert code == 0 or said.err.startswith(("fastlin: ", "usage: ")), said.err
