"""SGLang samples prompts with images as the learner scores them, before and after a change of the weights."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from asyncgrpo.data.images import Images
from asyncgrpo.engines.sglang.engine import SGLangEngine, SGLangOptions
from asyncgrpo.errors import RequestError
from asyncgrpo.types import PolicyVersion, Prompt, Sampling
from asyncgrpo.weights.files import disk_tensors
from tests.engines.shared import shared
from tests.learner.test_vision import plain, prompts_of
from tests.vision import make_tiny_vl, picture, written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_engine_and_learner_agree_on_prompts_with_images(tmp_path):
    path = make_tiny_vl(tmp_path / "model")
    images = Images(str(path), folder=tmp_path / "images")
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    prompts = prompts_of(images, model.config.vision_start_token_id, model.config.vision_end_token_id)
    hot = Sampling(max_tokens=40, temperature=1.0)

    engine = SGLangEngine(
        SGLangOptions(model_path=str(path), dtype=torch.float32, max_context=300, device="cpu", max_completions=16),
        images,
    )
    asked: list[str] = []
    read = images.read
    images.read = lambda digest, of: asked.extend([digest] * ("request" in of)) or read(digest, of)

    async def gap(number: int, prompt: Prompt) -> float:
        name = f"{engine.version.number}.{number}"
        completions = [c async for c in engine.generate(name, prompt.token_ids, 4, hot, 0, prompt.images)]
        assert len({tuple(c.token_ids.tolist()) for c in completions}) > 1
        with torch.no_grad():
            wanted = [plain(model, prompt, c.token_ids, images).numpy() for c in completions]
        assert all(span.version == engine.version for c in completions for span in c.spans)
        return max(np.abs(w - c.logprobs).max() for w, c in zip(wanted, completions, strict=True))

    await engine.start(PolicyVersion(1, 0))
    try:
        gaps = await asyncio.gather(*(gap(*one) for one in enumerate(prompts)))
        assert max(gaps) <= 1e-5, gaps
        assert sorted(asked) == sorted(digest for prompt in prompts for digest in prompt.images), "once for a group"

        torch.manual_seed(0)
        tensors = disk_tensors(model)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor += 0.02 * torch.randn_like(tensor) * (".visual." not in name)
        waiting, go, made = asyncio.Event(), asyncio.Event(), engine._seen

        async def late(request):
            seen = await made(request)
            assert all(item.hash is not None for item in seen.mm_items), "the scheduler would hash for each completion"
            waiting.set()
            await go.wait()
            return seen

        engine._seen = late
        meanwhile = asyncio.create_task(gap(8, prompts[1]))
        await waiting.wait()
        await engine.load_weights(shared(tensors), PolicyVersion(1, 1))
        go.set()
        # A request whose pixels were built under the old weights has no keys of theirs.
        assert await meanwhile <= 1e-5
        engine._seen = made
        gaps = await asyncio.gather(*(gap(*one) for one in enumerate(prompts)))
        assert max(gaps) <= 1e-5, gaps
        await engine.checksum()
        assert not engine.does_not_follow

        file = tmp_path / "images" / prompts[1].images[0]
        file.write_bytes(written(picture(99, 32, 32)))
        images.pixels.cache_clear()
        with pytest.raises(RequestError, match=f"{file}, an image of request lost, was altered"):
            await gap_of(engine, prompts[1])
        assert await gap(9, prompts[2]) <= 1e-5
    finally:
        await engine.close()


async def gap_of(engine: SGLangEngine, prompt: Prompt) -> None:
    async for _ in engine.generate("lost", prompt.token_ids, 2, Sampling(max_tokens=2), 0, prompt.images):
        pass
