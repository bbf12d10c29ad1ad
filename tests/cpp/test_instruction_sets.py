"""The object code of each instruction set, for this machine and for others.

AVX-512 and NEON are only compiled, unless the machine has them or qemu-aarch64 is installed.
"""

import re
import shutil

from support import toolchain

RELEASE = ("-O3", "-ffp-contract=off", "-fvisibility=hidden", "-fopenmp")  # as in setup.py


def functions(path):
    """Instructions of each function of an object file, by symbol."""
    by_symbol, lines = {}, []
    for line in toolchain.run(["objdump", "-d", "--no-show-raw-insn", path]).splitlines():
        if header := re.fullmatch(r"[0-9a-f]+ <(.+)>:", line):
            lines = by_symbol.setdefault(header[1], [])
        elif "\t" in line:
            lines.append(line.split("\t", 1)[1])
    assert by_symbol
    return by_symbol


def weak_symbols(path):
    lines = (line.split() for line in toolchain.run(["nm", path]).splitlines())
    return {line[-1] for line in lines if line[-2] in "WwVvu"}


def has(code, pattern):
    return any(re.search(pattern, line) for lines in code.values() for line in lines)


def test_object_code_of_x86(tmp_path):
    sources = {f"cpu/isa_{name}.cpp": RELEASE for name in ("avx512", "avx2", "scalar")}
    avx512, avx2, scalar = toolchain.objects(toolchain.native(), tmp_path, sources)
    code = functions(avx512)
    assert has(code, r"^vfmadd\w+p[sd] .*%zmm")
    code = functions(avx2)
    assert has(code, r"^vfmadd\w+p[sd] .*%ymm")
    assert not has(code, "%zmm")
    code = functions(scalar)
    assert not has(code, "%[yz]mm")
    assert not has(code, r"^vfmadd")
    # The linker keeps one copy of a weak function for all machines. Static initialisers and `runs_here` also run on
    # all machines.
    for made in (avx512, avx2):
        code, weak = functions(made), weak_symbols(made)
        everywhere = {name for name in code if name in weak or name.startswith("_GLOBAL__sub_I") or "_FUN" in name}
        assert everywhere & weak, "no weak function found: does the search for them still work?"
        assert any("_FUN" in name for name in everywhere)
        for name in everywhere:
            assert not has({name: code[name]}, r"^v(?!err|erw)|%[yz]mm"), f"{made.name}: {name}"


def test_x86_with_clang(tmp_path):
    sources = {f"cpu/isa_{name}.cpp": ("-O1",) for name in ("avx512", "avx2")}
    avx512, avx2 = toolchain.objects(toolchain.cross("x86_64-linux-gnu"), tmp_path, sources)
    assert has(functions(avx512), r"^vfmadd\w+p[sd] .*%zmm")
    assert has(functions(avx2), r"^vfmadd\w+p[sd] .*%ymm")
    assert not has(functions(avx2), "%zmm")


def test_aarch64_compiles_and_runs_where_qemu_is(tmp_path):
    """NEON is only compiled, unless qemu-aarch64 can run the driver of the sanitizer tests.

    Without qemu nothing is linked: the first time, zig builds the C++ library for the target, which takes minutes.
    """
    compiler = toolchain.cross("aarch64-linux-gnu")
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    sources = [f"cpu/{name}.cpp" for name in ("isa_neon", "isa_scalar", "dispatch")]
    sources += [f"testing/{name}.cpp" for name in ("attention_driver", "attention_cases", "attention_oracle")]
    made = toolchain.objects(compiler, tmp_path, dict.fromkeys(sources, ("-O1", "-DFASTLIN_WITHOUT_PORTABLE")))
    # binutils for x86 lists symbols of other machines but does not disassemble them: hence the assembly.
    table = r" [BDR] _ZN7fastlin4neon15instruction_setE"
    assert re.search(table, toolchain.run(["nm", made[0]]))
    assert " U _ZN7fastlin4neon15instruction_setE" in toolchain.run(["nm", made[2]])
    neon = toolchain.SOURCES / "cpu" / "isa_neon.cpp"
    flags = ("-O1", f"-I{toolchain.SOURCES}")
    # Not -Werror: zig passes an option that -S does not use.
    toolchain.run([*compiler, "-std=c++17", *flags, "-S", neon, "-o", tmp_path / "neon.s"])
    assembly = (tmp_path / "neon.s").read_text("latin-1")  # tables of constants are strings of arbitrary bytes
    assert re.search(r"\bfmla\tv\d+\.4s", assembly)
    assert re.search(r"\bfmla\tv\d+\.2d", assembly)
    if qemu is not None:
        driver = tmp_path / "driver"
        toolchain.run([*compiler, "-static", *made, "-o", driver])
        assert toolchain.run([qemu, driver, "edges"]).startswith("ok ")
