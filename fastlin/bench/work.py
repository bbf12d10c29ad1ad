"""What a call must do at least: multiply-adds and bytes of data, by which times become GFLOP/s and GB/s.

They are those of the best algorithm known for the op, whatever a contender does: a form that does more work, or passes
over the data more often, shows as a lower rate.
"""

from __future__ import annotations

from fastlin.bench.cases import ARGUMENTS, SAMPLED, CaseShape


def multiply_adds(shape: CaseShape) -> int:
    """Useful multiply-adds of a call, with the gradients of all parameters where the op has a loss.

    One layer on tokens takes the query's row, W'q, then z.a and z.v, and with gradients c and e and dW; or half of each
    Gram matrix once, and G v, G a and W'q, dW for each trial: whichever is less. A layer of a stack but the last one
    has 4 products of m x m matrices, and 6 more in reverse. Where data are drawn, G is a triangle times its transpose;
    random numbers are not counted.
    """
    n, m, R, op = shape.n, shape.m, shape.R or 1, shape.op
    gradients = op not in ("predict", "stack_predict", "gram")
    if op in SAMPLED:
        forming = m * (m + 1) * (m + 2) // 6
    elif op in ("gram_loss", "gram_stack_loss"):
        forming = 0
    else:
        forming = n * m * (m + 1) // 2
    if op == "gram":
        return shape.B * forming * (1 if shape.R is None else R)
    per_layer = (10 if gradients else 4) * m * m * m
    by_gram = forming + R * ((4 if gradients else 2) * m * m + (shape.layers - 1) * per_layer)
    if op in ("prompt_loss", "predict"):
        by_row = R * ((4 if gradients else 2) * n * m + (2 if gradients else 1) * m * m)
        return shape.B * min(by_gram, by_row)
    return shape.B * by_gram


def bytes_moved(shape: CaseShape, size: int = 4) -> int:
    """Bytes of the data that a call must read once and, without a loss, of its results; of numbers of `size` bytes.

    Parameters are not counted: they stay in the cache. An op that draws its data reads none.
    """
    if shape.op in SAMPLED:
        return 0
    n, m = shape.n, shape.m
    numbers = {"z": n * m, "G": m * m, "q": m, "y": 1}
    names = ARGUMENTS[shape.op]
    results = {"predict": 1, "stack_predict": 1, "gram": m * m}.get(shape.op, 0) * (shape.R or 1)
    return shape.B * (size * (sum(numbers.get(name, 0) for name in names) + results) + 8 * ("task" in names))
