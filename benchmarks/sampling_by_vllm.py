"""``python sampling_by_vllm.py FOLDER DTYPE REPLY``: replies by vLLM, for ``benchmarks.sampling``.
Needs vLLM alone.

The prompts' token ids are the first line of the input, as JSON. Each further line asks for all
replies once; the answer is a line with the seconds of wall time and of processor time.
"""

from __future__ import annotations

import json
import os
import sys
import time

# One process, whose processor time is that of vLLM, with the threads that OMP_NUM_THREADS gives it.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams

ANSWER = "seconds: "


def main() -> int:
    """Load the model, and sample until the input ends."""
    folder, dtype, reply = sys.argv[1], sys.argv[2], int(sys.argv[3])
    prompts = json.loads(sys.stdin.readline())
    longest = max(map(len, prompts)) + reply
    model = LLM(
        folder,
        dtype=dtype,
        max_model_len=longest,
        max_num_seqs=len(prompts),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        temperature=1.0, min_tokens=reply, max_tokens=reply, ignore_eos=True, detokenize=False
    )
    print(ANSWER, flush=True)
    for _ in sys.stdin:
        wall, processor = time.perf_counter(), time.process_time()
        replies = model.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
        )
        taken = time.perf_counter() - wall, time.process_time() - processor
        assert all(len(answer.outputs[0].token_ids) == reply for answer in replies)
        print(ANSWER, *taken, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
