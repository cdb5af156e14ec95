"""Files nobody should trust: refused with the reason, and nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdeft.heads.formats.files import all_finite
from specdeft.heads.medusa import HeadsConfig, MedusaHeads
from tests.heads.formats_fixtures import (
    F1,
    F4,
    F5,
    F7,
    F8,
    H,
    K,
    V,
    base_tensors,
    table,
    values,
    write,
    write_shards,
)

F1_FILE, F1_PT = "medusa_lm_head.safetensors", "medusa_lm_head.pt"


def refused(path: Path, message: str, **target: Any) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        MedusaHeads.load(path, **target)
    assert "\n" not in str(caught.value)


# ---- code inside


class Malicious:
    """Unpickling this makes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("where", ["instead of a tensor", "beside the tensors", "alone"])
@pytest.mark.parametrize("form", ["zip", "old torch file", "bare pickle"])
def test_pickled_code_is_not_run(tmp_path: Path, where: str, form: str) -> None:
    evil = Malicious(tmp_path / "executed")
    content: Any = table(F1, values())
    if where == "alone":
        content = evil
    else:
        content["0.1.weight" if where == "instead of a tensor" else "extra"] = evil
    heads = tmp_path / "heads"
    heads.mkdir()
    if form == "bare pickle":
        (heads / F1_PT).write_bytes(pickle.dumps(content))
    else:
        torch.save(content, heads / F1_PT, _use_new_zipfile_serialization=form == "zip")
    refused(
        heads, "nothing of it was run" if form == "zip" else "bare pickle, which could run code"
    )
    refused(heads / F1_PT, "could run code")
    assert not (tmp_path / "executed").exists()


def test_the_malicious_file_is_malicious(tmp_path: Path) -> None:
    """What the test above relies on."""
    path = tmp_path / F1_PT
    torch.save(Malicious(tmp_path / "executed"), path)
    torch.load(path, weights_only=False)
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_code_in_a_shard_is_not_run(tmp_path: Path, kind: str) -> None:
    heads = write_shards(tmp_path / "heads", kind, {**table(F4, values()), **base_tensors()})
    stem = "pytorch_model" if kind == "bin" else "model"
    evil = heads / f"{stem}-00001-of-00002.{kind}"
    torch.save({"medusa_head.0.0.linear.bias": Malicious(tmp_path / "executed")}, evil)
    # Newer versions of torch tell safetensors by its name, and then it is a broken one.
    refused(heads, "could run code|is not a whole")
    assert not (tmp_path / "executed").exists()


# ---- damage


@pytest.mark.parametrize("file", [F1_FILE, F1_PT])
@pytest.mark.parametrize("kept", [0.0, 0.02, 0.3, 0.9, 0.999])
def test_truncated_files(tmp_path: Path, file: str, kept: float) -> None:
    path = write(tmp_path, file, table(F1, values())) / file
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    refused(tmp_path, "is not a whole (safetensors|torch) file")


@pytest.mark.parametrize("file", [F1_FILE, F1_PT])
@pytest.mark.parametrize("name", F1.split()[:3])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers(tmp_path: Path, file: str, name: str, value: float) -> None:
    tensors = table(F1, values())
    tensors[name].view(-1)[-1] = value
    refused(write(tmp_path, file, tensors), f"{name} holds NaN or infinity")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    """Lengths and places around the widths of vector instructions."""
    for length in (1, 7, 8, 31, 33, 100):
        tensor = torch.randn(length).to(dtype)
        assert all_finite(tensor)
        for place in range(length):
            damaged = tensor.clone()
            damaged[place] = value
            assert not all_finite(damaged)
    assert all_finite(torch.zeros(0, dtype=dtype))
    matrix = torch.zeros(3000, 300, dtype=dtype)  # more than one thread's share
    matrix[2999, 299] = value
    assert not all_finite(matrix)
    assert not all_finite(matrix.T)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_wrong_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = table(F1, values())
    tensors["1.0.linear.weight"] = torch.ones(H, H).to(dtype)
    refused(write(tmp_path, F1_PT, tensors), r"1.0.linear.weight .*torch\.")


