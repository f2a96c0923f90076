"""Prompts with images in a packed row: the vision tower runs once for the images of a prompt, and its completions share them.

The tower is frozen. FSDP keeps it in the group of the root module, which every rank gathers for each row, so that a rank
without images in its row waits for nobody. Positions are those of the model's own `get_rope_index`. They continue after a
prompt as in the engine: by one for each token. Image tokens that the model samples itself are text on both sides.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncgrpo.config.model_size import VISION
from asyncgrpo.data.images import Images
from asyncgrpo.errors import ConfigError
from asyncgrpo.learner.packing import PackedBatch
from asyncgrpo.types import Prompt


def tower_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the vision tower; None: the model reads text alone."""
    return getattr(model.base_model, VISION, None)


class _Of(NamedTuple):
    """The images of one prompt, as its tokens see them."""

    features: Tensor
    """[image tokens, D]."""
    deeper: list[Tensor]
    """What is added after the first layers, of the same shape."""
    positions: Tensor
    """[3, tokens of the prompt] int64."""
    rank: Tensor
    """[tokens of the prompt] int64, number of image tokens before each; -1 where it is text."""


class Vision:
    """The images of the rows of one model."""

    def __init__(self, model: PreTrainedModel, images: Images | None) -> None:
        self._model, self._images = model, images

    def inputs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return the arguments of the decoder for a row with images: embeddings, and positions along three axes."""
        device = batch.token_ids.device
        embeddings = self._model.get_input_embeddings()(batch.token_ids)
        positions = batch.position_ids.repeat(3, 1)
        is_image = torch.zeros_like(batch.token_ids, dtype=torch.bool)
        features, deeper = [], []
        for one in batch.pictured:
            seen, row = self._of(one.prompt, device), slice(one.start, one.stop)
            place, length = batch.position_ids[row], len(one.prompt.token_ids)
            in_prompt = place.clamp(max=length - 1)
            after = (place - length).clamp(min=-1) + 1  # 0 in the prompt, then 1, 2, ...
            last = seen.positions.max() * (after > 0)
            positions[:, row] = torch.where(after > 0, last + after, seen.positions[:, in_prompt])
            rank = torch.where(after > 0, -1, seen.rank[in_prompt])
            is_image[row] = rank >= 0
            chosen = rank[rank >= 0]  # a prompt that is not shared stands in the row several times
            features.append(seen.features[chosen])
            deeper.append([level[chosen] for level in seen.deeper])
        mixed = embeddings.masked_scatter(is_image[:, None], torch.cat(features).to(embeddings.dtype))
        inputs = {"inputs_embeds": mixed[None], "position_ids": positions[:, None]}
        if deeper[0]:
            inputs |= {
                "visual_pos_masks": is_image[None],
                "deepstack_visual_embeds": [torch.cat(levels) for levels in zip(*deeper, strict=True)],
            }
        return inputs

    @torch.no_grad()
    def _of(self, prompt: Prompt, device: torch.device) -> _Of:
        if self._images is None:
            raise ConfigError(
                f"prompt {prompt.prompt_id} has images, and the learner was built without the folder of the run"
            )
        values, grid = (x.to(device) for x in self._images.pixels(prompt.images, f"of prompt {prompt.prompt_id}"))
        model: Any = self._model.base_model
        out = model.get_image_features(values, grid, return_dict=True)
        ids = torch.tensor(prompt.token_ids, device=device)
        is_image = (ids == self._images.token_id).long()
        positions, _ = model.get_rope_index(ids[None], is_image[None], image_grid_thw=grid)
        deeper = [torch.cat(list(level)) for level in getattr(out, "deepstack_features", None) or ()]
        rank = torch.where(is_image > 0, is_image.cumsum(0) - 1, -1)
        return _Of(torch.cat(list(out.pooler_output)), deeper, positions[:, 0], rank)
