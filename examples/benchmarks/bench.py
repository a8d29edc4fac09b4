"""Everything that ``make bench`` measures: hpfunc beside what a user of torch would pick instead.

``python examples/benchmarks/bench.py --cases a,b`` runs some of it. Each case is one interleaved run of processes on a
network of limited speed, which needs root; without root it falls back to loopback, and says so. Results go to
``results/``: ``results.json`` (raw), ``results.md`` (the tables) and a picture of each case.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

import experiments
import host_time
import ideal
import measure
import report
import torch
from cases import CASES, Case
from report import Verdict

HERE = Path(__file__).parent
LARGE_MODEL = 1000  # units


def can_shape() -> str:
    """Returns why no network can be shaped here, or ""."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not installed (iproute2)" if missing else ""


def launch(
    num_ranks: int, network: str, script: str, *options: str, memory: bool = False, patience_s: float = 900
) -> Any:
    """Runs a script on some ranks; returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        environment = os.environ | {"PYTHON": sys.executable}
        if memory:  # freed memory goes back to the system
            environment |= {"MALLOC_MMAP_THRESHOLD_": "65536"}
        # `timeout` sends a signal that the launcher can answer: it ends its ranks and takes its network down.
        launcher = ["timeout", str(patience_s), HERE / "launch.sh", str(num_ranks), network]
        command = [*launcher, HERE / script, *options, "--json", path]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not path.exists():
            raise SystemExit(f"{script} {' '.join(options)} failed\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(path.read_text())


def measure_case(key: str, case: Case, shaped: bool, options: list[str]) -> dict[str, Any]:
    """Returns everything about a case."""
    network = case.network if shaped else "loopback"
    num_ranks = math.prod(case.task.mesh)
    found = launch(num_ranks, network, "worker.py", "--case", key, *options)
    found["network"], found["memory"] = network, {}
    for name in case.memory:
        arguments = ("--case", key, "--variants", name, "--memory")
        found["memory"] |= launch(num_ranks, network, "worker.py", *arguments, memory=True)
    return found


def ideal_of(found: dict[str, Any], compute: dict[str, float]) -> dict[str, float]:
    """Returns the ideal step time of each schedule of a case."""
    schedules = {name: [ideal.Step(**step) for step in steps] for name, steps in found["schedules"].items()}
    return {name: ideal.replay(steps, compute, found["link"]) for name, steps in schedules.items()}


def plan_times() -> dict[int, float]:
    """Returns the processor seconds of planning and checking models of more and more units.

    As `timeit` has it: the best of some, without Python's collector, whose passes over all of torch are no part of it.
    """
    import hpfunc as hp
    from hpfunc import plan

    def seconds(count: int) -> float:
        program, policy = host_time.program_of(count), hp.Policy(pack_below_bytes=0)
        traits = hp.Traits(ordered_sums=True)
        return min(timeit.repeat(lambda: hp.check(plan(program, policy, traits)), timer=time.process_time, number=1))

    return {count: seconds(count) for count in (LARGE_MODEL // 4, LARGE_MODEL // 2, LARGE_MODEL)}


def more_verdicts(key: str, case: Case, found: dict[str, Any], compute: dict[str, float] | None) -> list[Verdict]:
    """Returns the targets of a case beyond its ratios of step times: the ideal, bytes on the wire, memory."""
    results, verdicts = measure.Results.of(found), []
    time_s = results.median(report.BASE, "time_s")
    if compute is not None:
        best_s = ideal_of(found, compute)[report.BASE]
        detail = f"{1e3 * time_s:.0f} ms, ideal {1e3 * best_s:.0f} ms"
        verdicts.append(Verdict("hpfunc / ideal of its schedule", time_s / best_s, 1.10, False, detail))
    if key == "a":
        least = minimal_bytes(case)
        sent = results.median(report.BASE, "sent_bytes")
        detail = f"{sent / 1e6:.1f} MB, minimum {least / 1e6:.1f} MB"
        verdicts.append(Verdict("bytes on the wire / minimum", sent / least, 1.02, False, detail))
    baselines = [name for name in found["memory"] if name.startswith("FSDP2 tuned")]
    if baselines:
        best = min(baselines, key=lambda name: found["memory"][name]["rise"])
        ours, theirs = (found["memory"][name]["rise"] for name in (report.BASE, best))
        detail = f"{ours / 1e6:.0f} MB, {theirs / 1e6:.0f} MB of {best}"
        verdicts.append(Verdict("peak memory / FSDP2 tuned", ours / theirs, 1.0, False, detail))
    return verdicts


def minimal_bytes(case: Case) -> float:
    """Returns what a rank must send at least: each weight gathered twice, that of the last unit once, and reduced."""
    size, model = case.task.mesh[-1], case.task.model
    messages = 3 * model.num_blocks - 1
    return messages * model.whole_bytes / model.num_blocks * (size - 1) / size


def run_experiments(shaped: bool, options: list[str], record: dict[str, Any], out: Path) -> tuple[str, list[Verdict]]:
    """Measures case (s) and draws its picture; returns its text and its targets."""
    network = experiments.NETWORK if shaped else "loopback"
    record["experiments"] = launch(4, network, "experiments.py", *options, patience_s=2400)
    founds = experiments.results_of(record["experiments"])
    experiments.plot(founds, out / "experiments.png")
    here = experiments.verdicts(founds)
    parts = ["## (s) Packing, prefetch, copies"]
    parts += [] if shaped else ["Over loopback, because no network could be shaped."]
    parts += [experiments.section(record["experiments"]), "![phases of a step](experiments.png)"]
    return "\n\n".join([*parts, report.verdict_table(here)]), here


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cases", default=",".join([*CASES, "h", "s"]), help="with commas between them; default: all")
    add("--repetitions", type=int, help="rounds over all variants")
    add("--max-foreign", type=float, default=0.06, help="share of the machine that others may use in a repetition")
    add("--out", type=Path, default=HERE / "results", help="folder for the results")
    return parser.parse_args()


def main() -> None:
    """Measures, writes the files and prints the tables."""
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    reason = can_shape()
    if reason:
        print(f"No network can be shaped here ({reason}): all ranks talk over loopback, which hides nothing.")
    begin = time.monotonic()
    options = ["--max-foreign", str(args.max_foreign)]
    options += ["--repetitions", str(args.repetitions)] if args.repetitions else []
    keys, founds, verdicts, sections = args.cases.split(","), {}, [], []
    machine = f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    record: dict[str, Any] = {"machine": machine, "date": time.strftime("%Y-%m-%d"), "cases": founds}
    for key in [key for key in keys if key in CASES]:
        case = CASES[key]
        if importlib.util.find_spec(case.task.framework) is None:
            print(f"({key}) is left out: {case.task.framework} is not installed")
            continue
        print(f"({key}) {case.title} ...", flush=True)
        found = founds[key] = measure_case(key, case, not reason, options)
        compute = launch(1, "loopback", "worker.py", "--case", key, "--compute") if key == "a" else None
        here = report.verdicts(case, found) + more_verdicts(key, case, found, compute)
        if compute is not None:
            found["compute"], found["ideal"] = compute, ideal_of(found, compute)
        verdicts += here
        sections.append(section(key, case, found, here))
        print(sections[-1], flush=True)
    if "h" in keys:
        print("(h) host time and planning ...", flush=True)
        record["host"] = launch(1, "loopback", "host_time.py")
        record["plan_s"] = plan_times()
        here = host_verdicts(record)
        verdicts += here
        sections.append(f"## (h) Host time\n\n{host_time.table_of(record['host'])}\n\n{report.verdict_table(here)}")
        print(sections[-1], flush=True)
    if "s" in keys:
        print("(s) packing, prefetch, copies ...", flush=True)
        text, here = run_experiments(not reason, options, record, args.out)
        verdicts += here
        sections.append(text)
        print(text, flush=True)
    record["seconds"] = time.monotonic() - begin
    for found in founds.values():
        del found["schedules"]  # long, and made again by any run
    (args.out / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    head = f"# Results\n\n{machine}; {record['date']}; {record['seconds'] / 60:.0f} minutes for all.\n\n"
    (args.out / "results.md").write_text(head + "\n\n".join(sections) + "\n")
    report.plot(CASES, founds, args.out)
    missed = [verdict.what for verdict in verdicts if not verdict.is_met]
    print(f"\n{len(verdicts) - len(missed)} of {len(verdicts)} targets met. Results in {args.out}")
    if missed:
        print("missed: " + "; ".join(missed))


def section(key: str, case: Case, found: dict[str, Any], verdicts: list[Verdict]) -> str:
    """Returns the text of a case."""
    parts = [f"## ({key}) {case.title}", report.table_of(case, found), f"![step times](case_{key}.png)"]
    if found["network"] != case.network:
        parts.append("Over loopback, because no network could be shaped.")
    if "compute" in found:
        compute_ms = {name: round(1e3 * s, 1) for name, s in found["compute"].items()}
        best_ms = {name: round(1e3 * s) for name, s in found["ideal"].items()}
        link = f"Link {found['link'] / 1e6:.0f} MB/s"
        parts.append(f"{link}; compute in ms, of a block and of the update {compute_ms}; ideal ms {best_ms}.")
    if found["memory"]:
        rows = [[n, f"{m['before'] / 1e6:.0f}", f"{m['rise'] / 1e6:.0f}"] for n, m in found["memory"].items()]
        parts.append(measure.table(["variant", "MB before a step", "MB more at its peak"], rows))
    if verdicts:
        parts.append(report.verdict_table(verdicts))
    return "\n\n".join(parts)


def host_verdicts(record: dict[str, Any]) -> list[Verdict]:
    """Returns the targets of case (h)."""
    slopes = {name: host_time.slope(host_time.beyond_plain(record["host"], name)) for name in ("hpfunc", "FSDP2")}
    (ours, ours_error), (theirs, theirs_error) = slopes["hpfunc"], slopes["FSDP2"]
    detail = f"{1e6 * ours:.0f} ± {1e6 * ours_error:.0f} µs a unit, FSDP2 {1e6 * theirs:.0f} ± {1e6 * theirs_error:.0f}"
    found = [Verdict("host time / FSDP2's", ours / theirs, 0.5, False, detail)]
    plan_s = {int(count): seconds for count, seconds in record["plan_s"].items()}
    large, half = plan_s[LARGE_MODEL], plan_s[LARGE_MODEL // 2]
    detail = ", ".join(f"{count} units {seconds:.2f} s" for count, seconds in plan_s.items())
    found.append(Verdict(f"plan and check {LARGE_MODEL} units, s", large, 0.2, False, detail))
    found.append(Verdict("twice the units, times the seconds", large / half, 2.5, False, detail))
    return found


if __name__ == "__main__":
    main()
