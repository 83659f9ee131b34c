"""`keepwise estimate`: what it prints, its exit codes, and that it loads no framework."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import keepwise
from keepwise.cli import main

LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
RULE = ["--layers", "32", "--width", "4096", "--tokens", "2048"]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def run(*arguments):
    return CliRunner().invoke(main, ["estimate", *arguments])


def test_the_help_shows_examples_one_a_line():
    lines = [line.strip() for line in run("--help").stdout.splitlines()]
    examples = [line.split()[2:] for line in lines if line.startswith("keepwise estimate ")]
    assert len(examples) == 3
    for arguments in examples[1:]:
        assert run(*arguments).exit_code == 0


def test_the_rule_in_words():
    result = run(*RULE, "--segment", "1")
    assert result.exit_code == 0
    assert "822,083,584 B" in result.stdout
    assert "98 x tokens x width" in result.stdout
    assert "+33.3%" in result.stdout


def test_the_rule_says_how_many_tokens_fit():
    budget = 10 * 2**30
    arguments = ["--layers", "32", "--width", "4096", "--segment", "1", "--parameters", "100M", "--budget", str(budget)]
    most = json.loads(run(*arguments, "--tokens", "2048", "--json").stdout)["largest_tokens"]
    peaks = [json.loads(run(*arguments, "--tokens", str(n), "--json").stdout)["peak_bytes"] for n in (most, most + 1)]
    assert peaks[0] <= budget < peaks[1]


def test_json_is_one_object_and_equals_python(config):
    result = run("--config", config, "--batch", "2", "--seq", "4096", "--checkpointing", "full", "--tp", "2", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    answer = keepwise.estimate(LLAMA, batch=2, sequence=4096, checkpointing="full", tensor_parallel=2)
    assert data["peak_bytes"] == answer.peak_bytes
    assert data["categories"] == answer.categories.as_dict()
    assert {p["changes"][0] for p in data["policies"]} >= {"checkpointing none", "checkpointing full"}
    assert data["largest_batch"] >= 1
    assert data["longest_sequence"] % 128 == 0


def test_it_says_no_with_exit_code_one(config):
    assert run("--config", config, "--seq", "8192").exit_code == 0  # nobody asked
    assert run("--config", config, "--seq", "8192", "--device", "rtx4090").exit_code == 1
    assert run("--config", config, "--seq", "8192", "--device", "b200", "--checkpointing", "full").exit_code == 0
    assert run("--config", config, "--seq", "8192", "--budget", "100GiB").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--config"),
        (["--layers", "3"], "--width"),
        (["--config", "nowhere.json"], "nowhere.json"),
        ([*RULE, "--checkpointing", "sometimes"], "sometimes"),
        ([*RULE, "--emit", "jax"], "--heads"),
        ([*RULE, "--heads", "7"], "divisible"),
        ([*RULE, "--heads", "32", "--device", "abacus"], "abacus"),
        ([*RULE, "--heads", "32", "--emit", "caffe"], "caffe"),
        ([*RULE, "--heads", "32", "--family", "nonsense"], "nonsense"),
        ([*RULE, "--heads", "32", "--kv-heads", "5"], "5 key heads"),
        ([*RULE, "--heads", "32", "--optimizer-kernel", "fast"], "fast"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_two(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_a_configuration_and_shapes_are_not_mixed(config):
    for more, word in ((["--layers", "3"], "layers"), (["--parameters", "7B"], "--parameters")):
        result = run("--config", config, *more)
        assert result.exit_code == 2
        assert word in result.stderr


def test_the_longest_sequence_of_pictures(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "vit"}))
    result = run("--config", str(path))
    assert "the model fixes its length" in result.stdout
    assert json.loads(run("--config", str(path), "--json").stdout)["longest_sequence"] is None


def test_an_unknown_model_type_is_read_as_a_llama_and_said_so(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {**LLAMA, "model_type": "new", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
        )
    )
    result = run("--config", str(path), "--json")
    assert json.loads(result.stdout)["num_parameters"] == keepwise.estimate(LLAMA).num_parameters
    assert any("'new' is not known" in note for note in json.loads(result.stdout)["notes"])


def test_files_that_are_no_configurations(tmp_path):
    for name, text, word in (
        ("a.json", "{", "no JSON"),
        ("b.json", "[]", "object"),
        ("c.json", '{"model_type": "llama", "hidden_size": "x"}', "hidden_size"),
    ):
        (tmp_path / name).write_text(text)
        result = run("--config", str(tmp_path / name))
        assert result.exit_code == 2
        assert word in result.stderr


def test_a_folder_is_a_configuration(config, tmp_path):
    assert run("--config", str(tmp_path), "--seq", "512").stdout == run("--config", config, "--seq", "512").stdout


def test_the_report_is_not_overwritten_without_force(config, tmp_path):
    target = tmp_path / "page.html"
    assert run("--config", config, "--report", str(target)).exit_code == 0
    first = target.read_text()
    assert first.startswith("<!doctype html>")
    refused = run("--config", config, "--report", str(target))
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert run(*RULE, "--report", str(target), "--force").exit_code == 0
    assert target.read_text() != first


def test_settings_are_printed(config):
    result = run("--config", config, "--seq", "4096", "--budget", "140GiB", "--emit", "transformers,megatron")
    assert "== transformers" in result.stdout
    assert "TrainingArguments(" in result.stdout
    assert "== megatron" in result.stdout
    assert "lost:" in result.stdout


def test_each_stage_has_its_column(config):
    result = run("--config", config, "--pp", "4", "--accumulation", "8")
    for stage in range(1, 5):
        assert f"stage {stage} of 4" in result.stdout
    assert "micro-batches in flight" in result.stdout


def test_no_framework_is_needed(config):
    """With every framework made impossible to import, and none of our heavier libraries loaded."""
    code = f"""
import sys
frameworks = ("torch", "transformers", "accelerate", "peft", "jax", "keras", "tensorflow")
for name in frameworks:
    sys.modules[name] = None
from click.testing import CliRunner
import keepwise
import keepwise.estimator
assert callable(keepwise.estimate)
keepwise.estimate(layers=32, width=4096, tokens=2048)
from keepwise.cli import main
result = CliRunner().invoke(main, ["estimate", "--config", {config!r}, "--emit", "all"])
assert result.exit_code == 0, result.output
assert all(sys.modules[name] is None for name in frameworks)
loaded = [name for name in ("numpy", "rich", "highspy", "jinja2") if name in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_answer_takes_little_time(config):
    """Processor time of the whole command, searches included; about 0.1 s where it was written."""
    resource = pytest.importorskip("resource")

    def used():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    seconds = []
    for _ in range(3):
        before = used()
        arguments = ["-c", "from keepwise.cli import main; main()", "estimate", "--config", config, "--seq", "8192"]
        subprocess.run([sys.executable, *arguments], check=True, timeout=60, stdout=subprocess.DEVNULL)
        seconds.append(used() - before)
    assert min(seconds) < 0.9, seconds


def test_importing_the_room_does_not_hide_the_function():
    code = "import keepwise.estimator.api, keepwise; assert keepwise.estimate(layers=1, width=1, tokens=1).peak_bytes == 34"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
