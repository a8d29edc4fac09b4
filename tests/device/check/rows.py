"""The rows of the table, the most valuable first: where time runs out, the last ones are skipped."""

from __future__ import annotations

from .found import Row

ROWS = (
    Row("i", "one rank computes what a CPU does", 90, "tests.device.check.numbers:one_rank"),
    Row("v", "2 and 4 ranks compute what CPUs do", 200, "tests.device.check.numbers:several_ranks"),
    Row("ii", "no race, however late a stream is", 120, "tests.device.check.races:races"),
    Row("iii", "the host never waits in a steady step", 60, "tests.device.check.steady:waits"),
    Row("vi", "a rank raises: so does the other, and goes on", 90, "tests.device.check.failures:rank_raises"),
    Row("iv", "memory is what the plan says", 60, "tests.device.check.steady:memory"),
    Row("vii", "what the host and the device pay", 90, "tests.device.check.cost:cost"),
    Row("viii", "compiled units", 90, "tests.device.check.compiled:compiled_units"),
    Row("vi.2", "a rank is killed: the other raises", 60, "tests.device.check.failures:rank_is_killed"),
    Row("ix", "a step in a CUDA graph", 60, "tests.device.check.compiled:graph"),
)
