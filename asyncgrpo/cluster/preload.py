"""Imports for the processes of a run on the CPU, made once in the warm process that they are forked from (`warm.py`).

No import here may start a thread, because forks do not inherit threads. `import ray` starts some, so each worker imports it.
"""

import os

os.setpgrp()  # the driver alone handles Ctrl-C and SIGHUP

from asyncgrpo.host import QUIET, importing  # noqa: E402
from asyncgrpo.logs import say_warnings  # noqa: E402
from asyncgrpo.warm import ENGINE  # noqa: E402

for _name, _text in {**QUIET, "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}.items():
    os.environ.setdefault(_name, _text)

say_warnings()
with importing():
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM  # noqa: F401

    import asyncgrpo.data.loading
    import asyncgrpo.engines.build
    import asyncgrpo.engines.torch.engine
    import asyncgrpo.generators.service
    import asyncgrpo.generators.turns
    import asyncgrpo.learner.service

    if os.environ.get(ENGINE) == "sglang":
        from asyncgrpo.engines.sglang.engine import kept

        with kept():
            import asyncgrpo.engines.sglang.processes
            import asyncgrpo.engines.sglang.weights  # noqa: F401
