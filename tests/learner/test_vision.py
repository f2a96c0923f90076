"""Rows with images: log-probs and gradients are those of plain transformers, one sequence at a time."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from asyncgrpo.config.memory import learner_tensors
from asyncgrpo.config.model_size import size_at
from asyncgrpo.config.rules import check_model
from asyncgrpo.data.images import Images
from asyncgrpo.errors import ConfigError
from asyncgrpo.learner.head import LossGradients
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.model import check_language_model, refuse_other_tokens
from asyncgrpo.learner.packing import pack
from asyncgrpo.types import Prompt
from tests.learner.helpers import VERSION, config, make_group, replace
from tests.models import make_tiny_qwen3
from tests.vision import make_tiny_vl, picture, written

SHAPES = [[(96, 64), (160, 128)], [(64, 192)], []]
"""Width and height of the images of three prompts."""


def prompts_of(images: Images, start: int, end: int) -> list[Prompt]:
    """Prompts of bytes, with one image between two markers."""
    made = []
    for number, shapes in enumerate(SHAPES):
        contents = [written(picture(10 * number + i, *shape)) for i, shape in enumerate(shapes)]
        tokens = [72, 105]
        for _ in contents:
            tokens += [start, images.token_id, end, 33]
        digests = tuple(map(images.keep, contents))
        made.append(Prompt(prompt_id=f"t/{number}", token_ids=images.expanded([*tokens, 63], contents), images=digests))
    return made


def groups_of(prompts: list[Prompt], images: Images) -> list:
    """Three completions of each prompt; one has an image token that the model sampled itself."""
    rng, groups = np.random.default_rng(0), []
    for number, prompt in enumerate(prompts):
        answers = [rng.integers(0, 256, rng.integers(3, 20)) for _ in range(3)]
        answers[1][1] = images.token_id
        groups.append(replace(make_group(number, [0.0, 1.0, 0.5], answers), prompt=prompt))
    return groups


def plain(model, prompt: Prompt, completion, images: Images) -> torch.Tensor:
    """Log-probs [L] of a completion, of one whole sequence; sampled image tokens are text."""
    ids = torch.tensor([[*prompt.token_ids, *completion.tolist()]])
    size = len(prompt.token_ids)
    inputs, inner = {"inputs_embeds": model.get_input_embeddings()(ids)}, model.base_model
    inputs["position_ids"] = torch.arange(ids.shape[1]).expand(3, 1, -1)
    if prompt.images:
        is_image = torch.zeros_like(ids)
        is_image[:, :size] = ids[:, :size] == images.token_id
        values, grid = images.pixels(prompt.images, "")
        with torch.no_grad():
            seen = inner.get_image_features(values, grid, return_dict=True)
        inputs["position_ids"], _ = inner.get_rope_index(ids, is_image, image_grid_thw=grid)
        inputs["inputs_embeds"] = inputs["inputs_embeds"].masked_scatter(
            is_image[..., None].bool(), torch.cat(list(seen.pooler_output))
        )
        if levels := getattr(seen, "deepstack_features", None):
            deeper = [torch.cat(list(level)) for level in levels]
            inputs |= {"visual_pos_masks": is_image.bool(), "deepstack_visual_embeds": deeper}
    hidden = inner.language_model(**inputs, use_cache=False).last_hidden_state
    scores = model.lm_head(hidden[0, size - 1 : -1]).log_softmax(-1)
    return scores.gather(1, torch.tensor(completion, dtype=torch.int64)[:, None])[:, 0]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_rows_with_images_are_those_of_plain_transformers(tmp_path, family):
    path = make_tiny_vl(tmp_path / "model", family=family)
    settings = config(path)
    images = Images.of(settings, tmp_path)
    learner = Learner(settings, rank=0, world=1, device="cpu", images=images)
    ids = learner.model.language_model.config
    groups = groups_of(prompts_of(images, ids.vision_start_token_id, ids.vision_end_token_id), images)

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    wanted = [plain(model, g.prompt, r.completion.token_ids, images) for g in groups for r in g.rollouts]
    sum((number % 3 + 1) * logprobs.sum() for number, logprobs in enumerate(wanted)).backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and ".visual." not in name}

    runs, tower = [], learner.model.language_model.base_model.visual
    assert not any(p.requires_grad for p in tower.parameters())
    tower.register_forward_hook(lambda *_: runs.append(1))
    for share, budget in [(True, 4096), (True, 150), (False, 4096)]:
        runs.clear()
        learner.optimizer.zero_grad()
        step = pack(groups, VERSION, rank=0, world=1, tokens_per_microbatch=budget, share_prompts=share)
        for batch in step.trained:
            lengths, which = batch.cu_seqlens.diff(), batch.rollouts
            weight = (which % 3 + 1).float().repeat_interleave(lengths)

            def objective(tokens, scores, weight=weight):
                return LossGradients(logprobs=weight[tokens], entropy=None, reference_kl=None)

            scored = learner.model(batch, objective)
            expected = torch.cat([wanted[i] for i in which.tolist()])
            assert torch.allclose(scored.scores.logprobs, expected, rtol=0, atol=1e-5)
            scored.loss.backward()
        assert len(runs) == sum(len(batch.pictured) for batch in step.trained)
        if (share, budget) == (True, 4096):
            assert len(runs) == 2, "once for each prompt with images"
        named = {name.removeprefix("language_model."): p for name, p in learner.model.named_parameters()}
        found = {name: p.grad.full_tensor() for name, p in named.items() if p.grad is not None}
        assert found.keys() == gradient.keys()
        for name, one in found.items():
            assert (one - gradient[name]).norm() <= 1e-5 * gradient[name].norm(), name


def test_what_a_vision_tower_does_not_take_is_refused(tmp_path):
    path, text = make_tiny_vl(tmp_path / "model"), tmp_path / "text"
    with pytest.raises(ConfigError, match=r"generators.engine is torch, which has no vision towers"):
        check_model(config(path, generators={"engine": "torch"}))
    with pytest.raises(ConfigError, match="qkv, which is no linear layer of the decoder"):
        check_language_model(str(path), config(path, model={"lora": {"rank": 2, "targets": ["qkv"]}}))
    adapted = check_language_model(str(path), config(path, model={"lora": {"rank": 2}}))
    assert not [n for n, p in adapted.named_parameters() if ".visual." in n and ".lora_" in n]
    make_tiny_qwen3(text, vocab=size_at(str(path)).vocabulary)
    AutoTokenizer.from_pretrained(path).save_pretrained(text)
    with pytest.raises(ConfigError, match=r"has no vision tower like that of model.path"):
        refuse_other_tokens(str(path), str(text))


def test_the_memory_of_a_tower_is_counted_as_frozen(tmp_path):
    path = make_tiny_vl(tmp_path / "model")
    size = size_at(str(path))
    model = AutoModelForImageTextToText.from_pretrained(path)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.vision_parameters == sum(p.numel() for p in model.model.visual.parameters())
    images = Images(str(path), folder=None)
    assert size.pixels == images._processor([picture(0)], return_tensors="pt")["pixel_values"].numel() // 4
    settings = config(path)
    held = learner_tensors(size, settings)
    assert held["weights"] == 4 * size.parameters, "float32: the frozen tower too"
    assert held["gradients"] == 4 * (size.parameters - size.vision_parameters)
