"""The division of csrc/cuda/dispatch/quantize.cuh, tried on this machine's processor with all numbers: 10^9."""

import shutil
import subprocess

import pytest
from commands import ROOT


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_quotients_are_rounded_as_in_ieee_754(tmp_path):
    program, source = tmp_path / "division", ROOT / "tests" / "division.cpp"
    flags = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-ffp-contract=off"]
    subprocess.run(["c++", *flags, source, "-o", program], check=True, timeout=300)
    assert subprocess.run([program], capture_output=True, text=True, timeout=300, check=True).stdout == "0\n"
