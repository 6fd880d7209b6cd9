"""Labelled sets as their authors publish them: every header and oddity, and the real files."""

import csv
import io
import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from bert_core.data.labelled.lines import Record
from bert_core.data.labelled_formats import FORMATS, labelled_records
from bert_core.data.tables import table_rows
from bert_core.errors import ConfigError, CorpusError
from bert_core.tasks.multiple_choice import MultipleChoice
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.shapes import labelled
from bert_core.tasks.text_classification import OneLabel
from bert_core.tasks.text_regression import Score
from bert_core.tasks.texts import TextInput
from bert_core.tasks.token_classification import TokenClassification

PARSES = "\t".join(["(a)"] * 4)
MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
    "sentence1_parse\tsentence2_parse\tsentence1\tsentence2"
)
STS = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
PAIR = {"text": 'He said "a', "text_pair": "b ."}
ONE = {"text": 'He said "a'}
# Of every set of GLUE a line as it is published for training, and what it comes to.
TRAINING: dict[str, tuple[str, dict]] = {
    "cola": ('gj04\t0\t*\tHe said "a', ONE | {"label": "0"}),
    "sst2": ('sentence\tlabel\nHe said "a\t1', ONE | {"label": "1"}),
    "mrpc": (
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t702876\t702977\tHe said "a\tb .',
        PAIR | {"label": "1"},
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
        '133273\t213221\t213222\tHe said "a\tb .\t0',
        PAIR | {"label": "0"},
    ),
    "stsb": (
        f"{STS}\tscore\n"
        '0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\tHe said "a\tb .\t5.000',
        PAIR | {"score": 5.0},
    ),
    "mnli": (
        f"{MNLI}\tlabel1\tgold_label\n"
        f'0\t31193\t31193n\tgovernment\t{PARSES}\tHe said "a\tb .\tneutral\tneutral',
        PAIR | {"label": "neutral"},
    ),
    "qnli": (
        'index\tquestion\tsentence\tlabel\n0\tHe said "a\tb .\tentailment',
        PAIR | {"label": "entailment"},
    ),
    "rte": (
        'index\tsentence1\tsentence2\tlabel\n0\tHe said "a\tb .\tnot_entailment',
        PAIR | {"label": "not_entailment"},
    ),
    "wnli": ('index\tsentence1\tsentence2\tlabel\n0\tHe said "a\tb .\t1', PAIR | {"label": "1"}),
}
# The same of test sets, whose rows have no label.
TEST: dict[str, tuple[str, dict]] = {
    "cola": ('index\tsentence\n0\tHe said "a', ONE),
    "sst2": ('index\tsentence\n0\tHe said "a', ONE),
    "mrpc": (
        '\ufeffindex\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1089874\t1089925\tHe said "a\tb .',
        PAIR,
    ),
    "qqp": ('id\tquestion1\tquestion2\n0\tHe said "a\tb .', PAIR),
    "stsb": (f'{STS}\n0\ta\tb\t2012\t0024\tnone\tnone\tHe said "a\tb .', PAIR),
    "mnli": (f'{MNLI}\n0\t31493\t31493\ttravel\t{PARSES}\tHe said "a\tb .', PAIR),
    "qnli": ('index\tquestion\tsentence\n0\tHe said "a\tb .', PAIR),
    "rte": ('index\tsentence1\tsentence2\n0\tHe said "a\tb .', PAIR),
    "wnli": ('index\tsentence1\tsentence2\n0\tHe said "a\tb .', PAIR),
    "ax": ('index\tsentence1\tsentence2\n0\tHe said "a\tb .', PAIR),
}


def records_of(text: str, name: str) -> list[Record]:
    return [*labelled_records(text.encode(), f"a.{name}", name).records]


def inputs_of(text: str, name: str) -> list[dict]:
    """What a line of a file holds of a text or a pair of texts."""
    columns = FORMATS[name].columns
    return [
        {
            field: record[columns.get(field, field)]
            for field in ("text", "text_pair")
            if columns.get(field, field) in record
        }
        for record in records_of(text, name)
    ]


@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\n\n\n"])
@pytest.mark.parametrize("name", TRAINING)
def test_every_training_set_of_glue_is_read_as_it_is_published(name: str, ending: str) -> None:
    text, row = TRAINING[name]
    text = text.replace("\n", "\r\n") if ending == "\r\n" else text
    found = labelled_records((text + ending).encode(), "train.tsv", name)
    shapes = (TextInput, Score if "score" in row else OneLabel)
    assert labelled(found.records, shapes, found.columns, "train.tsv") == [row]


