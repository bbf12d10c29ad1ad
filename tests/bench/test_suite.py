"""The suite of pytest-benchmark runs: checked contenders, groups, JSON and comparison."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pytest_in(folder, *arguments):
    quick = ["--smoke", "--benchmark-min-rounds=1", "--benchmark-max-time=0.001", "--benchmark-warmup=off"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "benchmarks"]
    options = ["-k", "predict or (sampled and vmap)", *quick, f"--benchmark-storage={folder}", *arguments]
    # What tells that these tests run in several processes would switch the benchmarks off.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_suite_runs_writes_json_and_compares(tmp_path):
    done = pytest_in(tmp_path, "--benchmark-save=first")
    assert done.returncode == 0, done.stdout + done.stderr
    (saved,) = tmp_path.rglob("*first.json")
    found = json.loads(saved.read_text())["benchmarks"]
    groups = {one["group"].split(" threads")[0] for one in found}
    assert groups == {
        "predict: predict B=64 n=50 m=11 float32",
        "stack-predict: stack_predict B=64 n=50 m=11 L=3 float32",
        "sampled-trials: sampled_loss B=64 n=50 m=11 R=4 float32",
    }
    assert {one["extra_info"]["label"] for one in found} >= {"fastlin", "reference", "eager", "numpy", "vmap-gram"}
    assert all(one["extra_info"]["error"] is None or one["extra_info"]["error"] < 1e-4 for one in found)
    again = pytest_in(tmp_path, "--benchmark-compare", "--benchmark-compare-fail=median:100000%")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Comparing against benchmarks from" in again.stderr
