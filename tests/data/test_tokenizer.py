"""The token ids of a prompt from its chat turns, and the tokens that end a completion."""

import json
import random
import shutil

import pytest
from huggingface_hub import constants
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncgrpo.data.tokenizer import (
    MARK,
    continuation,
    decoder,
    load_tokenizer,
    render,
    stop_token_ids,
    vocabulary_size,
)
from asyncgrpo.errors import ConfigError, DataError

QUESTION = [{"role": "user", "content": "735"}]


def spaced_tokenizer(spaces: str, *, eats_space: bool = False) -> PreTrainedTokenizerFast:
    """A token for each letter, and one before a text (`spaces` is `first`) or also behind a special token (`always`)."""
    letters = {letter: number for number, letter in enumerate("▁\n<>/:abcdefghijklmnopqrstuvwxyz")}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spaces, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=spaces, split=False)
    backend.add_special_tokens([AddedToken("</s>", rstrip=eats_space, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def test_the_ids_are_those_of_the_template_itself(tokenizer):
    turns = [*QUESTION, {"role": "assistant", "content": "735"}, {"role": "user", "content": "ä漢"}]
    direct = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert list(render(tokenizer, turns).token_ids) == direct


def test_the_system_prompt_is_put_first_unless_there_is_one(tokenizer):
    assert render(tokenizer, QUESTION, "Copy.").text == "<system>Copy.<user>735<assistant>"
    turns = [{"role": "system", "content": "Own."}, *QUESTION]
    assert render(tokenizer, turns, "Copy.").text == "<system>Own.<user>735<assistant>"
    assert QUESTION == [{"role": "user", "content": "735"}]


def test_without_a_template_the_contents_are_joined(demo_model):
    tokenizer = load_tokenizer(str(demo_model))
    tokenizer.chat_template = None
    assert render(tokenizer, QUESTION, "Copy: ") == ("Copy: 735", tuple(b"Copy: 735"))


def test_a_template_that_refuses_says_which_prompt(demo_model):
    tokenizer = load_tokenizer(str(demo_model))
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(DataError, match=r"rows\.jsonl, row 3: .* refuses the turns user: System role not supported"):
        render(tokenizer, QUESTION, where="rows.jsonl, row 3")


def test_answers_end_by_every_end_token_there_is(tokenizer, demo_model, tmp_path):
    assert stop_token_ids(tokenizer, str(tmp_path)) == (tokenizer.eos_token_id,)
    assert stop_token_ids(tokenizer, str(demo_model), ["\n"]) == (ord("\n"), tokenizer.eos_token_id)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert stop_token_ids(tokenizer, str(tmp_path)) == (5, 7, tokenizer.eos_token_id)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is broken"):
        stop_token_ids(tokenizer, str(tmp_path))


@pytest.mark.parametrize("spaces", ["first", "always"])
def test_a_space_that_the_tokenizer_puts_before_a_stop_is_no_part_of_it(tmp_path, spaces):
    tokenizer = spaced_tokenizer(spaces)
    newline, eos = tokenizer.convert_tokens_to_ids("\n"), tokenizer.eos_token_id
    assert stop_token_ids(tokenizer, str(tmp_path), ["\n"]) == (newline, eos)
    with pytest.raises(ConfigError, match=r"'ab' is 3 tokens"):
        stop_token_ids(tokenizer, str(tmp_path), ["ab"])


def test_the_files_of_a_hub_id_are_those_of_the_cache(tmp_path, demo_model, tokenizer, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--owner--name"
    shutil.copytree(demo_model, model / "snapshots" / "abc")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    assert vocabulary_size("owner/name") == len(tokenizer)
    assert stop_token_ids(tokenizer, "owner/name") == (tokenizer.eos_token_id,)
    (model / "snapshots" / "abc" / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert stop_token_ids(tokenizer, "owner/name") == (5, 7, tokenizer.eos_token_id)


def test_the_vocabulary_is_the_models(tmp_path, demo_model, tokenizer):
    assert vocabulary_size(str(demo_model)) == len(tokenizer)
    config = tmp_path / "config.json"
    for text, size in (('{"vocab_size": 151936}', 151936), ('{"text_config": {"vocab_size": 9}}', 9), ("{}", None)):
        config.write_text(text)
        assert vocabulary_size(str(tmp_path)) == size
    config.write_text("[")
    with pytest.raises(ConfigError, match=r"config\.json is broken"):
        vocabulary_size(str(tmp_path))


def test_a_model_that_cannot_be_loaded_says_why_in_a_sentence(tmp_path, demo_model, monkeypatch):
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"is not a model folder: it holds none of tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    shutil.copytree(demo_model, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path / "broken"))


@pytest.mark.parametrize("cleans_up", [False, True])
@pytest.mark.parametrize("keep_special", [False, True])
def test_text_is_what_the_tokenizer_itself_decodes(tokenizer, monkeypatch, keep_special, cleans_up):
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", cleans_up)
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    decode, draw = decoder(tokenizer, keep_special=keep_special), random.Random(0)
    tokens = [*tokenizer.encode("a b , c ! d", add_special_tokens=False), tokenizer.eos_token_id]
    for some in (tokens, [], *([draw.randrange(len(tokenizer)) for _ in range(50)] for _ in range(50))):
        assert decode(tuple(some)) == tokenizer.decode(some, skip_special_tokens=not keep_special)
    assert decode(tokens).startswith("a b, c! d" if cleans_up else "a b , c ! d")


# -- replies of an environment -----------------------------------------------------------------------------------------


def test_a_reply_may_have_the_character_that_marks_the_turn_before_it(tokenizer):
    said = [{"role": "user", "content": f"4{MARK}2"}]
    assert tokenizer.decode(continuation(tokenizer, said, tokenizer.eos_token_id)) == f"<user>4{MARK}2<assistant>"


@pytest.mark.parametrize("spaces", ["first", "always"])
@pytest.mark.parametrize("template", ["{c}{e}\n", " {c} {e}"], ids=["as Zephyr", "as Llama 2"])
@pytest.mark.parametrize("eats_space", [False, True], ids=["", "as Phi-3"])
def test_a_reply_has_the_tokens_that_it_has_in_the_whole_conversation(spaces, template, eats_space):
    tokenizer = spaced_tokenizer(spaces, eats_space=eats_space)
    said = template.format(c="{{ m.content }}", e="{{ eos_token }}")
    of_user = "{% if m.role == 'user' %}<u>{{ m.content }}{% else %}" + said + "{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + of_user + "{% endfor %}<a>"
    chat = [{"role": r, "content": c} for r, c in [("user", "ask"), ("assistant", "right"), ("user", "no: again")]]
    whole = tokenizer.apply_chat_template(chat, return_dict=False)
    eos = tokenizer.eos_token_id
    assert list(continuation(tokenizer, chat[2:], eos)) == whole[whole.index(eos) + 1 :]


@pytest.mark.parametrize("spaces", ["first", "always"])
def test_a_reply_without_a_template_follows_the_turn_without_a_space(spaces):
    tokenizer = spaced_tokenizer(spaces)
    turn = tokenizer.encode("ask:", add_special_tokens=False)
    said = continuation(tokenizer, [{"role": "user", "content": "no"}, {"role": "user", "content": " way"}], turn[-1])
    assert [*turn, *said] == tokenizer.encode("ask:no way", add_special_tokens=False)


def test_a_reply_that_the_template_leaves_out_is_refused():
    tokenizer = spaced_tokenizer("first")
    turns = "{% if m.role == 'user' %}<u>{{ m.content }}{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + turns + "{% endfor %}<a>"
    eos, said = tokenizer.eos_token_id, [{"role": "user", "content": "no"}, {"role": "tool", "content": "cat"}]
    assert tokenizer.decode(continuation(tokenizer, said[:1], eos)) == "<u>no<a>"
    assert tokenizer.decode(continuation(tokenizer, [], eos)) == "<a>"
    with pytest.raises(DataError, match="the model's chat template leaves out what a reply has in the roles tool"):
        continuation(tokenizer, said[1:], eos)
