"""What can be found wrong with a run before anything is started for it: algorithm, model, files, columns, rewards.

Reading the files once more costs seconds; finding out after the engines are up costs minutes of many GPUs.
"""

from asyncgrpo.config import Config
from asyncgrpo.errors import ConfigError


def check_run(config: Config) -> None:
    """Raises ConfigError, DataError or RewardError, in one sentence."""
    from asyncgrpo.config_checks import check_model
    from asyncgrpo.data.demo import demo_rules
    from asyncgrpo.data.files import read_rows
    from asyncgrpo.data.schemas import recognise
    from asyncgrpo.generators.availability import why_sglang_cannot_run
    from asyncgrpo.learner.settings import check_algorithm
    from asyncgrpo.rewards import RuleReward, build_reward

    check_algorithm(config)
    check_model(config)
    if config.generators.engine == "sglang" and (why := why_sglang_cannot_run()) is not None:
        raise ConfigError(f"generators.engine is sglang, which cannot run here: {why} (or use generators.engine=torch)")
    reward = build_reward(config.reward, extra_rules=demo_rules())
    for file in filter(None, (config.data.train, config.data.eval)):
        rows = read_rows(file)
        schema = recognise(rows, config.data.columns, file)
        sources = {schema.to_record(row, index).source for index, row in enumerate(rows)}
        if isinstance(reward, RuleReward):
            reward.check_sources(sources)
