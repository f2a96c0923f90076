"""Configurations are loaded as written, or refused with one sentence."""

import json
import shlex
from operator import attrgetter
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncgrpo.config.explain import explain, knobs, sizes_in_words
from asyncgrpo.config.load import find, load_config, shipped_names, to_yaml
from asyncgrpo.config.reach import find_model
from asyncgrpo.config.rules import check_model
from asyncgrpo.config.schema import Config, DataConfig, ModelConfig, SamplingConfig
from asyncgrpo.errors import ConfigError
from tests.config.test_verl import cases

NEEDED = ("model.path=m", "data.train=t")


def message_of(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides if path else [*NEEDED, *overrides])
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {path: m}\ndata:\n  train: t\n")
    return path


class TestReading:
    def test_the_command_line_wins_over_the_file_and_the_file_over_the_base(self, file):
        file.write_text(file.read_text() + "run: {steps: 7, seed: 3}\n")
        config = load_config(file, ["run.seed=1", "run.seed=5"], base={"run": {"steps": 1, "seed": 1, "out": "here"}})
        assert (config.run.steps, config.run.seed, config.run.out) == (7, 5, "here")

    def test_a_file_may_extend_several_and_later_ones_win(self, file):
        (file.parent / "a.yaml").write_text("run: {seed: 1, steps: 2}\nbuffer: {max_lag: 7}\n")
        (file.parent / "b.yaml").write_text("extends: a.yaml\nrun: {seed: 3}\n")
        file.write_text(file.read_text() + "extends: [a.yaml, b.yaml, algorithms/gspo]\nbuffer: {max_lag: 9}\n")
        config = load_config(file)
        assert (config.run.seed, config.run.steps, config.buffer.max_lag) == (3, 2, 9)
        assert (config.algorithm.loss, config.learner.minibatches) == ("gspo", 4)

    def test_an_algorithm_wins_over_the_file_and_the_command_line_over_the_algorithm(self):
        config = load_config("one_node_8gpu", ["algorithm.loss_args.clip_high=0.001"], algorithm="gspo")
        assert (config.algorithm.group_size, config.algorithm.kl_coef) == (5, 0.0)
        assert (config.algorithm.aggregation, config.learner.minibatches) == ("seq-mean-token-mean", 4)
        assert config.algorithm.loss_args == {"clip_low": 3e-4, "clip_high": 0.001}
        assert load_config("one_node_8gpu", algorithm="algorithms/gspo").algorithm.loss == "gspo"

    def test_keys_beside_the_preset_that_a_file_extends_are_the_files(self, file):
        (file.parent / "below.yaml").write_text("algorithm: {kl_coef: 0.5, entropy_coef: 0.5}\n")
        file.write_text(file.read_text() + "extends: [below.yaml, algorithms/opsm]\nalgorithm: {entropy_coef: 0.1}\n")
        algorithm = load_config(file).algorithm
        assert (algorithm.kl_coef, algorithm.entropy_coef) == (0.001, 0.1)

    def test_text_needs_no_quotes_on_the_command_line(self):
        config = load_config(None, [*NEEDED, "run.out=2024", "data.train=set #1.json", "data.system_prompt=A: b=[1"])
        assert (config.run.out, config.data.train, config.data.system_prompt) == ("2024", "set #1.json", "A: b=[1")
        assert load_config(None, [*NEEDED, "run.out='a: b'", "data.eval=null"]).run.out == "a: b"

    def test_a_tilde_is_the_home_folder(self, monkeypatch):
        monkeypatch.setenv("HOME", "/home/me")
        config = load_config(None, ["model.path=m", "data.train=[~/a.json, hf:b]", "data.eval={c: ~/c}", "run.out=~/r"])
        assert (config.data.sources, config.data.suites) == (("/home/me/a.json", "hf:b"), {"c": "/home/me/c"})
        assert config.run.out == "/home/me/r"
        for key in ("model.path", "algorithm.teacher", "teacher.path", "reward.model.path"):
            config = load_config(None, ["model.path=m", "data.train=a", f"{key}=~/m"], is_complete=False)
            assert attrgetter(key)(config) == "/home/me/m"

    def test_null_and_lists_and_free_keys_are_read_as_yaml(self, file, monkeypatch):
        monkeypatch.setenv("MY_STEPS", "12")
        file.write_text(file.read_text() + "run: {steps: '${oc.env:MY_STEPS}'}\nreward:\n")
        overrides = ["run.epochs=null", "run.loggers=[wandb,tensorboard]", "generators.extra.page_size=16"]
        config = load_config(file, overrides)
        assert (config.run.epochs, config.run.steps) == (None, 12)
        assert config.run.loggers == ("wandb", "tensorboard")
        assert config.generators.extra == {"page_size": 16}
        assert load_config(file, ["run.samples_every=${run.eval_every}"]).run.samples_every == 5, "a default"
        file.write_text("model: {path: m}\ndata: {train: t, eval: {a: a.json}}\n")
        assert load_config(file, ["data.eval={b: b.json}"]).data.suites == {"a": "a.json", "b": "b.json"}
        assert load_config(file, ["data.eval=[c.json]"]).data.eval == ("c.json",), "a list instead of a mapping"

    @pytest.mark.parametrize("name", shipped_names())
    def test_every_shipped_file_loads_and_reads_back_equal(self, name, tmp_path):
        config = load_config(name)
        assert config == load_config(find(name))
        (tmp_path / "copy.yaml").write_text(to_yaml(config))
        assert load_config(tmp_path / "copy.yaml") == config

    @settings(max_examples=20, deadline=None, derandomize=True)
    @example(text="${a} \\${b} \\\\${c} ${", number=1e-6, extra={"a": None})
    @given(
        text=st.text(alphabet="${}\\ab:'\"# \n-[]1e?", max_size=20).filter(lambda t: t != "???"),
        number=st.floats(min_value=1e-12, max_value=1e12),
        extra=st.dictionaries(
            st.text("abc", min_size=1), st.one_of(st.integers(1 - 2**63, 2**63 - 1), st.booleans(), st.none())
        ),
    )
    def test_any_configuration_reads_back_equal(self, tmp_path_factory, text, number, extra):
        config = Config(
            model=ModelConfig(path="m"),
            data=DataConfig(train="t", system_prompt=text),
            sampling=SamplingConfig(temperature=number, stop=(text,)),
            generators=msgspec.convert({"extra": extra}, type(load_config(None, NEEDED).generators)),
        )
        copy = tmp_path_factory.mktemp("copy") / "config.yaml"
        copy.write_text(to_yaml(config))
        assert load_config(copy) == config


