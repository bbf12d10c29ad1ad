"""Every launch that the public ops make, compiled for GPUs that are not here. Run as a program: one JSON line a kernel.

The backend runs on tensors of the CPU with its launches taken down instead of made, so that what is compiled is what a
call would launch: the kernel, the types of its arguments, its compile-time constants and options.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import fastlin as fl
from fastlin.backends import triton as backend
from fastlin.backends.triton import launch

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
OPCODES = ("HMMA", "UTCHMMA", "HGMMA", "DMMA", "FFMA", "DFMA", "RED", "REDG", "ATOM", "ATOMG", "BAR")
POINTERS = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64", torch.bfloat16: "*bf16"}


def taken_down(call):
    """Kernels and arguments of the launches of a call, which are not made."""
    found = []
    backend.supports = lambda *_: None
    fl.backends.resolve.cache_clear()
    launch._launch = lambda kernel, _programs, _like, **arguments: found.append((kernel, arguments | launch.OPTIONS))
    call()
    return found


def problems(m, dtype, n=17, B=40, K=3, t=1, R=2):
    """Calls by name: each op's kinds of launch, with gradients of the parameters, and of the data."""
    z, q, y, G = (torch.zeros(*shape, dtype=dtype) for shape in ((B, n, m), (B, m), (B,), (B, m, m)))
    task = torch.zeros(B, dtype=torch.int64)

    def parameters(*shapes):
        return [torch.zeros(*shape, dtype=dtype, requires_grad=True) for shape in shapes]

    one = parameters((K, t, m), (m, m), (K, m))
    layer = parameters((R, K, t, m), (R, m, m), (R, K, m))
    stack = parameters((R, K, t, m), (R, 2, m, m), (R, 2, m, m), (R, K, m))
    d = m - 2
    covariances, cov = torch.eye(d).repeat(K, 1, 1), torch.eye(d)
    mix = fl.TaskMixture(torch.zeros(K, d), covariances, [1 / K] * K, noise_std=0.5, bias=True, feature_cov=cov)
    draw = mix.draw(B, n, seed=1)
    options = {"backend": "triton", "see_query": True}
    place = {"seed": 1, "step": 0, **options}
    cpu = torch.device("cpu")

    def with_data_gradients():
        data = (z.clone().requires_grad_(), q.clone().requires_grad_())
        fl.stack_loss(*data, y, task, *stack, **options)[0].sum().backward()

    def predict():
        with torch.no_grad():
            fl.stack_predict(z, q, task, *stack, **options)

    return {
        "layer": lambda: fl.prompt_loss(z, q, y, task, *one, **options),
        "layer, bfloat16": lambda: fl.prompt_loss(z.bfloat16(), q, y, task, *one, **options),
        "gram layer": lambda: fl.gram_loss(G, q, y, task, *layer, **options),
        "stack": lambda: fl.stack_loss(z, q, y, task, *stack, **options),
        "stack, data": with_data_gradients,
        "predict": predict,
        "sampled layer": lambda: fl.sampled_loss(mix, n, B, *layer, **place),
        "sampled stack": lambda: fl.sampled_stack_loss(mix, n, B, *stack, **place),
        "gram": lambda: fl.gram(z, backend="triton"),
        "sample": lambda: backend.sample(draw, False, dtype, cpu),
        "sample gram": lambda: backend.sample(draw, True, dtype, cpu),
    }


def compiled(kernel, arguments, target):
    """A launch's kernel, compiled for a target."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
    options = {name: arguments[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def resources(kernel, target):
    """Registers, stack, shared memory and opcodes of a compiled kernel."""
    found = {"shared": kernel.metadata.shared}
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]
        for name, key in (("registers", "vgpr_count"), ("stack", "private_segment_fixed_size")):
            found[name] = int(re.search(rf"\.{key}:\s+(\d+)", text).group(1))
        patterns = {"MFMA": "v_mfma", "XF32": r"v_mfma\w*_xf32", "ATOM": "(?:global|flat|buffer)_atomic"}
        return found | {"opcodes": {name: len(re.findall(pattern, text)) for name, pattern in patterns.items()}}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    # Of float64 multiply-adds PTX tells which are fused; SASS has more of them, inside divisions and roots.
    found |= {"registers": registers, "stack": stack, "fused64": kernel.asm["ptx"].count("fma.rn.f64")}
    return found | {"opcodes": {name: len(re.findall(rf"\b{name}\b", sass)) for name in OPCODES}}


def kind(kernel, arguments):
    """What a compiled kernel depends on, as text."""
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    parts = []
    for name, value in sorted(arguments.items()):
        if isinstance(value, torch.Tensor):
            parts.append(f"{name} {value.dtype}")
        elif value is None or name in constants:
            parts.append(f"{name} {value}")
    return " ".join([kernel.fn.__name__, *parts])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--width", type=int, default=11)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--precision", default="ieee")
    parser.add_argument("--calls", nargs="+")
    given = parser.parse_args()
    seen = set()
    for name, call in problems(given.width, getattr(torch, given.dtype)).items():
        if given.calls and name not in given.calls:
            continue
        with backend.using(given.precision):
            launches = taken_down(call)
        for kernel, arguments in launches:
            if kind(kernel, arguments) in seen:
                continue
            seen.add(kind(kernel, arguments))
            for target in given.targets:
                start = time.perf_counter()
                made = compiled(kernel, arguments, TARGETS[target])
                row = {"call": name, "kernel": kernel.fn.__name__, "m": given.width, "dtype": given.dtype}
                row |= {"target": target, "fused": arguments["enable_fp_fusion"], "triton": triton.__version__}
                row |= resources(made, TARGETS[target])
                print(json.dumps({**row, "seconds": round(time.perf_counter() - start, 1)}))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