def test_development_rows_of_mnli_have_five_labels_of_which_one_is_right() -> None:
    header = f"{MNLI}\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label"
    row = f"0\t63735\t63735n\tslate\t{PARSES}\ta\tb\tneutral\tneutral\tneutral\tentailment\tx\tyes"
    (record,) = records_of(f"{header}\n{row}\n", "mnli")
    assert record[FORMATS["mnli"].columns["label"]] == "yes"


@pytest.mark.parametrize("name", TEST)
def test_every_test_set_of_glue_is_read_though_it_has_no_labels(name: str) -> None:
    text, row = TEST[name]
    assert inputs_of(f"{text}\r\n", name) == [row]
    assert TEST.keys() == TRAINING.keys() | {"ax"}


def test_a_line_broken_in_two_is_left_out_of_qqp_alone() -> None:
    header, row = TRAINING["qqp"][0].split("\n")
    broken = "1\t2\t3\tWhat is\nthis?\tthat?\t1"
    data = f"{header}\n{broken}\n{row}\n".encode()
    found = labelled_records(data, "train.tsv", "qqp")
    assert (found.broken, found.numbers, found.rows) == (2, [3], 3)
    found = labelled_records(f"index\tsentence\n0\ta\n1\n{2}\tb".encode(), "a", "sst2")
    assert (found.broken, found.numbers, [*found.unread]) == (0, [1, 3], [2])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("index\tsentence\tsentence\n0\ta\tb", "rte"),
        ("text,label,text\na,b,c", None),
        ("text\tlabel\ttext\na\tb\tc", None),
    ],
)
def test_a_duplicate_column_is_refused(text: str, name: str | None) -> None:
    source = "a.tsv" if "\t" in text else "a.csv"
    with pytest.raises(CorpusError, match=rf"{source}: wanted each column once, got .* 2 times"):
        labelled_records(text.encode(), source, name)


CONLL = """\
-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

-DOCSTART- -X- -X- O

Peter NNP B-NP B-PER


"""


@pytest.mark.parametrize(
    "change", [("", ""), ("\n", "\r\n"), (" ", "\t"), ("\n\n", "\n")], ids=repr
)
def test_conll_is_sentences_between_blank_lines_without_its_documents(
    change: tuple[str, str],
) -> None:
    text = CONLL.replace(*change) if change[0] else CONLL
    for ending in ("", "\n \n"):
        found = labelled_records((text.rstrip() + ending).encode(), "a", "conll")
        rows = labelled(found.records, TokenClassification.shapes(), found.columns, "a")
        assert rows == [
            {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]},
            {"tokens": ["Peter"], "tags": ["B-PER"]},
        ]
    assert found.records[0]["1"] == ["NNP", "VBZ"]


