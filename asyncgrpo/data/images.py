"""The images of prompts: found in data files, kept by digest in the run folder, and turned into pixels by the model's processor.

A prompt carries digests. The files `RUN/images/DIGEST` hold the bytes of the data file, in any format that Pillow reads.
Generator and learner build equal pixels from them, with the same code. `Prompt.token_ids` has one image token for each token
that the vision tower makes of an image.
"""

import base64
import binascii
import contextlib
import io
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from asyncgrpo.config.reach import find_model
from asyncgrpo.config.rules import VISION_MODELS
from asyncgrpo.config.schema import Config
from asyncgrpo.data.sources import Misfit, kind, one_line
from asyncgrpo.errors import ConfigError, DataError
from asyncgrpo.host import replace_file
from asyncgrpo.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

PLACEHOLDER = "<image>"
"""Place of an image in the text of a prompt, as in verl's files."""
FOLDER = "images"
"""Name of the folder in the run folder."""

# -- in the rows of a data file ----------------------------------------------------------------------------------------


def taken_from(row: Mapping[str, Any], column: str | None, root: Path) -> tuple[Mapping[str, Any], tuple[bytes, ...]]:
    """Return a row without its images, and the bytes of the images in order of their placeholders.

    The parts of chat turns become text with a placeholder for each image. Images come from parts that have one, and in order
    from the column for the others.

    Args:
        column: with images, each a path or an object with `bytes` or `path`; None: none.
        root: folder of relative paths.
    Raises:
        Misfit: an image cannot be read, or a part is neither text nor image.
    """
    found = row.get(column) if column else None
    if column in row and not found:
        row = {name: value for name, value in row.items() if name != column}
    rest = list(found) if isinstance(found, list | tuple) else [found] if found else []
    if not rest and not any(map(_has_parts, row.values())):
        return row, ()
    own: list[Any] = []
    """Images of parts, in order; None: one of the column."""
    flat = {
        name: [turn | {"content": _text_of_parts(turn["content"], own)} for turn in value]
        if _has_parts(value)
        else value
        for name, value in row.items()
        if name != column
    }
    images = [rest.pop(0) if one is None and rest else one for one in own] + rest
    return flat, tuple(_bytes_of(one, number, root) for number, one in enumerate(images))


def _has_parts(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(t, dict) and isinstance(t.get("content"), list) for t in value)


def _text_of_parts(content: Any, images: list[Any]) -> Any:
    """Return the parts of a turn as text, and append their images; other contents are returned as they are."""
    if isinstance(content, str):
        images += [None] * content.count(PLACEHOLDER)
    if not isinstance(content, list):
        return content
    text = ""
    for part in content:
        kind_of = part.get("type") if isinstance(part, dict) else None
        if kind_of == "text" and isinstance(part.get("text"), str):
            text += part["text"]
            images += [None] * part["text"].count(PLACEHOLDER)
        elif kind_of in ("image", "image_url"):
            text += PLACEHOLDER
            image = next((part[key] for key in ("image", "image_url", "url", "path", "bytes") if part.get(key)), None)
            images.append(image["url"] if isinstance(image, dict) and "url" in image else image)
        else:
            raise Misfit(f"a part of a chat turn has type {kind_of}; expected text or image")
    return text


def _bytes_of(image: Any, number: int, root: Path) -> bytes:
    """Return the bytes of an image: of an object with `bytes` or `path`, a path or a data URL."""
    if isinstance(image, dict):
        image = _decoded(image["bytes"]) if image.get("bytes") else image.get("path")
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str) or not image:
        what = "missing" if image in (None, "") else kind(image)
        raise Misfit(f"image {number} is {what}; expected a path, or an object with bytes or path")
    if image.startswith("data:"):
        return _decoded(image.partition(",")[2])
    if re.match(r"https?://", image):
        raise Misfit(f"image {number} is the address {image}; download it, and give the path of the file")
    try:
        return (root / image.removeprefix("file://")).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Misfit(f"image {number}: {root / image} cannot be read: {reason} (data.image_root)") from None


def _decoded(content: str | bytes) -> bytes:
    """Return bytes that `sources.plain_value` wrote as text. No image consists of the characters of base64 only."""
    if isinstance(content, bytes):
        return content
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        return content.encode()


def in_parts(content: str) -> str | list[dict[str, str]]:
    """Return the content of a turn as parts of text and images, as chat templates read it."""
    texts = content.split(PLACEHOLDER)
    if len(texts) == 1:
        return content
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        parts += [{"type": "image"}] * (number > 0) + ([{"type": "text", "text": text}] if text else [])
    return parts


# -- files and pixels --------------------------------------------------------------------------------------------------


class Pixels(NamedTuple):
    """What the vision tower reads of some images."""

    values: "Tensor"
    """[patches, numbers of a patch] float32."""
    grid: "Tensor"
    """[images, 3] int64, patches along time (1), height and width."""