class TestArgumentsGoWithTheirLoss:
    FILE = (
        "algorithm: {loss: ppo_clip, loss_args: {clip_low: 0.1, dual_ratio: 3.0}, critic: {lam: 0.5}, advantage: gae}"
    )

    def test_another_loss_starts_afresh_and_a_critic_goes_with_its_advantage(self, file):
        file.write_text(file.read_text() + self.FILE)
        before = load_config(file).algorithm
        assert (before.loss_args, before.critic.lam) == ({"clip_low": 0.1, "dual_ratio": 3.0}, 0.5)
        assert load_config(file, ["algorithm.advantage=rloo"]).algorithm.critic.lam == 0.95
        assert load_config(file, ["algorithm.loss=gspo"]).algorithm.loss_args == {}
        overrides = ["algorithm.loss_args.clip_high=0.3", "algorithm.loss=cispo"]
        assert load_config(file, overrides).algorithm.loss_args == {"clip_high": 0.3}

    def test_a_loss_that_comes_back_does_not_bring_them_back(self, file):
        file.write_text(file.read_text() + self.FILE)
        again = load_config(file, ["algorithm.loss=ppo_clip", "algorithm.loss_args.clip_low=0.2"])
        assert again.algorithm.loss_args == {"clip_low": 0.2, "dual_ratio": 3.0}, "it never left"
        file.write_text(file.read_text().replace("ppo_clip", "gspo").replace(", dual_ratio: 3.0", ""))
        assert load_config(file, ["algorithm.loss=gspo"]).algorithm.loss_args == {"clip_low": 0.1}
        (file.parent / "b.yaml").write_text("extends: [mine.yaml, algorithms/gspo]\nalgorithm: {loss: ppo_clip}\n")
        assert load_config(file.parent / "b.yaml").algorithm.loss_args == {}