TAGGED = "we O\nsaw O\nUS B-LOC\n\n# O\n1 O\nfan B-PER\n"
TOKENS = [["we", "saw", "US"], ["#", "1", "fan"]]
COMMENTED = {
    # The makers' own lines, of MultiCoNER, Universal NER, GermEval and CoNLL-2012.
    "two columns": ("# s1\nwe O\nsaw O\nUS B-LOC\n\n# s2\n# O\n1 O\nfan B-PER\n", ["# s1", "# s2"]),
    "MultiCoNER": (
        "# id 5239d808-f300-46ea-aa3b-5093040213a3\tdomain=en\nwe _ _ O\nsaw _ _ O\nUS _ _ "
        "B-LOC\n\n\n"
        "# id 1d6e\tdomain=en\n# _ _ O\n1 _ _ O\nfan _ _ B-PER\n",
        ["# id 5239d808-f300-46ea-aa3b-5093040213a3\tdomain=en", "# id 1d6e\tdomain=en"],
    ),
    "Universal NER": (
        "# sent_id = a-1\n# text = O\n1\twe\tO\n2\tsaw\tO\n3\tUS\tB-LOC\n\n"
        "# sent_id = O\n1\t#\tO\n2\t1\tO\n3\tfan\tB-PER\n",
        ["# sent_id = a-1", "# text = O", "# sent_id = O"],
    ),
    "GermEval": (
        "#\thttp://de.wikipedia.org/wiki/A [2009-10-17]\n1\twe\tO\tO\n2\tsaw\tO\tO\n3\tUS\tO"
        "\tB-LOC\n\n"
        "#\tx\n1\t#\tO\tO\n2\t1\tO\tO\n3\tfan\tO\tB-PER\n",
        ["#\thttp://de.wikipedia.org/wiki/A [2009-10-17]", "#\tx"],
    ),
    "CoNLL-2012": (
        "#begin document (bc/cctv/00/cctv_0000); part 000\nx 0 0 we O\nx 0 1 saw O\nx 0 2 US "
        "B-LOC\n\n"
        "x 0 0 # O\nx 0 1 1 O\nx 0 2 fan B-PER\n\n#end document\n",
        [],
    ),
    "none": (TAGGED, []),
}


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("dialect", COMMENTED)
def test_comments_of_conll_are_no_tokens_and_a_token_may_be_a_number_sign(
    dialect: str, ending: str
) -> None:
    text, comments = COMMENTED[dialect]
    found = labelled_records(text.replace("\n", ending).encode(), "a", "conll")
    assert found.comments == comments
    rows = found.records
    tokens = {"Universal NER": "1", "GermEval": "1", "CoNLL-2012": "3"}.get(dialect, "0")
    assert [row[tokens] for row in rows] == TOKENS
    assert [row["-1"] for row in rows] == [["O", "O", "B-LOC"], ["O", "O", "B-PER"]]


# White space of Unicode beyond blanks and tabs: no-break space, next line, separators, …
ODD = ["\xa0", "\x85", "\u2028", "\u3000", "\x1c", "\x0b", "\x0c", "\u200b", "\ufeff"]


@pytest.mark.parametrize("name", ["conll", "conllu", "sst2", None])
@pytest.mark.parametrize("odd", ODD, ids=ascii)
def test_only_blanks_and_tabs_separate_and_only_line_feeds_end_a_line(
    odd: str, name: str | None
) -> None:
    token = f"10{odd}000"
    if name in ("conll", "conllu"):
        middle = "\t_" * 6 if name == "conllu" else ""
        lines = [f"1\t{token}\t_\tNUM{middle}", f"2\t{odd}\t_\tX{middle}"]
        texts = ["\n".join(lines)]
        if name == "conll":
            texts += [text.replace("\t", " ") for text in texts]
        for text in texts:
            [row] = records_of(text, name)
            assert [*row.values()][1] == [token, odd]
    else:
        [row] = table_rows(f"sentence\tlabel\n{token}\t{odd}\n".encode(), "a.tsv")
        assert [*row.values()] == [token, odd]
        [row] = records_of(f"sentence\tlabel\n{token}\t{odd}\n", "sst2")
        assert [*row.values()] == [token, odd]


def test_conllu_plus_names_its_columns_in_the_first_line() -> None:
    text = "# global.columns = ID FORM PARSEME:MWE\n1\ta\t*\n2-3\tb\t_\n2\tc\t1:IAV\n"
    assert records_of(text, "conllu") == [
        {"id": ["1", "2"], "form": ["a", "c"], "parseme:mwe": ["*", "1:IAV"]}
    ]
    found = labelled_records(text.replace("\t*", "").encode(), "a", "conllu")
    message = "line 2: wanted 3 columns between tabs (id, form, parseme:mwe), got 2 ('1\\ta'): corr"
    assert found.unread[1].startswith(message)


def test_columns_of_conllu_plus_are_in_any_order_and_may_lack_ids() -> None:
    text = "# global.columns = FORM ID UPOS\na\t1\tDET\nab\t2-3\t_\nb\t2\tNOUN\n"
    wanted = {"form": ["a", "b"], "id": ["1", "2"], "upos": ["DET", "NOUN"]}
    assert records_of(text, "conllu") == [wanted]
    text = "# global.columns = FORM UPOS\na\tDET\nb\tNOUN\n"
    assert records_of(text, "conllu") == [{"form": ["a", "b"], "upos": ["DET", "NOUN"]}]


def test_names_of_columns_that_are_not_utf8_are_reported() -> None:
    data = b"# global.columns = ID FORM \xe9t \xe9t\n1\ta\tb\tc\n"
    with pytest.raises(CorpusError, match=r"a\.conllu, line 1: wanted UTF-8, byte 0xe9 is not"):
        labelled_records(data, "a.conllu", "conllu")


