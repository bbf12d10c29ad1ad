"""The public ops: prompted masked linear attention and its loss, over batches, tasks and trials.

A prediction depends on a sequence's tokens only through their Gram matrix G and the query q:

    G    = sum_t p p' + sum_i z_i z_i'  (+ q q' when see_query)
    layer:  yhat = scale sum_h (W_h' q) . (G v_hk)                            W = Wq Wk', v_k = Wv h_k
    stack:  T = rho I + scale sum_h A_h G C_h,  G <- T' G T,  q <- T' q,  yhat = q_L . h_k

because Z + scale Z A (Z' M Z) C = Z T for tokens Z in rows and the mask M, so that Z' M Z becomes T' Z' M Z T. The
derivatives are in `fastlin.backends.eager`. Shapes, for all ops:

    z (B, n, m)   q (B, m)   G (B, m, m)   y (B,)   task (B,) integers in [0, K) or None for one task
    p (K, t, m) or None   W (m, m)   v (K, m) or (m,)   A, C (L, m, m)   h (K, m) or (m,)   weight (K,)
    R trials lead in all parameters: p (R, K, t, m), W (R, m, m), v (R, K, m), A, C (R, L, m, m), h (R, K, m)
    H attention heads follow: W (R, H, m, m), v (R, H, K, m), A, C (R, L, H, m, m)

K is the number of tasks of p or of the heads, else of weight, else task.max() + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastlin.ops import registered
from fastlin.validation import Settings

Weight = Tensor | Sequence[float] | None


def prompt_loss(
    z: Tensor,
    q: Tensor,
    y: Tensor,
    task: Tensor | None,
    p: Tensor | None,
    W: Tensor,
    v: Tensor,
    *,
    weight: Weight = None,
    scale: float = 1.0,
    see_query: bool = False,
    backend: str = "auto",
    check_finite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Squared error of one layer of prompted masked linear attention, whole and per task.

    Parameters
    ----------
    z : Tensor, shape (B, n, m)
        Context tokens; n may be 0.
    q : Tensor, shape (B, m)
        Query tokens, label slot zero.
    y : Tensor, shape (B,)
        Targets. The loss is not differentiated in them.
    task : Tensor or None
        (B,) task of each sequence; None is one task.
    p : Tensor or None
        (K, t, m) prompt tokens of each task, or (R, K, t, m); None is no prompt.
    W : Tensor
        (m, m), (R, m, m) or (R, H, m, m): Wq Wk'.
    v : Tensor
        (m,), (K, m), (R, K, m) or (R, H, K, m): Wv h_k.
    weight : Tensor, sequence of float or None
        (K,): the loss is sum_k weight_k (mean over task k). None: the mean over the batch.
    scale : float
        Factor of the attention.
    see_query : bool
        Whether the query is among the keys and values.
    backend : str
        "auto", or the one that must serve; see `fastlin.info`.
    check_finite : bool
        Whether a non-finite input raises.

    Returns
    -------
    loss : Tensor, shape () or (R,)
        0 for an empty batch.
    per_task : Tensor, shape (K,) or (R, K)
        Mean over each task, 0 for an absent one.

    Notes
    -----
    Differentiable in p, W, v, and in z and q when they require grad. Equal to `fastlin.reference.prompt_loss`, which
    forms [p; z; q], its attention scores and their mask.

    Examples
    --------
    >>> mix = fl.TaskMixture([[1.0, 0.0], [0.0, -1.0]])
    >>> z, q, y, task = mix.sample(batch=64, n=10)
    >>> p, W, v = torch.zeros(2, 1, 3), torch.eye(3).requires_grad_(), torch.ones(2, 3)
    >>> loss, per_task = fl.prompt_loss(z, q, y, task, p, W, v, scale=0.1)
    >>> loss.backward()
    >>> loss.shape, per_task.shape, W.grad.shape
    (torch.Size([]), torch.Size([2]), torch.Size([3, 3]))
    """
    tensors = (z, q, task, p, None, None, W, v, None)
    settings = Settings(scale, see_query, None, 1.0, backend, check_finite)
    return registered.loss("prompt_loss", tensors, y, weight, settings)