def float8(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {**tensors, name: tensors[name].to(torch.float8_e4m3fn)}


@pytest.mark.parametrize("scale", [None, torch.zeros(1), torch.ones(3), torch.tensor(float("nan"))])
def test_float8_without_a_usable_scale(tmp_path: Path, scale: Tensor | None) -> None:
    tensors = float8(table(F7, values()), "medusa_heads.0.0.linear.weight")
    if scale is not None:
        tensors["medusa_heads.0.0.linear.weight_scale"] = scale
    refused(write(tmp_path, "model.safetensors", tensors), "weight_scale (is missing|must be one)")


def test_a_scale_of_a_tensor_that_is_not_quantised(tmp_path: Path) -> None:
    tensors = table(F7, values())
    tensors["medusa_heads.0.0.linear.weight_scale"] = torch.ones(1)
    refused(write(tmp_path, "model.safetensors", tensors), "has a scale but is torch.float32")


# ---- names and shapes


@pytest.mark.parametrize("names", [F1, F4, F5, F7, F8])
@pytest.mark.parametrize("index", [0, 3, -1])
def test_one_tensor_missing_is_named(tmp_path: Path, names: str, index: int) -> None:
    tensors = table(names, values())
    name = names.split()[index]
    del tensors[name]
    refused(write(tmp_path, "model.safetensors", tensors), f"lacks {name}")


@pytest.mark.parametrize(
    ("names", "extra"),
    [
        (F1, "optimizer.state"),
        (F1, "sequential_head.0.weight"),
        (F1, "0.0.linear.weight_scale"),
        (F1, "100.0.linear.weight"),
        (F1, "00.0.linear.weight"),
        (F4, "medusa_head.0.norm.weight"),
        (F5, "blocks.0.norm.weight"),
        (F5, "lm_head.weight"),
        (F7, "medusa_heads.0.0.linear.zero_point"),
        (F8, "medusa_heads.0.vocab_embedding.weight"),
    ],
)
def test_one_tensor_too_many_is_named(tmp_path: Path, names: str, extra: str) -> None:
    tensors = {**table(names, values()), extra: torch.zeros(1)}
    refused(write(tmp_path, "model.safetensors", tensors), extra)


@pytest.mark.parametrize("extra", ["0.2.weight", "3.1.weight", "0.1.linear.bias"])
def test_tensors_that_do_not_add_up(tmp_path: Path, extra: str) -> None:
    tensors = {**table(F1, values()), extra: torch.zeros(V, H)}
    refused(write(tmp_path, F1_FILE, tensors), "every head must have the same tensors")


def test_heads_in_two_layouts(tmp_path: Path) -> None:
    tensors = {**table(F1, values()), **table(F5, values())}
    refused(write(tmp_path, F1_FILE, tensors), "several layouts")


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    tensors = table(F1, values())
    tensors["module.0.1.weight"] = tensors["0.1.weight"].clone()
    refused(write(tmp_path, F1_FILE, tensors), "are the same tensor")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("0.0.linear.weight", (H, H + 1)),
        ("1.0.linear.weight", (H + 1, H)),
        ("0.0.linear.weight", (H,)),
        ("2.0.linear.bias", (H + 1,)),
        ("2.0.linear.bias", ()),
        ("0.1.weight", (V, H + 1)),
        ("2.1.weight", (V + 1, H)),
        ("0.1.weight", ()),
        ("0.0.linear.weight", (0, 0)),
    ],
)
def test_wrong_shapes_are_named(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    tensors = {**table(F1, values()), name: torch.zeros(shape)}
    refused(write(tmp_path, F1_FILE, tensors), f"{name} has the shape|belongs")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"hidden_size": H + 1}, "hidden size 16 but the model has 17"),
        ({"vocab_size": V + 128}, "vocabulary of 23 but the model has 151"),
        ({"vocab_size": 50_000}, "vocabulary of 23 but the model has 50000"),
    ],
)
def test_heads_of_another_model(tmp_path: Path, target: dict[str, int], message: str) -> None:
    refused(write(tmp_path, F1_FILE, table(F1, values())), message, **target)