CONLLU = """\
# sent_id = 1
# text = Vámonos al mar
1-2\tVámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tVamos\tir\tVERB\t_\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
3-4\tal\t_\t_\t_\t_\t_\t_\t_\t_
3\ta\ta\tADP\t_\t_\t5\tcase\t_\t_
4\tel\tel\tDET\t_\t_\t5\tdet\t_\t_
5\tmar\tmar\tNOUN\tNN\t_\t1\tobl\t_\tSpaceAfter=No
5.1\t_\tir\tVERB\t_\t_\t_\t_\t0:x\t_

# a remark, and no sentence

# sent_id = 2
1\t#\t#\tSYM\t_\t_\t0\troot\t_\t_
2\tNew York\tNew York\tPROPN\t_\t_\t1\tflat\t_\t_


"""


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_conllu_is_words_without_ranges_empty_nodes_and_comments(ending: str) -> None:
    data = CONLLU.replace("\n", ending).encode()
    found = labelled_records(data, "a", "conllu")
    rows = labelled(found.records, TokenClassification.shapes(), found.columns, "a")
    assert [row["tokens"] for row in rows] == [
        ["Vamos", "nos", "a", "el", "mar"],
        ["#", "New York"],
    ]
    assert [row["tags"] for row in rows] == [
        ["VERB", "PRON", "ADP", "DET", "NOUN"],
        ["SYM", "PROPN"],
    ]
    (record,) = [each for each in found.records if each["xpos"][-1] == "NN"]
    assert record["head"] == ["0", "1", "5", "5", "1"]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ('{"data": [{"paragraphs": [{}]}]}', "squad", "at question 1 there is no 'qas'"),
        ('{"data": ', "squad", "a.squad: wanted JSON, as in the format squad, it is not JSON ("),
        (
            "[]",
            "squad",
            "a.squad: wanted an object as SQuAD publishes it, with data → "
            "paragraphs → qas, got a list ([]): leave the format out if each is a row with quest",
        ),
        ('{"val": []}', "clinc_train", "wanted CLINC150's splits, found no 'train'"),
        (
            '{"train": 5}',
            "clinc_train",
            "wanted a list of pairs as CLINC150's split 'train', got a",
        ),
        (
            '{"val": [], "oos_val": null}',
            "clinc_val",
            "a.clinc_val: wanted a list of pairs as CLINC150's split 'oos_val', got nothing: give",
        ),
    ],
)
def test_a_file_that_is_not_what_it_is_said_to_be_is_named(
    text: str, name: str, message: str
) -> None:
    with pytest.raises(CorpusError, match=re.escape(message)):
        labelled_records(text.encode(), f"a.{name}", name)


def test_an_unknown_format_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"format: wanted one of cola, .*, got 'glue'"):
        labelled_records(b"", "a", "glue")


def test_squad_comes_with_and_without_answers() -> None:
    questions = [
        {"id": "1", "question": "q", "answers": [{"text": "b", "answer_start": 2}]},
        {"id": "2", "question": "r", "is_impossible": True, "answers": []},
        {"id": "3", "question": "s", "is_impossible": True},
        {"id": "4", "question": "a test row"},
    ]
    data = {"version": "v2.0", "data": [{"paragraphs": [{"context": "a b", "qas": questions}]}]}
    records = records_of(json.dumps(data), "squad")
    rows = labelled(records[:3], QuestionAnswering.shapes(), {}, "a")
    assert [row["id"] for row in rows] == ["1", "2", "3"]
    assert [len(row["answers"]) for row in rows] == [1, 0, 0]
    with pytest.raises(CorpusError, match=r"a, row 4: wanted .* in the column 'answers', got"):
        labelled(records, QuestionAnswering.shapes(), {}, "a")


def test_clinc_has_its_out_of_scope_rows() -> None:
    data = {"val": [["hi there", "greeting"]], "oos_val": [["blue", "oos"]], "train": []}
    found = records_of(json.dumps(data), "clinc_val")
    assert found == [{"text": "hi there", "intent": "greeting"}, {"text": "blue", "intent": "oos"}]


