"""A small real corpus and what the stages make of it, without Ray, for the tests of the stages.

All of it is made once per run of the tests, by whichever process needs it first, and is only read:
a test that changes one of these folders changes a copy.
"""

import fcntl
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bert_core import files
from bert_core.data.docstrings import docstrings_of, opening
from bert_core.data.masking import MaskingConfig
from bert_core.data.pairs import PairsConfig
from bert_core.data.tokenizer import Tokenizer
from bert_core.manifest import is_complete
from bert_core.tasks.text_classification import TextClassification
from bert_core.train.config import LoopConfig, OptimizerConfig, ScheduleConfig
from pipelines import evaluate, finetune, prepare, pretrain, vocab
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.labelled import LabelledConfig
from pipelines.evaluate import EvaluateConfig
from pipelines.finetune import FinetuneConfig
from pipelines.prepare import PrepareConfig
from pipelines.pretrain import PretrainConfig
from pipelines.vocab import VocabConfig

MODULES = """
    abc argparse ast bdb calendar cmd code codecs collections configparser contextlib copy csv
    dataclasses datetime decimal difflib dis doctest enum filecmp fractions ftplib functools gettext
    glob gzip hashlib heapq imaplib inspect ipaddress json logging mailbox optparse os pathlib pdb
    pickle pkgutil platform plistlib pprint random re sched shelve shlex shutil smtplib socket
    socketserver ssl statistics string subprocess tarfile tempfile textwrap threading timeit
    tokenize trace traceback turtle typing uuid warnings weakref
""".split()  # noqa: SIM905


def sources() -> dict[str, list[str]]:
    """Docstrings of modules of the standard library, by module."""
    root = Path(sysconfig.get_paths()["stdlib"])
    docstrings = {}
    for module in MODULES:
        path = root / f"{module}.py"
        path = path if path.exists() else root / module / "__init__.py"
        texts = docstrings_of(path.read_bytes())
        docstrings[module] = [text.replace("\n\n", "\n") for text in texts]
    return docstrings


