"""Every op with its gradients on an installation of fastlin, with the torch that is there; prints JSON.

It needs fastlin and torch alone. Run `python tests/support/smoke.py` in an environment where a wheel was installed.
Exits with 1 where a result differs from `fastlin.reference`.
"""

import importlib.metadata
import json
import sys

import torch

import fastlin as fl

MIX = fl.TaskMixture([[1.0, 0.0, 0.5], [0.0, -1.0, 0.0]], torch.eye(3).expand(2, 3, 3), [0.5, 0.5], noise_std=0.1)
N, B, M = 7, 50, MIX.m


def parameters(op, dtype, lead):
    """Random parameters of an op; `lead` is () or the (R,) of trials."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"p": (2, 2, M), "W": (M, M), "v": (2, M), "A": (2, M, M), "C": (2, M, M), "h": (2, M)}
    letters = "pACh" if "stack" in op else "p" if op == "gram" else "pWv"
    made = [torch.randn(*lead, *sizes[letter], generator=generator, dtype=dtype) * 0.3 for letter in letters]
    return [one.requires_grad_() for one in made]


def data(op, dtype):
    """What an op takes before its parameters."""
    if op.startswith("sampled"):
        return (MIX, N, B), {"seed": 3, "step": 4}
    x, q, y, task = (MIX.sample_gram if op.startswith("gram_") else MIX.sample)(B, N, dtype=dtype)
    return ((x, q, task) if "predict" in op else (x, q, y, task)), {}


def called(module, op, dtype, lead, **options):
    """Results and gradients of an op of a module, `fastlin` or `fastlin.reference`."""
    made = parameters(op, dtype, lead)
    if op == "gram":
        z, _, _, task = MIX.sample(B, N, dtype=dtype)
        results = [module.gram(z, made[0], task)]
    else:
        given, place = data(op, dtype)
        found = getattr(module, op)(*given, *made, scale=0.1, **place, **options)
        results = list(found) if isinstance(found, tuple) else [found]
    results[0].square().sum().backward()
    return [*(one.detach() for one in results), *(one.grad for one in made)]


def largest_error(op, dtype, lead, backend):
    ours = called(fl, op, dtype, lead, **({} if op == "gram" else {"backend": backend}))
    literal = called(fl.reference, op, dtype, lead)
    return max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in zip(ours, literal, strict=True))


def transformed():
    """Largest differences of an op under torch.compile and vmap from the plain call."""
    z, q, y, task = MIX.sample(B, N)
    p, W, v = (one.detach() for one in parameters("prompt_loss", torch.float32, (3,)))

    def loss(p, W, v):
        return fl.prompt_loss(z, q, y, task, p, W, v, scale=0.1)[0]

    plain = loss(p, W, v)
    compiled = torch.compile(loss, backend="aot_eager")
    return {
        "torch.compile": float((compiled(p, W, v) - plain).abs().max()),
        "vmap": float((torch.vmap(loss)(p, W, v) - plain).abs().max()),
        "vmap of grad": float((torch.vmap(torch.func.grad(loss))(p, W, v) - _gradient(loss, p, W, v)).abs().max()),
    }


def _gradient(loss, p, W, v):
    p = p.clone().requires_grad_()
    return torch.autograd.grad(loss(p, W, v).sum(), p)[0]


def main():
    errors = {}
    for op in fl.reference.__all__:
        for dtype in (torch.float32, torch.float64):
            for lead in ((), (3,)):
                key = f"{op} {str(dtype).removeprefix('torch.')} {lead}"
                errors[key] = max(largest_error(op, dtype, lead, backend) for backend in ("cpu", "eager"))
    run = fl.train(MIX, "joint", 5, trials=2, steps=20, batch=128, progress=False)
    limits = {key: 1e-4 if "float32" in key else 1e-11 for key in errors}
    transforms = transformed()
    wrong = [key for key, error in errors.items() if not error < limits[key]]
    wrong += [key for key, error in transforms.items() if not error < 1e-4]
    wrong += [] if bool(torch.isfinite(run.risk).all()) else ["train"]
    found = {
        "file": fl.__file__,
        "versions": {"fastlin": importlib.metadata.version("fastlin"), "torch": torch.__version__},
        "extension": fl.info()["extension"],
        "calls": len(errors),
        "largest error": {bits: max(e for key, e in errors.items() if bits in key) for bits in ("float32", "float64")},
        "transforms": transforms,
        "wrong": wrong,
        "draws": "matplotlib" in sys.modules,
    }
    print(json.dumps(found, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