def test_heads_without_output_layer_need_their_model(tmp_path: Path) -> None:
    tensors = {name: x for name, x in table(F1, values()).items() if "linear" in name}
    refused(write(tmp_path, F1_FILE, tensors), "vocab_size")


def test_values_too_large_for_the_dtype(tmp_path: Path) -> None:
    tensors = table(F1, values())
    tensors["0.1.weight"][0, 0] = 1e6
    write(tmp_path, F1_FILE, tensors)
    refused(tmp_path, "too large for torch.float16", dtype=torch.float16)
    MedusaHeads.load(tmp_path, dtype=torch.bfloat16)


# ---- the draft vocabulary, the shared output layer


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([0, 1, 1]), "each once"),
        (torch.tensor([-1, 1, 2]), "from 0 on"),
        (torch.tensor([0.0, 1.0, 2.0]), "list of token ids"),
        (torch.tensor([[0, 1, 2]]), "list of token ids"),
        (torch.zeros(0, dtype=torch.int64), "list of token ids"),
        (torch.arange(V + 1), "lists 24 tokens but the output layers have 23 rows"),
        (torch.tensor([0, 1, V]), "lists 3 tokens"),
    ],
)
def test_token_maps_that_cannot_be(tmp_path: Path, ids: Tensor, message: str) -> None:
    tensors = {**table(F5, values()), "token_map": ids}
    refused(write(tmp_path, "model.safetensors", tensors), message, vocab_size=V)


def test_a_token_map_of_another_vocabulary(tmp_path: Path) -> None:
    tensors = table(F5, values())
    tensors["token_map"] = torch.arange(V) + 5
    refused(write(tmp_path, "model.safetensors", tensors), "drafts? token 27", vocab_size=V)


@pytest.mark.parametrize("said", [True, False])
def test_config_and_output_layers_must_agree(tmp_path: Path, said: bool) -> None:
    tensors = table(F5, values())
    if not said:
        del tensors["lm_heads.1.weight"], tensors["lm_heads.2.weight"]
    config = {"model_type": "medusa", "original_lm_head": said}
    refused(write(tmp_path, "model.safetensors", tensors, **config), "original_lm_head")


# ---- sizes that are claimed and not there


def test_a_tensor_larger_than_its_file(tmp_path: Path) -> None:
    """Strides of zero: four bytes that say they are 4 TB."""
    tensors = table(F1, values())
    tensors["0.1.weight"] = torch.zeros(1).expand(10**8, 10**4)
    refused(write(tmp_path, F1_PT, tensors), "does not hold so much")


@pytest.mark.parametrize("make", [lambda x: x.to_sparse(), lambda x: x.to("meta")])
def test_tensors_that_are_not_plain(tmp_path: Path, make: Callable[[Tensor], Tensor]) -> None:
    tensors = table(F1, values())
    tensors["0.1.weight"] = make(tensors["0.1.weight"])
    refused(write(tmp_path, F1_PT, tensors), "no plain dense tensor")


@pytest.mark.parametrize("content", [[1, 2], {"0.0.weight": 3}, {1: torch.zeros(1)}, "text"])
def test_torch_files_of_something_else(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / F1_PT)
    refused(tmp_path, "named tensors|not a tensor")


def test_a_compressed_torch_file(tmp_path: Path) -> None:
    """The same archive deflated, as a bomb would be."""
    write(tmp_path, "plain.pt", table(F1, values()))
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / F1_PT, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    refused(tmp_path / F1_PT, "compressed")


