"""Images in data files: what is read, what a prompt becomes, and what is refused in one sentence."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from asyncgrpo.buffer.recovery import Reopened, Verdict, bring_back
from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import changed
from asyncgrpo.data.demo import make_demo_model
from asyncgrpo.data.images import Images, opened, preview, taken_from
from asyncgrpo.data.loading import check, prepare, recognise
from asyncgrpo.data.sources import plain_value
from asyncgrpo.errors import AsyncGRPOError, ConfigError, DataError
from tests.vision import make_tiny_vl, picture, written

GREY = Image.fromarray((np.arange(64 * 96).reshape(64, 96) // 24).astype(np.uint8))
COLOUR = picture(1, 96, 64)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # the camera was on its side


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_vl(tmp_path_factory.mktemp("vl"))


def settings(tmp_path, model, *more):
    base = {"model": {"path": str(model)}, "data": {"train": str(tmp_path / "train.parquet"), "max_prompt_tokens": 200}}
    return load_config(None, ["generators.engine=sglang", "data.shuffle=false", *more], base=base)


def verl(images, text="<image>?"):
    """A row as verl's geo3k has it."""
    row = {"data_source": "hiyouga/geometry3k", "prompt": [{"role": "user", "content": text}], "images": images}
    return row | {"reward_model": {"style": "rule", "ground_truth": "3"}, "extra_info": {"index": 0}}


def of_bytes(content):
    return {"bytes": content, "path": None}


def write(tmp_path, rows):
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")


def prompts_of(tmp_path, model, rows, *more):
    write(tmp_path, rows)
    config = settings(tmp_path, model, *more)
    check(config)
    return list(prepare(config, tmp_path / "run").train)


SIXTEEN_BITS = Image.fromarray((np.asarray(GREY).astype(np.uint16) << 8) + 7)
CLEAR = COLOUR.convert("RGBA")
CLEAR.putalpha(Image.new("L", COLOUR.size, 0))
FORMATS = {
    "png": (written(COLOUR), COLOUR, 0),
    "jpeg": (written(COLOUR, "JPEG", quality=95), COLOUR, 12),
    "webp": (written(COLOUR, "WEBP", lossless=True), COLOUR, 0),
    "gif": (written(GREY, "GIF", save_all=True, append_images=[COLOUR]), GREY, 0),
    "bmp": (written(COLOUR, "BMP"), COLOUR, 0),
    "tiff": (written(COLOUR, "TIFF"), COLOUR, 0),
    "palette": (written(COLOUR.quantize(256)), COLOUR, 12),
    "grey": (written(GREY), GREY, 0),
    "16 bits": (written(SIXTEEN_BITS), GREY, 0),
    "cmyk": (written(COLOUR.convert("CMYK"), "JPEG", quality=95), COLOUR, 12),
    "transparent": (written(CLEAR), Image.new("RGB", COLOUR.size, "white"), 0),
    "turned": (written(COLOUR, "PNG", exif=TURNED), COLOUR.rotate(-90, expand=True), 0),
    "black, valid UTF-8": (written(Image.new("RGB", (32, 32)), "PPM"), Image.new("RGB", (32, 32)), 0),
}


@pytest.mark.parametrize("name", FORMATS)
def test_an_image_of_any_format_is_seen_as_it_looks(name):
    content, looks, mean_difference = FORMATS[name]
    seen = opened(content)
    assert seen.mode == "RGB" and seen.size == looks.size
    difference = np.abs(np.asarray(seen, np.int64) - np.asarray(looks.convert("RGB"), np.int64))
    assert difference.mean() <= mean_difference