def gram_loss(
    G: Tensor,
    q: Tensor,
    y: Tensor,
    task: Tensor | None,
    p: Tensor | None,
    W: Tensor,
    v: Tensor,
    *,
    weight: Weight = None,
    scale: float = 1.0,
    see_query: bool = False,
    backend: str = "auto",
    check_finite: bool = False,
) -> tuple[Tensor, Tensor]:
    """`prompt_loss` of sequences that are given by their Gram matrices.

    Parameters
    ----------
    G : Tensor, shape (B, m, m)
        sum_i z_i z_i', without prompt and query, which the op adds. The op reads the symmetric part of G, so the
        gradient of G is symmetric.
    q, y, task, p, W, v, weight, scale, see_query, backend, check_finite
        As in `prompt_loss`.

    Returns
    -------
    loss : Tensor, shape () or (R,)
    per_task : Tensor, shape (K,) or (R, K)

    Notes
    -----
    `prompt_loss(z, ...)` equals `gram_loss(gram(z), ...)`. Differentiable in p, W, v, and in G and q.

    Examples
    --------
    >>> z, q, y, task = fl.SphereTasks(2).sample(batch=64, n=10)
    >>> W, v = torch.eye(3), torch.ones(3)
    >>> by_gram, _ = fl.gram_loss(fl.gram(z), q, y, task, None, W, v)
    >>> torch.allclose(by_gram, fl.prompt_loss(z, q, y, task, None, W, v)[0])
    True
    """
    tensors = (G, q, task, p, None, None, W, v, None)
    settings = Settings(scale, see_query, None, 1.0, backend, check_finite)
    return registered.loss("gram_loss", tensors, y, weight, settings)


