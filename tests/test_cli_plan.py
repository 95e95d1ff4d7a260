"""`headstart plan`: what is printed, written and refused."""

from __future__ import annotations

import json
import re

import pytest

from headstart.cli.main import main

MODEL = ("--model", "llama-3.1-8b")


def ended(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["plan", *args])
    return end.value.code, capsys.readouterr()


def test_the_table_and_the_formulas(capsys):
    code, printed = ended(capsys, *MODEL)
    assert code == 0
    assert re.search(r"KV of one more token +128 KiB", printed.out)
    assert "formula" not in printed.out
    code, printed = ended(capsys, *MODEL, "--explain")
    assert "(32 attention layers x 2048) elements x 16 bits of bfloat16 / 8" in printed.out
    assert "Micron 9400" in printed.out
    assert "Llama-3.1-8B: architecture: config.json of" in printed.out


def test_the_document(capsys):
    code, printed = ended(capsys, *MODEL, "--bandwidth", "10GB", "--kv-dtype", "fp8", "--json", "-")
    found = json.loads(printed.out)
    values = {each["key"]: each["value"] for each in found["answers"]}
    assert (code, found["schema"]) == (0, "headstart.plan/1")
    assert values["kv_token_nbytes"] == 65536
    assert values["read_bytes_per_s"] == 10e9
    assert found["load"]["memory_share"] == 0.0
    assert all(each["formula"] for each in found["answers"])