MISTAKES = """
algorithm.group_sise=8 -> `algorithm.group_sise` (value 8): did you mean `algorithm.group_size`?
sampling.prompts_per_step=8 -> (value 8): did you mean `buffer.prompts_per_step`?
actor_rollout_ref.rollout.n=5 -> (value 5): that is verl's name for `algorithm.group_size`
+learner.lr=1e-6 -> write it as `learner.lr`
algorithm.group_size=8.5 -> algorithm.group_size must be a whole number, at least 2; it is 8.5
model.dtype=fp16 -> model.dtype must be one of bfloat16, float32; it is fp16
run.loggers=wandb -> run.loggers must be a list
learner.betas=[0.9] -> learner.betas must be a list of 2, each a number, at least 0 and below 1; it is [0.9]
learner.lr=nan -> learner.lr must be above 0; it is nan
reward.timeout_s=.inf -> reward.timeout_s must be finite; it is inf
reward.timeout_s=1e10 -> reward.timeout_s must be at most 1000000000; it is 10000000000.0
buffer.max_lag=often -> buffer.max_lag must be auto or a whole number, at least 0; it is often
run.seed=9007199254740993 -> run.seed must be at most 9007199254740992; it is 9007199254740993
data.truncation=error -> that is verl's: longer prompts are dropped, never cut
num_generations=8 -> (value 8): that is TRL's name for `algorithm.group_size`
seed=8 -> (value 8): did you mean `run.seed`?
learner.lr -> `learner.lr` is not of the form key=value, for example learner.lr=1e-6
learner.betas=[[ -> the value of learner.betas, `[[`, is not valid YAML
algorithm=grpo -> `algorithm` is a section; set one of its keys
algorithm.loss=gpso -> topr, vespo; it is gpso: did you mean `gspo`?
algorithm.loss_args.clip_low=[1] -> algorithm.loss_args must be a mapping, each value a number or text
'algorithm.corrections=[{high_ratio: 2}, {kidn: veto}]' -> corrections[1]: Object contains unknown field `kidn`
'algorithm.corrections=[{high_ratio: much}]' -> corrections[0].high_ratio: Expected `float | null`, got `str`
algorithm.corrections.high_ratio=2 -> algorithm.corrections must be a list, each a mapping of kind, level
run.out=${nowhere} -> run.out: Interpolation key 'nowhere' not found
# fields that do not fit each other
learner.tokens_per_microbatch=1535 -> is smaller than the longest sequence
algorithm.min_completions=9 -> algorithm.min_completions (9) is more than algorithm.group_size (8)
buffer.straggler_factor=1.2 -> set it to at least 1.5
buffer.max_lag=auto buffer.policy=train -> bounds groups, which buffer.policy (train) does not
sampling.top_k=0 -> write -1 for no limit
sampling.top_k=1 -> the completions of a group would all be equal
data.curriculum=success -> the epochs after the first; raise run.epochs (1)
data.train=[] -> data.train ([]) has no entry
'data.train=[a, b]' data.weights=[1.0] -> needs a weight for each entry
'data.train=[a, b]' 'data.weights=[1.0, 0.0]' -> data.weights must be a list, each a number, above 0
model.lora.targets=[q_proj] -> model.lora.rank (0): all weights would be trained
data.eval_rows=10 -> needs a file in data.eval (null)
'data.eval=[a/test.json, b/a/test.json]' -> have the same name
'data.eval={train: a.json}' -> and is not train
'data.eval={a/b: a.json}' -> names a suite 'a/b'
sampling.eval_completions=4 -> would all be equal with sampling.eval_temperature (0.0)
weights.backend=nccl generators.gpus_each=0 -> learner.device (auto) and generators.gpus_each (0)
weights.backend=nccl learner.device=cpu -> on both sides: learner.device (cpu)
cluster.share_gpu=true learner.ranks=2 generators.count=1 -> learner.ranks (2); use learner.ranks=1
cluster.share_gpu=true generators.count=1 weights.backend=nccl -> use weights.backend=shared_memory
generators.extra.dp_size=2 -> generators.extra.dp_size is 2, but an engine is one group of tensor-parallel
generators.extra.pp_size=2 -> raise generators.gpus_each
generators.extra.enable_dp_attention=true -> generators.extra.enable_dp_attention is true, but
generators.extra.dtype=bfloat16 -> generators.extra.dtype is bfloat16, but an engine holds the weights as
generators.extra.speculative_algorithm=EAGLE -> would have the wrong policy version
generators.engine=torch generators.extra.page_size=16 -> which generators.engine=torch does not take
"""


