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
from fastlin.backends import triton as fastlin_triton
from fastlin.backends.triton import launch

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
OPCODES = ("HMMA", "UTCHMMA", "HGMMA", "DMMA", "FFMA", "DFMA", "RED", "REDG", "ATOM", "ATOMG", "BAR")
POINTERS = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64"}
POINTERS |= {torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def taken_down(call):
    """Kernels and arguments of the launches of a call, which are not made."""
    found = []
    fastlin_triton.backend.supports = lambda *_: None
    fl.backends.resolve.cache_clear()
    launch._launch = lambda kernel, _programs, _like, **arguments: found.append((kernel, arguments))
    call()
    return found


def problems(m, dtype, n=17, B=40, K=3, t=1, R=2, H=2):
    """Calls by name: what each op can launch, with gradients of the parameters, of the data too, or none.

    Numbers of trials, heads, layers and tokens are arguments of the kernels, not constants: one of each is all.
    """
    z, q, y, G = (torch.zeros(*shape, dtype=dtype) for shape in ((B, n, m), (B, m), (B,), (B, m, m)))
    task = torch.zeros(B, dtype=torch.int64)

    def parameters(*shapes):
        return [torch.zeros(*shape, dtype=dtype, requires_grad=True) for shape in shapes]

    one = parameters((K, t, m), (m, m), (K, m))
    layer = parameters((R, K, t, m), (R, H, m, m), (R, H, K, m))
    stack = parameters((R, K, t, m), (R, 2, H, m, m), (R, 2, H, m, m), (R, K, m))
    lowest = parameters((R, K, t, m), (R, 1, H, m, m), (R, 1, H, m, m), (R, K, m))
    d = m - 2
    covariances, cov = torch.eye(d).repeat(K, 1, 1), torch.eye(d)
    mix = fl.TaskMixture(torch.zeros(K, d), covariances, [1 / K] * K, noise_std=0.5, bias=True, feature_cov=cov)
    sphere = fl.SphereTasks(m - 1)
    of_one_task = parameters((R, 1, t, m), (R, 2, H, m, m), (R, 2, H, m, m), (R, 1, m))
    draw = mix.draw(B, n, seed=1)
    options = {"backend": "triton", "see_query": True}
    plain = {"backend": "triton"}
    place = {"seed": 1, "step": 0}
    cpu = torch.device("cpu")

    def with_data_gradients(op, x, given, **options):
        data = (x.clone().requires_grad_(), q.clone().requires_grad_())
        op(*data, y, task, *given, **options)[0].sum().backward()

    def without_gradients(op, given, **options):
        with torch.no_grad():
            op(z, q, task, *given, **options)

    def without_prompt(given):
        return [None, *given[1:]]

    def alone(given, i):
        return [a.detach().requires_grad_(i == k) for k, a in enumerate(given)]

    calls = {
        "layer": lambda: fl.prompt_loss(z, q, y, task, *one, **options),
        "layer, plain": lambda: fl.prompt_loss(z, q, y, task, *without_prompt(one), **plain),
        "layer, heads": lambda: fl.prompt_loss(z, q, y, task, *layer, **options),
        "layer, data": lambda: with_data_gradients(fl.prompt_loss, z, one, **options),
        "gram layer": lambda: fl.gram_loss(G, q, y, task, *layer, **options),
        "stack": lambda: fl.stack_loss(z, q, y, task, *stack, **options),
        "stack, plain": lambda: fl.stack_loss(z, q, y, task, *without_prompt(stack), **plain),
        "stack, only p": lambda: fl.stack_loss(z, q, y, task, *alone(stack, 0), **plain),
        "stack, only C": lambda: fl.stack_loss(z, q, y, task, *alone(stack, 2), **plain),
        "stack, data": lambda: with_data_gradients(fl.stack_loss, z, stack, **options),
        "stack, L = 1": lambda: fl.stack_loss(z, q, y, task, *lowest, first_skip=True, **options),
        "gram stack": lambda: fl.gram_stack_loss(G, q, y, task, *stack, **options),
        "gram stack, data": lambda: with_data_gradients(fl.gram_stack_loss, G, stack, **options),
        "predict": lambda: without_gradients(fl.predict, one, **options),
        "stack predict": lambda: without_gradients(fl.stack_predict, stack, **options),
        "sampled layer": lambda: fl.sampled_loss(mix, n, B, *layer, **place, **options),
        "sampled stack": lambda: fl.sampled_stack_loss(mix, n, B, *stack, **place, **options),
        "sampled, sphere": lambda: fl.sampled_stack_loss(sphere, n, B, *of_one_task, **place, **plain),
        "gram": lambda: fl.gram(z, backend="triton"),
        "sample": lambda: fastlin_triton.backend.sample(draw, False, dtype, cpu),
        "sample gram": lambda: fastlin_triton.backend.sample(draw, True, dtype, cpu),
    }
    if dtype is torch.float32:
        calls["layer, bfloat16"] = lambda: fl.prompt_loss(z.bfloat16(), q, y, task, *one, **options)
        calls["stack, bfloat16"] = lambda: fl.stack_loss(z.bfloat16(), q, y, task, *stack, **options)
        calls["stack, float16"] = lambda: fl.stack_loss(z.half(), q, y, task, *stack, **options)
    return calls


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
    options = {name: arguments[name] for name in ("num_warps", "enable_fp_fusion")}
    options |= launch.options(is_amd=target.backend == "hip")
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def resources(kernel, target):
    """Registers, stack, spills, shared memory and opcodes of a compiled kernel.

    On AMD a stack may be reserved that no instruction reads or writes: 32 bytes with triton 3.9.0. It is no spill.
    """
    found = {"shared": kernel.metadata.shared}
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]
        for name, key in (("registers", "vgpr_count"), ("stack", "private_segment_fixed_size")):
            found[name] = int(re.search(rf"\.{key}:\s+(\d+)", text).group(1))
        found["spilled"] = found["stack"] if re.search(r"\bscratch_(?:load|store)", text) else 0
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
    found |= {"registers": registers, "stack": stack, "spilled": stack}
    found["fused64"] = kernel.asm["ptx"].count("fma.rn.f64")
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
        with fastlin_triton.using(given.precision):
            launches = taken_down(call)
        for kernel, arguments in launches:
            if kind(kernel, arguments) in seen:
                continue
            seen.add(kind(kernel, arguments))
            for target in given.targets:
                start = time.perf_counter()
                made = compiled(kernel, arguments, TARGETS[target])
                row = {"call": name, "kernel": kernel.fn.__name__, "m": given.width, "dtype": given.dtype}
                row |= {"precision": given.precision}
                row |= {"target": target, "fused": arguments["enable_fp_fusion"], "triton": triton.__version__}
                row |= resources(made, TARGETS[target])
                print(json.dumps({**row, "seconds": round(time.perf_counter() - start, 1)}))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
