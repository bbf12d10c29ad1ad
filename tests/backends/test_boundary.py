"""Arguments that `fastlin._C` refuses by name: with them a kernel would leave its arrays, divide by zero or hang."""

import numpy as np
import pytest

from fastlin import _C

B, N, M = 4, 3, 2
LEAST, MOST = -(1 << 63), (1 << 63) - 1


def address(array):
    return array.ctypes.data


z, q, y, W, v = np.ones((B, N, M)), np.ones((B, M)), np.ones(B), np.ones((M, M)), np.ones((1, M))
task = np.zeros(B, np.int64)
G, loss, per_task = np.empty((B, M, M)), np.empty(1), np.empty(1)
sampled = [np.empty((B, N, M + 1)), np.empty((B, M + 1)), np.empty(B), np.empty(B, np.int64)]
INPUTS = {"x": z, "q": q, "task": None, "p": None, "A": None, "C": None, "W": W, "v": v, "h": None, "y": y}
INPUTS |= dict.fromkeys(("weight", "gy", "counts"))
RESULTS = {"yhat": None, "loss": loss, "per_task": per_task}
RESULTS |= dict.fromkeys(("dx", "dq", "dp", "dA", "dC", "dW", "dv", "dh"))
SIZES = {"B": B, "n": N, "m": M, "K": 1, "t": 0, "R": 1, "H": 1, "layers": 0, "total": 0}


def place(array):
    return array if isinstance(array, int) else 0 if array is None else address(array)


def attention(threads=1, strides=(N * M, M, M), flags=(False,) * 3, source=None, inputs=None, results=None, **sizes):
    inputs = [place(array) for array in (INPUTS | (inputs or {})).values()]
    results = [place(array) for array in (RESULTS | (results or {})).values()]
    sizes, factors = list((SIZES | sizes).values()), (1.0, 0.0, 0.0, 0.0)
    return _C.attention("", True, threads, sizes, strides, factors, flags, inputs, results, source)


def source(d=M, n=N, K=1, period=0, means=0, factors=0, cumulative=0, strata=0, features=0, step=0, stream=0, offset=0):
    arrays = [place(array) for array in (means, factors, cumulative, strata, features, 0)]
    return (d, n, K, 0, period), (1.0, 0.5), arrays, (0, offset, step, stream)


def drawn(**given):
    """A problem whose data a source draws, with d + 1 = m."""
    absent = dict.fromkeys(("x", "q", "y"))
    given["inputs"] = absent | given.get("inputs", {})
    return attention(**{"source": source(d=M - 1), **given})


def sample(threads=1, batch=B, results=sampled, **given):
    return _C.sample("", True, threads, source(**given), batch, False, [place(array) for array in results])


def gram(threads=1, z=z, G=G, B=B, n=N, m=M, batch=N * M, row=M):
    return _C.gram("", True, threads, (B, n, m, batch, row), (place(z), place(G)))


def fill(function="fill_uniform", to=z, rows=2, columns=3, threads=1):
    what = [3] * columns if function == "fill_chi" else columns
    return getattr(_C, function)(place(to), rows, what, "float64", 0, 0, 0, 0, 0, "", threads)


def test_right_ones_are_taken():
    assert attention() == drawn().replace("sampled rows", "streamed")
    assert attention(threads=8192) == attention()
    assert gram().endswith("gram")
    assert sample().endswith("sampled tokens")
    for function in ("fill_uniform", "fill_normal", "fill_chi"):
        fill(function)
    fill(to=0, rows=0)
    fill(to=0, rows=1 << 40, columns=0)  # returns at once, without a loop over rows


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [-1, LEAST, (1 << 44) + 1, MOST])
def test_sizes_that_cannot_be(name, size):
    with pytest.raises(ValueError, match=rf"^{name}: got {size}, wants an integer in \[[01], \d+\]$"):
        attention(**{name: size})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"m": 0}, "m: got 0"),  # a division by zero
        ({"K": 0}, "K: got 0"),
        ({"R": 0}, "R: got 0"),
        ({"H": 0}, "H: got 0"),
        ({"m": 1 << 40}, r"W: got sizes \(1, 1, 1099511627776, 1099511627776\), wants at most \d+ elements"),
        ({"K": 1 << 40, "R": 1 << 40}, r"h: got sizes "),
        ({"B": 1 << 40, "R": 1 << 40}, r"yhat: got sizes "),
        ({"t": 1 << 44}, "p: got sizes "),
        ({"K": 1 << 40, "H": 1 << 20, "flags": (False, False, True)}, "v: got sizes "),
        ({"t": 1}, "p: got address 0, wants the address of 2 elements"),
        ({"layers": 1}, "A: got address 0, wants the address of 4 elements"),
        ({"threads": 0}, r"threads: got 0, wants an integer in \[1, 8192\]"),
        ({"threads": -1}, "threads: got -1"),
        ({"threads": 8193}, "threads: got 8193"),
        ({"strides": (-6, 2, 2)}, "x: got strides -6 and 2, wants strides from 0 on"),
        ({"strides": (6, LEAST, 2)}, "x: got strides 6 and"),
        ({"strides": (6, 2, MOST)}, f"q: got strides {MOST} and 0"),
        ({"flags": (True, False, False)}, r"n: got 3, wants an integer in \[2, 2\]"),
        ({"inputs": {"x": 0}}, "x: got address 0, wants the address of 24 elements"),
        ({"inputs": {"q": 0}}, "q: got address 0"),
        ({"inputs": {"W": 0}}, "W: got address 0"),
        ({"inputs": {"v": 0}}, "v: got address 0"),
        ({"inputs": {"y": address(y) + 4}}, r"y: got address \d+, wants a multiple of 8"),
        ({"inputs": {"more": 0}}, "inputs: got 14 addresses, wants 13"),
        ({"results": {"per_task": 0}}, "per_task: got address 0, wants the address of 1 elements"),
        ({"results": {"dh": v}}, "h: got address 0"),
        ({"results": {"more": 0}}, "results: got 12 addresses, wants 11"),
    ],
)
def test_attention_names_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        attention(**arguments)


