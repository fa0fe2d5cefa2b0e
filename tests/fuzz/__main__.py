"""``python -m fuzz``: draw cases, run them, print what differs from one process."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from fuzz.areas import AREAS
from fuzz.campaign import Campaign, Tally
from fuzz.case import from_json
from fuzz.divergence.area import DIVERGENCE
from fuzz.faults import FAULTS
from fuzz.fixed_sums import REPRODUCIBLE
from fuzz.programs import Programs
from fuzz.proved import run_for
from fuzz.runner import Runner
from fuzz.selftest import run_self_test

OF_THEIR_OWN: dict[str, tuple[Programs[Any], list[int]]] = {  # and on how many ranks; none: on the most
    "divergence": (DIVERGENCE, [2, 4]),
    "reproducible": (REPRODUCIBLE, []),
}


def main() -> None:
    """Run the command line."""
    os.environ["SHARDWISE_CHECKS"] = "always"  # ranks inherit it
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many (default: none)")
    parser.add_argument(
        "--cases", type=int, default=0, help="stop after so many (default: none; 100 without --minutes)"
    )
    parser.add_argument("--ranks", type=int, default=4, help="the largest world size (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the campaign; the same seed gives the same cases")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="of the ranks; they may share a GPU (without the area meta, whose models are made on the host)",
    )
    parser.add_argument(
        "--area",
        default="",
        help=f"one or several of {','.join(AREAS)} (default: all), or one of divergence, reproducible, proved",
    )
    parser.add_argument("--avoid", default="", help="leave out cases that use one of these, e.g. Follower,convert")
    parser.add_argument("--found", type=Path, default=Path("found"), help="folder for the scripts of failures")
    parser.add_argument(
        "--replay", type=Path, help="carry out the case in this file (JSON, or a script with one in it)"
    )
    parser.add_argument("--self-test", action="store_true", help="plant faults and count the cases until each is found")
    parser.add_argument("--only", default="", help="with --self-test: those whose names hold this")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.area in OF_THEIR_OWN:
        programs, sizes = OF_THEIR_OWN[args.area]
        if args.replay is not None:
            sys.exit(programs.replay(args.replay))
        chosen = [size for size in sizes if size <= args.ranks] or [args.ranks]
        sys.exit(programs.run_for(args.minutes * 60, args.cases, args.seed, chosen))
    if args.area == "proved":
        sys.exit(run_for(args.minutes * 60, args.cases, args.seed, args.ranks, args.found))
    areas = args.area.split(",") if args.area else [each for each in AREAS if (args.device, each) != ("cuda", "meta")]
    unknown = sorted(set(areas) - set(AREAS))
    if unknown:
        parser.error(f"there is no area {unknown}; there are {list(AREAS)}")
    if args.self_test:
        names = [name for name in FAULTS if args.only in name]
        max_cases = args.cases or 150
        found = run_self_test(names, max_cases, lambda line: print(line, flush=True), args.seed)
        sys.exit(not all(found.values()))
    with Runner(device=args.device) as runner:
        campaign = Campaign(runner, args.found, lambda line: print(line, flush=True), _names(args.avoid))
        if args.replay is not None:
            outcome = campaign.take(from_json(_json_in(args.replay.read_text())))
            for contender, verdict in outcome.verdicts.items():
                print(f"{contender.name}: {verdict.kind} {verdict.text}")
            sys.exit(bool(outcome.failures))
        max_cases = args.cases or (0 if args.minutes else 100)
        tally = campaign.run(areas, args.seed, args.ranks, args.minutes, max_cases)
    print(report(tally))
    sys.exit(bool(tally.found))


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _json_in(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith('{"seed"'))


KINDS = ("equal", "refused", "excused", "as torch", "numbers", "raw error", "some ranks", "gone", "memory")


def report(tally: Tally) -> str:
    """Return the counts as text."""
    lines = [f"{sum(tally.cases.values())} cases in {tally.seconds:.0f} s", ""]
    lines.append(f"{'area':15}{'cases':>7}" + "".join(f"{kind:>11}" for kind in KINDS))
    for area, count in tally.cases.items():
        lines.append(f"{area:15}{count:>7}" + "".join(f"{tally.kinds[area, kind]:>11}" for kind in KINDS))
    for title, counter in (
        ("refused by name", tally.refusals),
        ("unlike one process, like torch's own class", tally.as_torch),
        ("torch's own classes", tally.torch),
        ("failures like others, not looked into", tally.repeats),
    ):
        if counter:
            lines += ["", f"{title}:"] + [f"{count:6}  {text}" for text, count in counter.most_common(40)]
    if tally.found:
        lines += ["", "failures:"] + [f"  {signature}" for signature in tally.found]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
