"""What the processes of a run on the CPU import, in the warm process of which they are forks (`warm.py`).

Nothing here may start a thread, which no fork would have. `import ray` does, so each worker imports it for itself.
"""

import os

os.setpgrp()  # Ctrl-C and the end of a terminal are for the driver

from asyncgrpo.importing import QUIET, importing  # noqa: E402
from asyncgrpo.logs import say_warnings  # noqa: E402
from asyncgrpo.warm import ENGINE  # noqa: E402

for _name, _text in {**QUIET, "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}.items():
    os.environ.setdefault(_name, _text)

say_warnings()
with importing():
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM  # noqa: F401

    import asyncgrpo.data.kept
    import asyncgrpo.engines.build
    import asyncgrpo.engines.torch.engine
    import asyncgrpo.generators.build
    import asyncgrpo.generators.service
    import asyncgrpo.learner.service

    if os.environ.get(ENGINE) == "sglang":
        from asyncgrpo.engines.sglang.engine import kept

        with kept():
            import asyncgrpo.engines.sglang.processes
            import asyncgrpo.engines.sglang.weights  # noqa: F401
