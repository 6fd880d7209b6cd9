"""Plants faults that were mended, one at a time, and says which tests notice them.

    python -m tests.planted_faults [--tree FOLDER] [--only NAME …] [--list]

Each fault is planted in a copy of the tree's tracked files. Its tests run there without it first:
a fault counts as caught only by tests that pass without it. What `make test` and `.ci/run` select
is read from the Makefile. Exit status 1 if a fault is not caught.

Run it before and after tests are moved, merged or marked: what was caught has to be caught. It
takes five minutes of CPU, so pytest does not collect it; `test_planted_faults.py` checks the table
itself.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600
"""For a test that a fault makes wait for ever."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A mistake that was made once, or could be again."""

    name: str
    what: str
    """What goes wrong, as a user sees it."""
    file: str
    old: str
    """Occurs once in the file."""
    new: str
    tests: tuple[str, ...]
    """`path::function` of those that should notice. In another tree they are looked for by the name
    of the file, then by that of the function."""


def _fault(name: str, what: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(name=name, what=what, file=file, old=old, new=new, tests=tests)


FAULTS = (
    # bert_core: data
    _fault(
        "pairs",
        "A random second sentence may come from a document with the same text.",
        "bert_core/data/pairs.py",
        "        if document >= before:\n",
        "        if document > before:\n",
        "tests/bert_core/data/test_pairs.py"
        "::test_a_random_next_sentence_never_comes_from_an_equal_text",
    ),
    _fault(
        "masking",
        "A random replacement may be a special token.",
        "bert_core/data/masking.py",
        "self._replacement_ids = np.flatnonzero(~self._is_special)",
        "self._replacement_ids = np.arange(vocab_size)",
        "tests/bert_core/data/test_masking.py"
        "::test_a_masker_never_predicts_a_special_token_and_inserts_none_but_mask",
    ),
    _fault(
        "order",
        "The rows of a window are in the same order in every epoch.",
        "bert_core/data/order.py",
        "np.random.default_rng([seed, epoch, window + 1])",
        "np.random.default_rng([seed, window + 1])",
        "tests/bert_core/data/test_order.py::test_seeds_and_epochs_have_orders_of_their_own",
    ),
    _fault(
        "vocabulary",
        "A vocabulary keeps 1,000 characters, also of Chinese, which needs more.",
        "bert_core/data/vocabulary.py",
        "or places > vocab_size // 2:",
        "or places > LEAST_ALPHABET:",
        "tests/bert_core/data/test_vocabulary.py"
        "::test_text_without_spaces_has_the_characters_that_it_needs",
    ),
    _fault(
        "reader",
        "A quote that is not closed takes the lines after it with it.",
        "bert_core/data/tables.py",
        "            lines.give_back()\n",
        "",
        "tests/bert_core/data/test_tables.py::test_an_unclosed_quote_affects_no_other_line",
    ),
    _fault(
        "bulk",
        "Tokenized in bulk, a text with an added token may get other ids.",
        "bert_core/data/bulk.py",
        "holds |= pc.match_substring(texts, token)",
        "holds = pc.match_substring(texts, token)",
        "tests/bert_core/data/test_bulk.py::test_tricky_texts",
    ),
    _fault(
        "tokenizer",
        "Of a text that is cut, the beginning is kept where the tokenizer keeps the end.",
        "bert_core/data/tokenizer.py",
        'whole.keeps_end = there.settings.get("truncation_side") == "left"',
        'whole.keeps_end = there.settings.get("padding_side") == "left"',
        "tests/bert_core/tasks/test_texts.py"
        "::test_texts_are_cut_where_and_at_the_end_that_the_tokenizer_says",
    ),
    _fault(
        "shards",
        "A damaged copy of a shard stays in the cache.",
        "bert_core/data/shards.py",
        "            cache.drop(copy)\n",
        "",
        "tests/bert_core/data/test_shards.py::test_a_copy_that_was_damaged_is_fetched_again",
    ),
    # bert_core: models and training
    _fault(
        "attention",
        "A row attends to its padding.",
        "bert_core/model/dot_product.py",
        "bias = None if mask is None else _mask_bias(mask, query)\n            bias = _plus",
        "bias = None\n            bias = _plus",
        "tests/bert_core/model/test_encoder.py::test_a_row_does_not_see_its_padding",
    ),
    _fault(
        "negatives",
        "A copy of a row's own text counts as a negative.",
        "bert_core/objectives/vector_losses.py",
        "keys = (anchors.repeat(2) * many + torch.cat([compared[texts.targets], own])).unique()",
        "keys = (anchors * many + compared[texts.targets]).unique()",
        "tests/bert_core/tasks/test_feature_extraction.py"
        "::test_a_rows_right_answers_are_not_its_negatives",
    ),
    _fault(
        "order-of-workers",
        "Vectors of several workers are compared with labels in another order.",
        "bert_core/train/joint.py",
        "return [vectors[order] for vectors in self.vectors], {",
        "return list(self.vectors), {",
        "tests/bert_core/train/test_joint.py"
        "::test_any_micro_batch_has_the_gradient_and_the_loss_of_plain_autograd",
    ),
    _fault(
        "workers",
        "Several workers train with a smaller gradient than one.",
        "bert_core/train/backward.py",
        "* world_size / (whole[name] or 1.0)",
        "/ (whole[name] or 1.0)",
        "tests/bert_core/train/test_loop.py"
        "::test_the_number_of_workers_does_not_change_the_gradient",
    ),
    _fault(
        "resume",
        "A run that resumes draws other dropout than one left alone.",
        "bert_core/train/backward.py",
        "        torch.manual_seed(_dropout_seed(",
        "        self.index or torch.manual_seed(_dropout_seed(",
        "tests/bert_core/train/test_loop.py"
        "::test_a_resumed_run_ends_with_the_same_bits_with_dropout_on",
    ),
    _fault(
        "checkpoint",
        "A run goes on from a checkpoint that a kill left unfinished.",
        "bert_core/train/checkpoint.py",
        "        if files.exists(files.join(checkpoint.folder, LAST_FILE))\n",
        "",
        "tests/bert_core/train/test_checkpoint.py"
        "::test_leftovers_of_a_killed_run_are_not_a_checkpoint_and_are_cleared",
    ),
    _fault(
        "bundle",
        "A file that has changed since the bundle was written is read.",
        "bert_core/bundle/record.py",
        "if sha256 != record.files[name]:",
        "if name not in record.files:",
        "tests/bert_core/test_bundle.py"
        "::test_a_changed_file_is_named_with_both_digests_and_the_way_out",
    ),
    _fault(
        "entities",
        "Entities of one word are joined where the tags are BIOES or BILOU.",
        "bert_core/metrics/entities.py",
        'begins = inside and (prefix in "BSU" or kind != open_type or ended)',
        'begins = inside and (prefix == "B" or kind != open_type)',
        "tests/bert_core/metrics/test_entities.py"
        "::test_entities_are_written_in_a_scheme_and_read_back",
    ),
    _fault(
        "quantization",
        "Products of 8-bit weights overflow on CPUs that add two of them in 16 bits.",
        "bert_core/inference/quantization.py",
        "LARGEST_WEIGHT = 64\n",
        "LARGEST_WEIGHT = 127\n",
        "tests/bert_core/inference/test_export.py::test_a_graph_in_8_bits_is_small_and_near",
    ),
    _fault(
        "answers",
        "Texts of different lengths get each other's answers.",
        "bert_core/scores.py",
        "in zip(group, parts, strict=True):",
        "in zip(sorted(group), parts, strict=True):",
        "tests/bert_core/inference/test_predictor.py"
        "::test_a_text_gets_the_same_answer_in_any_company_and_order",
    ),
    # bert_core: files, storage
    _fault(
        "files",
        "A file that could not be written leaves a part of it.",
        "bert_core/files.py",
        "        with suppress(OSError):  # renamed, or never created\n            os.unlink(part)",
        "        if not is_local:\n            os.unlink(part)",
        "tests/bert_core/test_files.py"
        "::test_a_block_that_raises_leaves_the_old_file_and_nothing_else",
    ),
    _fault(
        "storage",
        "A file that was created counts as another's if the store's answer was lost.",
        "bert_core/storage/bucket.py",
        "return version if present == data else None",
        "return None",
        "tests/bert_core/test_storage.py::test_a_created_file_is_ours_even_if_the_response_was_lost",
    ),
    # tracking
    _fault(
        "champion",
        "A champion that came during a comparison is replaced without one.",
        "tracking/models/registry.py",
        "if compared_with is not None and compared_with != before:",
        "if compared_with is not None and compared_with == new:",
        "tests/tracking/models/test_registry.py"
        "::test_a_comparison_says_nothing_about_a_champion_that_came_after_it",
    ),
    _fault(
        "spool",
        "A line that a kill has torn corrupts the next one.",
        "tracking/runs/spool.py",
        "    if end < len(data):\n        os.truncate(path, end)\n",
        "",
        "tests/tracking/runs/test_spool.py::test_a_line_torn_by_a_kill_is_cut_off",
    ),
    # pipelines
    _fault(
        "renamed",
        "A run that goes on after a folder was renamed loses documents.",
        "pipelines/corpus/digest.py",
        "    corpus = replace(corpus, files=ordered)\n"
        "    return corpus, _as_input(corpus, digests)",
        "    return corpus, _as_input(replace(corpus, files=ordered), digests)",
        "tests/pipelines/test_prepare.py"
        "::test_a_restart_under_other_names_loses_and_repeats_no_document",
    ),
    _fault(
        "skipped",
        "A run that was killed after its last step stays RUNNING in MLflow.",
        "pipelines/runtime/stage.py",
        "        finish_run(\n            config.local_folder, uri=",
        "        dict(\n            folder=config.local_folder, uri=",
        "tests/pipelines/runtime/test_stage.py"
        "::test_a_stage_killed_after_its_manifest_has_its_run_ended_by_the_next_start",
    ),
    _fault(
        "lease",
        "A writer whose output another has taken over goes on writing.",
        "pipelines/runtime/lease.py",
        "                    self._interrupt()\n",
        "",
        "tests/pipelines/runtime/test_lease.py"
        "::test_a_writer_that_lost_its_lease_is_interrupted_and_learns_who_holds_it",
    ),
    _fault(
        "secrets",
        "A secret in a parameter of a URI goes into a job's command line.",
        "pipelines/jobs/secret_values.py",
        "named = [(name, value), *_PARAMETER.findall(value)]",
        "named = [(name, value)]",
        "tests/pipelines/jobs/test_submission.py::test_a_secret_is_refused_without_being_repeated",
    ),
    _fault(
        "segments",
        "A student whose teacher has no segments is trained on pairs without them.",
        "pipelines/distill.py",
        "replace(shorter, tokenizer=reader.tokenizer)",
        "replace(shorter, tokenizer=teacher.tokenizer)",
        "tests/pipelines/test_distill.py"
        "::test_a_student_reads_pairs_in_training_as_it_will_when_it_answers",
    ),
    _fault(
        "points",
        "A run that is killed right after a checkpoint loses points of its curves.",
        "pipelines/training/worker.py",
        "self._waiting, self._new = list(before), list(before)",
        "self._waiting, self._new = Records(), list(before)",
        "tests/pipelines/test_pretrain.py::test_lost_points_are_recorded_by_the_resumed_run",
    ),
    _fault(
        "distributed",
        "A worker's error about the data reaches the user as a traceback of Ray's.",
        "pipelines/runtime/distribute.py",
        "except errors.RaybertError as error:",
        "except errors.ConfigError as error:",
        "tests/pipelines/test_prepare.py::test_a_workers_error_reaches_the_user_as_it_was_written",
    ),
    _fault(
        "retried",
        "A user's mistake on a training worker is retried instead of told.",
        "pipelines/training/controller.py",
        "                raise mistake\n",
        "                logger.error(mistake)\n",
        "tests/pipelines/training/test_worker.py"
        "::test_an_error_on_any_rank_is_retried_but_a_users_mistake_ends_training_at_once",
    ),
    _fault(
        "options",
        "An option written with hyphens is named up to the first of them.",
        "pipelines/runtime/config_errors.py",
        r"Option ')([\w.-]+)",
        r"Option ')([\w.]+)",
        "tests/pipelines/test_configure.py"
        "::test_an_option_with_hyphens_is_quoted_as_written_with_the_field_for_it",
    ),
    # serve
    _fault(
        "batching",
        "A request that fails takes those of its batch with it.",
        "serve/model/batching.py",
        "            if len(items) == 1:\n                return [error]\n",
        "            return [error] * len(items)\n",
        "tests/serve/model/test_batching.py::test_an_error_affects_only_its_item",
    ),
    _fault(
        "keys",
        "Paths of a model that compute nothing, such as /tokenize, ask for no key.",
        "serve/http/routes/model.py",
        "caller = None if endpoint.is_open else admit(keys, request, model.name)",
        "caller = admit(keys, request, model.name) if endpoint.task else None",
        "tests/serve/request/test_auth.py::test_every_path_but_probes_and_pages_asks_for_a_key",
    ),
    _fault(
        "joint",
        "A request to several models loses its key on the way to them.",
        "serve/http/routes/joint.py",
        'for name, value in headers_to_model(request) if name != "accept"]',
        'for name, value in headers_to_model(request) if not name.startswith("a")]',
        "tests/serve/model/test_shared_passes.py::test_a_key_must_be_allowed_to_use_all_of_the_models",
    ),
    _fault(
        "slow body",
        "A body that does not arrive is waited for as long as an answer.",
        "serve/request/body.py",
        "async with asyncio.timeout(limits.body_timeout_s) as timeout:",
        "async with asyncio.timeout(limits.deadline_s) as timeout:",
        "tests/serve/request/test_limits.py::test_a_body_that_does_not_arrive_times_out",
    ),
    _fault(
        "disconnect",
        "Work for a client that is gone is computed to the end.",
        "serve/request/disconnects.py",
        "        task.cancel()\n",
        "",
        "tests/serve/request/test_disconnects.py::test_queued_work_of_a_closed_connection_is_dropped",
    ),
    _fault(
        "roll-over",
        "The version before is dropped before the new one has answered.",
        "serve/versions/follower.py",
        "                self._former = _Former(self._held, replaced)\n",
        "                replaced.retire()\n",
        "tests/serve/test_faults_of_versions.py"
        "::test_a_plan_whose_model_fails_every_request_is_rolled_back",
    ),
    _fault(
        "nan",
        "A version with NaN among its weights is served.",
        "serve/model/model.py",
        "            check_weights(folder, self.predictor.model)\n",
        "",
        "tests/serve/test_faults_of_versions.py"
        "::test_a_version_with_nan_in_weights_that_no_example_uses_is_not_served",
    ),
    _fault(
        "positions",
        "The results of a ranking have the index of their rank instead of their document's.",
        "serve/surfaces/rerank.py",
        "            for index, score in best_first(answered)[: request.top_n]\n",
        "            for index, (_, score) in enumerate(best_first(answered)[: request.top_n])\n",
        "tests/serve/surfaces/test_rerank.py::test_coheres_client_reranks",
    ),
    _fault(
        "cached",
        "A cached answer is given to a request with other parameters.",
        "serve/model/answer_cache.py",
        "repr((digest, task, vars(parameters))).encode()",
        "repr((digest, task)).encode()",
        "tests/serve/model/test_answer_cache.py::test_only_equal_questions_to_equal_weights_have_equal_keys",
    ),
    _fault(
        "proxy",
        "A replica that ends while it answers gets 502, at which clients do not try again.",
        "serve/cluster/haproxy_launcher.py",
        '    502: "503 Service Unavailable",',
        '    502: "502 Bad Gateway",',
        "tests/serve/cluster/test_haproxy_launcher.py"
        "::test_requests_pass_and_errors_of_the_proxy_are_json_with_their_own_status",
    ),
    _fault(
        "metrics",
        "A roll-over that has failed is not among the metrics.",
        "serve/observe/metrics.py",
        "self._problem.set(int(state.has_problem), tags=of_model)",
        "self._problem.set(0, tags=of_model)",
        "tests/serve/test_metrics_live.py"
        "::test_versions_errors_and_a_failed_roll_over_are_distinguished",
    ),
)


def planted(text: str, fault: Fault) -> str:
    """The content of the fault's file with the fault. Raises: ValueError if it has no one place."""
    count = text.count(fault.old)
    if count != 1:
        raise ValueError(
            f"{fault.name}: wanted this once in {fault.file}, it is there {count} times: "
            f"{fault.old!r}: write the fault for the file as it is now"
        )
    return text.replace(fault.old, fault.new)


def located(tree: Path, test: str) -> str:
    """Where a tree has a test. Raises: ValueError if it has none of that name, or several."""
    path, _, function = test.partition("::")
    defined = re.compile(rf"^(?:async )?def {re.escape(function)}\(", re.MULTILINE)
    tests = sorted(tree.glob("tests/**/test_*.py"))
    namesakes = [each for each in tests if each.name == Path(path).name]
    for candidates in ([tree / path], namesakes, tests):
        found = [each for each in candidates if each.is_file() and defined.search(each.read_text())]
        if len(found) == 1:
            return f"{found[0].relative_to(tree)}::{function}"
    raise ValueError(f"{test}: wanted one test of this name in {tree}, there is none, or several")


@dataclass(frozen=True)
class Stage:
    """What runs tests, and the marks of those that it runs."""

    command: str
    marks: str


def stages_of(tree: Path) -> tuple[Stage, ...]:
    """`make test`, and what `.ci/run` runs besides: the guards, or in a tree without them all that
    `make check` runs."""
    targets = re.findall(r"^([a-z-]+):", (tree / "Makefile").read_text(), re.MULTILINE)
    first = marks_of(tree, "test")
    more = marks_of(tree, "guard" if "guard" in targets else "check")
    return Stage("make test", first), Stage(".ci/run", f"({more}) and not ({first})")


def marks_of(tree: Path, target: str) -> str:
    """The expression that a target gives to `pytest -m`."""
    command = ["make", "--dry-run", "--directory", str(tree), target]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    [line] = [line for line in lines.splitlines() if " -m pytest" in line]
    words = shlex.split(line.partition(" -m pytest")[2])
    return words[words.index("-m") + 1]


@dataclass(frozen=True)
class Ran:
    """What a run of tests came to."""

    outcomes: Mapping[str, str]
    """`stem::function[parameters]` → passed, failed, skipped."""
    cpu_s: float
    output: str

    def those_of(self, test: str) -> list[str]:
        """The outcomes of a test, for each of its parameters."""
        name = f"{Path(test.partition('::')[0]).stem}::{test.partition('::')[2]}"
        return [each for key, each in self.outcomes.items() if key.partition("[")[0] == name]

    @property
    def first_failure(self) -> str | None:
        return next((key for key, each in self.outcomes.items() if each == "failed"), None)


def run(copy: Path, marks: str, tests: Sequence[str], *options: str) -> Ran:
    """Run tests of a copy. Raises: RuntimeError if they cannot be collected."""
    report = copy / "report.xml"
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider"]
    command += ["-o", f"timeout={TIMEOUT_S}", "-m", marks, f"--junitxml={report}", *options]
    before = os.times()
    done = subprocess.run(
        [*command, *sorted(tests)],
        cwd=copy, env=environment(copy), capture_output=True, text=True, check=False,
    )  # fmt: skip
    after = os.times()
    cpu_s = after.children_user + after.children_system
    cpu_s -= before.children_user + before.children_system
    if done.returncode not in (0, 1, 5):  # 5: no test has these marks
        raise RuntimeError(f"{shlex.join(command)}: {done.stdout[-4000:]}{done.stderr[-2000:]}")
    return Ran(dict(_outcomes(report)), cpu_s, done.stdout)


def _outcomes(report: Path) -> Iterator[tuple[str, str]]:
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "skipped" if "skipped" in kinds else "passed"
        outcome = "failed" if kinds & {"failure", "error"} else outcome
        yield f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}", outcome