def safetensors_file(path: Path, header: bytes, data: bytes = b"", size: int | None = None) -> None:
    length = len(header) if size is None else size
    path.write_bytes(struct.pack("<Q", length) + header + data)


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"0.1.weight": entry([2**40, 2**40], 0, 4)},
        {"0.1.weight": entry([2**62, 8], 0, 4)},
        {"0.1.weight": entry([1], 0, 2**63)},
        {"0.1.weight": entry([1], 4, 0)},
        {"0.1.weight": entry([-1], 0, 4)},
        {"0.1.weight": entry([1], 0, 4, "F99")},
        {"0.1.weight": entry([1], 0, 4, "I64")},
        {"0.1.weight": {"dtype": "F32"}},
        {"0.1.weight": entry([1], 0, 4), "1.1.weight": entry([1], 0, 4)},
        [],
    ],
)
def test_safetensors_headers_that_lie(tmp_path: Path, header: Any) -> None:
    safetensors_file(tmp_path / F1_FILE, json.dumps(header).encode(), bytes(4))
    refused(tmp_path, "is not a whole safetensors file")


def test_safetensors_names_that_stand_twice(tmp_path: Path) -> None:
    one = json.dumps(entry([1], 0, 4))
    header = f'{{"0.1.weight": {one}, "0.1.weight": {one.replace("[0, 4]", "[4, 8]")}}}'
    safetensors_file(tmp_path / F1_FILE, header.encode(), bytes(8))
    refused(tmp_path, "is not a whole safetensors file")


@pytest.mark.parametrize("size", [0, 2**32, 2**63, 2**64 - 1])
def test_safetensors_header_lengths_that_lie(tmp_path: Path, size: int) -> None:
    safetensors_file(tmp_path / F1_FILE, b"{}", size=size)
    refused(tmp_path, "is not a whole safetensors file|no Medusa heads")


# ---- configs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[]", "no JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"medusa_num_heads": 3, "medusa_num_heads": 2}', "twice"),
        ('{"format": 5}', "not a config of heads"),
        ('{"format": "specdeft-medusa-2"}', "not a config of heads"),
        ("\xff\xfe", "not JSON|no JSON"),
    ],
)
def test_configs_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, F1_FILE, table(F1, values()))
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    refused(tmp_path, message)


@pytest.mark.parametrize("value", ["five", 2.5, None, [], 10**30, True])
def test_counts_that_are_no_counts_are_said(tmp_path: Path, value: Any) -> None:
    write(tmp_path, F1_FILE, table(F1, values()), medusa_num_heads=value, medusa_num_layers=1)
    if value is None:
        assert MedusaHeads.load(tmp_path).config.num_heads == K
        return
    with pytest.warns(UserWarning, match="config.json says heads"):
        assert MedusaHeads.load(tmp_path).config.num_heads == K


# ---- files that lead elsewhere


@pytest.mark.parametrize("place", ["../evil.safetensors", "/etc/passwd", "a/b", "..", "", "x\0y"])
@pytest.mark.parametrize("name", ["medusa_head.0.0.linear.bias", "model.norm.weight"])
def test_an_index_that_leads_out_of_the_folder(tmp_path: Path, place: str, name: str) -> None:
    heads = write_shards(tmp_path / "heads", "safetensors", table(F4, values()))
    save_file({name: torch.zeros(H)}, tmp_path / "evil.safetensors")
    index = heads / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][name] = place
    index.write_text(json.dumps(content))
    refused(heads, "is none of a file in it|link out")


@pytest.mark.parametrize("places", [None, [], {"0.1.weight": 5}, {"0.1.weight": None}])
def test_an_index_without_places(tmp_path: Path, places: Any) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    refused(tmp_path, "no weight_map of file names")


