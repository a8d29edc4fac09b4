"""`make zoo`: trains the architectures of the zoo by `from_module` on two ranks, and writes docs/zoo.md.

python -m tests.zoo                              # all; goes on where an earlier sweep was stopped
python -m tests.zoo --only causal:llama t5       # those whose names have one of these words in them
python -m tests.zoo --fresh                      # forgets earlier sweeps
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

# Before torch is imported anywhere: one thread in this process and in all that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tqdm import tqdm

from tests.helpers.ranks import Pool
from tests.zoo import page
from tests.zoo.plain import NUM_RANKS
from tests.zoo.registry import names
from tests.zoo.runner import examine_with_usual_size
from tests.zoo.sweep import read, sweep, write

KEPT = Path("out/zoo.jsonl")


def main(given: Sequence[str] | None = None) -> int:
    """Returns 1 if a model is wrong or raises an error that is not hpfunc's."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names; what is found is printed only")
    parser.add_argument("--fresh", action="store_true", help="run also what an earlier sweep has run")
    parser.add_argument("--sources", nargs="+", default=["transformers", "timm", "diffusers"])
    parser.add_argument("--kept", type=Path, default=KEPT, help=f"where results are kept ({KEPT})")
    args = parser.parse_args(given)
    args.kept.parent.mkdir(parents=True, exist_ok=True)
    if args.fresh:
        args.kept.unlink(missing_ok=True)
    is_part = args.only != [""]
    chosen = [name for name in names(args.sources) if any(word in name for word in args.only)]
    done = {} if is_part else read(args.kept)
    ranks, rest = Pool(NUM_RANKS), [name for name in chosen if name not in done]
    for found in tqdm(sweep(rest, ranks, examine=examine_with_usual_size), total=len(rest), unit="model"):
        done[found.name] = found
        if is_part:
            tqdm.write(f"{found.name}: {found.verdict} {found.why} {found.facts}")
        else:
            write(args.kept, found)
    ranks.stop()
    if not is_part:
        page.write([done[name] for name in chosen])
    return int(any(found.verdict in ("wrong", "error", "hangs") for found in done.values()))


if __name__ == "__main__":
    raise SystemExit(main())