def test_the_page_needs_nothing_else(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "plan.html"
    code, _ = ended(capsys, *MODEL, "--html", str(page))
    text = page.read_text()
    assert code == 0
    assert text.count("<svg viewBox") == 3
    assert not re.search(r'(?:src|href)="(?!#|data:)', text)


def test_a_hardware_file_and_options_over_it(capsys, tmp_path):
    path = tmp_path / "hardware.toml"
    path.write_text('gpu = "b200"\ndrive = "nvme-gen5"\nnum_drives = 2\n')
    args = (*MODEL, "--hardware", str(path), "--num-drives", "1", "--json", "-")
    _, printed = ended(capsys, *args)
    found = json.loads(printed.out)
    assert found["machine"]["gpu"].startswith("NVIDIA B200")
    assert {e["key"]: e["value"] for e in found["answers"]}["read_bytes_per_s"] == 14e9


def test_measured_prefills_are_used(capsys):
    args = (*MODEL, "--context", "2048", "--prefill", "1024=1,4096=4.6", "--json", "-")
    _, printed = ended(capsys, *args)
    values = {e["key"]: e["value"] for e in json.loads(printed.out)["answers"]}
    assert values["prefill_s"] == pytest.approx(2.1, rel=0.03)


def test_hits_in_host_memory_steps_and_links(capsys):
    args = ("--memory-share", "60%", "--step", "20ms", "--step-tokens", "2048")
    _, printed = ended(capsys, *MODEL, *args, "--link", "pcie4-x16", "--explain")
    assert re.search(r"its hit, copied from host memory +[0-9.]+ ms", printed.out)
    assert "0.02 s x 4 steps" in printed.out
    assert "3.15e+10 B/s x 0.87 x 1 GPUs" in printed.out
    assert re.search(r"TPOT, hit: p99 +[0-9.]+ ms +simulated", printed.out)
    assert "steps of up to 2048 prompt tokens, 0.03 s longer while answers run" in printed.out


def test_the_figures_of_the_page(capsys):
    """Those that docs/plan.md gives as examples."""
    found = {}
    for name in ("llama-3.1-8b", "llama-3.1-405b"):
        _, printed = ended(capsys, "--model", name, "--context", "8k", "--json", "-")
        answers = json.loads(printed.out)["answers"]
        found[name] = {each["key"]: each["value"] for each in answers}
    small, large = found.values()
    assert (small["flip_concurrency"], large["flip_concurrency"]) == (1, 23)
    tpots = [round(small[f"{what}_tpot_p50_s"] * 1000) for what in ("hit", "recompute")]
    assert tpots == [31, 48]


def test_the_reference_says_what_it_missed(capsys):
    code, printed = ended(capsys, "reference", "--explain")
    assert code == 1
    assert [len(re.findall(rf"  {word}  ", printed.out)) for word in ("missed", "undecided")] == [
        1,
        2,
    ]
    assert "-5.0 (-5.7 to -4.4) points" in printed.out
    assert "fitted to" in printed.out
    code, printed = ended(capsys, "reference", "--json", "-")
    found = json.loads(printed.out)
    assert found["schema"] == "headstart.plan.reference/1"
    assert {line["verdict"] for line in found["lines"]} >= {"met", "undecided", "missed", "fitted"}


def test_times_and_the_flip_by_length(capsys):
    _, printed = ended(capsys, *MODEL)
    assert re.search(r"tokens +computed +read, alone +from memory +loading wins up to", printed.out)
    assert re.search(r"131,072 +13\.4 s +2\.77 s +319 ms +5 at once", printed.out)


def test_presets_have_their_figures(capsys):
    _, printed = ended(capsys, "presets", "--json", "-")
    found = {each["name"]: each for each in json.loads(printed.out)["presets"]}
    assert found["h100"]["figures"] == "bf16 989.4, fp8 1979 TFLOPS, MFU 0.5, pcie5-x16"
    assert found["nvme-gen5"]["figures"] == "14 GB/s read, 10 written, 60 us"
    assert found["100gbe"]["figures"] == "12.5 GB/s x 0.82"
    assert found["deepseek-v3"]["figures"] == "3.7e+10 parameters a token, 68.62 KiB of KV"
    assert all(each["source"] for each in found.values())


@pytest.mark.parametrize(("command", "word"), [("break-even", "SmolLM2"), ("presets", "mi308x")])
def test_tables(capsys, command, word):
    code, printed = ended(capsys, command)
    assert (code, word in printed.out) == (0, True)
    _, printed = ended(capsys, command, "--json", "-")
    assert json.loads(printed.out)["schema"].startswith("headstart.plan.")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--model is missing"),
        (("--model", "gpt-9"), "nor one of deepseek-v3"),
        ((*MODEL, "--bandwidth", "0GB"), "at no bandwidth nothing loads"),
        ((*MODEL, "--context", "1000k"), "has at most 131072"),
        ((*MODEL, "--mfu", "0"), "mfu is 0"),
        ((*MODEL, "--prefill", "x"), "write tokens=seconds"),
        ((*MODEL, "--prefill", "0=1"), "cannot be"),
        ((*MODEL, "--hit-share", "2"), "--hit-share"),
        ((*MODEL, "--memory-share", "100%"), "no storage to size"),
        ((*MODEL, "--memory-share", "x"), "--memory-share 'x' is no share"),
        ((*MODEL, "--step-tokens", "0"), "compute at least 1 token"),
        ((*MODEL, "--step", "soon"), "is not a quantity"),
        ((*MODEL, "--gpu", "h900"), "gpu 'h900' is no preset"),
        ((*MODEL, "--link", "pcie9"), "link 'pcie9' is no preset"),
        ((*MODEL, "--step", "soon"), "--step: 'soon'"),
        ((*MODEL, "--tpot", "-1ms"), "--tpot: '-1ms' is not a quantity"),
        ((*MODEL, "--tpot", "9" * 400), "is beyond all bounds"),
        ((*MODEL, "--bandwidth", "7"), "read_bytes_per_s is 7, in bytes a second"),
        ((*MODEL, "--bandwidth", "10Gb"), "--bandwidth: unit 'Gb' in '10Gb' is unknown"),
        ((*MODEL, "--bandwidth", "nan"), "--bandwidth: 'nan' is not a quantity"),
        ((*MODEL, "--staging", "0"), "staging is '0'; supply a size"),
        ((*MODEL, "--storage-month", "0"), "storage_month is 0"),
        ((*MODEL, "--prefill", ""), "--prefill is empty"),
        ((*MODEL, "--hit-share", "0.00001", "--staging", "1GiB"), "no KV to load"),
        ((*MODEL, "--concurrency", "2001"), "between 1 and 2000 can be simulated"),
        ((*MODEL, "--json", "."), "--json .: cannot be written"),
        ((*MODEL, "--json", "x", "--html", "./x"), "both x: one would be lost"),
        ((*MODEL, "--json", "/dev/full"), "No space left on device"),
        ((*MODEL, "reference"), "--model stands before `plan reference` and does nothing there"),
        (("--json", "x.json", "presets"), "--json stands before `plan presets`"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_supply(capsys, args, message):
    code, printed = ended(capsys, *args)
    assert code == 2
    assert message in printed.err
    assert printed.err.count("\n") == 1