class TestMistakes:
    @pytest.mark.parametrize(("overrides", "sentence"), cases(MISTAKES))
    def test_a_bad_override_is_one_sentence(self, overrides, sentence):
        assert sentence in message_of(*shlex.split(overrides))

    def test_an_engine_of_one_group_may_say_so_and_ranks_need_not_share_a_step_equally(self):
        engine = "generators.extra={dp_size: 1, pp_size: 1, enable_dp_attention: false}"
        load_config(None, [*NEEDED, "learner.ranks=5", engine])

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("model: {path: m}\ndata: {train: t}\nrun: {steps: none at all}\n", "{file}: run.steps must be"),
            ("model: {path: 7}\ndata: {train: t}\n", "{file}: model.path must be text; it is 7; put it in quotes"),
            ("model: {path: m}\n", "{file}: data.train is missing"),
            ("model:\n  path: m\n  - oops\n", "{file}, line 3: this is not valid YAML"),
            ("model: {path: m}\nmodel: {path: n}\n", "duplicate key model"),
            ('run: {out: "${"}\n', "{file}: this is not valid YAML (no viable alternative at input '${{')"),
            ("just words\n", "unknown configuration key `just words`"),
            ("extends: mine.yaml\n", "leads back to this file"),
            ("extends: other.yaml\n", "{file}: extends: file {folder}/other.yaml does not exist; "),
            ("extends: algorithms/grop\n", "unknown algorithm `algorithms/grop`; did you mean "),
        ],
    )
    def test_the_file_that_holds_the_mistake_is_named(self, file, content, message):
        file.write_text(content)
        child = file.parent / "child.yaml"
        child.write_text("extends: mine.yaml\n")
        said = message_of(path=child if "none at all" in content else file)
        assert message.format(file=file, folder=file.parent) in said
        if "none at all" in content:
            assert message_of("run.steps=some", path=child).startswith("command line: run.steps must be")
            nothing = message_of("run.steps=1", "learner.lr=null", path=child)
            assert nothing == "command line: learner.lr must be a number, above 0; it is null"

    def test_a_missing_file_is_answered_with_the_nearest(self, file):
        assert f"did you mean {file}?" in message_of(path=file.parent / "mime.yaml")
        assert "did you mean quickstart?" in message_of(path=file.parent / "quickstart.yaml")
        assert "did you mean quickstart?" in message_of(path=Path("quick_start"))

    def test_several_misspelt_keys_are_all_told(self, file):
        file.write_text(file.read_text() + "run: {epoch: 1}\n")
        with pytest.raises(ConfigError) as caught:
            load_config(file, ["algorithm.group_sise=8", "xyzzy=1", "beta=0"])
        assert str(caught.value).splitlines() == [
            f"{file}: unknown configuration key `run.epoch` (value 1): did you mean `run.epochs`?",
            "command line: unknown configuration key `algorithm.group_sise` (value 8): did you mean `algorithm.group_size`?",
            "command line: unknown configuration key `xyzzy` (value 1): `asyncgrpo config explain` lists all keys",
            "command line: unknown configuration key `beta` (value 0): that is TRL's name for `algorithm.kl_coef`",
            "`asyncgrpo config from-trl FILE|KEY=VALUE...` translates keys and values of TRL",
        ]