def test_a_parquet_file_as_verl_writes_it_gives_prompts_with_files_by_digest(tmp_path, model):
    contents = [FORMATS[name][0] for name in FORMATS]
    (one, two, *rest) = prompts_of(tmp_path, model, [verl([of_bytes(c)]) for c in contents])
    images = Images(str(model), folder=tmp_path / "run" / "images")
    for prompt, content in zip((one, two, *rest), contents, strict=True):
        (digest,) = prompt.images
        assert (tmp_path / "run" / "images" / digest).read_bytes() == content, "as the bytes came"
        assert prompt.token_ids.count(images.token_id) == images.tokens_of(content)
        assert prompt.turns == ({"role": "user", "content": "<image>?"},) and "images" not in prompt.info
    pixels = images.pixels(one.images, "")
    assert len(pixels.values) == 4 * one.token_ids.count(images.token_id)
    assert preview(tmp_path / "run" / "images" / rest[3].images[0]).startswith("data:image/png;base64,")


def test_paths_parts_and_urls_are_the_same_images(tmp_path, model):
    content = written(COLOUR)
    (tmp_path / "a.png").write_bytes(content)
    encoded = base64.b64encode(content).decode()
    parts = [{"type": "image"}, {"type": "text", "text": "?"}]
    rows = [
        verl(["a.png"]),
        verl([{"bytes": None, "path": "a.png"}]),
        verl([f"file://{tmp_path}/a.png"]),
        verl([f"data:image/png;base64,{encoded}"]),
        verl(None) | {"prompt": [{"role": "user", "content": [parts[0] | {"image": "a.png"}, parts[1]]}]},
        verl(["a.png"]) | {"prompt": [{"role": "user", "content": parts}]},
        verl("a.png") | {"prompt": "<image>?"},
        verl(None)
        | {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}, parts[1]]}]},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings(tmp_path, model, f"data.train={tmp_path / 'train.jsonl'}")
    check(config)
    first, *others = prepare(config, tmp_path / "run").train
    assert all((one.token_ids, one.images) == (first.token_ids, first.images) for one in others)
    assert [file.name for file in (tmp_path / "run" / "images").iterdir()] == list(first.images)
    (smaller, *_) = prepare(changed(config, {"data.max_pixels": 2048})).train
    assert len(smaller.token_ids) < len(first.token_ids)


PNG, LARGE = written(COLOUR), written(picture(1, 1024, 1024))
REFUSED = {
    "too few": (verl([], "<image>?"), "0 images, but 1 <image> in its prompt"),
    "too many": (verl([of_bytes(PNG)] * 2), "2 images, but 1 <image> in its prompt"),
    "no place": (verl([of_bytes(PNG)], "What?"), "1 images, but 0 <image> in its prompt"),
    "not an image": (verl([of_bytes(b"\x89PNG, or so")]), "its bytes are no image"),
    "cut": (verl([of_bytes(written(COLOUR, "JPEG")[:700])]), "an image cannot be read: image file is truncated"),
    "empty": (verl([of_bytes(b"")]), "image 0 is missing"),
    "no file": (verl([{"bytes": None, "path": "b.png"}]), "b.png cannot be read: No such file or directory"),
    "address": (verl([{"path": "https://example.com/a.png"}]), "image 0 is the address https://example.com"),
    "a number": (verl([{"path": None, "width": 3}]), "image 0 is missing; expected a path, or an object"),
    "a line": (verl([of_bytes(written(Image.new("RGB", (4, 1000))))]), "4 x 1000 pixels: absolute aspect ratio"),
    "floats": (verl([of_bytes(written(GREY.convert("F"), "TIFF"))]), "floating-point pixels"),
    "written placeholder": (verl([of_bytes(PNG)], "<image> <|image_pad|>?"), "has 2 image tokens by the chat template"),
    "too long": (verl([of_bytes(LARGE)] * 4, "<image>" * 4), "longer than data.max_prompt_tokens"),
    "video": (
        verl([of_bytes(PNG)]) | {"prompt": [{"role": "user", "content": [{"type": "video", "text": "a"}]}]},
        "a part of a chat turn has type video; expected text or image",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_with_file_row_and_one_sentence(tmp_path, model, name):
    row, message = REFUSED[name]
    write(tmp_path, [row])
    with pytest.raises(DataError) as refused:
        check(settings(tmp_path, model))
    text = str(refused.value)
    assert message in text and "train.parquet" in text and "\n" not in text


def test_an_image_token_in_the_text_of_any_row_is_refused_before_the_run(tmp_path, model):
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps(verl(None, f"{text}?")) + "\n" for text in ("", "<|image_pad|>"))
    )
    with pytest.raises(DataError, match=r"row 1: 0 images, but its prompt has 1 image tokens"):
        check(settings(tmp_path, model, f"data.train={tmp_path / 'train.jsonl'}"))


