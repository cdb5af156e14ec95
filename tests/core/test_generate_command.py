"""`specdeft generate` as typed: what goes to which stream, exit codes, one-sentence refusals."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdeft.cli import main
from tests.core.tiny import EOS_ID, VOCAB_SIZE, tiny_model


def save_tokenizer(folder: Path, *, chat: bool) -> None:
    """One letter a token, saved as a Hugging Face tokenizer."""
    vocab = {chr(32 + index): index for index in range(VOCAB_SIZE - 1)}
    tokenizer = Tokenizer(models.WordLevel({**vocab, "<end>": EOS_ID}, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    if chat:
        fast.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    save_tokenizer(path, chat=True)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["generate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_text_on_stdout_figures_on_stderr(folder: Path, capsys) -> None:
    asked = ["--model", str(folder), "--max-new-tokens", "9", "--lookup", "off"]
    code, out, err = run(capsys, "Hello", *asked)
    assert code == 0
    assert len(out.rstrip("\n")) <= 9
    assert "no draft heads and no lookup: plain decoding" in err
    assert "tau 1.00 tokens a step, acceptance length 0.00" in err
    assert "tokens/s" in err


def test_compare_says_whether_the_texts_are_identical(folder: Path, capsys) -> None:
    code, _out, err = run(
        capsys, "Hello", "--model", str(folder), "--max-new-tokens", "9", "--compare"
    )
    assert code == 0
    assert "speed ratio" in err
    assert "identical to plain decoding: yes, token for token" in err


def test_json_is_one_document(folder: Path, capsys) -> None:
    code, out, _err = run(
        capsys, "Hi", "--model", str(folder), "--max-new-tokens", "5", "--json", "--compare"
    )
    report = json.loads(out)
    assert code == 0
    assert len(report["token_ids"]) == report["stats"]["num_new_tokens"] == 5
    assert report["compare"]["identical"] is True


def test_chat_template_raw_and_stdin(folder: Path, capsys, monkeypatch) -> None:
    def prompt_length(*arguments: str) -> int:
        _code, out, _err = run(
            capsys, *arguments, "--model", str(folder), "--max-new-tokens", "1", "--json"
        )
        return int(json.loads(out)["stats"]["num_prompt_tokens"])

    assert prompt_length("Hello") == len("[Hello]")
    assert prompt_length("--prompt", "Hello", "--raw") == len("Hello")
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped text"))
    assert prompt_length("-", "--raw") == len("piped text")


def test_sampling_repeats_with_its_seed(folder: Path, capsys) -> None:
    arguments = ["Hi", "--model", str(folder), "--max-new-tokens", "20", "--temperature", "1.2"]
    texts = [run(capsys, *arguments, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one prompt"),
        (["a", "--prompt", "b"], "two were given"),
        (["  "], "the prompt is empty"),
        (["a", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["a", "--max-new-tokens", "9999"], "exceed the model's context of 256"),
        (["a" * 300], "context holds 256"),
        (["a", "--temperature", "-1"], "temperature is -1.0"),
        (["a", "--top-p", "0"], "top_p is 0.0"),
        (["a", "--top-k", "-3"], "top_k is -3"),
        (["a", "--tree", "oak"], "there is no tree 'oak'"),
        (["a", "--tree", "99"], "cannot be chosen from 0 valued paths"),
        (["a", "--tree", "5", "--lookup", "off"], "no draft heads"),
        (["a", "--dtype", "int8"], "dtype 'int8' is not known"),
        (["a", "--device", "tpu"], "is not a device"),
        (["a", "--heads", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_exits_with_2_and_one_sentence(
    folder: Path, capsys, arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments, "--model", str(folder))
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("specdeft: ")
    assert err.count("\n") == 1


def test_an_unknown_model_is_named(capsys, tmp_path: Path) -> None:
    code, _out, err = run(capsys, "a", "--model", str(tmp_path / "nothing"))
    assert code == 2
    assert "nothing" in err
    assert "smollm2-135m" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["{", '{"parents": [0]}', '{"paths": [[0], [0]]}', "[[-1]]"])
def test_a_malformed_tree_file_is_named(folder: Path, capsys, tmp_path: Path, text: str) -> None:
    file = tmp_path / "tree.json"
    file.write_text(text)
    code, _out, err = run(capsys, "a", "--model", str(folder), "--tree", str(file))
    assert code == 2
    assert "tree.json" in err
    assert err.count("\n") == 1


def test_ctrl_c_while_streaming_exits_with_130(folder: Path) -> None:
    """In a process of its own, interrupted once the first text is out."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    # Slowed down, so that it cannot end before the signal arrives, however busy the machine is.
    program = (
        # A shell's background jobs inherit an ignored SIGINT, and so would this process.
        "import signal, sys, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import specdeft.text as text; from specdeft.cli import main; "
        "take = text.TextAssembler.take; "
        "text.TextAssembler.take = lambda self: (time.sleep(0.1), take(self))[1]; "
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["generate", "Hello", "--model", str(folder), "--max-new-tokens", "240"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err


def test_help_teaches(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "generate" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = capsys.readouterr().out
    assert "Examples" in text
    for option in ("--tree", "--temperature", "--compare", "--raw", "--stop"):
        assert option in text