class TestModelCheck:
    @pytest.fixture
    def model(self, tmp_path: Path, monkeypatch) -> Path:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
        folder = tmp_path / "runs" / "tiny-model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 1536}))
        return folder

    def check(self, path: object, *overrides: str) -> None:
        check_model(load_config(None, [f"model.path={path}", "data.train=t", *overrides]))

    def message(self, path: object, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            self.check(path, *overrides)
        return str(caught.value)

    def test_a_prompt_and_a_completion_must_fit_the_context(self, model):
        self.check(model)
        message = self.message(model, "sampling.max_tokens=1025")
        assert "is 1536 tokens, but data.max_prompt_tokens (512) + sampling.max_tokens (1025) = 1537" in message
        assert message.endswith("lower one of the two")
        (model / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 64}}))
        assert "is 64 tokens" in self.message(model)

    def test_the_gpus_of_an_engine_share_the_heads(self, model):
        (model / "config.json").write_text(json.dumps({"num_attention_heads": 12}))
        self.check(model, "generators.gpus_each=4")
        message = self.message(model, "generators.gpus_each=8")
        assert "is 8, which does not divide the 12 attention heads of" in message and message.endswith(
            "use one of 1, 2, 3, 4, 6, 12"
        )

    @pytest.mark.parametrize("written", ["[]", '"qwen3"', '{"text_config": [1]}'])
    def test_a_config_that_describes_no_model_is_named(self, model, written):
        (model / "config.json").write_text(written)
        assert self.message(model).startswith(f"model.path: {model}/config.json ")

    @pytest.mark.parametrize(
        ("path", "sentence"),
        [
            ("./runs/tiny", "the folder ./runs/tiny does not exist"),
            ("runs", "has no config.json; did you mean runs/tiny-model?"),
            ("runs/tiny-model/config.json", "is a file; give the folder"),
        ],
    )
    def test_what_is_no_folder_of_a_model_is_refused(self, model, path, sentence):
        assert sentence in self.message(path)

    def test_a_hub_id_passes_unless_the_hub_is_off_and_the_cache_empty(self, model, monkeypatch):
        self.check("Qwen/Qwen3-8B")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(ConfigError, match="nor in the local Hugging Face cache, and HF_HUB_OFFLINE is set"):
            find_model("Qwen/Qwen3-8B")
        snapshot = model.parent.parent / "hub-home/hub/models--Qwen--Qwen3-8B/snapshots/abc"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))
        assert "context of Qwen/Qwen3-8B is 100 tokens" in self.message("Qwen/Qwen3-8B")


class TestWords:
    def test_every_knob_has_a_description(self):
        assert [key for key, knob in knobs().items() if not knob.description] == []

    @pytest.mark.parametrize(
        ("key", "sentences"),
        [
            ("algorithm.group_size", ["Completions per prompt", "a whole number, at least 2", "default  8", "section  Obj"]),
            ("algorithm.corrections", ["a list, each a mapping", "algorithm.corrections[].max_nats (null): Largest estimate"]),
            ("algorithm.corrections.action", ["one of clip, mask, reject, truncate"]),
            ("algorithm.corrections[].action", ["one of clip, mask, reject, truncate"]),
        ],
    )  # fmt: skip
    def test_a_key_is_explained(self, key, sentences):
        assert [sentence for sentence in sentences if sentence not in explain(key)] == []

    def test_the_sizes_of_a_run_are_said_in_words(self):
        text = sizes_in_words(load_config(None, [*NEEDED, "generators.count=3", "run.steps=10"]))
        assert "64 prompts x 8 completions = 512 sequences per step" in text
        assert "lag at most 4 steps; up to 320 groups in flight" in text
        assert "3 generators (sglang, 1 GPU each) + 1 learner rank = 4 GPUs" in text
        assert "ends after 10 steps or 1 epoch, whichever is first; checkpoint every 20 steps, no evaluation" in text


def test_held_out_files_are_suites_with_names():
    def suites(value: str) -> dict[str, str]:
        return load_config(None, [*NEEDED, f"data.eval={value}"]).data.suites

    assert suites("null") == {} and suites("a/test.json") == {"eval": "a/test.json"}
    assert suites("[a/gsm8k.json, b/math.parquet]") == {"gsm8k": "a/gsm8k.json", "math": "b/math.parquet"}
    assert list(suites("[gsm8k/test.json, math/test.json, aime.json]")) == ["gsm8k.test", "math.test", "aime"]
    assert suites("{short: a/test.json, long: a/test2.json}") == {"short": "a/test.json", "long": "a/test2.json"}