def stack_loss(
    z: Tensor,
    q: Tensor,
    y: Tensor,
    task: Tensor | None,
    p: Tensor | None,
    A: Tensor,
    C: Tensor,
    h: Tensor,
    *,
    weight: Weight = None,
    scale: float = 1.0,
    see_query: bool = False,
    first_skip: bool | None = None,
    residual: float = 1.0,
    backend: str = "auto",
    check_finite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Squared error of a stack of L layers of prompted masked linear attention, whole and per task.

    Parameters
    ----------
    z, q, y, task, p, weight, scale, see_query, backend, check_finite
        As in `prompt_loss`.
    A, C : Tensor
        (L, m, m), (R, L, m, m) or (R, L, H, m, m): Wq Wk' and Wv of each layer.
    h : Tensor
        (m,), (K, m) or (R, K, m): heads that read the query token after the last layer.
    first_skip : bool or None
        Whether the first layer has a skip connection; the others do. None: when L >= 2.
    residual : float
        Factor of the skip connections.

    Returns
    -------
    loss : Tensor, shape () or (R,)
    per_task : Tensor, shape (K,) or (R, K)

    Notes
    -----
    Costs O(L m^3) per sequence beyond forming G, whatever n is; attention over the tokens costs O(L n^2 m).
    Differentiable in p, A, C, h, and in z and q. Equal to `fastlin.reference.stack_loss`.

    Examples
    --------
    >>> z, q, y, task = fl.SphereTasks(2).sample(batch=64, n=10)
    >>> A, C, h = torch.eye(3).repeat(2, 1, 1), torch.eye(3).repeat(2, 1, 1), torch.ones(3)
    >>> loss, per_task = fl.stack_loss(z, q, y, task, None, A, C, h, scale=0.1)
    >>> loss.shape, per_task.shape
    (torch.Size([]), torch.Size([1]))
    """
    tensors = (z, q, task, p, A, C, None, None, h)
    settings = Settings(scale, see_query, first_skip, residual, backend, check_finite)
    return registered.loss("stack_loss", tensors, y, weight, settings)


def gram_stack_loss(
    G: Tensor,
    q: Tensor,
    y: Tensor,
    task: Tensor | None,
    p: Tensor | None,
    A: Tensor,
    C: Tensor,
    h: Tensor,
    *,
    weight: Weight = None,
    scale: float = 1.0,
    see_query: bool = False,
    first_skip: bool | None = None,
    residual: float = 1.0,
    backend: str = "auto",
    check_finite: bool = False,
) -> tuple[Tensor, Tensor]:
    """`stack_loss` of sequences that are given by their Gram matrices.

    Parameters
    ----------
    G : Tensor, shape (B, m, m)
        As in `gram_loss`.
    q, y, task, p, A, C, h, weight, scale, see_query, first_skip, residual, backend, check_finite
        As in `stack_loss`.

    Returns
    -------
    loss : Tensor, shape () or (R,)
    per_task : Tensor, shape (K,) or (R, K)

    Examples
    --------
    >>> G, q, y, task = fl.SphereTasks(2).sample_gram(batch=64, n=10**9)
    >>> A, C, h = torch.eye(3).repeat(2, 1, 1), torch.eye(3).repeat(2, 1, 1), torch.ones(3)
    >>> loss, per_task = fl.gram_stack_loss(G, q, y, task, None, A, C, h, scale=1e-10)
    >>> loss.shape, per_task.shape
    (torch.Size([]), torch.Size([1]))
    """
    tensors = (G, q, task, p, A, C, None, None, h)
    settings = Settings(scale, see_query, first_skip, residual, backend, check_finite)
    return registered.loss("gram_stack_loss", tensors, y, weight, settings)


def predict(
    z: Tensor,
    q: Tensor,
    task: Tensor | None,
    p: Tensor | None,
    W: Tensor,
    v: Tensor,
    *,
    scale: float = 1.0,
    see_query: bool = False,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """Predictions of one layer of prompted masked linear attention.

    Parameters
    ----------
    z, q, task, p, W, v, scale, see_query, backend, check_finite
        As in `prompt_loss`.

    Returns
    -------
    Tensor, shape (B,) or (R, B)
        Differentiable in z, q, p, W, v.

    Examples
    --------
    >>> z, q, y, task = fl.SphereTasks(2).sample(batch=64, n=10)
    >>> fl.predict(z, q, task, None, torch.eye(3), torch.ones(3)).shape
    torch.Size([64])
    >>> W, v = torch.eye(3).repeat(5, 1, 1), torch.ones(5, 1, 3)  # five trials
    >>> fl.predict(z, q, task, None, W, v).shape
    torch.Size([5, 64])
    """
    tensors = (z, q, task, p, None, None, W, v, None)
    settings = Settings(scale, see_query, None, 1.0, backend, check_finite)
    return registered.predict("predict", tensors, settings)


def stack_predict(
    z: Tensor,
    q: Tensor,
    task: Tensor | None,
    p: Tensor | None,
    A: Tensor,
    C: Tensor,
    h: Tensor,
    *,
    scale: float = 1.0,
    see_query: bool = False,
    first_skip: bool | None = None,
    residual: float = 1.0,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """Predictions of a stack of layers of prompted masked linear attention.

    Parameters
    ----------
    z, q, task, p, A, C, h, scale, see_query, first_skip, residual, backend, check_finite
        As in `stack_loss`.

    Returns
    -------
    Tensor, shape (B,) or (R, B)
        Differentiable in z, q, p, A, C, h.

    Examples
    --------
    >>> z, q, y, task = fl.SphereTasks(2).sample(batch=64, n=10)
    >>> A, C, h = torch.eye(3).repeat(2, 1, 1), torch.eye(3).repeat(2, 1, 1), torch.ones(3)
    >>> fl.stack_predict(z, q, task, None, A, C, h, scale=0.1).shape
    torch.Size([64])
    """
    tensors = (z, q, task, p, A, C, None, None, h)
    settings = Settings(scale, see_query, first_skip, residual, backend, check_finite)
    return registered.predict("stack_predict", tensors, settings)


def gram(
    z: Tensor,
    p: Tensor | None = None,
    task: Tensor | None = None,
    q: Tensor | None = None,
    *,
    see_query: bool = False,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """Gram matrices of sequences, with their prompts and, when it is seen, their query.

    Parameters
    ----------
    z : Tensor, shape (B, n, m)
        Context tokens.
    p : Tensor or None
        (K, t, m) or (R, K, t, m) prompt tokens.
    task : Tensor or None
        (B,) task of each sequence.
    q : Tensor or None
        (B, m) queries, added when `see_query` is True.
    see_query, backend, check_finite
        As in `prompt_loss`.

    Returns
    -------
    Tensor, shape (B, m, m) or (R, B, m, m)
        sum_t p p' + sum_i z_i z_i' (+ q q'). `gram_loss` adds prompt and query itself: it takes `gram(z)`.
        Differentiable in z, p, q.

    Examples
    --------
    >>> z = torch.tensor([[[1.0, 2.0], [3.0, 0.0]]])
    >>> fl.gram(z)
    tensor([[[10.,  2.],
             [ 2.,  4.]]])
    """
    tensors = (z, q, task, p, None, None, None, None, None)
    settings = Settings(see_query=see_query, backend=backend, check_finite=check_finite)
    return registered.predict("gram", tensors, settings)