@pytest.mark.parametrize("what", ["missing shard", "missing tensor"])
def test_an_index_that_promises_too_much(tmp_path: Path, what: str) -> None:
    heads = write_shards(tmp_path, "safetensors", table(F4, values()))
    shard = heads / "model-00002-of-00002.safetensors"
    if what == "missing shard":
        shard.unlink()
    else:
        save_file({"other": torch.zeros(1)}, shard)
    refused(heads, "is not there|lacks medusa_head")


@pytest.mark.parametrize("file", [F1_FILE, "config.json"])
def test_links_out_of_the_folder(tmp_path: Path, file: str) -> None:
    elsewhere = write(tmp_path / "elsewhere", F1_FILE, table(F1, values()), medusa_num_heads=3)
    heads = write(tmp_path / "heads", F1_FILE, table(F1, values()), medusa_num_heads=3)
    (heads / file).unlink()
    (heads / file).symlink_to(elsewhere / file)
    refused(heads, "link out of its folder")


def test_links_of_our_own_format_out_of_the_folder(tmp_path: Path) -> None:
    for name in ("elsewhere", "heads"):
        MedusaHeads(HeadsConfig(1, 1, H, V)).save(tmp_path / name)
    file = tmp_path / "heads" / "model.safetensors"
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere" / "model.safetensors")
    refused(tmp_path / "heads", "link out of its folder")


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    """snapshots/COMMIT/name -> ../../blobs/HASH, as every download stands there."""
    (tmp_path / "blobs").mkdir()
    heads = write(tmp_path / "snapshots" / "abc", F1_FILE, table(F1, values()), medusa_num_heads=3)
    for path in list(heads.iterdir()):
        path.rename(tmp_path / "blobs" / f"hash-{path.name}")
        path.symlink_to(Path("..") / ".." / "blobs" / f"hash-{path.name}")
    assert MedusaHeads.load(heads).config.num_heads == K


@pytest.mark.parametrize("what", ["folder", "pipe", "device"])
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, what: str) -> None:
    path = tmp_path / F1_FILE
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    refused(tmp_path, "holds no heads|link out|no regular file")
    refused(path, "holds no heads|no regular file")


@pytest.mark.parametrize("files", [[], ["a.safetensors", "b.safetensors"], ["rank1.safetensors"]])
def test_folders_in_which_nothing_says_where_the_heads_are(
    tmp_path: Path, files: list[str]
) -> None:
    for file in files:
        write(tmp_path, file, table(F8, values()))
    refused(tmp_path, "holds no heads|ranks have a gap")


def test_slices_that_do_not_belong_together(tmp_path: Path) -> None:
    tensors = table(F8, values())
    write(tmp_path, "rank0.safetensors", tensors)
    name = "medusa_heads.0.medusa_layers.0.linear.weight"
    write(tmp_path, "rank1.safetensors", {**tensors, name: torch.zeros(2, H)})
    refused(tmp_path, "differ in shape")
    del tensors[name]
    write(tmp_path, "rank1.safetensors", tensors)
    refused(tmp_path, "different tensors")


@pytest.mark.parametrize("what", ["open", "stat"])
def test_files_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    write(tmp_path, F1_FILE, table(F1, values()), medusa_num_heads=3)

    def fail(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, what, fail)
        with pytest.raises(ValueError, match="Permission denied"):
            MedusaHeads.load(tmp_path)


ESCAPES = "\x1b[2J\x1b]0;title\x07\r\nsecond line \u202e"


def test_names_cannot_write_on_the_terminal(tmp_path: Path) -> None:
    tensors = {**table(F1, values()), ESCAPES: torch.zeros(1)}
    write(tmp_path, F1_FILE, tensors)
    with pytest.raises(ValueError, match="second line") as caught:
        MedusaHeads.load(tmp_path)
    assert str(caught.value).isprintable()


def test_shard_names_cannot_either(tmp_path: Path) -> None:
    index = {"weight_map": {"medusa_head.0.0.linear.weight": f"{ESCAPES}.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="none of a file") as caught:
        MedusaHeads.load(tmp_path)
    assert str(caught.value).isprintable()