def environment(copy: Path) -> dict[str, str]:
    """With the packages of the copy first, for the tests and for what they start."""
    paths = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def copied(tree: Path, copy: Path) -> None:
    """Copy what git tracks, as it is on disk. Raises: RuntimeError if Python imports another."""
    names = subprocess.run(
        ["git", "-C", str(tree), "ls-files", "-z"], check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in names:
        if (tree / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, copy / name)
    code = "import bert_core; print(bert_core.__file__)"
    place = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/", env=environment(copy), check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    if not Path(place).is_relative_to(copy):
        raise RuntimeError(f"wanted {copy} first on the path, Python imports {place}")


def check_without(copy: Path, stages: Sequence[Stage], tests: Sequence[str]) -> dict[str, Stage]:
    """Each test's stage, the first one that runs it. Raises: RuntimeError if one does not pass."""
    stage_of: dict[str, Stage] = {}
    for stage in stages:
        ran = run(copy, stage.marks, tests)
        for test in tests:
            outcomes = ran.those_of(test)
            if "failed" in outcomes:
                raise RuntimeError(f"{test} fails without any fault: {ran.output[-4000:]}")
            if "passed" in outcomes:
                stage_of.setdefault(test, stage)
        print(f"without faults: {len(ran.outcomes)} cases of {stage.command} in {ran.cpu_s:.0f} s")
    return stage_of


def noticed(
    copy: Path, fault: Fault, tests: Sequence[str], stage_of: Mapping[str, Stage]
) -> tuple[str, str, float]:
    """What notices a fault, by which test, and how many seconds of CPU the tests took."""
    file, cpu_s = copy / fault.file, 0.0
    sound = file.read_text()
    file.write_text(planted(sound, fault))
    try:
        for stage in dict.fromkeys(stage_of[test] for test in tests if test in stage_of):
            chosen = [test for test in tests if stage_of.get(test) == stage]
            ran = run(copy, stage.marks, chosen, "-x")
            cpu_s += ran.cpu_s
            if (first := ran.first_failure) is not None:
                return stage.command, first, cpu_s
    finally:
        file.write_text(sound)
    return "nothing", "", cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to plant them in")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults alone")
    parser.add_argument("--list", action="store_true", help="show the faults, and run nothing")
    arguments = parser.parse_args()
    by_name = {fault.name: fault for fault in FAULTS}
    if unknown := set(arguments.only or ()) - set(by_name):
        parser.error(f"there is no fault {', '.join(sorted(unknown))}: see --list")
    faults = [by_name[name] for name in arguments.only or by_name]
    if arguments.list:
        for fault in faults:
            print(f"{fault.name:<13} {fault.file:<36} {fault.what}")
        return
    tree, began_s = arguments.tree.resolve(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as scratch:
        copy = Path(scratch).resolve()
        copied(tree, copy)
        for fault in faults:
            planted((copy / fault.file).read_text(), fault)
        tests_of = {fault.name: [located(copy, each) for each in fault.tests] for fault in faults}
        stages = stages_of(tree)
        every = sorted({test for tests in tests_of.values() for test in tests})
        stage_of = check_without(copy, stages, every)
        print(f"{'fault':<13} {'caught by':<10} {'CPU s':>5}  first failing test", flush=True)
        missed = 0
        for fault in faults:
            by, first, cpu_s = noticed(copy, fault, tests_of[fault.name], stage_of)
            missed += by == "nothing"
            print(f"{fault.name:<13} {by:<10} {cpu_s:>5.0f}  {first[:100]}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} caught in {time.monotonic() - began_s:.0f} s")
    sys.exit(int(missed > 0))


if __name__ == "__main__":
    main()
