"""The roofline: machine code is read as loops, every site is in the source, and peaks are the published ones."""

from collections import Counter

import pytest

from dev import roofline, sass
from dev.roofline import Site
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
        /*0040*/                   LDS R2, [R4] ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/                   MUFU.RCP R3, R3 ;
        /*0070*/                   BRA `(.L_x_0) ;
.L_x_2:
        /*0080*/                   BRA `(.L_x_3);
.L_x_3:
        /*0090*/                   NOP;
"""


@pytest.fixture
def loops():
    return sass.read(SASS)["_Z6kernelv"]


def test_machine_code_is_read_as_nested_loops(loops):
    straight, outer = loops
    assert straight.counts == {"integer": 1, "other": 1}
    assert outer.counts == {"memory": 1, "other": 2}
    (inner,) = outer.inside
    assert inner.counts == {"fma": 2, "memory": 1, "other": 1}
    assert inner.counts_at(("a.h", 9)) == inner.counts_at(("c.h", 3)) == inner.counts
    assert inner.counts_at(("a.h", 2)) == {}
    assert outer.counts_at(("b.h", 7)) == {"memory": 1}


def test_a_site_is_its_loop_as_often_as_a_sequence_goes_through_it(loops):
    site = Site("work", "a.h", "", "fma", lambda s: 10 * s.n)
    place = ("a.h", 9)
    # Two multiply-adds a step: 50 steps for n = 10, of 4 instructions each.
    assert roofline.at_site(site, CaseShape(n=10), loops, place) == {"fma": 100, "memory": 50, "other": 50}
    with_parts = Site("work", "a.h", "", "fma", lambda s: 10 * s.n, lambda s: 3)
    assert roofline.at_site(with_parts, CaseShape(n=10), loops, place)["other"] == 50 + 3 * 2
    with pytest.raises(LookupError, match=r"no loop of 'work' at a.h:4"):
        roofline.at_site(site, CaseShape(), loops, ("a.h", 4))


def test_every_site_is_in_the_source():
    for case in roofline.CASES:
        for site in case.sites:
            file, line = roofline.place_of(site)
            assert line > 0, file
            assert site.units(case.shape) > 0
    with pytest.raises(LookupError, match="has 0 lines with 'no such text'"):
        roofline.place_of(Site("work", "cuda/trial.h", "no such text", "fma", lambda s: 1))


def test_the_peaks_are_the_published_ones():
    flops = {gpu.name: 2 * gpu.fma * gpu.multiprocessors * gpu.clock for gpu in roofline.GPUS}
    assert flops == {"A100 SXM 80GB": pytest.approx(19.5e12, rel=2e-3), "H100 SXM": pytest.approx(66.9e12, rel=2e-3)}
    a100 = roofline.GPUS[0]
    seconds = a100.seconds(Counter(fma=64, integer=0, memory=64), 2.04e3)
    assert seconds["fma"] == pytest.approx(1 / (108 * 1.41e9))
    assert seconds["memory"] == pytest.approx(2 * seconds["fma"])
    assert seconds["issue"] == pytest.approx(seconds["fma"])
    assert seconds["DRAM"] == pytest.approx(1e-9)


def test_without_tools_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(sass.shutil, "which", lambda name: None)
    monkeypatch.setattr(sass, "find_spec", lambda name: None)
    assert roofline.main([]) == 2
    assert "no nvdisasm, neither on the PATH nor in the wheel triton" in capsys.readouterr().err
