"""A small real corpus and what the stages make of it, without Ray, for the tests of the stages."""

import json
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bert_core import files
from bert_core.data.docstrings import docstrings_of, opening
from bert_core.data.masking import MaskingConfig
from bert_core.data.pairs import PairsConfig
from bert_core.train.config import LoopConfig, OptimizerConfig, ScheduleConfig
from pipelines import finetune, prepare, pretrain, vocab
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.labelled import LabelledConfig
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


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The corpus alone."""
    folder = tmp_path_factory.mktemp("small")
    texts = sources()
    (folder / "text.txt").write_text("\n\n".join("\n".join(each) for each in texts.values()))
    rows = [
        {"text": opening(text), "label": "late" if module > "m" else "early"}
        for module, each in texts.items()
        for text in each[:6]
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Small(folder)


@pytest.fixture(scope="session")
def prepared(small: Small) -> Small:
    """With vocab/ and shards/."""
    vocab.run(small.vocab(small.folder / "vocab"))
    prepare.run(small.prepare(small.folder / "shards"))
    return small


@pytest.fixture(scope="session")
def pretrained(prepared: Small) -> Small:
    """With pretrain/ too."""
    pretrain.run(prepared.pretrain(prepared.folder / "pretrain"))
    return prepared


@pytest.fixture(scope="session")
def finetuned(pretrained: Small) -> Small:
    """With finetune/ too."""
    finetune.run(pretrained.finetune(pretrained.folder / "finetune"))
    return pretrained