def test_the_images_of_every_row_are_read_before_the_run(tmp_path, model):
    write(tmp_path, [verl([of_bytes(PNG)])] * 2 + [verl([of_bytes(b"\x89PNG, or so")])])
    with pytest.raises(DataError, match=r"row 2: .*its bytes are no image"):
        check(settings(tmp_path, model))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["environment.tools=[calculator]"], "environments and agents give text alone"),
        (["learner.parallel.context=2", "learner.ranks=2"], "learner.parallel.context"),
        (["teacher.path=m", "algorithm.kl_coef=1"], r"a served teacher \(teacher.path\) reads text alone"),
        (["data.max_pixels=100"], "data.max_pixels is 100; the processor"),
    ],
)
def test_settings_that_do_not_fit_images_are_refused(tmp_path, model, more, message):
    write(tmp_path, [verl([of_bytes(PNG)])])
    with pytest.raises(ConfigError, match=message):
        check(settings(tmp_path, model, *more))


def test_an_image_that_datasets_decoded_is_one_of_the_same_pixels():
    given = plain_value({"prompt": "<image>?", "images": [COLOUR]})
    row, (content,) = taken_from(given, "images", Path())
    assert row == {"prompt": "<image>?"} and opened(content).tobytes() == COLOUR.tobytes()
    schema = recognise([given], {}, image_column=None)
    assert schema.to_record(given, 0).info.keys() == {"images"}, "a column like any other"


def test_a_text_model_refuses_images_unless_the_column_is_like_any_other(tmp_path):
    make_demo_model(tmp_path / "text", seed=0)
    write(tmp_path, [verl([of_bytes(PNG)])])
    with pytest.raises(ConfigError, match="images need a Qwen3-VL"):
        check(settings(tmp_path, tmp_path / "text"))
    check(settings(tmp_path, tmp_path / "text", "data.image_column=null"))
    (prompt,) = prepare(settings(tmp_path, tmp_path / "text", "data.image_column=null")).train
    assert prompt.images == () and prompt.token_ids


@pytest.mark.parametrize("change", ["missing", "altered"])
def test_a_file_of_the_run_that_is_not_what_it_was_is_named_with_its_prompt(tmp_path, model, change):
    (prompt,) = prompts_of(tmp_path, model, [verl([of_bytes(PNG)])])
    file = tmp_path / "run" / "images" / prompt.images[0]
    file.unlink() if change == "missing" else file.write_bytes(written(GREY))
    images = Images(str(model), folder=file.parent)
    with pytest.raises(AsyncGRPOError, match=f"{file}, an image of prompt train/0, .*{change}"):
        images.pixels(prompt.images, f"of prompt {prompt.prompt_id}")
    # At a resume a group of the journal is not trained on, and the run ends.
    verdict = Verdict(None, SimpleNamespace(lease_id="1.0", prompt_index=0, tokens=3), None, 0)  # type: ignore[arg-type]
    history = SimpleNamespace(group=lambda found: (SimpleNamespace(prompt=prompt), b""))
    buffer = SimpleNamespace(restore_failures=lambda failures: None)
    with pytest.raises(AsyncGRPOError, match=f"{file}, an image of prompt train/0, .*{change}"):
        bring_back(buffer, Reopened(None, history, [verdict], None), images)  # type: ignore[arg-type]
