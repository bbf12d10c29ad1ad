"""The model of times on paper: machine code is read as loops, counted as often as they run, and every part is found."""

from pathlib import Path

import pytest

from dev import paper, roofline, sass
from dev.paper import GPUS, Launch, Part
from fastlin.bench.cases import CaseShape

SASS = """
//--------------------- .text._Z6kernelv --------------------------
.text._Z6kernelv:
	//## File "/x/a.h", line 1
        /*0000*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_0:
	//## File "/x/b.h", line 7 inlined at "/x/a.h", line 2
	//## File "/x/a.h", line 2
        /*0010*/                   LD.E R2, [R4.64] ;
.L_x_1:
	//## File "/x/c.h", line 3 inlined at "/x/a.h", line 9
	//## File "/x/a.h", line 9
        /*0020*/                   FFMA R3, R2, R2, R3 ;
        /*0030*/              @!P0 FFMA R3, R2, R2, R3 ;
        /*0040*/                   LDS.128 R2, [R4] ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
	//## File "/x/a.h", line 4
        /*0060*/                   MUFU.RCP R3, R3 ;
        /*0070*/                   BRA `(.L_x_0) ;
        /*0080*/                   EXIT ;
.L_x_2:
        /*0090*/                   IADD3 R1, R1, 0x1, RZ ;
        /*00a0*/                   BRA `(.L_x_0) ;
.L_x_3:
        /*00b0*/                   BRA `(.L_x_3);
        /*00c0*/                   NOP;
$_Z6kernelv$rare:
        /*00d0*/                   DMUL R2, R2, R2 ;
        /*00e0*/                   RET.REL.NODEC R20 `(_Z6kernelv) ;
"""


@pytest.fixture
def kernels():
    return sass.read(SASS)


def test_machine_code_is_read_as_nested_loops(kernels):
    straight, outer = kernels["_Z6kernelv"]
    assert straight.counts == {"alu": 1, "other": 1}
    assert outer.counts == {"generic": 1, "special": 1, "other": 1}
    assert outer.line == ("a.h", 4)
    (inner,) = outer.inside
    assert inner.counts == {"fma": 2, "shared": 1, "other": 1}
    assert inner.line == ("c.h", 3)
    assert inner.has(("a.h", 9))
    assert not inner.has(("a.h", 2))
    assert outer.has(("b.h", 7))
    assert sum(x.shared_clocks for x in inner.own) == 2
    assert kernels["_Z6kernelv$rare"][0].counts == {"double": 1, "other": 1}


def of(opcode, stall, writes=None, waits=()):
    word = stall << 41 | (7 if writes is None else writes) << 46 | 7 << 49 | sum(1 << b for b in waits) << 52
    return sass.Instruction(0, opcode, None, (), sass.Control.of(word))


def test_a_warp_waits_for_stalls_and_for_what_it_has_loaded():
    assert sass.clocks([of("FFMA", 2), of("FFMA", 4)]) == 6
    # The load is there after 30 clocks, and the product issues then.
    assert sass.clocks([of("LDS", 1, writes=0), of("FFMA", 4, waits=[0])]) == 34
    # Loaded for the next round: it is there before its product comes.
    ahead = [of("FFMA", 4, waits=[0]), of("LDS", 1, writes=0), *[of("FFMA", 10)] * 4]
    assert sass.clocks(ahead) == 45


def test_a_launch_counts_every_loop_as_often_as_it_runs(kernels, tmp_path):
    (tmp_path / "c.h").write_text("\n\nfor (inner)\n")
    (tmp_path / "a.h").write_text("\n\n\nfor (outer)\n")
    parts = (Part("c.h", "for (inner)", lambda s: 100 * s.B, ("fma", 1)), Part("a.h", "for (outer)", lambda s: s.B))
    launch = Launch("kernel", lambda s: 4, 64, lambda s: 0, parts, lambda s: 1e6, ((r"\$rare", lambda s: 5),))
    shape, gpu = CaseShape(B=10), GPUS[1]
    found = paper.estimate(launch, shape, gpu, kernels, {"_Z6kernelv": 32}, tmp_path)
    # Two multiply-adds a round: unrolled twice, 500 rounds.
    assert found.counts["fma"] == 1000
    assert found.counts["shared"] == 500
    assert found.counts["special"] == 10
    assert found.counts["alu"] == 8
    assert found.counts["double"] == 5
    assert found.uncounted == []
    without = Launch("kernel", lambda s: 4, 64, lambda s: 0, parts[:1], lambda s: 1e6)
    assert len(paper.estimate(without, shape, gpu, kernels, {"_Z6kernelv": 32}, tmp_path).uncounted) == 1
    assert found.bound == "DRAM"
    assert found.seconds == pytest.approx(1e6 / gpu.bandwidth)
    call = paper.total([found, found])
    assert call.launches == 2
    assert call.counts["fma"] == 2000
    assert call.seconds == pytest.approx(2 * found.seconds + paper.LAUNCH + paper.GAP)


def test_a_part_that_is_not_in_the_code_is_refused(kernels, tmp_path):
    (tmp_path / "a.h").write_text("for (one)\n")
    with pytest.raises(LookupError, match=r"0 loops at a\.h:1"):
        paper.loops_of(Part("a.h", "for (one)", lambda s: 1), kernels["_Z6kernelv"], tmp_path)
    with pytest.raises(LookupError, match=r"a\.h has 0 lines with 'for \(two\)'; wants one"):
        paper.loops_of(Part("a.h", "for (two)", lambda s: 1), kernels["_Z6kernelv"], tmp_path)


def test_every_part_is_in_the_sources():
    parts = {part for case in roofline.CASES for launch in case.launches for part in launch.parts}
    for part in parts:
        paper.line_of(part.file, part.text, roofline.SOURCES)
        if part.inside:
            paper.line_of(*part.inside.split(": ", 1), roofline.SOURCES)


def test_peaks_are_those_published():
    a100, h100 = GPUS
    flops = [gpu.multiprocessors * gpu.clock * gpu.rates["fma"] * 64 for gpu in (a100, h100)]
    assert flops == pytest.approx([19.5e12, 66.9e12], rel=0.01)
    assert Path(roofline.SOURCES).name == "csrc"


def test_blocks_fit_by_registers_shared_memory_and_threads():
    h100 = GPUS[1]
    assert h100.resident(256, 255, 0) == 1
    assert h100.resident(256, 128, 0) == 2
    assert h100.resident(256, 32, 99 << 10) == 2
    assert h100.resident(1024, 32, 0) == 2
