"""Tries mutated files of every family (`hostile_models`), and writes what is found:

python -m tests.run_hostile_models --count 1000 --first 0
"""

import sys
import time
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.hostile_models import Folder, Gguf, search
from tests.hostile_seeds import checkpoint_seed, gguf_names, gguf_seed


def all_seeds(kept: Path | None) -> list[Gguf | Folder]:
    """All of them; in `kept` they are kept for the next time."""
    from tests.test_checkpoints import MODELS

    seeds = list[Gguf | Folder]()
    with TemporaryDirectory() as temporary:
        folder = kept or Path(temporary)
        folder.mkdir(exist_ok=True)
        for number, name in enumerate(gguf_names()):
            path = folder / f"{number}.gguf"
            seeds.append(Gguf.read(path) if path.exists() else gguf_seed(name, path))
        for number, name in enumerate(MODELS):
            path = folder / f"checkpoint-{number}"
            seeds.append(Folder.read(path) if path.exists() else checkpoint_seed(name, path))
    return seeds


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--torch-every", type=int, default=0, help="every n-th file that is refused goes to transformers"
    )
    parser.add_argument("--folder", type=Path, help="of files to start from; all families if there is none")
    chosen = parser.parse_args()
    seeds, counts, every = all_seeds(chosen.folder), Counter[str](), chosen.torch_every
    begun, different = time.monotonic(), Counter[str]()
    numbers = range(chosen.first, chosen.first + chosen.count)
    for finding in search(seeds, numbers, lambda number: bool(every) and number % every == 0, counts):
        key = "\n".join(finding.what.splitlines()[-2:])
        different[key] += 1
        if different[key] <= 2:
            print(f"--- {finding.number}: {finding.what}", flush=True)
    print(f"{sum(counts.values())} files in {time.monotonic() - begun:.0f} s: {dict(counts)}; {len(different)} kinds")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
