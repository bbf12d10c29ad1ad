"""Calls of the compiled module, correct ones and ones with wrong arguments.

The arguments are sizes and addresses, so that only calls that are harmless or must be refused can run from Python. The
C++ fuzzer (`boundary`) runs kernels on any sizes that pass the checks, in arrays of exactly these sizes.
"""

import random
import re

import numpy as np
from finds import Find

ABSURD = (-1, -(1 << 63), 1 << 45, 1 << 62, (1 << 63) - 1)
WRONG_TYPES = ("1", 1.5, {}, 1 << 64, -(1 << 70), object(), b"x")  # wrong for every argument except a flag
COUNTS = {"rows", "columns", "pairs", "iterations", "batch", "step", "stream", "block"}


class Call:
    """Arguments of a function by name, the arrays that it fills, and arrays that must outlive the call.

    Attributes
    ----------
    needed : list of int
        Indices of the inputs that must not be null.
    wrong : bool
        Whether the module must refuse the call.
    """

    def __init__(self, name, arguments, results, kept=None, needed=()):
        self.name, self.arguments, self.results, self.kept, self.needed = name, arguments, results, kept, needed
        self.wrong = False


def _addresses(arrays):
    return [0 if array is None else array.ctypes.data for array in arrays]


class Compiled:
    """Calls of `fastlin._C`."""

    corpus = (bytes(64),)

    def __init__(self):
        from fastlin import _C

        self._module = _C
        self._sets = [name for name, runs in _C.instruction_sets() if runs]

    def __call__(self, data):
        source = random.Random(data)
        make = source.choice((self._attention, self._attention, self._gram, self._sample, self._fill, self._other))
        call = make(source)
        for name in source.sample(sorted(call.arguments), source.choice((0, 1, 1, 2))):
            self._change(source, call, name)
        before = [array.copy() for array in call.results]
        try:
            getattr(self._module, call.name)(**call.arguments)
        except TypeError:
            refused = call.wrong  # pybind11 shows the signature and what it got
        except (ValueError, IndexError) as error:
            refused = call.wrong
            if not re.search(r"^\w+: got |task index", str(error)):
                raise Find(f"names no argument: {error}") from error
        else:
            if call.wrong:
                raise Find(f"{call.name} accepts {call.arguments}")
            return
        if not refused:
            raise Find(f"{call.name} refuses {call.arguments}")
        for array, old in zip(call.results, before, strict=True):
            if array.tobytes() != old.tobytes():
                raise Find(f"{call.name} wrote results before it refused {call.arguments}")

    def _common(self, source):
        return {"instruction_set": source.choice(("", *self._sets)), "threads": source.choice((1, 1, 2, 3))}

    def _attention(self, source):
        B, n, m = source.choice((0, 1, 9, 70)), source.choice((0, 1, 5)), source.choice((1, 3, 8))
        K, t, R, H, layers = (source.choice((1, 1, 2)) for _ in range(5))
        layers, drawn, is_gram = layers - 1, source.random() < 0.3, source.random() < 0.3
        dtype = np.float64 if source.random() < 0.5 else np.float32
        n = m if is_gram and not drawn else n
        m = max(m, 3) if drawn else m

        def array(*shape):
            return np.ones(shape, dtype)

        x, q, y, task = array(B, n, m), array(B, m), array(B), np.zeros(B, np.int64)
        source_tuple, kept = None, []
        if drawn:
            x = q = y = task = None
            source_tuple, kept = self._source(source, m - 1, n, K)
        shares_v = source.random() < 0.3
        square, heads = array(R, H, m, m), array(R, H, 1 if shares_v else K, m)
        stacked = array(R, layers, H, m, m)
        prompts, weight = array(R, K, t, m), array(K) if source.random() < 0.5 else None
        of_data = [None, None] if drawn else [array(B, n, m), array(B, m)]
        results = [array(R, B), array(R), array(R, K), *of_data]
        results += [array(R, K, t, m), stacked.copy(), stacked.copy(), square.copy(), heads.copy(), array(R, K, m)]
        inputs = [x, q, task, prompts, stacked, stacked, square, heads, array(R, K, m), y, weight, None, None]
        arguments = {
            **self._common(source),
            "float64": dtype is np.float64,
            "sizes": [B, n, m, K, t, R, H, layers, 0],
            "strides": [n * m, m, m],
            "factors": [1.0, 1.0, 1.0, 1.0],
            "flags": [is_gram and not drawn, source.random() < 0.5, shares_v],
            "inputs": _addresses(inputs),
            "results": _addresses(results),
            "source": source_tuple,
        }
        needed = [i for i in (0, 1, 3, 4, 5, 6, 7) if inputs[i] is not None and inputs[i].size]
        call = Call("attention", arguments, [array for array in results if array is not None], (inputs, kept), needed)
        if task is not None and B > 0 and source.random() < 0.05:
            task[source.randrange(B)] = source.choice((-1, K, 1 << 40, -(1 << 63)))
            call.wrong = True
        return call

    def _source(self, source, d, n, K):
        """The tuple of a source, and its arrays."""
        means, factors = np.ones((K, d)), np.ones((K, d, d))
        cumulative, strata = np.arange(1, K + 1) / K, np.zeros(3, np.int64)
        strata = strata if source.random() < 0.5 else None
        arrays = [means, factors, cumulative, strata, np.eye(d) if source.random() < 0.5 else None]
        seed = [source.getrandbits(64), source.getrandbits(64), source.randrange(1 << 24), source.randrange(1 << 16)]
        return [[d, n, K, 0, 3], [1.0, 0.5], _addresses([*arrays, None]), seed], arrays

    def _gram(self, source):
        B, n, m = source.choice((0, 1, 9, 70)), source.choice((0, 1, 5)), source.choice((1, 3, 8))
        z, G = np.ones((B, n, m)), np.ones((B, m, m))
        sizes = [B, n, m, n * m, m]
        arguments = {**self._common(source), "float64": True, "sizes": sizes, "addresses": _addresses((z, G))}
        return Call("gram", arguments, [G], z)

    def _sample(self, source):
        B, n, d, K = source.choice((0, 1, 70)), source.choice((0, 1, 5)), source.choice((1, 4)), source.choice((1, 2))
        is_gram, (source_tuple, kept) = source.random() < 0.5, self._source(source, d, n, K)
        task = np.ones(B, np.int64)
        arguments = {**self._common(source), "source": source_tuple, "batch": B}
        if source.random() < 0.3:
            call = Call("sample_tasks", {**arguments, "task": task.ctypes.data}, [task], kept)
        else:
            results = [np.ones((B, d + 1 if is_gram else n, d + 1)), np.ones((B, d + 1)), np.ones(B), task]
            arguments |= {"float64": True, "is_gram": is_gram, "results": _addresses(results)}
            call = Call("sample", arguments, results, kept)
            if K > 1 and B > 0 and kept[3] is not None and source.random() < 0.1:
                kept[3][:] = source.choice((-1, K, 1 << 50))
                call.wrong = True
        return call

    def _fill(self, source):
        rows, columns = source.choice((0, 1, 3, 70)), source.choice((0, 1, 5, 64))
        out = np.ones((rows, columns), source.choice((np.float32, np.float64)))
        name = source.choice(("fill_uniform", "fill_normal", "fill_chi"))
        arguments = {**self._common(source), "address": out.ctypes.data, "rows": rows, "dtype": out.dtype.name}
        arguments |= {"seed": source.getrandbits(64), "offset": source.getrandbits(64), "block": source.randrange(99)}
        arguments |= {"step": source.randrange(1 << 24), "stream": source.randrange(1 << 16)}
        freedom = [source.choice((0, 1, 2, 1 << 20, *ABSURD)) for _ in range(columns)]
        arguments |= {"freedom": freedom} if name == "fill_chi" else {"columns": columns}
        return Call(name, arguments, [out])

    def _other(self, source):
        common = {"dtype": source.choice(("float32", "float64")), "instruction_set": source.choice(("", *self._sets))}
        if source.random() < 0.3:
            return Call("fma_chains", {**common, "iterations": source.randrange(100)}, [])
        pairs = source.choice((0, 1, 5, 40))
        words, out = np.full((pairs, 2), source.getrandbits(32), np.uint32), np.ones((pairs, 2), common["dtype"])
        arguments = {**common, "pairs": pairs, "address": out.ctypes.data, "words": words.ctypes.data}
        return Call("box_muller", arguments, [out], words)

    def _change(self, source, call, name):
        """Make an argument wrong, unless the call would then need more memory than the machine has."""
        value, wrong = call.arguments[name], True
        if name in {"float64", "is_gram", "flags", "seed", "offset", "freedom"}:
            return
        if source.random() < 0.2:
            value = source.choice(WRONG_TYPES)
        elif name in {"instruction_set", "dtype"}:
            value = source.choice(("nonsense", "float16", "AVX2", "\0"))
        elif name == "threads":
            value = source.choice((0, 8193, 1 << 30, *ABSURD))
        elif name in COUNTS:
            value = source.choice(ABSURD)
        elif name == "sizes":
            value[source.randrange(3 if call.name == "gram" else len(value))] = source.choice(ABSURD)
        elif name == "source" and value is not None:
            self._change_source(source, value)
        elif name in {"inputs", "results", "addresses"}:
            kind, there = source.randrange(4), [i for i, address in enumerate(value) if address]
            if kind == 0:
                value.append(0)
            elif kind == 1:
                value.pop()
            elif kind == 2 and name == "inputs" and call.needed:
                value[source.choice(call.needed)] = 0
            else:
                value[source.choice(there)] += 1
        elif name in {"address", "words", "task"} and any(array.size for array in call.results):
            value = source.choice((0, value + 1))
        else:
            wrong = False
        call.arguments[name], call.wrong = value, call.wrong or wrong

    def _change_source(self, source, value):
        sizes, _, addresses, counter = value
        kind = source.randrange(4)
        if kind == 0:
            sizes[source.randrange(3)] = source.choice(ABSURD)
        elif kind == 1:
            addresses.append(0) if source.random() < 0.5 else addresses.pop()
        elif kind == 2:
            addresses[0] = source.choice((0, addresses[0] + 1))  # means, which the factors need
        else:
            counter[source.choice((2, 3))] = source.choice((1 << 24, 1 << 32, (1 << 64) - 1))
