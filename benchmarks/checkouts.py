"""`raybert prepare` as a whole command, this checkout against another (`git worktree add`).

    python -m benchmarks.checkouts --before FOLDER [--rounds N] [--quick] [--json FILE]

Three runs of each checkout, one checkout after the other in every round: on 5 kB, which gives the
fixed cost of a run; on the 80 MB of classic_books in the folder that RAYBERT_DATA names; and the
latter again, when everything exists and is skipped. Each starts its own Ray with two workers. CPU
seconds are those of every process that the command starts, so they are meaningful even with other
work running. Both checkouts must write the same bytes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.harness import ROUNDS, compared, in_turn, print_line, provenance
from benchmarks.processes import Timed, timed
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_vocabulary
from bert_core.manifest import read_manifest

HERE = Path(__file__).parents[1]
VOCAB_SIZE = 30_522
QUICK_BOOKS = 2  # of authors
CHAPTER = "## Chapter\nThis is number {}. Two. Three.\n"


class Checkout:
    """A checkout whose command is run, with its own folder for the output."""

    def __init__(self, code: Path, scratch: Path) -> None:
        self.code, self.scratch = code, scratch
        scratch.mkdir()
        self.environment: Mapping[str, str] = {
            **os.environ,
            "PYTHONPATH": str(code),
            "RAY_ADDRESS": "local",
        }

    @property
    def commit(self) -> str:
        """What is checked out, and whether it has uncommitted changes."""
        command = ["git", "-C", str(self.code), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "no git checkout"

    def prepare(self, source: Path, vocabulary: Path, *, keep: bool) -> Timed:
        """One run. Without `keep`, the output of an earlier run is removed first."""
        output = self.output(source)
        if not keep:
            shutil.rmtree(output, ignore_errors=True)
        options = {
            "output": output,
            "tokenizer": vocabulary,
            "corpus.source": source,
            "corpus.document_boundary": "heading",
            "pairs.dupe_factor": 1,
            "num_workers": 2,
            "tracking_uri": f"sqlite:///{self.scratch}/mlflow.db",
        }
        command = [sys.executable, "-m", "pipelines.cli", "prepare"]
        command += [f"--{name}={value}" for name, value in options.items()]
        return timed(command, self.scratch, self.environment)

    def output(self, source: Path) -> Path:
        return self.scratch / source.name

    def digests(self, source: Path) -> dict[str, str]:
        """Digests of the last run on `source` and of every output."""
        manifest = read_manifest(str(self.output(source)))
        outputs = {name: output.sha256 for name, output in manifest.outputs.items()}
        return {"digest": manifest.digest, **outputs}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkouts")
    parser.add_argument("--before", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="two authors, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list of results there")
    arguments = parser.parse_args()
    books = Path(os.environ["RAYBERT_DATA"], "classic_books").absolute()
    rounds = 1 if arguments.quick else arguments.rounds
    results = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if arguments.quick:
            chosen = scratch / "books"
            for author in sorted(path for path in books.iterdir() if path.is_dir())[:QUICK_BOOKS]:
                shutil.copytree(author, chosen / author.name)
            books = chosen
        small = scratch / "small.txt"
        small.write_text("".join(CHAPTER.format(number) for number in range(150)))
        vocabulary = _vocabulary(books, scratch / "vocab")
        ours = Checkout(HERE, scratch / "ours")
        before = Checkout(arguments.before.absolute(), scratch / "before")
        print(f"{'name':<40}{'ours':>14}{'peer':>14}  {'unit':<12}{'ratio':>7}", flush=True)
        for name, source, keep in (
            ("prepare_fixed_cost", small, False),
            ("prepare_books", books, False),
            ("prepare_books_skipped", books, True),
        ):
            pairs, cpu_of_others = in_turn(
                lambda: ours.prepare(source, vocabulary, keep=keep),  # noqa: B023
                lambda: before.prepare(source, vocabulary, keep=keep),  # noqa: B023
                rounds,
            )
            same = ours.digests(source) == before.digests(source)
            if not same:
                raise SystemExit(f"{name}: the checkouts wrote different bytes")
            for kind in ("wall_s", "cpu_s"):
                seconds = [(getattr(a, kind), getattr(b, kind)) for a, b in pairs]
                line = compared(
                    f"{name}_{kind}",
                    [(3600 / mine, 3600 / theirs) for mine, theirs in seconds],
                    cpu_of_others,
                    unit="runs/h",
                    what=" vs ".join(
                        f"{median(side):.2f} s" for side in zip(*seconds, strict=True)
                    ),
                    seconds=seconds,
                    workers=2,
                    bytes=_size_bytes(source),
                    commits=[ours.commit, before.commit],
                )
                print_line(line)
                results.append({**asdict(line), "made": provenance()})
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def _vocabulary(books: Path, folder: Path) -> Path:
    texts = [path.read_text(encoding="utf-8") for path in sorted(books.rglob("*.md"))]
    lines = "\n".join(texts)[: 16 << 20].split("\n")
    vocabulary = train_vocabulary(lines, vocab_size=VOCAB_SIZE, lowercase=True)
    Tokenizer.from_vocabulary(vocabulary, lowercase=True).save(str(folder))
    return folder


def _size_bytes(source: Path) -> int:
    paths = [source] if source.is_file() else source.rglob("*.md")
    return sum(path.stat().st_size for path in paths)


if __name__ == "__main__":
    main()
