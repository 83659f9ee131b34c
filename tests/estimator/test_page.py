"""The interactive page: whole in one file, and its arithmetic equals ours, in a real browser."""

import json
import re
import shutil
import subprocess

import pytest

import keepwise
from keepwise.estimator.api import architecture_of, make_setup
from keepwise.estimator.page import render
from keepwise.estimator.rule import activation_memory

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}


def rule_page(**sizes):
    answer = keepwise.estimate(**sizes)
    policy = f"every:{sizes['segment']}" if "segment" in sizes else "none"
    return render(answer, None, make_setup(checkpointing=policy)), answer


def config_page(**options):
    answer = keepwise.estimate(LLAMA, **options)
    policy = options.pop("checkpointing", "none")
    return render(answer, architecture_of(LLAMA), make_setup(checkpointing=policy, **options)), answer


def test_one_small_file_without_links():
    page, _ = config_page(sequence=8192)
    assert len(page.encode()) < 200_000
    assert not re.search(r"""(src|href)\s*=\s*["']""", page)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "__DATA__" not in page


def test_data_cannot_close_its_element():
    answer = keepwise.estimate(
        {**LLAMA, "model_type": "x</script><b>", "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32}
    )
    page = render(answer, architecture_of(LLAMA), make_setup(checkpointing="none"))
    assert page.count("</script>") == 2


def run(page, script, tmp_path):
    """Run `script` after the page's own and read the JSON that it leaves in the title."""
    path = tmp_path / "page.html"
    path.write_text(
        page.replace("</body>", f"<script>document.title = JSON.stringify((() => {{ {script} }})());</script></body>")
    )
    arguments = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=2000",
        "--dump-dom",
        f"file://{path}",
    ]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(.*?)</title>", result.stdout, re.DOTALL)
    assert title is not None
    return json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium")


@needs_browser
def test_sliders_follow_the_rule(tmp_path):
    page, _ = rule_page(layers=32, width=4096, tokens=2048, segment=1)
    sizes = "[32,2048,4096,0,34],[32,2048,4096,8,34],[80,2048,8192,0,34],[40,4096,5120,1,34],[36,512,1024,6,2]"
    script = f"return [{sizes}].map(a => at(...a).act);"
    found = run(page, script, tmp_path)
    cases = [
        (32, 2048, 4096, None, 34),
        (32, 2048, 4096, 8, 34),
        (80, 2048, 8192, None, 34),
        (40, 4096, 5120, 1, 34),
        (36, 512, 1024, 6, 2),
    ]
    for value, (layers, tokens, width, segment, layer_bytes) in zip(found, cases, strict=True):
        memory = activation_memory(layers=layers, tokens=tokens, width=width, layer_bytes=layer_bytes, segment=segment)
        assert value == pytest.approx(memory.total_bytes, rel=1e-12)


@needs_browser
def test_moving_a_slider_redraws(tmp_path):
    page, _ = rule_page(layers=32, width=4096, tokens=2048, segment=1)
    script = """
      const before = [$("act").textContent, $("bar").children.length, $("units").textContent];
      const k = $("k"); k.value = 0; k.dispatchEvent(new Event("input"));
      const after = [$("act").textContent, $("ok").value, $("units").textContent];
      $("reset").click();
      return {before, after, again: $("act").textContent};
    """
    found = run(page, script, tmp_path)
    assert found["before"][0] == "784 MiB"
    assert found["before"][1] >= 4
    assert found["before"][2] == "4 units"
    assert found["after"] == ["8.50 GiB", "off", "3 units"]
    assert found["again"] == "784 MiB"


@needs_browser
@pytest.mark.parametrize(
    "options",
    [
        {"sequence": 4096},
        {"sequence": 4096, "checkpointing": "full"},
        {"sequence": 2048, "attention": "eager", "batch": 2},
        {"sequence": 4096, "pipeline_parallel": 4, "accumulation": 8, "tensor_parallel": 2, "sequence_parallel": True},
        {"sequence": 4096, "precision": "bf16-autocast", "data_parallel": 8, "zero": 3},
    ],
    ids=["none", "full", "matrix", "pipeline", "sharded"],
)
def test_the_page_starts_at_the_estimate(options, tmp_path):
    page, answer = config_page(**options)
    found = run(page, "const s = m.start; return at(s.L, s.T, s.d, s.k, s.A).total;", tmp_path)
    assert found == pytest.approx(answer.peak_bytes, rel=0.002)


@needs_browser
def test_the_page_extrapolates_tokens(tmp_path):
    page, _ = config_page(sequence=4096)
    for tokens in (2048, 8192):
        found = run(page, f"const s = m.start; return at(s.L, {tokens}, s.d, 0, s.A).total;", tmp_path)
        assert found == pytest.approx(keepwise.estimate(LLAMA, sequence=tokens).peak_bytes, rel=0.01)