class Images:
    """The images of a run, as a model reads them."""

    def __init__(self, model_path: str, *, folder: Path | None, max_pixels: int | None = None) -> None:
        """
        Args:
            model_path: folder of the model, or its hub id.
            folder: of the files; None: nothing is written.
            max_pixels: an image with more is made smaller; None: the limit of the processor.
        Raises:
            ConfigError: the processor cannot be loaded, or does not take so few pixels.
        """
        from transformers import AutoConfig, AutoImageProcessor
        from transformers.utils import logging

        logging.set_verbosity_error()
        try:
            self.token_id = int(AutoConfig.from_pretrained(model_path).image_token_id)
            self._processor: Any = AutoImageProcessor.from_pretrained(model_path, backend="pil")
            least, most = self._processor.size["shortest_edge"], self._processor.size["longest_edge"]
        except Exception as error:  # of many kinds
            raise ConfigError(f"model.path ({model_path}): its image processor fails: {one_line(error)}") from error
        if max_pixels is not None and max_pixels < least:
            raise ConfigError(f"data.max_pixels is {max_pixels}; the processor of {model_path} makes {least} or more")
        self._processor.size = {"shortest_edge": least, "longest_edge": min(most, max_pixels or most)}
        self._folder = folder
        self.pixels = lru_cache(maxsize=16)(self._pixels)

    @classmethod
    def of(cls, config: Config, run_dir: Path | None = None) -> "Images | None":
        """Return the images of a run; None if its model reads none. Without `run_dir` nothing is written."""
        folder = None if run_dir is None else run_dir / FOLDER
        path = config.model.path
        return cls(path, folder=folder, max_pixels=config.data.max_pixels) if has_vision(path) else None

    def keep(self, content: bytes) -> str:
        """Write an image unless it is there, and return its digest."""
        digest = xxhash.xxh3_128_hexdigest(content)
        if self._folder is not None and not (self._folder / digest).exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / digest, content)
        return digest

    def read(self, digest: str, of: str) -> bytes:
        """Return the bytes of an image. Raises DataError, with the words `of`: the file is missing or was altered."""
        assert self._folder is not None
        file, content = self._folder / digest, b""
        with contextlib.suppress(FileNotFoundError):
            content = file.read_bytes()
        if xxhash.xxh3_128_hexdigest(content) != digest:
            what = "was altered since it was written" if content else "is missing or empty"
            raise DataError(f"{file}, an image {of}, {what}; restore the file, or begin a new run")
        return content

    def check(self, prompt: Prompt) -> None:
        """Raise DataError if a file of the prompt's images is missing or was altered."""
        for digest in prompt.images:
            self.read(digest, f"of prompt {prompt.prompt_id}")

    def tokens_of(self, content: bytes) -> int:
        """Return the number of tokens of an image. Raises Misfit: it cannot be read."""
        image = opened(content)
        try:
            patches = self._processor.get_number_of_image_patches(image.height, image.width, {})
        except ValueError as error:
            raise Misfit(f"{image.width} x {image.height} pixels: {one_line(error)}") from None
        return int(patches) // self._processor.merge_size**2

    def expanded(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[int, ...]:
        """Return token ids with as many image tokens for each image as the vision tower makes of it.

        Args:
            token_ids: with one image token for each image.
        Raises:
            Misfit: there are more or fewer, or an image cannot be read.
        """
        written = sum(token == self.token_id for token in token_ids)
        if written != len(images):
            raise Misfit(f"{len(images)} images, but its prompt has {written} image tokens by the chat template")
        counts = iter([self.tokens_of(image) for image in images])
        return tuple(x for t in token_ids for x in ([t] * next(counts) if t == self.token_id else [t]))

    def _pixels(self, digests: tuple[str, ...], of: str) -> Pixels:
        """Return the pixels of some images. The last few calls are remembered. Raises DataError, as `read`."""
        try:
            images = [opened(self.read(digest, of)) for digest in digests]
        except Misfit as error:
            raise DataError(f"{error} ({of})") from None
        made = self._processor(images=images, return_tensors="pt")
        return Pixels(made["pixel_values"], made["image_grid_thw"])


def has_vision(model_path: str) -> bool:
    """True if the model reads images."""
    from transformers import PretrainedConfig

    try:
        settings, _ = PretrainedConfig.get_config_dict(str(find_model(model_path) or model_path))
        return settings.get("model_type") in VISION_MODELS
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def opened(content: bytes) -> "Image":
    """Return the first frame of an image in RGB: upright, on white where it is transparent. Raises Misfit."""
    from PIL import Image, ImageOps

    try:
        image: Image.Image = Image.open(io.BytesIO(content))
        image.load()
        image = ImageOps.exif_transpose(image)
    except Exception as error:  # of many kinds, from each format
        reason = "its bytes are no image" if isinstance(error, Image.UnidentifiedImageError) else one_line(error)
        raise Misfit(f"an image cannot be read: {reason}") from None
    if image.mode == "F":
        raise Misfit("an image has floating-point pixels; save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip to 255
        import numpy as np

        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        over = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    return image.convert("RGB")


def preview(file: Path, most: int = 512) -> str:
    """Return an image as the data URL of a PNG of at most `most` x `most` pixels. Raises DataError: it cannot be shown."""
    try:
        image = opened(file.read_bytes())
    except (OSError, Misfit) as error:
        raise DataError(f"{file} cannot be shown: {error}") from None
    image.thumbnail((most, most))
    shown = io.BytesIO()
    image.save(shown, "PNG")
    return f"data:image/png;base64,{base64.b64encode(shown.getvalue()).decode()}"