@pytest.mark.parametrize("index", [-1, 1, LEAST, MOST])
def test_a_task_outside_is_told_before_anything_is_written(index):
    wrong = np.array([0, 0, index, 0])
    loss[0] = per_task[0] = 17
    with pytest.raises(IndexError, match="a task index is outside"):
        attention(inputs={"task": wrong})
    assert (loss[0], per_task[0]) == (17, 17)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": {"x": z}}, r"x: got address \d+, wants 0 beside a source"),
        ({"inputs": {"q": q}}, "q: got address"),
        ({"inputs": {"y": y}}, "y: got address"),
        ({"inputs": {"task": task}}, "task: got address"),
        ({"results": {"dx": z}}, "dx: got address"),
        ({"results": {"dq": q}}, "dq: got address"),
        ({"source": source(d=M)}, r"m: got 2, wants an integer in \[3, 3\]"),
        ({"source": source(d=M - 1, n=N + 1)}, r"n: got 3, wants an integer in \[4, 4\]"),
        ({"source": source(d=M - 1, K=2, cumulative=y)}, r"K: got 1, wants an integer in \[2, 2\]"),
    ],
)
def test_a_problem_and_its_source_agree(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        drawn(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 0}, "threads: got 0"),
        ({"batch": -1}, "batch: got -1"),
        ({"batch": 1 << 43}, "x: got sizes "),
        ({"d": 0}, "d: got 0"),
        ({"d": -2}, "d: got -2"),
        ({"d": 1 << 30}, r"means|factors: got sizes "),
        ({"n": -1}, "n: got -1"),
        ({"K": 0}, "K: got 0"),
        ({"K": 2}, "cumulative: got address 0, wants the address of 2 elements"),
        ({"factors": W}, "means: got address 0"),
        ({"K": 2, "strata": task}, "period: got 0"),
        ({"K": 2, "strata": np.full(3, 2), "period": 3}, r"strata: got 2, wants an integer in \[0, 2\)"),
        ({"K": 2, "strata": np.array([0, 2, 0]), "period": 3, "offset": (1 << 64) - 2}, "strata: got 2"),
        ({"step": 1 << 24}, "step: got 16777216"),
        ({"step": 1 << 40}, "step: got 1099511627776"),
        ({"stream": 1 << 16}, "stream: got 65536"),
        ({"results": [0, *sampled[1:]]}, "x: got address 0"),
        ({"results": [*sampled[:3], 0]}, "task: got address 0"),
        ({"results": sampled[:3]}, "results: got 3 addresses, wants 4"),
    ],
)
def test_sample_names_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        sample(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 0}, "threads: got 0"),
        ({"B": 1 << 61}, "B: got"),
        ({"B": 1 << 43}, "G: got sizes"),
        ({"n": -1}, "n: got -1"),
        ({"m": 0}, "m: got 0"),
        ({"z": 0}, "z: got address 0"),
        ({"G": 0}, "G: got address 0"),
        ({"row": -1}, "z: got strides 6 and -1"),
        ({"n": 0, "batch": 1 << 62}, f"z: got strides {1 << 62} and 2"),
    ],
)
def test_gram_names_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        gram(**arguments)


@pytest.mark.parametrize("function", ["fill_uniform", "fill_normal", "fill_chi"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 0}, "threads: got 0"),
        ({"threads": 1 << 30}, "threads: got"),
        ({"rows": -1}, "rows: got -1"),
        ({"rows": 1 << 59, "columns": 0}, "rows: got"),
        ({"rows": 1 << 43}, "address: got sizes"),
        ({"to": 0}, "address: got address 0"),
        ({"to": address(z) + 1}, "address: got address"),
    ],
)
def test_fills_name_what_is_wrong(function, arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        fill(function, **arguments)


def test_other_functions_name_what_is_wrong():
    for iterations in (-1, 1 << 33):
        with pytest.raises(ValueError, match=r"^iterations: got"):
            _C.fma_chains(iterations, "float32")
    with pytest.raises(ValueError, match=r"^words: got address 0"):
        _C.box_muller(address(z), 0, 3, "float64")
    with pytest.raises(ValueError, match=r"^task: got address 0"):
        _C.sample_tasks("", 1, source(), B, 0)
    with pytest.raises(ValueError, match=r"^batch: got -1"):
        _C.sample_tasks("", 1, source(), -1, address(task))