@dataclass(frozen=True)
class Small:
    """A folder with text.txt and rows.jsonl, and configs of stages that take them."""

    folder: Path

    @property
    def text(self) -> Path:
        return self.folder / "text.txt"

    @property
    def rows(self) -> LabelledConfig:
        return LabelledConfig(source=str(self.folder / "rows.jsonl"))

    @property
    def tracking_uri(self) -> str:
        return f"sqlite:///{self.folder}/mlflow.db"

    @property
    def corpus(self) -> CorpusConfig:
        return CorpusConfig(source=str(self.text), held_out_share=0.1)

    def vocab(self, output: Path) -> VocabConfig:
        return VocabConfig(
            output=str(output),
            corpus=self.corpus,
            vocab_size=1000,
            num_workers=0,
            tracking_uri=self.tracking_uri,
        )

    def prepare(self, output: Path) -> PrepareConfig:
        return PrepareConfig(
            output=str(output),
            corpus=self.corpus,
            tokenizer=str(self.folder / "vocab"),
            pairs=PairsConfig(max_length=48, dupe_factor=2),
            masking=MaskingConfig(max_predictions_per_seq=8),
            shard_bytes=60_000,
            block_bytes=40_000,
            num_workers=0,
            tracking_uri=self.tracking_uri,
        )

    def pretrain(self, output: Path, steps: int = 12) -> PretrainConfig:
        """BERT-tiny with dropout on; several checkpoints within an epoch."""
        return PretrainConfig(
            output=str(output),
            shards=str(self.folder / "shards"),
            tokenizer=str(self.folder / "vocab"),
            variant="bert-tiny",
            global_batch_size=16,
            micro_batch_tokens=256,
            held_out_rows=64,
            log_every_steps=1,
            checkpoint_every_steps=4,
            loop=LoopConfig(max_steps=steps, precision="fp32"),
            optimizer=OptimizerConfig(lr=1e-3),
            schedule=ScheduleConfig(warmup_steps=2),
            num_workers=0,
            tracking_uri=self.tracking_uri,
        )

    def on_bucket(self, config: PretrainConfig, bucket: str) -> PretrainConfig:
        """The same with its inputs, which are copied, and its output in a bucket."""
        for folder in ("vocab", "shards"):
            for path in (self.folder / folder).rglob("*"):
                if path.is_file():
                    name = path.relative_to(self.folder)
                    files.write_bytes(f"{bucket}/{name}", path.read_bytes())
        return replace(
            config,
            output=f"{bucket}/out",
            shards=f"{bucket}/shards",
            tokenizer=f"{bucket}/vocab",
        )

    def finetune(self, output: Path) -> FinetuneConfig:
        return FinetuneConfig(
            output=str(output),
            model=str(self.folder / "pretrain" / "bundle"),
            train=self.rows,
            held_out=self.rows,
            rows_per_class=16,
            max_length=32,
            epochs=2.0,
            batch_size=8,
            lr=1e-3,
            precision="fp32",
            seeds=(0, 1),
            num_workers=0,
            tracking_uri=self.tracking_uri,
        )

    def evaluate(self, output: Path) -> EvaluateConfig:
        """Of finetune/."""
        return EvaluateConfig(
            output=str(output),
            model=str(self.folder / "finetune" / "bundle"),
            held_out=self.rows,
            num_workers=0,
            tracking_uri=self.tracking_uri,
        )


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked here, instead of started by Ray, which takes ten times as long: for tests
    of what workers do, not of how they are started, lost and replaced."""
    import pipelines.training.worker  # noqa: F401  # once, and not in a test's own time
    from pipelines.runtime import distribute
    from pipelines.training import driver
    from tests import ranks

    monkeypatch.setattr(driver, "_fit_on_ray", ranks.fit_on_ranks)
    monkeypatch.setattr(distribute, "_run_on_ray", ranks.run_on_processes)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Let no other process in before this one is out, or has died."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Once:
    """The folder that the processes of a run of the tests share."""

    folder: Path

    def made(self, name: str, run: Callable[[Path], object]) -> Path:
        """The output of a stage. One process makes it, the others wait for that."""
        output = self.folder / name
        with alone(self.folder / f"{name}.lock"):
            if not is_complete(str(output)):
                run(output)
        return output


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "once"
    folder.mkdir(exist_ok=True)
    return Once(folder)


@pytest.fixture(scope="session")
def small(once: Once) -> Small:
    """The corpus alone."""
    rows = once.folder / "rows.jsonl"
    with alone(once.folder / "small.lock"):
        if not rows.exists():
            texts = sources()
            whole = "\n\n".join("\n".join(each) for each in texts.values())
            (once.folder / "text.txt").write_text(whole)
            labelled = [
                {"text": opening(text), "label": "late" if module > "m" else "early"}
                for module, each in texts.items()
                for text in each[:6]
            ]
            lines = "".join(json.dumps(row) + "\n" for row in labelled)
            files.write_bytes(str(rows), lines.encode())  # it appears when all is there
    return Small(once.folder)


@pytest.fixture(scope="session")
def prepared(small: Small, once: Once) -> Small:
    """With vocab/ and shards/."""
    once.made("vocab", lambda output: vocab.run(small.vocab(output)))
    once.made("shards", lambda output: prepare.run(small.prepare(output)))
    return small


@dataclass(frozen=True)
class Untrained:
    """Bundles with random weights that read the words of the corpus, up to 512 tokens."""

    encoder: Path
    """It can fill masks, and tell which sentence is next."""
    classifier: Path
    """Of the labelled rows."""


@pytest.fixture(scope="session")
def untrained(prepared: Small, tmp_path_factory: pytest.TempPathFactory) -> Untrained:
    from bert_core.objectives.mlm import MaskedLanguageModeling
    from bert_core.objectives.sentence_pairs import NextSentencePrediction
    from tests import tiny

    folder = tmp_path_factory.mktemp("untrained")
    words = Tokenizer.load(prepared.folder / "vocab")
    config = tiny.encoder_config(words.vocab_size, max_position_embeddings=512)
    heads = [MaskedLanguageModeling, NextSentencePrediction]
    rows = [{"text": "a", "label": label} for label in ("early", "late")]
    task = TextClassification.from_rows(rows)
    return Untrained(
        encoder=tiny.bundle(folder / "encoder" / "bundle", words, config, objectives=heads),
        classifier=tiny.bundle(folder / "classifier" / "bundle", words, config, task=task),
    )


@pytest.fixture(scope="session")
def pretrained(prepared: Small, once: Once) -> Small:
    """With pretrain/ too."""
    once.made("pretrain", lambda output: pretrain.run(prepared.pretrain(output)))
    return prepared


@pytest.fixture(scope="session")
def finetuned(pretrained: Small, once: Once) -> Small:
    """With finetune/ too."""
    once.made("finetune", lambda output: finetune.run(pretrained.finetune(output)))
    return pretrained


@pytest.fixture(scope="session")
def evaluated(finetuned: Small, once: Once) -> Small:
    """With evaluate/ too."""
    once.made("evaluate", lambda output: evaluate.run(finetuned.evaluate(output)))
    return finetuned