# Rows of each file as its authors count them.
REAL = {
    "cola/in_domain_train.tsv": ("cola", 8551),
    "cola/out_of_domain_dev.tsv": ("cola", 516),
    "sst2/train.tsv": ("sst2", 67349),
    "mrpc/msr_paraphrase_train.txt": ("mrpc", 4076),
    "mrpc/msr_paraphrase_test.txt": ("mrpc", 1725),
    "stsb/sts-train.csv": ("sts_benchmark", 5749),
    "stsb/sts-dev.csv": ("sts_benchmark", 1500),
    "wnut17/wnut17train.conll": ("conll", 3394),
    "wnut17/emerging.dev.conll": ("conll", 1009),
    "ud_ewt/en_ewt-ud-dev.conllu": ("conllu", 2001),
    "clinc150/data_full.json": ("clinc_train", 15100),
    "banking77/train.csv": (None, 10003),
    "banking77/test.csv": (None, 3080),
    "squadshifts/amazon_reviews_v1.0.json": ("squad", 9885),
}


@pytest.mark.parametrize("path", REAL)
def test_a_real_file_has_its_published_rows(path: str, data_dir: Path) -> None:
    name, count = REAL[path]
    found = labelled_records((data_dir / path).read_bytes(), path, name)
    assert (len(found.records), found.rows) == (count, count)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"text": "a", "label": "x", "answer": "reject", "_task_hash": 1}, "prodigy"),
        ({"id": 1, "data": {"text": "a"}, "annotations": []}, "label_studio"),
        ({"text": "a", "annotation_id": 1, "lead_time": 2.5, "sentiment": "x"}, "label_studio"),
        ({"text": "a", "label": [[0, 1, "x"], [2, 3, "y"]]}, "doccano"),
    ],
)
def test_an_annotation_tools_export_is_not_read_as_a_table(row: dict, name: str) -> None:
    """A rejected label would be learned as that label."""
    for source, data in (("a.jsonl", json.dumps(row)), ("a.json", json.dumps([row], indent=1))):
        with pytest.raises(CorpusError, match=f"{source}: wanted rows of a task, .*format {name}"):
            labelled_records(data.encode(), source, None)


SWAG = """,video-id,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label
0,a,"She opens, sees. He",\"She opens, sees.\",He,gold,runs.,"sits ""down"".",falls.,sings.,2
1,b,"It rains. They",It rains.,They,gen,a.,b.,c.,d.,7
2,c,"It rains. They",It rains.,They,gen,a.,b.,c.,d.,0
"""


def test_swags_situations_are_read_with_what_begins_their_endings() -> None:
    found = labelled_records(SWAG.encode(), "train.csv", "swag")
    assert found.records[0] == {
        "text": "She opens, sees.",
        "choices": ["He runs.", 'He sits "down".', "He falls.", "He sings."],
        "label": 2,
    }
    assert [record["label"] for record in found.records] == [2, 0]
    [(number, unread)] = found.unread.items()
    assert (number, found.rows) == (2, 3)
    assert "row 2: wanted a label from 0 to 3, the number of an ending, got '7'" in str(unread)
    test = "\n".join(line.rpartition(",")[0] for line in SWAG.splitlines()).encode()
    assert "label" not in labelled_records(test, "test.csv", "swag").records[0]
    with pytest.raises(CorpusError, match=r"a\.csv: wanted SWAG's columns .* got text, label"):
        labelled_records(b"text,label\na,1\n", "a.csv", "swag")


def test_balanced_copa_in_swags_format_has_its_published_rows(data_dir: Path) -> None:
    """SWAG itself is not at hand; COPA's premises and alternatives have the same shape."""
    tree = ET.parse(data_dir / "balanced_copa" / "balanced-copa-dev-all.xml")
    written = io.StringIO()
    columns = ["startphrase", "sent1", "sent2", "ending0", "ending1", "label"]
    table = csv.writer(written)
    table.writerow(columns)
    for item in tree.iter("item"):
        premise, first, second = (item.findtext(name) for name in ("p", "a1", "a2"))
        label = int(item.get("most-plausible-alternative", "")) - 1
        table.writerow([premise, premise, "", first, second, label])
    records = labelled_records(written.getvalue().encode(), "copa.csv", "swag").records
    assert len(records) == 1000
    assert Counter(record["label"] for record in records) == {0: 506, 1: 494}
    wanted = ["The sun was rising.", "The grass was cut."]
    assert (records[0]["choices"], records[1]["choices"]) == (wanted, wanted[::-1])
    rows = MultipleChoice.checked([*records])
    assert not [row for row in rows if isinstance(row, Exception)]
