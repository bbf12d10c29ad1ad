"""The table and picture of throughput against processes, on numbers that are made up."""

from benchmarks import world


def test_table_and_picture(tmp_path):
    table = {
        size: {
            name: {"seconds": [3.0, 1.0, 2.0 / size], "busy": 2.0, "bytes": 1256, "sum": [1e-4]} for name in world.CASES
        }
        for size in (1, 2)
    }
    lines = world.rows(table)
    assert len(lines) == 2 + 2 * len(world.CASES)
    assert lines[2] == "| 1 trial, batch 8192 | 1 | 0.00 | 1.00 | 1.00 | - |"
    assert lines[3] == "| 1 trial, batch 8192 | 2 | 0.01 | 2.00 | 1.00 | 1256 bytes, 100 µs |"
    world.draw(table, tmp_path / "world.png")
    assert (tmp_path / "world.png").stat().st_size > 5000
